"""What each rank holds of the sharded model, and agreement on errors between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import nn

from ..errors import QuadsError
from .hf import HFModel
from .mapping import unit_key


@dataclass(frozen=True)
class Held:
    """A unit that this rank holds: its parameter, the module that owns it, and which shard of how many it is."""

    parameter: nn.Parameter
    module: nn.Module
    rank: int
    size: int


@dataclass(frozen=True)
class Remote:
    """What other ranks know of a ``Held``."""

    rank: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def rank() -> int:
    """Global rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def held_units(chunks: Sequence[nn.Module], hf: HFModel) -> dict[str, Held]:
    """Unit key -> what this rank holds; QuadsError for parameters that no HF tensor corresponds to."""
    out: dict[str, Held] = {}
    for chunk in unwrap_model(list(chunks)):
        layer_of = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        tp = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
        etp = (parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size())
        first_expert = _first_expert(hf)
        for name, parameter in chunk.named_parameters():
            key = unit_key(name, layer_of=layer_of, first_expert=first_expert, hf=hf)
            module = chunk.get_submodule(name.rpartition(".")[0])
            index, size = etp if ".experts." in name else tp
            out[key] = Held(parameter, module, index, size)
    return out


def _first_expert(hf: HFModel) -> int:
    ep = parallel_state.get_expert_model_parallel_world_size()
    if hf.num_experts % ep:
        raise QuadsError(
            f"{hf.num_experts} experts cannot be divided over {ep} expert-parallel ranks",
            where="--expert-model-parallel-size",
            do="choose a divisor",
        )
    return parallel_state.get_expert_model_parallel_rank() * (hf.num_experts // ep)


def exchange(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def agree(error: QuadsError | None) -> None:
    """Collective: when any rank has an error all raise (the lowest rank's), so that none waits for ever."""
    found = [e for e in exchange(None if error is None else (error.what, error.where, error.do)) if e is not None]
    if error is not None:
        raise error
    if found:
        what, where, do = found[0]
        raise QuadsError(what, where=where, do=do)
