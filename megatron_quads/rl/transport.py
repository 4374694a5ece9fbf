"""How a run's weights reach the rollout between two steps: as flat packed chunks from memory, or as an export folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.gather import iter_units
from ..checkpoint.hf import HFModel
from ..checkpoint.inventory import agree
from ..checkpoint.mapping import units
from ..checkpoint.packing import encoded
from ..config import QuadsConfig
from ..errors import QuadsError
from ..rac.metadata import RacMetadata
from ..rollout.client import LocalRollout
from ..rollout.flat import chunks_of
from ..rollout.types import Rollout
from ..trainer.trainer import Trainer


@dataclass(frozen=True)
class Transport:
    """``flat``: chunks from memory, through ``file`` or, where it is None, CUDA IPC. ``line``: what the log says of it."""

    flat: bool
    line: str
    file: Path | None = None


def choose(mode: str, rollout: Rollout, rac_hash: str | None, device: torch.device, file: Path) -> Transport:
    """Rank 0: the transport of a run. ``device``: of the trainer's weights. ``file``: to share when IPC cannot.

    ``auto`` falls back to folders and says why; ``flat`` raises QuadsError then.
    """
    if mode == "folder":
        return Transport(False, "refit: export folders")
    try:
        if not isinstance(rollout, LocalRollout):
            raise QuadsError("only a local rollout takes flat refits", where="--refit flat", do="give --refit auto")
        theirs = rollout.flat_device(rac_hash)
    except QuadsError as e:
        if mode == "flat":
            raise QuadsError(e.what, where="--refit flat", do="give --refit auto or folder") from e
        return Transport(False, f"refit: export folders ({e.what})")
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    if mine is not None and mine == theirs:
        return Transport(True, "refit: packed weights from memory, CUDA IPC")
    return Transport(True, "refit: packed weights from memory, through a file", file)


def send_flat(
    trainer: Trainer,
    hf: HFModel,
    quads: QuadsConfig,
    rac: RacMetadata | None,
    rollout: Rollout | None,
    version: int,
    file: Path | None,
) -> int:
    """Collective: the trainer's weights, packed as the export's, into the rollout; the bytes sent (0 but on rank 0).

    Rank 0 gathers one parameter at a time and sends one layer at a time. Every rank raises the same QuadsError when a
    weight is not finite or the rollout refuses, dies or misses something: it serves nothing any more then.
    """
    layers = quads.quantized_layers(hf.num_layers)
    error: QuadsError | None = None
    sent = 0
    stream = iter_units(trainer.chunks, hf)
    if rollout is not None:
        assert isinstance(rollout, LocalRollout)
        try:
            named = encoded(stream, layers, rac, trainer.dtype, input_scales=False)
            rac_hash = rac.content_hash if rac is not None else None
            block = rac.to_block() if rac is not None else None
            sent = rollout.update_flat(chunks_of(named), version, rac_hash=rac_hash, rac=block, file=file).bytes
        except QuadsError as e:
            error = e
        finally:
            if file is not None:
                file.unlink(missing_ok=True)
    # rank 0: what is left after an error, so that no rank waits in a send; other ranks: all of it
    for _ in stream:
        pass
    agree(error)
    return sent


def bf16_bytes(hf: HFModel) -> int:
    """Bytes of all the weights of a refit in BF16."""
    return sum(2 * torch.Size(s).numel() for unit in units(hf) if unit.exported for s in unit.shapes)
