"""Metrics against hand-computed values; the writer's files, and what a resume leaves of them."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_quads.errors import QuadsError
from megatron_quads.rl.metrics import (
    MetricsWriter,
    gap_metrics,
    masked_mean,
    read_rows,
    rollout_metrics,
    truncate_rows,
)

MASK = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


def test_gap_by_hand() -> None:
    train = torch.tensor([[9.0, -1.0, -2.0], [-0.5, 9.0, float("nan")]])
    rollout = torch.tensor([[-9.0, -1.5, -1.5], [-1.5, -9.0, float("inf")]])
    d = [0.5, -0.5, 1.0]  # log pi_train - log pi_rollout under the mask
    w = [math.exp(x) for x in d]
    got = gap_metrics(train, rollout, MASK, tis_cap=2.0)
    assert got == pytest.approx(
        {
            "train_rollout_logprob_abs_diff/mean": 2 / 3,
            "train_rollout_logprob_abs_diff/max": 1.0,
            "train_rollout_kl": sum(a - x - 1 for a, x in zip(w, d, strict=True)) / 3,
            "tis_clipfrac": 1 / 3,
            "ess_ratio": sum(w) ** 2 / (3 * sum(a * a for a in w)),
            "ppl_ratio": (1.0 + math.exp(-1.0)) / 2,
        }
    )


def test_gap_of_equal_engines() -> None:
    lp = -torch.rand(4, 7)
    got = gap_metrics(lp, lp.clone(), torch.ones(4, 7))
    assert got == {
        "train_rollout_logprob_abs_diff/mean": 0.0,
        "train_rollout_logprob_abs_diff/max": 0.0,
        "train_rollout_kl": 0.0,
        "tis_clipfrac": 0.0,
        "ess_ratio": pytest.approx(1.0),
        "ppl_ratio": 1.0,
    }


def test_one_far_token_shows_in_max_and_ess_not_in_the_mean() -> None:
    lp = torch.full((10, 100), -1.0)
    rollout = lp.clone()
    rollout[3, 7] = -7.14  # a ratio of 464
    got = gap_metrics(lp, rollout, torch.ones(10, 100))
    assert got["train_rollout_logprob_abs_diff/mean"] < 0.01
    assert got["train_rollout_logprob_abs_diff/max"] == pytest.approx(6.14, rel=1e-5)
    assert got["ess_ratio"] < 0.02 and got["tis_clipfrac"] == pytest.approx(0.001)


def test_kl_estimates_the_rollouts_side() -> None:
    p, q = torch.tensor([0.6, 0.4]).log(), torch.tensor([0.3, 0.7]).log()  # rollout, trainer
    tokens = torch.tensor([[0] * 6 + [1] * 4])  # as often as the rollout samples them
    got = gap_metrics(q[tokens], p[tokens], torch.ones(1, 10))
    assert got["train_rollout_kl"] == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)


def test_bad_log_probs_are_refused() -> None:
    lp = torch.zeros(2, 3)
    with pytest.raises(QuadsError, match="no response token"):
        gap_metrics(lp, lp, torch.zeros(2, 3))
    with pytest.raises(QuadsError, match="non-finite rollout"):
        gap_metrics(lp, torch.full((2, 3), float("nan")), MASK)
    with pytest.raises(QuadsError, match="non-finite trainer"):
        gap_metrics(torch.full((2, 3), -float("inf")), lp, MASK)


def test_rollout_metrics_by_hand() -> None:
    got = rollout_metrics(torch.tensor([1.0, 0.5]), MASK, seconds=0.5)
    assert got == {"reward": 0.75, "reward_std": 0.25, "response_length": 1.5, "tokens_per_s": 6.0}
    assert masked_mean(torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 9.0]]), MASK) == 2.0
    with pytest.raises(ValueError, match="cannot take"):
        rollout_metrics(torch.ones(2), MASK, seconds=0.0)


def fill(folder: Path, steps: range, **kwargs: int | None) -> None:
    writer = MetricsWriter(folder, **kwargs)  # type: ignore[arg-type]
    for step in steps:
        writer.write(step, {"reward": step / 10, "gap/mean": 0.5})
    writer.close()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return [(e.step, pytest.approx(e.value)) for e in events.Scalars(name)]


def test_writer_and_resume(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 6, "rew')  # killed in mid-write
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    fill(tmp_path, range(4, 8), resume_step=3)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows == [{"step": s, "reward": s / 10, "gap/mean": 0.5} for s in range(1, 8)]
    assert scalars(tmp_path, "reward") == [(s, s / 10) for s in range(1, 8)]
    assert [s for s, _ in scalars(tmp_path, "gap/mean")] == list(range(1, 8))


def test_writer_refuses_another_runs_folder(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 3))
    with pytest.raises(QuadsError, match=r"metrics of another run.*metrics\.jsonl"):
        MetricsWriter(tmp_path)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_writer_refuses_a_non_finite_value(tmp_path: Path, value: float) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"loss": 1.0})
    with pytest.raises(QuadsError, match=r"metric loss is (nan|inf).*step 2"):
        writer.write(2, {"reward": 1.0, "loss": value})
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="W&B is installed")
def test_wandb_asked_for_and_missing(tmp_path: Path) -> None:
    with pytest.raises(QuadsError, match=r"W&B was asked for but is not installed.*pip install wandb"):
        MetricsWriter(tmp_path / "run", wandb_project="quads")
    assert not (tmp_path / "run").exists()


def test_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\nnot json\n" + json.dumps({"step": 2}) + "\n")
    before = path.read_text()
    with pytest.raises(QuadsError, match=r"metrics\.jsonl:2\]"):
        truncate_rows(path, 1)
    assert path.read_text() == before
