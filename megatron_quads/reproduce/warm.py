"""Warm-up: from an untrained MoE to held-out pass@1 in the wanted range, on Megatron, measured by the real rollout."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from .. import atomic, jobs
from ..errors import QuadsError
from ..rl.data import warmup_batch
from ..rl.loss import supervised_loss
from ..rl.metrics import read_rows
from ..rl.ranks import on_rank0, share
from ..rl.runfolder import RunFolder
from ..rl.sampler import Sampler
from ..rl.tasks import make_task
from ..rl.tiny import make_tiny_checkpoint
from ..screen import Screen
from .config import check
from .folder import Root

SOLVED = 1.0 - 1e-6  # a verifier's full mark


def make_warm(root: Root) -> None:
    """Make ``root.warm`` if it is not there; a broken-off warm-up goes on from its last check."""
    if atomic.is_committed(root.warm):
        root.require_warm()
        shutil.rmtree(root.path / "warm-run", ignore_errors=True)
        print(f"warm checkpoint: {root.warm}, as it is", flush=True)
        return
    config = root.config
    if not atomic.is_committed(root.init):
        task = make_task(config.task, config.task_config)
        make_tiny_checkpoint(root.init, config.seed, task=task, model=config.model.tiny())
    settings = {"part": "warm", "root": str(root.path), "config": config.model_dump(mode="json")}
    argv = [*config.flags(), "--lr", str(config.warm.lr), "--quads-recipe", "bf16"]
    with Screen() as screen:
        jobs.launch(
            "reproduce",
            settings,
            argv,
            nproc=config.nproc,
            logs=root.path / "warm-run" / "logs",
            show=screen.line,
        )
    root.require_warm()
    shutil.rmtree(root.path / "warm-run", ignore_errors=True)


def warm_job(job: jobs.Job) -> None:
    """Every rank: train, measure every few steps, export the checkpoint that meets the mark."""
    import torch.distributed as dist

    from ..checkpoint.export import export_hf
    from ..trainer.trainer import Trainer

    _repeatable()
    config = check(job.settings["config"], where="job")
    root = Root(Path(job.settings["root"]), config)
    args, hf, quads = jobs.start(job, str(root.init))
    w, folder = config.warm, RunFolder(root.path / "warm-run")
    atomic.make_folder(folder.path)
    cfg = config.rl_config(root.init, folder.path, config.seed)
    sampler = Sampler(cfg, hf, folder, multiple=max(1, args.tensor_model_parallel_size))
    trainer = Trainer(args, hf, quads)
    start = share(folder.latest_step()) or 0
    passed = trainer.load(folder.checkpoint(start))["pass@1"] if start else 0.0
    judge = _Judge(sampler, folder)
    try:
        for step in range(start, w.steps):
            if passed >= w.stop_at:
                break
            batch = warmup_batch(
                sampler.task,
                lambda t: sampler.tokenizer.encode(t),
                seed=config.seed,
                step=step,
                n=w.batch,
                eos_id=sampler.tokenizer.eos_token_id,
                pad_id=sampler.tokenizer.pad_token_id,
                context=hf.max_position,
                noise=w.noise,
                multiple=args.tensor_model_parallel_size,
            )
            for group in trainer.optimizer.param_groups:
                group["lr"] = w.lr * min(1.0, (step + 1) / w.ramp)
            loss = trainer.step(batch, supervised_loss)["loss"]
            done = step + 1
            if done % w.eval_every and done != w.steps:
                continue
            export_hf(trainer.chunks, hf, quads, folder.refit(done), rac=None, dtype=trainer.dtype, extra_marker={})
            passed = float(on_rank0(partial(judge.pass_at_1, done, trainer.dtype)))
            trainer.save(folder.checkpoint(done), {"pass@1": passed})
            start = done
            if dist.get_rank() == 0:
                for old in folder.path.glob("checkpoints/step_*"):
                    if old != folder.checkpoint(done):
                        shutil.rmtree(old)
                print(f"warm-up {done:4d}/{w.steps}  loss {loss:.3f}  held-out pass@1 {passed:.3f}", flush=True)
    finally:
        judge.close()
    if not w.low <= passed <= w.high:
        raise QuadsError(
            f"held-out pass@1 is {passed:.3f} after {start} steps, wanted {w.low}..{w.high}",
            where="warm",
            do="change warm.steps, warm.lr or warm.noise, and start with another --root",
        )
    marker = {"kind": "warm-up", "config": config.warm_hash, "steps": start, "pass@1": passed}
    export_hf(trainer.chunks, hf, quads, root.warm, rac=None, dtype=trainer.dtype, extra_marker=marker)


def _repeatable() -> None:
    """On a GPU: sums in a fixed order, so that a machine of the same kind makes the same checkpoint again.

    Before Transformer Engine and cuBLAS are started, which read these variables. An operation that has no such form only warns.
    """
    import torch

    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class _Judge:
    """Rank 0's engine: loads each export and samples the held-out problems."""

    def __init__(self, sampler: Sampler, folder: RunFolder) -> None:
        self.sampler, self.folder = sampler, folder
        self.rollout: Any = None

    def pass_at_1(self, version: int, dtype: Any) -> float:
        """Share of held-out problems solved by one sample each."""
        from ..rollout.client import LocalRollout

        checkpoint = self.folder.refit(version)
        if self.rollout is None:
            self.rollout = LocalRollout(
                checkpoint,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=self.sampler.context,
                max_num_seqs=256,
                seed=self.sampler.cfg.seed,
                log=self.folder.logs / "rollout.log",
            )
            self.first = version
        else:
            self.rollout.update_weights(checkpoint, version)
        self.folder.prune_refits(keep=self.first)
        self.sampler.evaluate(self.rollout, version)
        return solved(read_rows(self.folder.evals)[-1]["rewards"])

    def close(self) -> None:
        """End the engine."""
        if self.rollout is not None:
            self.rollout.close()


def solved(rewards: list[float]) -> float:
    """pass@1: the share of problems with the verifier's full mark."""
    return sum(r >= SOLVED for r in rewards) / len(rewards)
