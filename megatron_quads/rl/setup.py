"""What a run starts before its session: the rollout's process and, where the loss has a KL term, the starting policy."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from ..checkpoint.hf import HFModel
from ..checkpoint.load import load_hf
from ..config import QuadsConfig
from ..rollout.process import EngineProcess
from ..trainer.model import build
from .config import RLConfig
from .runfolder import RunFolder


@contextlib.contextmanager
def early_engine(cfg: RLConfig) -> Iterator[EngineProcess | None]:
    """On rank 0 of a run with its own rollout: a process that imports vLLM while the trainer is built; it ends with the block."""
    if cfg.rollout != "local" or dist.get_rank():
        yield None
        return
    process = EngineProcess(RunFolder(cfg.out).logs / "rollout.log")
    try:
        yield process
    finally:
        process.close()


def reference_model(args: argparse.Namespace, hf: HFModel, quads: QuadsConfig) -> list[nn.Module]:
    """A frozen copy of the starting policy, sharded like the trainer, without DDP or optimizer."""
    chunks = build(args, hf, quads)
    load_hf(chunks, hf)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return chunks
