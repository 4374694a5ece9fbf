"""Sharded Megatron model -> full Hugging Face tensors on rank 0, streamed one parameter at a time.

Which rank sends what is decided once from every rank's inventory, so any EP x TP x ETP x PP layout, with any number of
data-parallel replicas, gives the same tensors in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import QuadsError
from .hf import HFModel
from .inventory import Held, Remote, exchange, held_units, rank
from .mapping import Unit, merge, units

Weights = Literal["master", "compute"]


def iter_hf_tensors(
    chunks: Sequence[nn.Module],
    hf: HFModel,
    *,
    transform: Callable[[str, Tensor], Tensor] | None = None,
    weights: Weights = "master",
) -> Iterator[tuple[str, Tensor]]:
    """Collective: on rank 0 (HF name, full tensor) in canonical order; other ranks take part and get nothing.

    Every rank must exhaust the iterator. Rank 0 may stop early: closing it drains what the others still send.
    ``transform(name, tensor)`` is applied to each full tensor. ``weights="compute"`` gives for expert weights what the
    trainer's GEMMs multiply with (``trainer.experts.compute_weight``), else the parameters themselves. Tensors are
    detached, contiguous, in the parameter's dtype and on its device.
    """
    with contextlib.closing(iter_units(chunks, hf, weights=weights)) as stream:
        for unit, tensors in stream:
            for name, tensor in zip(unit.names, tensors, strict=True):
                yield name, tensor if transform is None else transform(name, tensor)


def iter_units(
    chunks: Sequence[nn.Module], hf: HFModel, *, weights: Weights = "master"
) -> Generator[tuple[Unit, list[Tensor]]]:
    """As ``iter_hf_tensors``, by unit: gate and up of an expert come together."""
    held = held_units(chunks, hf)
    plan = [u for u in units(hf) if u.exported]
    senders = _senders(plan, held)
    for i, unit in enumerate(plan):
        shards = _fetch(unit, held.get(unit.key), senders[unit.key], weights)
        if shards is None:
            continue
        try:
            yield unit, merge(unit, shards, hf)
        except GeneratorExit:
            for rest in plan[i + 1 :]:
                _fetch(rest, held.get(rest.key), senders[rest.key], weights)
            raise


def _senders(plan: list[Unit], held: dict[str, Held]) -> dict[str, list[tuple[int, Remote]]]:
    """Unit key -> per shard, in shard order, the lowest global rank that holds it."""
    mine = {k: Remote(h.rank, h.size, tuple(h.parameter.shape), h.parameter.dtype) for k, h in held.items()}
    found: dict[str, dict[int, tuple[int, Remote]]] = {}
    for owner, inventory in enumerate(exchange(mine)):
        for key, remote in inventory.items():
            found.setdefault(key, {}).setdefault(remote.rank, (owner, remote))
    out = {}
    for unit in plan:
        parts = found.get(unit.key, {})
        size = next(iter(parts.values()))[1].size if parts else 1
        wanted = [min(parts)] if parts and unit.layout == "whole" else list(range(size))
        if not all(k in parts for k in wanted):
            raise QuadsError(
                f"ranks hold shards {sorted(parts)} of {size}", where=unit.names[0], do="build the model on every rank"
            )
        out[unit.key] = [parts[k] for k in wanted]
    return out


def _fetch(unit: Unit, held: Held | None, senders: list[tuple[int, Remote]], weights: Weights) -> list[Tensor] | None:
    """Every rank calls this for every unit, in the same order. Rank 0 gets the shards, others None."""
    me = rank()
    # compute weights may need a collective over the shards' group: every holder computes, replicas included
    mine = _value(unit, held, weights) if held is not None else None
    shards = []
    for source, remote in senders:
        if me == 0 and source == 0:
            assert mine is not None
            shards.append(mine)
        elif me == 0:
            buffer = torch.empty(remote.shape, dtype=remote.dtype, device=_device(mine))
            dist.recv(buffer, src=source)
            shards.append(buffer)
        elif me == source:
            assert mine is not None
            dist.send(mine.contiguous(), dst=0)
    return shards if me == 0 else None


def _value(unit: Unit, held: Held, weights: Weights) -> Tensor:
    if weights == "master" or unit.expert is None:
        return held.parameter.detach()
    from ..trainer.experts import compute_weight

    value = compute_weight(held.module, held.parameter).detach()
    if value.shape != held.parameter.shape or value.dtype != held.parameter.dtype:
        raise QuadsError(
            f"compute weight is {value.dtype} {list(value.shape)}, the parameter {held.parameter.dtype}",
            where=unit.names[0],
        )
    return value


def _device(mine: Tensor | None) -> torch.device:
    if mine is not None:
        return mine.device
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
