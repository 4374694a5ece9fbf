"""The loop as users run it: ``quads calibrate``, ``quads rl`` on two ranks, resume, verify, and what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import TIMES, quads

from megatron_quads.rl.metrics import read_rows

pytestmark = pytest.mark.slow
TASK = ["--task", "spell_backward", "--task-config", '{"min_word_len": 4, "max_word_len": 6}']
SMALL = ["--prompts-per-step", "4", "--samples-per-prompt", "4", "--max-new-tokens", "8", "--heldout", "8"]
LAYOUT = ["--nproc", "2", "--expert-model-parallel-size", "2", "--lr", "1e-3", "--micro-batch-size", "8"]


def rl(model: Path, out: Path, *more: str, recipe: str = "quads") -> list[str]:
    """Arguments of a small run."""
    return ["rl", "--model", str(model), "--out", str(out), *TASK, *SMALL, *LAYOUT, "--quads-recipe", recipe, *more]


@pytest.fixture(scope="module")
def finished(base: Path) -> Path:
    """A run of four steps with checkpoints after two and four."""
    out = base.parent / "run"
    done = quads(*rl(base, out, "--steps", "4", "--save-every", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_run_folder_holds_what_it_promises(finished: Path) -> None:
    rows = read_rows(finished / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    for name in (
        "train_rollout_logprob_abs_diff/mean",
        "train_rollout_logprob_abs_diff/max",
        "train_rollout_kl",
        "tis_clipfrac",
        "ess_ratio",
        "reward",
        "response_length",
        "entropy",
        "tokens_per_s",
    ):
        assert all(name in r for r in rows), name
    assert all(r["weight_bits_mismatched"] == 0 for r in rows)
    audit = read_rows(finished / "audit.jsonl")
    assert [a["step"] for a in audit] == [0, 1, 2, 3, 4]
    assert all(a["tensors"] == 2 * 4 * 3 and a["trainer"] == a["rollout"] for a in audit)
    assert len({a["trainer"] for a in audit}) == 5  # every step changed the weights
    assert list((finished / "tb").iterdir())
    config = json.loads((finished / "export" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4" and config["rac"]["hash"]
    status = json.loads((finished / "status.json").read_text())
    assert status["state"] == "done" and 0 <= status["reward_before"] <= 1


def test_verify_passes_and_names_the_tensor_of_a_flipped_byte(finished: Path, tmp_path: Path) -> None:
    good = quads("verify", finished)
    assert good.returncode == 0, good.stderr
    assert good.stdout.strip().splitlines()[-1] == "verify: version 4: 0 mismatched bits"
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    flip_byte(run / "export" / "model.safetensors", name)
    bad = quads("verify", run, "--no-engine")
    assert bad.returncode == 1
    assert bad.stderr.strip().splitlines()[-1].startswith(f"quads: error: {name} differs")
    flip_byte(run / "export" / "model.safetensors", name)  # whole again
    name = "model.layers.0.self_attn.q_proj.weight"
    flip_byte(run / "export" / "model.safetensors", name)
    bad = quads("verify", run, "--no-engine")
    assert bad.returncode == 1 and f"quads: error: {name} differs" in bad.stderr


def flip_byte(file: Path, tensor: str) -> None:
    """Change one bit of a stored tensor."""
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    data[8 + size + header[tensor]["data_offsets"][0] + 5] ^= 0x01
    file.write_bytes(data)


def test_resume_gives_the_metrics_of_an_uninterrupted_run(base: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step_000004")  # as if it had stopped after step 3
    shutil.rmtree(run / "export")
    done = quads(*rl(base, run, "--steps", "4", "--save-every", "2", "--resume"))
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = (
        [{k: v for k, v in r.items() if k not in TIMES} for r in read_rows(p / "metrics.jsonl")]
        for p in (run, finished)
    )
    assert mine == theirs
    a, b = (read_rows(p / "audit.jsonl") for p in (run, finished))
    assert a == b
    last = [json.loads((p / "status.json").read_text()) for p in (run, finished)]
    assert last[0]["reward_after"] == last[1]["reward_after"]


def test_a_run_refused_before_its_first_step_leaves_the_folder_free(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = quads(*rl(base, run, "--steps", "1", "--task", "nosuch"))
    assert done.returncode == 2 and "unknown task 'nosuch'" in done.stderr
    assert not (run / "run.json").exists()
    again = quads(*rl(base, run, "--steps", "1", "--task", "neither"))
    assert again.returncode == 2 and "unknown task 'neither'" in again.stderr


def test_used_folder_and_changed_settings_are_refused(base: Path, finished: Path) -> None:
    again = quads(*rl(base, finished, "--steps", "4"))
    assert again.returncode == 2 and "already holds a run" in again.stderr
    changed = quads(*rl(base, finished, "--steps", "4", "--resume", "--seed", "5"))
    assert changed.returncode == 2 and "seed was 0 and is now 5" in changed.stderr


def test_killed_rollout_is_reported_and_resumable(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = [sys.executable, "-m", "megatron_quads.cli", *rl(base, run, "--steps", "50", "--save-every", "1")]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not (run / "checkpoints" / "step_000002").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(rollout_pid(run), signal.SIGKILL)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "rollout process died" in said.strip().splitlines()[-1]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    steps = len(read_rows(run / "metrics.jsonl"))
    done = quads(*rl(base, run, "--steps", str(steps + 1), "--save-every", "1", "--resume"))
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in read_rows(run / "metrics.jsonl")] == list(range(1, steps + 2))


def rollout_pid(run: Path) -> int:
    """The engine's process: the child whose standard output is the run's rollout log."""
    log = (run / "logs" / "rollout.log").resolve()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "fd" / "1").resolve() == log:
                    return int(entry.name)
            except OSError:  # gone, or not ours
                continue
    raise AssertionError("no rollout process")


def test_naive_counts_the_bits_that_differ_and_kl_is_measured_to_the_start(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "naive"
    done = quads(*rl(base, run, "--steps", "2", "--kl-coef", "0.01", recipe="naive"))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = read_rows(run / "metrics.jsonl")
    assert first["weight_bits_mismatched"] > 0
    assert read_rows(run / "audit.jsonl")[0]["tensors_differing"] == 2 * 4 * 3
    # before the first update the policy is the reference; then it has moved
    assert abs(first["ref_kl"]) < 1e-9 < second["ref_kl"]
