"""Where quantisation meets the routed experts: linear layers that multiply with DQ(Q(weight)) and train the weight.

They are Megatron's own Column/RowParallelLinear with one method overridden, and reach the model through its layer spec.
The gradient passes straight through: what the GEMM would give to the quantised weight goes to the parameter unchanged.
On Transformer Engine's layers ``megatron_quads.te`` does the same; ``expert_linears`` shows both alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from ..config import QuadsConfig
from ..errors import QuadsError
from ..kernels.nvfp4 import reference as nvfp4
from ..te.install import compute_weight as installed_weight

Kind = Literal["fc1", "fc2"]


class StraightThrough(torch.autograd.Function):
    """Forward: the given value in place of ``x``. Backward: the gradient to ``x``, unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _QuantizedExpert(nn.Module):
    """Mixin over Megatron's parallel linears. ``quantized`` False makes it the plain layer."""

    weight: nn.Parameter
    tp_group: dist.ProcessGroup

    def __init__(self, *args: Any, quantized: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quantized = quantized
        # both live only inside ``frozen_weights``: there no weight can change
        self._frozen_amax: Tensor | None = None
        self._frozen_weight: Tensor | None = None

    def shard_amax(self) -> Tensor:
        """fp32 scalar: largest magnitude of this rank's shard. fc1 holds [gate; up], so the two share one amax."""
        return nvfp4.amax(self.weight)

    @torch.no_grad()
    def compute_weight(self) -> Tensor:
        """What the GEMM multiplies with: the parameter, or its DQ(Q(.)) under the whole tensor's amax, in its dtype.

        Collective over the expert tensor parallel group when that has several ranks (outside ``frozen_weights``).
        """
        if not self.quantized:
            return self.weight
        if self._frozen_weight is not None:
            return self._frozen_weight
        amax = self._frozen_amax
        if amax is None:
            amax = self.shard_amax()
            if self.tp_group.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.tp_group)
        value = nvfp4.qdq(self.weight.detach(), nvfp4.tensor_scale(amax))
        if self._frozen_amax is not None:
            self._frozen_weight = value
        return value

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Megatron's GEMM, with the quantised weight in the parameter's place."""
        if self.quantized:
            weight = StraightThrough.apply(weight, self.compute_weight())
        return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]


class QuadsColumnParallelLinear(_QuantizedExpert, ColumnParallelLinear):
    """An expert's fc1, [gate; up] stacked; weight [2 * I / etp, H]."""


class QuadsRowParallelLinear(_QuantizedExpert, RowParallelLinear):
    """An expert's fc2 (down); weight [H, I / etp]."""


@dataclass(frozen=True)
class ExpertLinear:
    """One expert GEMM of this rank. ``layer`` and ``expert`` are global, 0-based.

    ``module``: the expert's own linear, or the one that holds the weights of all local experts.
    """

    layer: int
    expert: int
    kind: Kind
    module: Any
    parameter: nn.Parameter

    @property
    def quantized(self) -> bool:
        """Whether its GEMM multiplies with DQ(Q(weight))."""
        return is_quantized(self.module)

    def compute_weight(self) -> Tensor:
        """What its GEMM multiplies with; collective as the function of that name."""
        return compute_weight(self.module, self.parameter)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Hugging Face names of the weights it holds (a shard of)."""
        stem = f"model.layers.{self.layer}.mlp.experts.{self.expert}"
        parts = ("gate_proj", "up_proj") if self.kind == "fc1" else ("down_proj",)
        return tuple(f"{stem}.{part}.weight" for part in parts)


def moe_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, MoELayer]]:
    """(global 0-based layer index, MoE layer) of this rank, in order."""
    for chunk in unwrap_model(list(chunks)):
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                yield layer.layer_number - 1, layer.mlp


def expert_linears(chunks: Sequence[nn.Module]) -> list[ExpertLinear]:
    """Every routed expert GEMM of this rank, quantised or not, in the order layer, expert, fc1, fc2."""
    out = []
    kinds: tuple[Kind, ...] = ("fc1", "fc2")
    for index, moe in moe_layers(chunks):
        experts: Any = moe.experts
        first = parallel_state.get_expert_model_parallel_rank() * experts.num_local_experts
        for i in range(experts.num_local_experts):
            for kind in kinds:
                if isinstance(experts, TEGroupedMLP):
                    module = getattr(experts, f"linear_{kind}")
                    parameter = getattr(module, f"weight{i}")
                else:
                    assert isinstance(experts, SequentialMLP)
                    module = getattr(experts.local_experts[i], f"linear_{kind}")
                    parameter = module.weight
                out.append(ExpertLinear(index, first + i, kind, module, parameter))
    return out


def is_quantized(module: nn.Module) -> bool:
    """Whether an expert's linear multiplies with quantised weights: by its class, or because a recipe is installed."""
    if isinstance(module, _QuantizedExpert):
        return module.quantized
    return getattr(module, "quads_weights", None) is not None


def compute_weight(module: nn.Module, parameter: Tensor | None = None) -> Tensor:
    """What a linear layer's GEMM multiplies with for ``parameter`` (default ``weight``): DQ(Q(.)) in experts, or itself."""
    if isinstance(module, _QuantizedExpert) and module.quantized:
        return module.compute_weight()
    if parameter is None:
        assert isinstance(module.weight, Tensor)
        parameter = module.weight
    return installed_weight(module, parameter)


@contextlib.contextmanager
def frozen_weights(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Quantise each expert weight at most once inside: nothing in there may change a weight.

    Does nothing for Transformer Engine's layers, whose values are kept until a weight changes.
    All amax values are reduced over the expert tensor parallel group in one collective. Raises QuadsError naming the
    tensor when a weight is not finite. Does not nest.
    """
    linears = [x for x in expert_linears(chunks) if isinstance(x.module, _QuantizedExpert) and x.quantized]
    if not linears:
        yield
        return
    amax = torch.stack([x.module.shard_amax() for x in linears])
    group = linears[0].module.tp_group
    if group.size() > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    if not torch.isfinite(amax).all():
        bad = linears[int((~torch.isfinite(amax)).nonzero()[0, 0])]
        raise QuadsError(
            "expert weight holds NaN or Inf", where=" / ".join(bad.hf_names), do="resume from an earlier checkpoint"
        )
    try:
        for x, value in zip(linears, amax, strict=True):
            x.module._frozen_amax = value
        yield
    finally:
        for x in linears:
            x.module._frozen_amax = x.module._frozen_weight = None


def require_match(chunks: Sequence[nn.Module], quads: QuadsConfig) -> None:
    """Collective: raise QuadsError, on every rank, when the recipe matched no module on some rank."""
    if quads.recipe == "bf16":
        return
    if quads.quantized_trainer:
        count = sum(x.quantized for x in expert_linears(chunks))
    else:  # naive: only the rollout quantises, but the same layers must exist
        config = unwrap_model(list(chunks))[0].config
        count = sum(quads.quantizes_layer(x.layer, config.num_layers) for x in expert_linears(chunks))
    counts: list[Any] = [count]
    if dist.is_initialized():
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, count)
    if empty := [rank for rank, n in enumerate(counts) if not n]:
        raise QuadsError(
            f"recipe {quads.recipe!r} matched no module on rank {', '.join(map(str, empty))}",
            where=f"--quads-module-pattern={quads.module_pattern}, first {quads.keep_first_layers} and last "
            f"{quads.keep_last_layers} layers kept",
            do="widen the pattern, keep fewer layers or use fewer pipeline stages",
        )
