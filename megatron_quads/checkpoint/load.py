"""Hugging Face checkpoint -> sharded Megatron model, under any EP x TP x ETP x PP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import QuadsError
from .hf import HFModel, SafetensorsFolder
from .inventory import Held, agree, exchange, held_units
from .mapping import Unit, shard, units


def load_hf(chunks: Sequence[nn.Module], hf: HFModel) -> None:
    """Collective: fill this rank's parameters from ``hf.path``; each rank reads only the tensors it holds a part of.

    ``chunks`` are the rank's GPTModel chunks, wrapped (DDP, Float16Module) or not. Values are cast to each parameter's
    dtype. An optimizer built before must be told (``reload_model_params``). QuadsError, on every rank, when a shard is
    missing or truncated, a tensor is missing, misshapen or holds NaN/Inf, or the checkpoint is itself quantised.
    """
    error: QuadsError | None = None
    try:
        if hf.config.get("quantization_config"):
            raise QuadsError(
                "the checkpoint is quantised", where=str(hf.path), do="train from a BF16 or FP32 checkpoint"
            )
        reader = SafetensorsFolder(hf.path)
        held = held_units(chunks, hf)
        for unit in units(hf):
            if unit.key in held:
                _load_unit(unit, held[unit.key], reader, hf)
    except QuadsError as e:
        error = e
    agree(error)
    loaded = set().union(*exchange(set(held)))
    # a tied head exists as a parameter only on a last stage that is not the first one too
    if absent := [u for u in units(hf) if u.exported and u.key not in loaded]:
        raise QuadsError(
            f"no rank holds {absent[0].names[0]} ({len(absent)} parameters are not in the model)",
            where=str(hf.path),
            do="build the model from this checkpoint's configuration",
        )


def _load_unit(unit: Unit, held: Held, reader: SafetensorsFolder, hf: HFModel) -> None:
    tensors = [_read(reader, name, shape) for name, shape in zip(unit.names, unit.shapes, strict=True)]
    local = shard(unit, tensors, hf, rank=held.rank, size=held.size, rows=held.parameter.shape[0])
    if local.shape != held.parameter.shape:
        raise QuadsError(
            f"the model expects {list(held.parameter.shape)}, the checkpoint gives {list(local.shape)}",
            where=", ".join(unit.names),
            do="build the model from this checkpoint's configuration",
        )
    with torch.no_grad():
        held.parameter.copy_(local)


def _read(reader: SafetensorsFolder, name: str, shape: tuple[int, ...]) -> Tensor:
    if reader.shape(name) != shape:
        raise QuadsError(
            f"{name} has shape {list(reader.shape(name))}, config.json implies {list(shape)}",
            where=str(reader.path),
            do="fetch the checkpoint again",
        )
    tensor = reader.get(name)
    if not tensor.is_floating_point():
        raise QuadsError(
            f"{name} has dtype {tensor.dtype}", where=str(reader.path), do="give a BF16 or FP32 checkpoint"
        )
    require_finite(name, tensor, where=str(reader.path))
    return tensor


def require_finite(name: str, tensor: Tensor, *, where: str) -> None:
    """QuadsError naming ``name`` when the tensor holds NaN or Inf."""
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise QuadsError(f"{name} holds {bad} NaN or Inf values", where=where, do="use an earlier checkpoint")
