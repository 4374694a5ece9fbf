"""Routed experts on packed operands: both GEMMs take FP4 activations whose K is extended by the residual's blocks.

    [Q(x) | Q(r_S)]  once per token, rows gathered per (token, expert) pair      packed FP4, block scales, FP32 scale
    h = that times [W13 | W13_S]^T                                               ``rac.grouped_gemm``
    [Q(silu(gate) up) | Q(r_S)]                                                  one launch
    y = that times [W2 | W2_S]^T                                                 ``rac.grouped_gemm``

``W_S`` is read from the stored weight again, there is no copy. The sums of both products stay in the fp32 accumulator;
all FP32 scales, per token and per expert, multiply at its end. Shapes depend on x alone and nothing syncs with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import rac
from .backends import PackedExperts
from .prepared import PreparedPlan


@dataclass(frozen=True)
class Routing:
    """(token, expert) pairs in the order of the local experts; pairs of other ranks come first and belong to none."""

    order: Tensor  # int64 [pairs]: the pair token * k + slot that stands at each row
    token: Tensor  # int64 [pairs]: its token
    offsets: Tensor  # int32 [E + 1]: expert e owns the rows offsets[e] to offsets[e + 1]


def route(topk_ids: Tensor, experts: int) -> Routing:
    """topk_ids [tokens, k] of ``experts`` local experts, -1 for another rank's. Equal experts keep the tokens' order."""
    ids, order = topk_ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    return Routing(order, order // topk_ids.shape[1], torch.searchsorted(ids, bounds, out_int32=True))


def gather(q: rac.Quantized, rows: Tensor) -> rac.Quantized:
    """Rows of packed activations with linear block scales."""
    scales = q.block_scales.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return rac.Quantized(q.codes[rows], scales, q.scale[rows])


def forward(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, packed: PackedExperts, plan: PreparedPlan) -> Tensor:
    """x [tokens, H] in bf16, fp16 or fp32, topk_weights and local topk_ids [tokens, k] -> [tokens, H] in x.dtype.

    The weighted sum over an expert's k is taken in fp32, in token order, without atomics: it is repeatable.
    """
    tokens, k = topk_ids.shape
    if not tokens:
        return torch.empty_like(x)
    way = route(topk_ids, packed.w13.shape[0])
    pairs = gather(plan.pack("gate_up", x), way.token)
    up, down = plan.blocks["gate_up"], plan.blocks["down"]
    h = rac.grouped_gemm(pairs, packed.w13, packed.w13_scale, packed.w13_scale_2, way.offsets, up, dtype=x.dtype)
    inner = plan.pack("down", h, silu=True)
    y = rac.grouped_gemm(inner, packed.w2, packed.w2_scale, packed.w2_scale_2, way.offsets, down, dtype=x.dtype)
    wide = y.float() * topk_weights.flatten()[way.order].unsqueeze(-1)
    out = torch.empty_like(wide)
    out[way.order] = wide
    return out.view(tokens, k, -1).sum(1).to(x.dtype)
