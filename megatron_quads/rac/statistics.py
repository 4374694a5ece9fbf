"""What calibration remembers of the experts' inputs, summed over all ranks so that every layout gives the same numbers.

Two passes: ``Moments`` (counts, channel second moments, amax) decides the order of channels and static scales;
``ResidualEnergy`` then sees the sorted model under the configured activation scale. Sums are fp64: the order in which
ranks and micro-batches add up must not decide which block is ranked first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.nvfp4 import reference as nvfp4
from ..kernels.rac import reference as rac
from .metadata import BLOCK, ModelShape
from .select import GEMMS, Gemm, Unit

ActivationScale = Literal["token", "tensor", "static"]


def activation_scale(x: Tensor, mode: ActivationScale, static_amax: float | None = None) -> Tensor:
    """FP32 global scale of activations x [tokens, K]: [tokens, 1] per token, else a scalar."""
    if mode == "token":
        return nvfp4.row_scale(x)
    if mode == "tensor":
        return nvfp4.tensor_scale(nvfp4.amax(x))
    if static_amax is None:
        raise ValueError("a static activation scale needs static_amax")
    return nvfp4.tensor_scale(torch.tensor(static_amax, dtype=torch.float32, device=x.device))


def saturated(x: Tensor, static_amax: float) -> int:
    """Elements of x that a static scale made for ``static_amax`` clips."""
    return int((x.detach().abs().float() > static_amax).sum())


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """All-reduce in place over every rank; a no-op without a process group. CPU tensors travel by device under NCCL."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    moved = tensor.to(device)
    dist.all_reduce(moved, op=op)
    tensor.copy_(moved)


def _named(prefix: str, tables: Mapping[Gemm, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{gemm}": table for gemm, table in tables.items()}


class Moments:
    """Per layer and expert: tokens, amax of both inputs, second moment of down's input channels.

    ``tokens`` [L, E], ``amax[gemm]`` [L, E], ``down_square`` [L, E, I] (sums of squares), all on the CPU. Call the
    object for every observed input (``observe_experts``), then ``reduce`` once on all ranks. ``weight`` scales what is
    observed: 1/n while n data-parallel ranks run the same prompt. ``copies``: ranks that observe the same rows.
    """

    def __init__(self, shape: ModelShape, copies: int = 1) -> None:
        size = (shape.num_layers, shape.num_experts)
        self.tokens = torch.zeros(size, dtype=torch.float64)
        self.amax: dict[Gemm, Tensor] = {gemm: torch.zeros(size) for gemm in GEMMS}
        self.down_square = torch.zeros(*size, shape.moe_intermediate_size, dtype=torch.float64)
        self.weight, self.copies = 1.0, copies

    def __call__(self, layer: int, expert: int, gemm: Gemm, x: Tensor) -> None:
        """Add an expert GEMM's input x [tokens, K]."""
        if not x.numel():
            return
        here = self.amax[gemm][layer, expert]
        torch.maximum(here, x.detach().abs().amax().float().cpu(), out=here)
        if gemm == "down":
            self.tokens[layer, expert] += self.weight * x.shape[0]
            self.down_square[layer, expert] += self.weight * x.detach().double().square().sum(0).cpu()

    def tables(self) -> dict[str, Tensor]:
        """The tensors themselves, by name; those named ``amax`` combine by their largest, others by their sum."""
        return {"tokens": self.tokens, "down_square": self.down_square, **_named("amax", self.amax)}

    def reduce(self) -> None:
        """Combine all ranks; afterwards every rank holds the same numbers."""
        for total in (self.tokens, self.down_square):
            all_reduce(total, dist.ReduceOp.SUM)
            total /= self.copies
        for top in self.amax.values():
            all_reduce(top, dist.ReduceOp.MAX)

    def unseen(self, layers: Iterable[int]) -> list[tuple[int, int]]:
        """(layer, expert) pairs of ``layers`` that no calibration token reached."""
        return [(layer, e) for layer in layers for e in torch.nonzero(self.tokens[layer] == 0).flatten().tolist()]

    def second_moment(self, layer: int) -> Tensor:
        """Mean square of down's input channels [E, I]; experts never reached get the layer's."""
        tokens, square = self.tokens[layer], self.down_square[layer]
        whole = square.sum(0) / tokens.sum().clamp(min=1)
        return torch.where((tokens > 0)[:, None], square / tokens.clamp(min=1e-9)[:, None], whole)

    def unit_amax(self, layers: Iterable[int]) -> dict[Unit, float]:
        """Largest input magnitude per unit over all experts of the layer."""
        return {(layer, gemm): float(self.amax[gemm][layer].max()) for layer in layers for gemm in GEMMS}


class ResidualEnergy:
    """Residual energy per unit and 16-block, sum over tokens of ``||r||^2`` with r = x - DQ(Q(x)).

    ``static_amax`` (headroom included) is used when ``mode`` is static; what it clips is counted per unit.
    """

    def __init__(
        self, shape: ModelShape, mode: ActivationScale, static_amax: Mapping[Unit, float], copies: int = 1
    ) -> None:
        layers = shape.num_layers
        self.energy: dict[Gemm, Tensor] = {
            "gate_up": torch.zeros(layers, shape.hidden_size // BLOCK, dtype=torch.float64),
            "down": torch.zeros(layers, shape.moe_intermediate_size // BLOCK, dtype=torch.float64),
        }
        self.clipped: dict[Gemm, Tensor] = {gemm: torch.zeros(layers, dtype=torch.float64) for gemm in GEMMS}
        self.mode, self.static_amax = mode, static_amax
        self.weight, self.copies = 1.0, copies

    def __call__(self, layer: int, expert: int, gemm: Gemm, x: Tensor) -> None:
        """Add an expert GEMM's input x [tokens, K]."""
        if not x.numel():
            return
        top = self.static_amax.get((layer, gemm))
        rest = rac.residual(x.detach(), activation_scale(x, self.mode, top))[1]
        self.energy[gemm][layer] += self.weight * rest.double().square().sum(0).unflatten(0, (-1, BLOCK)).sum(-1).cpu()
        if self.mode == "static" and top is not None:
            self.clipped[gemm][layer] += self.weight * saturated(x, top)

    def tables(self) -> dict[str, Tensor]:
        """The tensors themselves, by name; all are sums."""
        return {**_named("energy", self.energy), **_named("clipped", self.clipped)}

    def reduce(self) -> None:
        """Combine all ranks; afterwards every rank holds the same numbers."""
        for total in (*self.energy.values(), *self.clipped.values()):
            all_reduce(total, dist.ReduceOp.SUM)
            total /= self.copies

    def by_unit(self, layers: Iterable[int]) -> dict[Unit, Tensor]:
        """Block energies [K/16] per unit."""
        return {(layer, gemm): self.energy[gemm][layer] for layer in layers for gemm in GEMMS}
