"""``triton.rows_kernel`` for BF16 on sm_90 and newer, a thread a block (``nvfp4/packed.py``)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..nvfp4.device import block_scale, is_fast
from ..nvfp4.packed import (
    clean,
    encode,
    encode_residual,
    lanes,
    load_words,
    residual,
    store_codes,
    store_words,
    values,
    values_and_residual,
)
from .triton import _row_scale, _store_s8, _write_slowly, silu


@triton.jit
def _halves(word):
    return (word << 16).to(tl.float32, bitcast=True), (word & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _join(low, high):
    """fp32 -> a word of two BF16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _silu_and_mul(gate, up):
    """``triton._silu_and_mul`` of both halves of a word."""
    low, high = _halves(gate)
    low, high = _halves(_join(silu(low, tl.bfloat16), silu(high, tl.bfloat16)))
    up_low, up_high = _halves(up)
    return _join(low * up_low, high * up_high)


@triton.jit
def _take(x_ptr, order_ptr, row_blocks, first, end, ORDERED: tl.constexpr, SILU: tl.constexpr, BLOCKS: tl.constexpr):
    """Places first .. of the order up to end: where their blocks lie, their words and largest magnitudes."""
    one, two, odd = lanes(BLOCKS)
    one += first
    two += first
    place = tl.where(odd == 1, two, one)
    mask_one, mask_two, mask = one < end, two < end, place < end
    if ORDERED:
        one = tl.load(order_ptr + one, mask=mask_one, other=0)
        two = tl.load(order_ptr + two, mask=mask_two, other=0)
    block = tl.where(odd == 1, two, one)
    w = load_words(x_ptr, one, two, odd, mask_one, mask_two)
    if SILU:
        u = load_words(x_ptr + row_blocks * 16, one, two, odd, mask_one, mask_two)
        w = (_silu_and_mul(w[0], u[0]), _silu_and_mul(w[1], u[1]), _silu_and_mul(w[2], u[2]), _silu_and_mul(w[3], u[3]),
             _silu_and_mul(w[4], u[4]), _silu_and_mul(w[5], u[5]), _silu_and_mul(w[6], u[6]), _silu_and_mul(w[7], u[7]))  # fmt: skip
    words, top = clean(w)
    return (one, two, odd, mask_one, mask_two), place, block, mask, words, top


@triton.jit
def _put(at, place, block, mask, words, top, row, scale, out_ptr, codes_ptr, s8_ptr, row_blocks, count,
         RESIDUAL: tl.constexpr, CODES: tl.constexpr, SWIZZLED: tl.constexpr):  # fmt: skip
    """``triton._write`` under a fast scale."""
    one, two, odd, mask_one, mask_two = at
    s8, step = block_scale(top, scale, True)
    codes, v = encode(words, step)
    columns = row_blocks + count
    if CODES:
        store_codes(codes_ptr, block, odd, codes, mask)
        _store_s8(s8_ptr, row, block, columns, s8, mask, SWIZZLED)
    if RESIDUAL:
        r, rest_top = residual(words, v, step)
        rest_s8, rest_step = block_scale(rest_top, scale, True)
        if CODES:
            chosen = mask & (place < count)
            store_codes(codes_ptr, row_blocks + place, odd, encode_residual(r, rest_step), chosen)
            _store_s8(s8_ptr, row, row_blocks + place, columns, rest_s8, chosen, SWIZZLED)
        else:
            both = values_and_residual(v, step, r, rest_step, place < count)
            store_words(out_ptr, one, two, odd, both, mask_one, mask_two)
    elif not CODES:
        store_words(out_ptr, one, two, odd, values(v, step), mask_one, mask_two)


@triton.jit
def packed_rows_kernel(x_ptr, x_stride, scale_ptr, order_ptr, out_ptr, codes_ptr, s8_ptr, scale_out_ptr, row_blocks,
                       head, count, OWN_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, ORDERED: tl.constexpr,
                       SILU: tl.constexpr, CODES: tl.constexpr, SWIZZLED: tl.constexpr, HEAD: tl.constexpr,
                       TAIL: tl.constexpr, SLOW: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Row program_id(0) of x BF16 [tokens, 16 row_blocks] ([tokens, 32 row_blocks] with SILU): as ``triton.rows_kernel``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x = x_ptr + row * x_stride
    out = out_ptr + row * row_blocks * 16
    codes = codes_ptr + row * (row_blocks + count) * 8
    top = 0.0
    if HEAD > 0:
        at, place, block, mask, words, tops = _take(x, order_ptr, row_blocks, 0, head, ORDERED, SILU, HEAD)
        if OWN_SCALE:
            top = tl.maximum(top, tl.max(tops, 0))
    if TAIL > 0:
        at2, place2, block2, mask2, words2, tops2 = _take(
            x, order_ptr, row_blocks, head, row_blocks, ORDERED, SILU, TAIL
        )
        if OWN_SCALE:
            top = tl.maximum(top, tl.max(tops2, 0))
    scale = _row_scale(top, scale_ptr, scale_out_ptr, row, OWN_SCALE, ROW_SCALE, CODES)
    if is_fast(scale, scale, False):
        if HEAD > 0:
            _put(at, place, block, mask, words, tops, row, scale, out, codes, s8_ptr, row_blocks, count, True, CODES,
                 SWIZZLED)  # fmt: skip
        if TAIL > 0:
            _put(at2, place2, block2, mask2, words2, tops2, row, scale, out, codes, s8_ptr, row_blocks, count, False, CODES,
                 SWIZZLED)  # fmt: skip
    else:
        _write_slowly(x, order_ptr, row, scale, out, codes, s8_ptr, row_blocks, count, HEAD > 0, ORDERED, SILU, CODES,
                      SWIZZLED, SLOW)  # fmt: skip
