"""How the routed experts of one quantised layer compute. The seam where a native kernel slots in.

    y = DQ(Q(x)) W^T + DQ(Q(r_S)) W_S^T    for gate/up and for down; the router weight is applied after down

An ``ExpertBackend`` owns what it derives from the packed weights and computes the layer. ``EmulationBackend`` runs the
arithmetic contract in PyTorch on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import nvfp4, rac

GEMMS = ("gate_up", "down")


@dataclass
class PackedExperts:
    """ModelOpt NVFP4 tensors of one layer's E local experts; H hidden, I intermediate."""

    w13: Tensor  # uint8 [E, 2I, H/2], rows gate then up
    w13_scale: Tensor  # e4m3 [E, 2I, H/16]
    w13_scale_2: Tensor  # fp32 [E], shared by gate and up
    w2: Tensor  # uint8 [E, H, I/2]
    w2_scale: Tensor  # e4m3 [E, H, I/16]
    w2_scale_2: Tensor  # fp32 [E]


@dataclass
class ActivationPlan:
    """How one layer quantises its activations. ``mode``: w4a16 (not at all), w4a4, rac (w4a4 plus residual)."""

    mode: str
    scale: str  # token | tensor | static
    blocks: dict[str, Tensor]  # gemm -> selected 16-block indices int64 [S]; empty: RAC is off there
    static_amax: dict[str, float] = field(default_factory=dict)
    saturated: dict[str, Tensor] = field(default_factory=dict)  # gemm -> rows beyond static_amax, int64 scalar
    listed: frozenset[str] = frozenset()  # gemms whose blocks stay a list even when they happen to be the leading ones

    def quantize(self, gemm: str, x: Tensor) -> Tensor:
        """x [rows, K] -> what the GEMM multiplies with, same shape and dtype."""
        if self.mode == "w4a16" or not x.shape[0]:
            return x
        blocks = self.blocks.get(gemm) if self.mode == "rac" else None
        return rac.qdq_with_residual(x, self._scale(gemm, x), blocks)

    def _scale(self, gemm: str, x: Tensor) -> Tensor:
        if self.scale == "token":
            return nvfp4.row_scale(x)
        if self.scale == "tensor":
            return nvfp4.tensor_scale(nvfp4.amax(x))
        top = torch.tensor(self.static_amax[gemm], dtype=torch.float32, device=x.device)
        over = (x.abs().amax(-1).float() > top).sum()
        self.saturated[gemm] = self.saturated[gemm] + over if gemm in self.saturated else over
        return nvfp4.tensor_scale(top)


class ExpertBackend(Protocol):
    """Computes one layer's routed experts."""

    name: str

    def load(self, packed: PackedExperts, dtype: torch.dtype) -> None:
        """Take (new) weights. A second call must keep the addresses of derived tensors (CUDA graphs hold them)."""

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, plan: ActivationPlan) -> Tensor:
        """x [tokens, H], topk_weights [tokens, k], local topk_ids [tokens, k] (-1: not on this rank) -> [tokens, H]."""

    def weights(self) -> tuple[Tensor, Tensor]:
        """The dequantised (w13 [E, 2I, H], w2 [E, H, I]) in compute dtype, as the GEMMs see them."""


class EmulationBackend:
    """The contract in PyTorch: exact, any device, host-synchronising (so it needs eager execution on a GPU)."""

    name = "emulation"

    def __init__(self) -> None:
        self._w13: Tensor | None = None
        self._w2: Tensor | None = None

    def load(self, packed: PackedExperts, dtype: torch.dtype) -> None:
        """Dequantise once per load, expert by expert (bounded temporaries), in place after the first time."""
        experts, rows, half = packed.w13.shape
        hidden, inter_half = packed.w2.shape[1:]
        if self._w13 is None or self._w2 is None:
            self._w13 = torch.empty(experts, rows, 2 * half, dtype=dtype, device=packed.w13.device)
            self._w2 = torch.empty(experts, hidden, 2 * inter_half, dtype=dtype, device=packed.w2.device)
        for e in range(experts):
            self._w13[e] = nvfp4.dequantize(packed.w13[e], packed.w13_scale[e], packed.w13_scale_2[e], dtype)
            self._w2[e] = nvfp4.dequantize(packed.w2[e], packed.w2_scale[e], packed.w2_scale_2[e], dtype)

    def weights(self) -> tuple[Tensor, Tensor]:
        """See ExpertBackend; raises RuntimeError before the first load."""
        if self._w13 is None or self._w2 is None:
            raise RuntimeError("expert weights are not loaded yet")
        return self._w13, self._w2

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, plan: ActivationPlan) -> Tensor:
        """Sort (token, expert) pairs by expert once; quantise all pairs in one call; loop only the GEMMs."""
        w13, w2 = self.weights()
        tokens, k = topk_ids.shape
        flat = topk_ids.flatten().long()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat + 1, minlength=w13.shape[0] + 1).tolist()  # slot 0: pairs of other ranks
        order = order[counts[0] :]
        pairs = plan.quantize("gate_up", x)[order // k]
        gate, up = _grouped(pairs, w13, counts[1:]).chunk(2, -1)
        y = _grouped(plan.quantize("down", F.silu(gate) * up), w2, counts[1:])
        # weighted and summed in fp32, rounded once; back in token order the sum needs no atomics, so it is repeatable
        y = y.float() * topk_weights.flatten()[order].unsqueeze(-1)
        out = y.new_zeros(tokens * k, y.shape[-1])
        out[order] = y
        return out.view(tokens, k, -1).sum(1).to(x.dtype)


def _grouped(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows of x [pairs, K], sorted by expert, times weight [E, N, K]^T -> [pairs, N]."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for e, count in enumerate(counts):
        if count:
            out[start : start + count] = F.linear(x[start : start + count], weight[e])
            start += count
    return out
