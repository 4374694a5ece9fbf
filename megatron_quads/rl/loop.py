"""GRPO between a Megatron trainer and a vLLM rollout. ``train`` is the whole algorithm; the rest serves it.

Every rank runs this file. Rank 0 alone talks to the rollout and writes the run folder; what it learns is broadcast.
Version N of the weights is what N optimizer steps made: step N + 1 samples from version N and trains on it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..rac.refresh import require_selectable
from ..rollout.process import EngineProcess
from ..rollout.types import Rollout
from ..trainer.trainer import Trainer
from .config import RLConfig
from .control import Control, StopRequested
from .data import whole_sequences
from .loss import grpo_loss
from .metrics import MetricsWriter, gap_metrics, masked_mean, truncate_rows
from .ranks import on_rank0, share
from .refit import Refitter
from .runfolder import RunFolder
from .sampler import Sampler
from .setup import early_engine, reference_model


def train(args: argparse.Namespace, hf: HFModel, quads: QuadsConfig, cfg: RLConfig, *, resume: bool) -> dict[str, Any]:
    """Run (or resume) ``cfg.steps`` GRPO steps; returns rewards before and after, on every rank.

    When the launcher asks for it, the run saves and ends between two steps (or while it waits for a rollout): nothing
    is returned then, and ``--resume`` goes on.
    """
    with (
        contextlib.suppress(StopRequested),
        early_engine(cfg) as engine,
        Session(args, hf, quads, cfg, resume=resume, engine=engine) as s,
    ):
        s.before = s.before if s.before is not None else s.evaluate(s.start)
        for step in range(s.start, cfg.steps):
            started = time.monotonic()
            s.seconds = {}
            with s.timed("rollout_s"):
                batch, rollout_stats = s.sample(step)
            with s.timed("logprobs_s"):
                old_logprobs, entropy = s.trainer.logprobs(batch["tokens"])
                gap = gap_metrics(old_logprobs, batch["rollout_logprobs"], batch["mask"])
                batch["old_logprobs"] = old_logprobs
                if s.reference is not None:
                    batch["ref_logprobs"], _ = s.trainer.logprobs(batch["tokens"], chunks=s.reference)
            with s.timed("update_s"):
                update = s.update(step, batch)
            selection = s.recalibrate(step + 1, batch)
            mismatch = s.refit(step + 1)
            row = {
                **gap,
                **rollout_stats,
                **update,
                **selection,
                **mismatch,
                **s.seconds,
                "entropy": masked_mean(entropy, batch["mask"]),
            }
            row["step_s"] = time.monotonic() - started
            if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
                row["heldout_reward"] = s.evaluate(step + 1)
            s.finish_step(step + 1, row)
        return s.close_run(s.evaluate(cfg.steps))
    return {}


class Session:
    """State of a run on one rank: trainer everywhere; rollout and writer on rank 0."""

    def __init__(
        self,
        args: argparse.Namespace,
        hf: HFModel,
        quads: QuadsConfig,
        cfg: RLConfig,
        *,
        resume: bool,
        engine: EngineProcess | None,
    ) -> None:
        self.engine = engine
        self.args, self.hf, self.quads, self.cfg, self.resume = args, hf, quads, cfg, resume
        self.rank0 = dist.get_rank() == 0
        self.folder = RunFolder(cfg.out)
        self.rollout: Rollout | None = None
        self.writer: MetricsWriter | None = None
        self.before: float | None = None
        self.seconds: dict[str, float] = {}  # of the newest step's parts
        self.start = self.completed = 0  # completed: steps whose row is written and whose weights the trainer holds
        self.control = Control.from_environment()
        if cfg.recalibrate_every:
            require_selectable(quads, hf)
        # a fault in the data must show before anything slow starts
        self.sampler = Sampler(cfg, hf, self.folder, multiple=max(1, args.tensor_model_parallel_size))
        self.trainer = Trainer(args, hf, quads)
        # KL is measured to the policy that the run started from, computed as the trainer computes it
        self.reference = reference_model(args, hf, quads) if cfg.grpo.kl_coef > 0 else None
        self.refitter = Refitter(self.trainer, hf, quads, self.folder)
        self.refitter.reselects = cfg.recalibrate_every > 0
        if resume:
            self._resume()

    def __enter__(self) -> Session:
        try:
            self.refitter.export(self.start)
            if self.rank0:
                resumed = self.start if self.resume else None
                config = {**self.cfg.to_dict(), **self.quads.to_dict()}
                truncate_rows(self.folder.audit, self.start - 1)  # the start is audited again
                self.writer = MetricsWriter(
                    self.folder.path, resume_step=resumed, wandb_project=self.cfg.wandb_project, config=config
                )
            on_rank0(self._start_rollout)
            self.refitter.choose_transport(self.cfg.refit, self.rollout)
            self.refitter.prove(self.rollout, self.start)
        except BaseException as e:
            self.__exit__(type(e), e, e.__traceback__)
            raise
        return self

    def _start_rollout(self) -> None:
        self.rollout = self.refitter.start_rollout(
            self.cfg, self.start, context=self.sampler.context, control=self.control, process=self.engine
        )
        self.folder.write_status("running", self.start)

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if isinstance(error, StopRequested):
            self._save_and_stop()
        elif error is not None and self.rank0:
            self.folder.write_status("failed", self.folder.latest_step() or 0, error=str(error))
        self._stop()

    def _save_and_stop(self) -> None:
        """All ranks: leave a committed checkpoint of the completed steps, then tell the launcher."""
        step = self.completed
        if step and share(self.folder.latest_step()) != step:
            self._save(step)
        dist.barrier()
        if self.rank0:
            self.folder.write_status("stopped", step)
            self.control.saved(step)

    def _save(self, step: int) -> None:
        """All ranks: the trainer's state, and the weights as a folder, which `quads verify` reads of an unfinished run."""
        extra = {"before": self.before, "step": step, **self.refitter.selection_state()}
        self.trainer.save(self.folder.checkpoint(step), extra)
        if step < self.cfg.steps:
            self.refitter.keep(step, start=self.start)

    def _stop(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.rollout is not None:
            self.rollout.close()

    def _resume(self) -> None:
        step = share(self.folder.latest_step())
        if step is None:
            return  # stopped before its first checkpoint: start over in the same folder
        extra = self.trainer.load(self.folder.checkpoint(step))
        self.start = self.completed = step
        self.before = extra["before"]
        self.refitter.restore_selection(extra, str(self.folder.checkpoint(step)))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long a part of the step takes; every part ends in values that the host has."""
        begin = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begin

    def sample(self, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Roll out step ``step`` (0-based) from weights of that version; batch and statistics on every rank."""
        sampled: tuple[dict[str, Tensor], dict[str, float]] = on_rank0(
            lambda: self.sampler.sample(self._held_rollout(), step)
        )
        return sampled

    def evaluate(self, step: int) -> float:
        """Mean sampled reward on the held-out problems after ``step`` steps, the same on every rank."""
        return float(on_rank0(lambda: self.sampler.evaluate(self._held_rollout(), step)))

    def _held_rollout(self) -> Rollout:
        assert self.rollout is not None, "only rank 0 asks the rollout"
        return self.rollout

    def update(self, step: int, batch: dict[str, Tensor]) -> dict[str, float]:
        """The step's optimizer updates; token-weighted metrics."""
        scale = min(1.0, (step + 1) / self.cfg.lr_ramp) if self.cfg.lr_ramp else 1.0
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.args.lr * scale
        size = batch["tokens"].shape[0] // self.cfg.updates_per_step
        totals: dict[str, float] = {}
        for part in range(self.cfg.updates_per_step):
            mini = {k: v[part * size : (part + 1) * size] for k, v in batch.items()}
            found = self.trainer.step(mini, lambda lp, ent, b: grpo_loss(lp, ent, b, self.cfg.grpo))
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value / self.cfg.updates_per_step
        totals["lr"] = self.args.lr * scale
        return totals

    def recalibrate(self, version: int, batch: dict[str, Tensor]) -> dict[str, float]:
        """When it is due: the selection that goes with version ``version``, on the sequences that were just sampled."""
        every = self.cfg.recalibrate_every
        if not every:
            return {}
        new = 0 if version % every else self.refitter.recalibrate(version, whole_sequences(batch))
        return {"rac_version": self.refitter.rac_version, "rac_blocks_changed": new}

    def refit(self, version: int) -> dict[str, float]:
        """Bring version ``version`` into the rollout, prove that both sides multiply with the same weights."""
        try:
            with self.timed("refit_s"):
                sent = self.refitter.send(self.rollout, version)
            self.refitter.prune(self.start)
            with self.timed("prove_s"):
                bits = float(self.refitter.prove(self.rollout, version))
        except StopRequested:
            # the rollout is lost for good, the step is not: its row goes without the proof that the resumed run makes
            return {}
        return {**sent, "weight_bits_mismatched": bits}

    def finish_step(self, step: int, row: dict[str, float]) -> None:
        """Write the row, save when it is due, say where the run is; StopRequested when the launcher wants its end."""
        if self.rank0:
            assert self.writer is not None
            self.writer.write(step, row)
            print(
                f"step {step:3d}/{self.cfg.steps}  reward {row['reward']:.3f}  "
                f"gap mean {row['train_rollout_logprob_abs_diff/mean']:.2e} max {row['train_rollout_logprob_abs_diff/max']:.2e}  "
                f"bits {row.get('weight_bits_mismatched', float('nan')):.0f}  {row['tokens_per_s']:.0f} tok/s  {row['step_s']:.1f} s",
                flush=True,
            )
        every = self.cfg.save_every
        if step == self.cfg.steps or (every and step % every == 0):
            self._save(step)
        self.completed = step
        if self.rank0:
            self.folder.write_status("running", step)
        if step < self.cfg.steps and (reason := share(self.control.stop_reason() if self.rank0 else None)):
            raise StopRequested(reason)

    def close_run(self, after: float) -> dict[str, Any]:
        """Write the final export and the summary."""
        self.refitter.export_final(self.cfg.steps)
        result = {"reward_before": self.before, "reward_after": after}
        if self.rank0:
            self.folder.write_status("done", self.cfg.steps, **result)
        return result
