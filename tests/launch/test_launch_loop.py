"""The true loop on the cluster: Megatron ranks on two nodes, two vLLM servers; then preempted and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMES
from slurm_cluster import Cluster, Launch

from megatron_quads.rl.metrics import read_rows
from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import TinyModel, make_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
WORDS = {"min_word_len": 4, "max_word_len": 6}


@pytest.fixture(scope="module")
def base(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated tiny checkpoint."""
    root = tmp_path_factory.mktemp("loop")
    task = make_task("spell_backward", WORDS)
    small = TinyModel(hidden=64, moe_intermediate=64, experts=4)
    model = make_tiny_checkpoint(root / "init", 0, task=task, model=small)
    (root / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": task.train(i).prompt_text}) for i in range(8)))
    options = {"model": str(model), "prompts": str(root / "prompts.jsonl"), "out": str(root / "base")}
    options["quads-rac-policy"] = "uniform"
    job = Launch(cluster, root / "calibration", job="train", command="calibrate", options=options, roles={}).submit()
    assert job.wait() == ("COMPLETED", 0), job.output()
    return root / "base"


def launch(cluster: Cluster, run: Path, base: Path, **over: Any) -> Launch:
    """A run of four steps."""
    options = {
        "model": str(base),
        "task": "spell_backward",
        "task-config": WORDS,
        "steps": 4,
        "prompts-per-step": 2,
        "samples-per-prompt": 4,
        "max-new-tokens": 6,
        "heldout": 2,
        "quads-recipe": "quads",
        "lr": 1.0e-3,
        "micro-batch-size": 4,
        "expert-model-parallel-size": 2,
    }
    # one sequence at a time: what else is in flight then changes no bit of a sample
    rollout = {"max_num_seqs": 1, **over.pop("rollout")}
    limits = {"save_s": 300, "health_misses": 600, "fence_s": 60}
    return Launch(cluster, run, options=options, roles={}, rollout=rollout, limits=limits, **over)


def numbers(run: Path) -> list[dict[str, Any]]:
    """Rows without times."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_rows(run / "metrics.jsonl")]


def test_an_export_job_exports_and_ends_with_its_exit_code(idle: Cluster, run: Path, base: Path) -> None:
    options = {"model": str(base), "out": str(run / "nvfp4"), "quads-recipe": "quads", "expert-model-parallel-size": 2}
    words = {"job": "export", "command": "export", "options": options, "roles": {}}
    job = Launch(idle, run, trainer={"nodes": 1, "ranks_per_node": 2}, **words)
    shown = idle.quads("submit", str(job.file), "--dry-run").stdout
    assert job.submit().wait() == ("COMPLETED", 0), job.output()
    script = idle.run("scontrol", "write", "batch_script", job.job, "-")
    assert script.strip() in shown and "--signal" not in script and "Export of a checkpoint" in script
    assert (run / "nvfp4" / "COMMITTED.json").exists() and (run / "nvfp4" / "hf_quant_config.json").exists()
    again = Launch(idle, run, trainer={"nodes": 1, "ranks_per_node": 2}, **words).submit()
    assert again.wait() == ("FAILED", 2) and str(run / "nvfp4") in again.slot("driver", 1)["reason"], again.output()


def test_two_trainer_and_two_rollout_nodes_then_preempted_and_resumed(idle: Cluster, run: Path, base: Path) -> None:
    whole = launch(idle, run, base, trainer={"nodes": 2, "ranks_per_node": 1}, rollout={"servers": 2}).submit()
    assert whole.wait(700) == ("COMPLETED", 0), whole.output()
    assert [r["step"] for r in whole.rows()] == [1, 2, 3, 4]
    assert all(r["weight_bits_mismatched"] == 0 for r in whole.rows())
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done" and (run / "export" / "COMMITTED.json").exists()
    seen = json.loads(idle.quads("status", str(run), "--json").stdout)
    assert seen["state"] == "done" and seen["code"] == 0 and seen["gap"] is not None
    health = json.loads((run / "attempt-0" / "endpoints" / "health-1.json").read_text())
    assert health["job"] == whole.job and health["rac_hash"]

    # the same two ranks on one node, one server: where things run changes no number either
    cut = launch(idle, run.with_name("cut"), base, trainer={"nodes": 1, "ranks_per_node": 2}, rollout={"servers": 1})
    cut.submit()
    cut.until(lambda: len(cut.rows()) >= 1, 600)
    urgent = idle.run("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    assert idle.wait(urgent.strip())[0] == "COMPLETED"
    assert cut.wait(700) == ("COMPLETED", 0), cut.output()
    start = json.loads((cut.run / "attempt-1" / "plan.json").read_text())["start_step"]
    assert 1 <= start < 4
    assert numbers(cut.run) == numbers(run)
    last = json.loads((cut.run / "status.json").read_text())
    assert (last["reward_before"], last["reward_after"]) == (status["reward_before"], status["reward_after"])
    assert [(r["step"], r["trainer"], r["rollout"]) for r in read_rows(cut.run / "audit.jsonl")] == [
        (r["step"], r["trainer"], r["rollout"]) for r in read_rows(run / "audit.jsonl")
    ]
