"""Weights of layers that vLLM runs unquantised, back in checkpoint layout (vLLM's CPU experts permute them)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import QuadsError


def plain_weights(layer: Any) -> tuple[Tensor, Tensor]:
    """(w13 [E, 2I, H] rows gate then up, w2 [E, H, I]) of an unquantised RoutedExperts layer, as served."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms import current_platform

    kernel = layer.quant_method.moe_kernel
    experts: Any = kernel.fused_experts if kernel is not None else None
    w13, w2 = layer.w13_weight.data, layer.w2_weight.data
    if current_platform.is_cpu() and _is_prepacked(experts):
        if experts._use_zentorch:
            raise QuadsError("expert weights in zentorch's layout cannot be audited", where=layer.layer_name)
        # the kernel zero-pads the intermediate dimension
        inter = layer.moe_config.intermediate_size_per_partition
        w13, w2 = _unpack(w13, experts.isa), _unpack(w2, experts.isa)
        gate, up = w13.chunk(2, 1)
        return torch.cat([gate[:, :inter], up[:, :inter]], 1), w2[..., :inter].contiguous()
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    if backend not in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        raise QuadsError(
            f"expert weights in the layout of {backend} cannot be audited",
            where=layer.layer_name,
            do="use vLLM's Triton experts",
        )
    return w13, w2


def _is_prepacked(experts: Any) -> bool:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return isinstance(experts, CPUUnquantizedExperts)


def _unpack(packed: Tensor, isa: str) -> Tensor:
    """Prepacked [E, N, K] -> checkpoint layout [E, N, K]."""
    out = torch.empty_like(packed).flatten(1)
    out[:, prepack_order(packed.shape[1], packed.shape[2], packed.dtype, isa)] = packed.flatten(1)
    return out.view_as(packed)


@functools.lru_cache(maxsize=8)
def prepack_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """int64 [rows * columns]: where each element of a prepacked expert came from.

    vLLM has no inverse of its prepack, but the prepack only moves elements: packing the elements' own indices, as raw
    bits, tells the order. Raises QuadsError when the result is not a permutation.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    index = torch.arange(rows * columns, dtype=torch.int64)
    parts = 4 // dtype.itemsize  # 16 bits of the index at a time for 2-byte types
    order = torch.zeros_like(index)
    for part in range(parts):
        shift = 16 * part
        bits = (index >> shift) & (0xFFFF if parts > 1 else 0xFFFFFFFF)
        raw = bits.to(torch.int32).view(torch.int32)
        if parts > 1:
            raw = raw.to(torch.uint16).view(dtype)
        else:
            raw = raw.view(dtype)
        packed = cpu_prepack_moe_weight(raw.view(1, rows, columns).contiguous(), isa)
        back = packed.flatten().view(torch.uint16 if parts > 1 else torch.int32).to(torch.int64)
        order |= back << shift
    if not torch.equal(order.sort().values, index):
        raise QuadsError(f"vLLM's CPU prepack for {isa} is not a permutation", where="rollout audit", do="report this")
    return order
