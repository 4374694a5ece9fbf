"""Metrics of a step, under the names peers use, and where they are written.

Token tensors are [b, t], aligned with ``tokens[:, 1:]``; ``mask`` is 1 on response tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import atomic
from ..errors import QuadsError
from .loss import k3


def gap_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, tis_cap: float = 2.0
) -> dict[str, float]:
    """How far the trainer's log-probs are from those the rollout sampled with; all fp32 [b, t], the whole step.

        train_rollout_logprob_abs_diff/mean, /max   |log pi_train - log pi_rollout| in nats
        train_rollout_kl   k3 estimate of KL(rollout, train)
        tis_clipfrac       share of tokens with pi_train / pi_rollout > tis_cap
        ess_ratio          (sum w)^2 / (n sum w^2) of w = pi_train / pi_rollout: 1 when the engines agree
        ppl_ratio          mean over responses of ppl_train / ppl_rollout

    Sums run in fp64. Raises QuadsError when no token is masked, or a log-prob under the mask is not finite.
    """
    mask = mask.bool()
    train, rollout = train_logprobs.detach()[mask].double(), rollout_logprobs.detach()[mask].double()
    if train.numel() == 0:
        raise QuadsError(
            "no response token in the batch", where="log-prob gap", do="check that the rollout returned text"
        )
    for name, values in (("trainer", train), ("rollout", rollout)):
        if not torch.isfinite(values).all():
            raise QuadsError(f"non-finite {name} log-prob", where="log-prob gap", do="check the weights of that side")
    difference = (train - rollout).abs()
    weight = torch.exp(train - rollout)
    per_response = torch.where(mask, (rollout_logprobs - train_logprobs).detach().double(), 0.0).sum(1)
    lengths = mask.sum(1)
    answered = lengths > 0
    return {
        "train_rollout_logprob_abs_diff/mean": difference.mean().item(),
        "train_rollout_logprob_abs_diff/max": difference.max().item(),
        "train_rollout_kl": k3(rollout, train).mean().item(),
        "tis_clipfrac": (weight > tis_cap).double().mean().item(),
        "ess_ratio": (weight.sum().square() / (weight.numel() * weight.square().sum())).item(),
        "ppl_ratio": torch.exp(per_response[answered] / lengths[answered]).mean().item(),
    }


def rollout_metrics(rewards: Tensor, mask: Tensor, seconds: float) -> dict[str, float]:
    """reward and its spread, response_length and tokens_per_s (sampled tokens by rollout wall time) of one step.

    rewards [b]; mask [b, t]; ``seconds`` > 0. Raises ValueError otherwise.
    """
    if seconds <= 0:
        raise ValueError(f"a rollout cannot take {seconds} s")
    tokens = mask.bool().sum(1).double()
    return {
        "reward": rewards.double().mean().item(),
        "reward_std": rewards.double().std(correction=0).item(),
        "response_length": tokens.mean().item(),
        "tokens_per_s": tokens.sum().item() / seconds,
    }


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of ``values`` [b, t] over the mask, fp64; used for ``entropy``."""
    return values.detach()[mask.bool()].double().mean().item()


class MetricsWriter:
    """Appends one row per step to ``metrics.jsonl`` and, if asked, to TensorBoard (``tb/``) and Weights & Biases.

    ``resume_step`` is the last completed step of the checkpoint a run resumes from: rows past it are dropped, because
    those steps run again. None starts afresh and refuses a folder that already holds metrics. Opened by one process.
    Raises QuadsError when W&B is asked for and not installed, or when a row holds a value that is not finite.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "metrics.jsonl"
        wandb = _wandb() if wandb_project else None  # before anything is written
        if resume_step is None and self.path.exists():
            raise QuadsError(
                "metrics of another run", where=str(self.path), do="choose another folder or resume the run"
            )
        atomic.make_folder(self.folder)
        if resume_step is not None:
            truncate_rows(self.path, resume_step)
        purge = None if resume_step is None else resume_step + 1
        self._tensorboard = _tensorboard(self.folder / "tb", purge) if tensorboard else None
        self._wandb = None
        if wandb is not None:
            self._wandb = wandb.init(project=wandb_project, dir=str(self.folder), config=dict(config or {}))

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Record one step. Every value is a finite number."""
        for name, value in values.items():
            if not math.isfinite(value):
                raise QuadsError(
                    f"metric {name} is {value}", where=f"step {step}", do="stop and inspect the step before it"
                )
        try:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as e:
            raise QuadsError(
                f"cannot write: {e.strerror}", where=str(self.path), do="free space and resume the run"
            ) from e
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def close(self) -> None:
        """Flush and close the sinks."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``. A last line without its newline (a crash in mid-write) is left out.

    Raises QuadsError naming any other line that is not JSON.
    """
    *lines, _torn = Path(path).read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as e:
            raise QuadsError(f"line is not JSON: {e}", where=f"{path}:{number}", do="restore the file") from e
    return rows


def truncate_rows(path: str | Path, last_step: int) -> None:
    """Atomically keep only the rows with ``step`` <= ``last_step``."""
    path = Path(path)
    if path.exists():
        kept = [row for row in read_rows(path) if row["step"] <= last_step]
        atomic.write_bytes(path, "".join(json.dumps(row) + "\n" for row in kept).encode())


def _tensorboard(folder: Path, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise QuadsError(f"TensorBoard is not importable: {e}", where=str(folder), do="pip install tensorboard") from e
    return SummaryWriter(str(folder), purge_step=purge_step)


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as e:
        raise QuadsError(
            "W&B was asked for but is not installed", where="--wandb-project", do="pip install wandb"
        ) from e
    return wandb
