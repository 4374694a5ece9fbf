"""Grouped W4A4 + RAC expert GEMM in Triton: K is extended by the residual blocks, whose weights are read again in place.

On Blackwell the products run on block-scaled FP4 tensor cores (``tl.dot_scaled``). Elsewhere (sm_89, sm_90) codes are
dequantised in registers: an E2M1 value times an E4M3 scale is exact in BF16, and fp32 accumulates. The FP32 scales
multiply the accumulator once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def _value(code):
    """4-bit codes (int32) -> E2M1 values fp32: the code is the top of an fp32 number 2^-126 times as large."""
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * TWO_126


@triton.jit
def _halves(codes, s8, ROWS: tl.constexpr, BK: tl.constexpr):
    """Packed [ROWS, BK/2], block scales [ROWS, BK/16] -> BF16 values of the even and of the odd columns [ROWS, BK/2]."""
    wide = tl.reshape(codes.to(tl.int32), (ROWS, BK // 16, 8))
    scale = s8.to(tl.float32)[:, :, None]
    even = (_value(wide) * scale).to(tl.bfloat16)
    odd = (_value(wide >> 4) * scale).to(tl.bfloat16)
    return tl.reshape(even, (ROWS, BK // 2)), tl.reshape(odd, (ROWS, BK // 2))


@triton.jit
def _product(a, a_s8, w, w_s8, acc, NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """acc += A W^T of packed A [BM, BK/2] and W [BN, BK/2]."""
    if NATIVE:
        return tl.dot_scaled(a, a_s8, "e2m1", w.T, w_s8, "e2m1", acc)
    # even and odd columns are multiplied apart: the order along K does not matter
    a_even, a_odd = _halves(a, a_s8, BM, BK)
    w_even, w_odd = _halves(w, w_s8, BN, BK)
    acc = tl.dot(a_even, w_even.T, acc)
    return tl.dot(a_odd, w_odd.T, acc)


@triton.jit
def _expert_tile(offsets_ptr, experts, tile, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Which expert owns row tile ``tile``, its first row, and the end of the expert's rows; no expert: 0 rows."""
    e = tl.arange(0, EXPERTS)
    start = tl.load(offsets_ptr + e, mask=e < experts, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0)
    tiles = (end - start + BM - 1) // BM
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    own = e == expert
    first = tile - tl.sum(tl.where(e < expert, tiles, 0), 0)
    return expert, tl.sum(tl.where(own, start, 0), 0) + first * BM, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def grouped_gemm_kernel(a_ptr, a_s8_ptr, a_scale_ptr, w_ptr, w_s8_ptr, w_scale_ptr, offsets_ptr, blocks_ptr, out_ptr,
                        N, K, count, experts, EXPERTS: tl.constexpr, LISTED: tl.constexpr, NATIVE: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One [BM, BN] tile of one expert's output.

    a [tokens, (K + 16 count)/2], a_s8 [tokens, K/16 + count], w [experts, N, K/2], w_s8 [experts, N, K/16], offsets
    [experts + 1]. The residual's blocks are the leading ``count``, or (LISTED) those of ``blocks`` int32 [count].
    """
    expert, row0, end = _expert_tile(offsets_ptr, experts, tl.program_id(0), EXPERTS, BM)
    if row0 >= end:
        return
    rows = row0 + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    row_mask = (rows < end)[:, None]
    column_mask = (columns < N)[:, None]
    a_ptr += rows.to(tl.int64)[:, None] * ((K + 16 * count) // 2)
    a_s8_ptr += rows.to(tl.int64)[:, None] * (K // 16 + count)
    w_row = expert.to(tl.int64) * N + columns
    w_ptr += w_row[:, None] * (K // 2)
    w_s8_ptr += w_row[:, None] * (K // 16)
    byte = tl.arange(0, BK // 2)
    block = tl.arange(0, BK // 16)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        b = (k // 2 + byte)[None, :]
        s = (k // 16 + block)[None, :]
        a = tl.load(a_ptr + b, mask=row_mask & (b < K // 2), other=0)
        w = tl.load(w_ptr + b, mask=column_mask & (b < K // 2), other=0)
        a_s8 = tl.load(a_s8_ptr + s, mask=row_mask & (s < K // 16), other=0.0)
        w_s8 = tl.load(w_s8_ptr + s, mask=column_mask & (s < K // 16), other=0.0)
        acc = _product(a, a_s8, w, w_s8, acc, NATIVE, BM, BN, BK)
    for k in range(0, count * 16, BK):
        byte_at = k // 2 + byte
        block_at = k // 16 + block
        in_bytes = byte_at < count * 8
        in_blocks = block_at < count
        a = tl.load(a_ptr + (K // 2 + byte_at)[None, :], mask=row_mask & in_bytes[None, :], other=0)
        a_s8 = tl.load(a_s8_ptr + (K // 16 + block_at)[None, :], mask=row_mask & in_blocks[None, :], other=0.0)
        if LISTED:
            byte_at = tl.load(blocks_ptr + byte_at // 8, mask=in_bytes, other=0) * 8 + byte_at % 8
            block_at = tl.load(blocks_ptr + block_at, mask=in_blocks, other=0)
        w = tl.load(w_ptr + byte_at[None, :], mask=column_mask & in_bytes[None, :], other=0)
        w_s8 = tl.load(w_s8_ptr + block_at[None, :], mask=column_mask & in_blocks[None, :], other=0.0)
        acc = _product(a, a_s8, w, w_s8, acc, NATIVE, BM, BN, BK)
    scale = tl.load(a_scale_ptr + rows, mask=rows < end, other=0.0)[:, None] * tl.load(w_scale_ptr + expert)
    out = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, (acc * scale).to(out_ptr.dtype.element_ty), mask=row_mask & (columns < N)[None, :])


def tile_shape(tokens_per_expert: int, major: int) -> dict[str, int]:
    """Tile, warps and stages by the major compute capability.

    tcgen05's block-scaled MMA needs 128 rows; sm_120 has 99 KB of shared memory and spills at a BK of 256. The shapes of
    Hopper were chosen by times on an H200, the others by what compiles without spilling.
    """
    if major >= 12:
        return {"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 3}
    if major >= 10:
        return {"BM": 128, "BN": 128, "BK": 256, "num_warps": 8, "num_stages": 3}
    if tokens_per_expert <= 16:
        return {"BM": 16, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 3}
    if tokens_per_expert <= 64:
        return {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}


def grouped_gemm_(
    codes: Tensor, s8: Tensor, scale: Tensor, weight_codes: Tensor, weight_s8: Tensor, weight_scale: Tensor,
    offsets: Tensor, blocks: Tensor | None, count: int, out: Tensor,
) -> None:  # fmt: skip
    """out [tokens, N] := the grouped product; ``blocks`` int32 [at least count] or None for the leading ``count`` blocks."""
    experts, n, half = weight_codes.shape
    if not codes.shape[0] or not experts:
        return
    major = torch.cuda.get_device_capability(out.device)[0]
    shape = tile_shape(codes.shape[0] // experts, major)
    grid = (triton.cdiv(codes.shape[0], shape["BM"]) + experts, triton.cdiv(n, shape["BN"]))
    grouped_gemm_kernel[grid](
        codes, s8, scale, weight_codes, weight_s8, weight_scale, offsets, blocks, out, n, 2 * half, count, experts,
        EXPERTS=triton.next_power_of_2(experts), LISTED=blocks is not None, NATIVE=major >= 10, **shape,
    )  # fmt: skip
