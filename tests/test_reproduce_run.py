"""``quads reproduce`` as users run it: a warm-up and one arm, killed, stopped, taken up again; status and tables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMES

from megatron_quads.rl.metrics import read_rows

pytestmark = pytest.mark.slow
STEPS = 4
CONFIG: dict[str, Any] = {
    "scale": "a test",
    "task": "spell_backward",
    "task_config": {"min_word_len": 4, "max_word_len": 6},
    "model": {"layers": 1, "hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "experts": 4, "topk": 2}
    | {"moe_intermediate": 64, "init_std": 0.05},
    # any pass@1 will do
    "warm": {
        "steps": 4,
        "batch": 8,
        "lr": 1e-3,
        "noise": 0.1,
        "eval_every": 2,
        "low": 0.0,
        "stop_at": 1.0,
        "high": 1.0,
    },
    "calibration_prompts": 8,
    "rl": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 1e-3}
    | {"heldout": 8, "eval_every": 2},
    "megatron": {"micro-batch-size": 8},
    "save_every": 1,
    "arms": {"ours": {"title": "QUADS", "recipe": "quads", "ratio": 0.5, "seeds": 1}},
}


def start(*words: str | Path) -> subprocess.Popen[str]:
    """``quads reproduce`` in a session of its own."""
    program = [sys.executable, "-m", "megatron_quads.cli", "reproduce", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def quads(*words: str | Path, code: int = 0) -> str:
    """Run it to its end; what it printed."""
    process = start(*words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out + err


def state(root: Path) -> dict[str, Any]:
    """Of the only run."""
    found: dict[str, Any] = json.loads((root / "arms/ours/seed-0/status.json").read_text())
    return found


def numbers(run: Path) -> list[dict[str, float]]:
    """The steps' metrics without what a clock gives."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_rows(run / "metrics.jsonl")]


def evaluations(run: Path) -> dict[int, list[float]]:
    """By step; the last of a step counts."""
    return {row["step"]: row["rewards"] for row in read_rows(run / "evals.jsonl")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction whose arm ran without interruption."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "config.yaml").write_text(json.dumps(CONFIG))  # JSON is YAML
    root = folder / "whole"
    quads("warm", "--config", folder / "config.yaml", "--root", root)
    quads("run", "--root", root)
    assert state(root)["state"] == "done"
    return root


@pytest.fixture(scope="module")
def broken(whole: Path) -> Path:
    """The same, killed with signal 9 after its first step, stopped once more at its start, then taken to its end."""
    root = whole.with_name("broken")
    shutil.copytree(whole, root, ignore=shutil.ignore_patterns("arms"))
    run = root / "arms/ours/seed-0"
    process = start("run", "--root", root)
    deadline = time.monotonic() + 240
    while not (run / "checkpoints/step_000001/COMMITTED.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed = state(root)
    assert killed["state"] == "running" and killed["step"] < STEPS
    assert "killed; goes on" in quads("status", "--root", root)
    assert "time is up" not in quads("run", "--root", root, "--max-seconds", "2")
    stopped = state(root)
    assert stopped["state"] == "stopped" and killed["step"] <= stopped["step"] < STEPS
    moved = root.rename(root.with_name("moved"))  # the weights' digest binds a run, not where they lie
    quads("run", "--root", moved)
    return moved


def test_a_run_that_was_killed_and_stopped_ends_with_the_numbers_of_one_that_was_not(whole: Path, broken: Path) -> None:
    first, second = (root / "arms/ours/seed-0" for root in (whole, broken))
    assert state(broken)["state"] == "done" and len(numbers(first)) == STEPS
    assert numbers(first) == numbers(second)
    assert evaluations(first) == evaluations(second) and set(evaluations(first)) == {0, 2, 4}
    audits = [[row["trainer"] for row in read_rows(run / "audit.jsonl")] for run in (first, second)]
    assert audits[0] == audits[1] and len(audits[0]) == STEPS + 1
    assert [p.name for p in (second / "checkpoints").iterdir()] == [f"step_{STEPS:06d}"]


def test_what_is_done_is_left_alone(whole: Path) -> None:
    before = (whole / "arms/ours/seed-0/metrics.jsonl").read_bytes()
    assert "done before" in quads("run", "--root", whole)
    assert "as it is" in quads("warm", "--root", whole)
    assert (whole / "arms/ours/seed-0/metrics.jsonl").read_bytes() == before


def test_another_configuration_is_refused(whole: Path) -> None:
    changed = whole.parent / "changed.yaml"
    changed.write_text(json.dumps({**CONFIG, "rl": {**CONFIG["rl"], "lr": 2e-3}}))
    said = quads("run", "--config", changed, "--root", whole, code=2)
    assert "made with other settings" in said
    changed.write_text(json.dumps({**CONFIG, "arms": {"ours": {"title": "QAT", "recipe": "qat", "seeds": 1}}}))
    copy = whole.with_name("other-arm")
    shutil.copytree(whole, copy)
    assert "config was" in quads("run", "--config", changed, "--root", copy, code=2)
    assert "logs of another run" in quads("tables", "--root", copy, "--out", copy / "tables", code=2)


def test_status_tables_and_pack_read_what_the_run_wrote(whole: Path) -> None:
    assert f"{STEPS}/{STEPS}" in quads("status", "--root", whole)
    said = quads("tables", "--root", whole, "--out", whole.parent / "tables")
    assert said.count("not run") == 6 and f"{STEPS + 1} refits of 1 runs" in said
    page = (whole.parent / "tables/reproduction.md").read_text()
    assert "Runs: 1 done" in page and "megatron-core" in page
    assert "8 files" in quads("pack", "--root", whole, "--out", whole.parent / "logs.tar.gz")
