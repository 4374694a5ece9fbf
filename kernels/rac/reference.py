"""Residual activation compensation (QUADS, arXiv 2607.15810) in plain PyTorch.

For activations x [tokens, K] and the selected 16-blocks S of K:

    y = DQ(Q(x)) W^T + DQ(Q(r_S)) W_S^T,   r = x - DQ(Q(x))

Selecting whole 16-blocks means that W_S is a slice of the packed weight: codes and scales are re-read, never requantised.
The residual shares the activation's FP32 scale (an own scale made no difference), so no second scale exists to be 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..nvfp4 import reference as nvfp4


class Quantized(NamedTuple):
    """Activations [tokens, K] and the residuals of S selected blocks, side by side for a K-augmented GEMM."""

    codes: Tensor  # uint8 [tokens, K/2 + 8 S]: Q(x), then Q(r) of the selected blocks in the order they were listed
    block_scales: Tensor  # e4m3 [tokens, K/16 + S], or flat in the order of nvfp4.swizzle
    scale: Tensor  # fp32 [tokens]


def block_mask(blocks: Tensor, k: int) -> Tensor:
    """Indices of selected 16-blocks -> boolean mask [K]."""
    mask = torch.zeros(k // nvfp4.BLOCK, dtype=torch.bool, device=blocks.device)
    mask[blocks] = True
    return mask.repeat_interleave(nvfp4.BLOCK)


def residual(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 (DQ(Q(x)), x - DQ(Q(x))) of x [tokens, K]; the residual is taken before any rounding to x.dtype."""
    wide = x.float()
    quantised = nvfp4.qdq(wide, scale)
    return quantised, wide - quantised


def qdq_with_residual(x: Tensor, scale: Tensor, blocks: Tensor | None) -> Tensor:
    """DQ(Q(x)) + DQ(Q(r_S)), what a K-augmented W4A4 GEMM multiplies with W; x [tokens, K], in and out in x.dtype.

    ``scale`` is fp32, scalar or [tokens, 1]. ``blocks`` holds the selected 16-block indices (int64 [S]); None or empty
    means RAC is off and the result is DQ(Q(x)). The sum is taken in fp32 and rounded once to x.dtype: exact in fp32,
    while BF16's 8 bits may drop the residual's tail (a native kernel adds the two products in its fp32 accumulator).
    """
    if blocks is None or blocks.numel() == 0:
        return nvfp4.qdq(x, scale)
    quantised, rest = residual(x, scale)
    columns = (blocks[:, None] * nvfp4.BLOCK + torch.arange(nvfp4.BLOCK, device=x.device)).flatten()
    quantised[..., columns] += nvfp4.qdq(rest[..., columns], scale)
    return quantised.to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """down_proj's input of x = [gate | up] [tokens, 2 K]: silu(gate) * up, each step computed in fp32, rounded to x.dtype."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def quantize_with_residual(
    x: Tensor, scale: Tensor | None, blocks: Tensor | None, *, silu: bool = False, swizzled: bool = False
) -> Quantized:
    """Q(x) and Q(r_S) of x [tokens, K] ([tokens, 2 K] of gate and up with ``silu``).

    ``scale`` is fp32, scalar or [tokens, 1]; None takes each row's own. ``blocks`` as in ``qdq_with_residual``.
    """
    if silu:
        x = silu_and_mul(x)
    scale = nvfp4.row_scale(x) if scale is None else scale.float()
    codes, s8 = nvfp4.quantize(x, scale)
    if blocks is not None and blocks.numel():
        columns = (blocks[:, None] * nvfp4.BLOCK + torch.arange(nvfp4.BLOCK, device=x.device)).flatten()
        more_codes, more_s8 = nvfp4.quantize(residual(x, scale)[1][..., columns], scale)
        codes = torch.cat([codes, more_codes], -1)
        s8 = torch.cat([s8.view(torch.uint8), more_s8.view(torch.uint8)], -1).view(torch.float8_e4m3fn)
    tokens = x.shape[0]
    return Quantized(codes, nvfp4.swizzle(s8) if swizzled else s8, scale.reshape(-1).expand(tokens).contiguous())


def grouped_gemm(
    q: Quantized,
    weight_codes: Tensor,
    weight_block_scales: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    blocks: Tensor | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y = DQ(Q(x)) W_e^T + DQ(Q(r_S)) W_e,S^T for the rows of each expert e -> [tokens, N].

    ``weight_codes`` uint8 [E, N, K/2], ``weight_block_scales`` e4m3 [E, N, K/16], ``weight_scale`` fp32 [E]; expert e
    owns the rows offsets[e] to offsets[e + 1] (int [E + 1]). Rows outside are 0. ``q`` has linear block scales. Both
    products use the same stored weight blocks and are summed in fp32; the FP32 scales multiply the sum.
    """
    experts, n, half = weight_codes.shape
    k = 2 * half
    one = torch.ones((), device=q.codes.device)
    x = nvfp4.dequantize(q.codes, q.block_scales, one)
    out = x.new_zeros((x.shape[0], n))
    bounds = offsets.tolist()
    for e in range(experts):
        rows = slice(bounds[e], bounds[e + 1])
        w = nvfp4.dequantize(weight_codes[e], weight_block_scales[e], one)
        y = x[rows, :k] @ w.T
        if blocks is not None and blocks.numel():
            columns = (blocks[:, None] * nvfp4.BLOCK + torch.arange(nvfp4.BLOCK, device=x.device)).flatten()
            y = y + x[rows, k:] @ w[:, columns].T
        out[rows] = y * (q.scale[rows, None] * weight_scale[e])
    return out.to(dtype)
