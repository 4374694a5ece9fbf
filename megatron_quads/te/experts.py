"""The routed experts of a model that Megatron built: which linear layers they are, by global layer.

Found through the built modules, not through module names: those count layers within a pipeline stage. Layers of
multi-token prediction are not routed experts of the model that is served, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import nn

from ..errors import QuadsError

Kind = Literal["fc1", "fc2"]
Backend = Literal["grouped", "te", "local"]


@dataclass(frozen=True)
class ExpertGemm:
    """One GEMM (fc1 or fc2) of one MoE layer of this rank: the modules that hold its weights, in expert order.

    ``layer``: global, 0-based. ``names``: of the weights, for messages; experts have their global number.
    """

    layer: int
    kind: Kind
    backend: Backend
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    tp_group: dist.ProcessGroup | None

    def params(self, module: nn.Module) -> list[nn.Parameter]:
        """Weights of one of the modules, in expert order."""
        if self.backend == "grouped":
            return [getattr(module, f"weight{i}") for i in range(int(module.num_gemms))]  # type: ignore[arg-type]
        return [module.weight]  # type: ignore[list-item]


def expert_gemms(chunks: Sequence[nn.Module]) -> list[ExpertGemm]:
    """Every routed expert GEMM of this rank, by layer. QuadsError for an expert class that is not known."""
    return [gemm for chunk in unwrap_model(list(chunks)) for gemm in _of_chunk(chunk)]


def _of_chunk(chunk: nn.Module) -> Iterator[ExpertGemm]:
    for path, moe in chunk.named_modules():
        if not isinstance(moe, MoELayer) or "mtp" in path.split("."):
            continue
        experts: Any = moe.experts
        layer = int(moe.layer_number) - 1  # type: ignore[arg-type]
        group: Any = experts.tp_group
        first = experts.ep_group.rank() * experts.num_local_experts if experts.ep_group is not None else 0
        numbers = range(first, first + experts.num_local_experts)
        for kind in ("fc1", "fc2"):
            names = tuple(f"layers.{layer}.mlp.experts.{e}.linear_{kind}.weight" for e in numbers)
            modules: tuple[nn.Module, ...]
            if type(experts) is TEGroupedMLP:
                modules = (getattr(experts, f"linear_{kind}"),)
                backend: Backend = "grouped"
            elif isinstance(experts, SequentialMLP):
                modules = tuple(getattr(e, f"linear_{kind}") for e in experts.local_experts)
                local = isinstance(modules[0], ColumnParallelLinear | RowParallelLinear)
                backend = "local" if local else "te"
            else:
                raise QuadsError(
                    f"experts of class {type(experts).__name__} are not supported",
                    where=f"layer {layer}",
                    do="use Megatron's TEGroupedMLP (--moe-grouped-gemm) or SequentialMLP",
                )
            if backend == "te" and not _is_te_linear(modules[0]):
                raise QuadsError(
                    f"expert linears of class {type(modules[0]).__name__} are not supported",
                    where=f"layer {layer}",
                    do="use Megatron's own or Transformer Engine's linear layers",
                )
            yield ExpertGemm(layer, kind, backend, modules, names, group)  # type: ignore[arg-type]


def _is_te_linear(module: nn.Module) -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear

    return bool(HAVE_TE) and isinstance(module, TELinear)
