"""On the demo's trained model, sorted channels with adaptive ratios close more of the gap than unsorted uniform ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import run_ranks

from megatron_quads import jobs
from megatron_quads.demo import calibration_sequences, warmup_job
from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import DemoDefaults, make_tiny_checkpoint

ARMS = {
    "unsorted uniform 50 %": ["--no-quads-rac-sort", "--quads-rac-policy", "uniform"],
    "sorted uniform 50 %": ["--quads-rac-policy", "uniform"],
    "sorted adaptive 50 %": ["--quads-rac-policy", "adaptive"],
}


@pytest.mark.slow
def test_sorted_adaptive_closes_more_than_unsorted_uniform(tmp_path: Path) -> None:
    d = DemoDefaults()
    init = make_tiny_checkpoint(tmp_path / "init", 0, task=make_task(d.task, d.task_config))
    settings, argv = warmup_job(init, tmp_path / "warm", seed=0, nproc=2)
    jobs.launch("warmup", settings, argv, nproc=2, logs=tmp_path / "logs")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(calibration_sequences(init, 0)))
    for i, flags in enumerate(ARMS.values()):
        job = {"model": str(tmp_path / "warm"), "prompts": str(prompts), "out": str(tmp_path / f"base{i}")}
        jobs.launch("calibrate", job, ["--quads-recipe", "quads", *flags], nproc=1, logs=tmp_path / "logs")
    pairs = [f"{name}={tmp_path / f'base{i}'}" for i, name in enumerate(ARMS)]
    run_ranks(1, Path(__file__).parent / "closure_worker.py", [str(tmp_path / "gaps.json"), *pairs])
    gaps = json.loads((tmp_path / "gaps.json").read_text())
    print(json.dumps(gaps))
    assert gaps["tokens"] >= 2000
    closed = {name: 1 - gaps[name] / gaps["w4a4 of unsorted uniform 50 %"] for name in ARMS}
    print({name: f"{share:.1%}" for name, share in closed.items()})
    assert 0.1 < closed["unsorted uniform 50 %"] < closed["sorted adaptive 50 %"]
