"""Trainer checkpoints: exact resume in BF16 with FP32 masters, another layout, and saves that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import run_ranks, tiny_config, tiny_weights, write_hf

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "trainer_worker.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict]:
    """Two ranks with EP 2 that save and resume, and one process that loads what they saved."""
    folder = tmp_path_factory.mktemp("resume")
    config = tiny_config()
    write_hf(folder / "hf", config, tiny_weights(config))
    run_ranks(2, WORKER, ["resume", str(folder), "--expert-model-parallel-size", "2"])
    run_ranks(1, WORKER, ["resume", str(folder)])
    tp = ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"]
    run_ranks(2, WORKER, ["reshard", str(folder), *tp])
    two = [json.loads((folder / f"resume-2-{r}.json").read_text()) for r in range(2)]
    again = json.loads((folder / "reshard-0.json").read_text())
    return two, {**json.loads((folder / "resume-1-0.json").read_text()), "resharded": again}


def test_resumed_run_is_the_uninterrupted_one(runs: tuple[list[dict], dict]) -> None:
    for rank in runs[0]:
        assert rank["resumed"] == rank["straight"]
        assert rank["state_equal"] and rank["same_draw"]
        assert rank["iteration"] == 5 and rank["extra"] == {"note": "after two"}
        assert len({step["loss"] for step in rank["straight"]}) == 3
        # the schedule goes on as well: warm-up over three steps
        assert [step["lr"] for step in rank["resumed"]] == pytest.approx([1e-3 * 2 / 3, 1e-3, 1e-3])


def test_a_failed_save_raises_everywhere_and_leaves_the_old_checkpoint(runs: tuple[list[dict], dict]) -> None:
    first, second = runs[0]
    assert "JSON serializable" in first["failed_save"]
    assert second["failed_save"].startswith("QuadsError") and "rank 0" in second["failed_save"]
    assert first["kept"] == {"kind": "trainer-checkpoint", "iteration": 2}


def test_another_layout_loads_it(runs: tuple[list[dict], dict]) -> None:
    two, one = runs
    assert one["iteration_loaded"] == two[0]["iteration_loaded"] == 2
    assert torch.tensor(one["logprobs"]).equal(torch.tensor(two[0]["logprobs"]))
    assert one["next"]["loss"] == pytest.approx(two[0]["next"]["loss"], rel=1e-6)
    assert one["next"]["grad_norm"] == pytest.approx(two[0]["next"]["grad_norm"], rel=1e-3)


def test_and_back_to_an_optimizer_chain(runs: tuple[list[dict], dict]) -> None:
    again, one = runs[1]["resharded"], runs[1]
    assert again["iteration_loaded"] == 2 and again["next"]["lr"] == one["next"]["lr"]
    # tensor parallel BF16 sums in another order
    assert again["next"]["loss"] == pytest.approx(one["next"]["loss"], rel=2e-3)
    assert again["next"]["grad_norm"] == pytest.approx(one["next"]["grad_norm"], rel=0.1)


def test_no_checkpoint_is_one_clear_line(runs: tuple[list[dict], dict]) -> None:
    message = runs[1]["missing"]
    assert "no complete trainer checkpoint" in message and "nothing" in message and "\n" not in message
