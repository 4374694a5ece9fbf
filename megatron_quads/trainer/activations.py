"""Quantised activations of the routed experts inside the trainer, and a look at those activations.

Both see what the rollout quantises: the input of fc1, and silu(gate) * up *before* the router's probability. Megatron
multiplies that probability between activation and fc2 (the rollout does so after down_proj), so fc2's own input is the
wrong tensor: it is rebuilt here from fc1's output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import QuadsError
from ..kernels.nvfp4 import reference as nvfp4
from ..kernels.rac import reference as rac_reference
from ..rac.metadata import GemmSelection, RacMetadata
from .experts import StraightThrough, is_quantized, moe_layers

Gemm = Literal["gate_up", "down"]
ActivationScale = Literal["token", "tensor", "static"]
Unit = tuple[int, Gemm]
Observer = Callable[[int, int, Gemm, Tensor], None]
Map = Callable[[Tensor, Sequence[int]], Tensor]


def swiglu(fc1: Tensor) -> Tensor:
    """silu(gate) * up of fc1's output [tokens, 2 * I / etp], as Megatron's expert computes it."""
    gate, up = fc1.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Quantizer:
    """DQ(Q(x)) of one unit's inputs, RAC included; K may be sharded over ``group`` (fc2 under expert TP)."""

    def __init__(
        self, scale: ActivationScale, selection: GemmSelection | None, k: int, group: dist.ProcessGroup | None
    ) -> None:
        self.scale_mode = scale
        self.static_amax = selection.static_amax if selection else None
        self.group = group if group is not None and group.size() > 1 else None
        blocks = k // nvfp4.BLOCK
        first = self.group.rank() * blocks if self.group else 0
        chosen = selection.indices() if selection else []
        self.blocks = torch.tensor([b - first for b in chosen if first <= b < first + blocks], dtype=torch.int64)

    def _scale(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        if self.scale_mode == "static":
            return nvfp4.tensor_scale(torch.tensor(self.static_amax, dtype=torch.float32, device=x.device))
        if self.scale_mode == "token":
            amax = x.abs().amax(-1, keepdim=True).float()
        elif len(tokens) == 1:
            amax = nvfp4.amax(x)
        else:
            amax = per_expert_amax(x, tokens)
        if self.group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        return nvfp4.tensor_scale(amax)

    def __call__(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """x [tokens, K local] -> what the GEMM multiplies with, gradient straight through; ``tokens`` of each expert."""
        with torch.no_grad():
            if self.blocks.device != x.device:
                self.blocks = self.blocks.to(x.device)
            value = rac_reference.qdq_with_residual(x.detach(), self._scale(x.detach(), tokens), self.blocks)
        return StraightThrough.apply(x, value)


def per_expert_amax(x: Tensor, tokens: Sequence[int]) -> Tensor:
    """fp32 [rows, 1]: the largest magnitude of all rows of the same expert; ``tokens[i]`` rows belong to expert i."""
    parts = [nvfp4.amax(part).expand(len(part), 1) for part in x.split(list(tokens)) if len(part)]
    return torch.cat(parts) if parts else x.new_zeros(0, 1, dtype=torch.float32)


class _Expert:
    """Hooks on one expert's MLP, or on the one of all local experts (``grouped``).

    ``gate_up`` and ``down`` map an input [tokens, K] and the number of tokens of each expert to the tensor used in its place.
    """

    def __init__(self, mlp: nn.Module, gate_up: Map, down: Map) -> None:
        self.gate_up, self.down = gate_up, down
        self.grouped = isinstance(mlp, TEGroupedMLP)
        self.probabilities: Tensor | None = None
        self.fc1: Tensor | None = None
        linears: Any = mlp
        fc1, fc2 = linears.linear_fc1, linears.linear_fc2
        self.handles: list[RemovableHandle] = [
            mlp.register_forward_pre_hook(self._enter, with_kwargs=True),
            fc1.register_forward_pre_hook(self._before_fc1),
            fc1.register_forward_hook(self._after_fc1),
            fc2.register_forward_pre_hook(self._before_fc2),
        ]

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.grouped:
            self.probabilities = args[2]
        else:
            self.probabilities = args[1] if len(args) > 1 else kwargs["per_token_scale"]

    def _tokens(self, args: tuple[Any, ...]) -> Sequence[int]:
        return args[1] if self.grouped else [len(args[0])]

    def _before_fc1(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.gate_up(args[0], self._tokens(args)), *args[1:])

    def _after_fc1(self, _: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        self.fc1 = output[0]

    def _before_fc2(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        fc1, probabilities = self.fc1, self.probabilities
        self.fc1 = self.probabilities = None
        assert fc1 is not None and probabilities is not None
        x = self.down(swiglu(fc1), self._tokens(args))
        return ((x * probabilities.unsqueeze(-1)).to(x.dtype), *args[1:])


@contextlib.contextmanager
def _hooked(experts: list[_Expert]) -> Iterator[None]:
    try:
        yield
    finally:
        for expert in experts:
            for handle in expert.handles:
                handle.remove()


@dataclass(frozen=True)
class _Place:
    """An MLP of this rank. ``expert``: global number of its first one. ``k``: of fc1 and fc2, local."""

    layer: int
    expert: int
    mlp: Any
    k: tuple[int, int]
    tp_group: dist.ProcessGroup


def _mlps(chunks: Sequence[nn.Module]) -> Iterator[_Place]:
    for layer, moe in moe_layers(chunks):
        experts: Any = moe.experts
        first = parallel_state.get_expert_model_parallel_rank() * experts.num_local_experts
        grouped = isinstance(experts, TEGroupedMLP)
        name = "weight0" if grouped else "weight"
        for i, mlp in enumerate([experts] if grouped else experts.local_experts):
            k1, k2 = (getattr(linear, name).shape[1] for linear in (mlp.linear_fc1, mlp.linear_fc2))
            yield _Place(layer, first + i, mlp, (k1, k2), experts.tp_group)


def _quantized_experts(chunks: Sequence[nn.Module], layers: Collection[int] | None) -> Iterator[_Place]:
    """The MLPs of ``layers``; None takes those whose weights are quantised."""
    for place in _mlps(chunks):
        if is_quantized(place.mlp.linear_fc1) if layers is None else place.layer in layers:
            yield place


@contextlib.contextmanager
def emulate_activations(
    chunks: Sequence[nn.Module],
    rac: RacMetadata | None,
    *,
    activation_scale: ActivationScale = "token",
    units: Collection[Unit] | None = None,
) -> Iterator[None]:
    """Inside, the routed experts compute as the rollout does: DQ(Q(x)), plus DQ(Q(residual)) in RAC's blocks.

    Applies to the layers that ``rac`` names, or, without it (plain W4A4), to those whose weights are quantised;
    ``units`` limits it to some (layer, "gate_up" | "down"). Gradients pass straight through. A ``tensor`` scale spans
    the tokens of one expert. Raises QuadsError on a static scale without a calibrated amax.
    """
    if activation_scale == "static" and rac is None:
        raise QuadsError(
            "a static activation scale needs calibrated amax values",
            where="--quads-activation-scale",
            do="give RAC metadata, or scale per token",
        )

    def keep(x: Tensor, tokens: Sequence[int]) -> Tensor:
        return x

    experts = []
    for place in _quantized_experts(chunks, None if rac is None else rac.layers):
        layer = place.layer
        chosen = rac.layers[layer] if rac is not None else None
        maps: dict[Gemm, Map] = {"gate_up": keep, "down": keep}
        if units is None or (layer, "gate_up") in units:
            maps["gate_up"] = _Quantizer(activation_scale, chosen.gate_up if chosen else None, place.k[0], None)
        if units is None or (layer, "down") in units:
            maps["down"] = _Quantizer(activation_scale, chosen.down if chosen else None, place.k[1], place.tp_group)
        if units is None or maps["gate_up"] is not keep or maps["down"] is not keep:
            experts.append(_Expert(place.mlp, maps["gate_up"], maps["down"]))
    with _hooked(experts):
        yield


@contextlib.contextmanager
def observe_experts(chunks: Sequence[nn.Module], fn: Observer) -> Iterator[None]:
    """Inside, ``fn(layer, expert, "gate_up" | "down", x)`` sees each input [tokens, K] of the layers' routed experts.

    Layers are those whose weights are quantised, or all when none is. Under expert tensor parallelism "down" is
    gathered to its full K on each rank of the group; all observe the same rows. ``fn`` must not keep or change x.
    """
    any_quantized = any(is_quantized(place.mlp.linear_fc1) for place in _mlps(chunks))
    layers = None if any_quantized else {layer for layer, _ in moe_layers(chunks)}

    def watcher(place: _Place, gemm: Gemm, group: dist.ProcessGroup | None) -> Map:
        def watch(x: Tensor, tokens: Sequence[int]) -> Tensor:
            with torch.no_grad():
                parts = _full_k(x.detach(), group).split(list(tokens))
                for i, part in enumerate(parts):
                    fn(place.layer, place.expert + i, gemm, part)
            return x

        return watch

    experts = [
        _Expert(place.mlp, watcher(place, "gate_up", None), watcher(place, "down", place.tp_group))
        for place in _quantized_experts(chunks, layers)
    ]
    with _hooked(experts):
        yield


def _full_k(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or group.size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)
