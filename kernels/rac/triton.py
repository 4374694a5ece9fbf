"""Triton kernels of residual activation compensation: one program a row, one read of x, bit-identical to the reference.

A row's blocks are taken in an order that lists the selected ones first. Where it pays, they are two tiles, so that blocks
without a residual do no residual's work.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..nvfp4.device import (
    SIX_E4M3_MAX,
    block_scale,
    block_top,
    is_fast,
    load_pairs,
    magnitudes,
    pack,
    store_pairs,
    with_sign,
)

SLOW_BLOCKS = 16
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


@triton.jit
def silu(gate, dtype: tl.constexpr):
    """gate / (1 + exp(-gate)) in fp32, which rounded to dtype is what torch computes on CUDA.

    For 16-bit dtypes the quotient takes one step from an approximate reciprocal, to about 2^-45 before it is rounded; all
    65,536 gates are compared with torch in tests/test_kernels_gpu.py. Divisor and dividend are a sixteenth, so that the
    reciprocal of no finite divisor is flushed to zero; where exp overflows, the remainder is NaN, and the result -0.
    """
    if dtype == tl.float32:
        return tl.div_rn(gate, 1.0 + libdevice.exp(-gate))
    b = tl.fma(libdevice.exp(-gate), 0.0625, 0.0625)
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)
    a = gate * 0.0625
    q = a * y
    return tl.fma(tl.maximum(tl.fma(-b, q, a), LOWEST), y, q)


@triton.jit
def _silu_and_mul(gate, up, X: tl.constexpr):
    """silu(gate) * up, each step rounded to X."""
    return (silu(gate, X).to(X).to(tl.float32) * up).to(X).to(tl.float32) + 0.0


@triton.jit
def _load(x_ptr, order_ptr, row_blocks, first, end, ORDERED: tl.constexpr, SILU: tl.constexpr, BLOCKS: tl.constexpr):
    """Places first .. of the order up to end: their block indices, the mask, and the pairs (of silu(gate) * up)."""
    place = first + tl.arange(0, BLOCKS)
    mask = place < end
    if ORDERED:
        block = tl.load(order_ptr + place, mask=mask, other=0)
    else:
        block = place
    low, high = load_pairs(x_ptr, block, mask)
    if SILU:
        up_low, up_high = load_pairs(x_ptr + row_blocks * 16, block, mask)
        low = _silu_and_mul(low, up_low, x_ptr.dtype.element_ty)
        high = _silu_and_mul(high, up_high, x_ptr.dtype.element_ty)
    return place, block, mask, low, high


@triton.jit
def _store_codes(codes_ptr, column, low_c, high_c, low, high, mask):
    code = pack(low_c, high_c, low, high)
    tl.store(codes_ptr + (column[:, None] * 8 + tl.arange(0, 8)[None, :]), code, mask=mask[:, None])


@triton.jit
def _store_s8(s8_ptr, row, column, columns, s8, mask, SWIZZLED: tl.constexpr):
    """Entry (row, column) of the block scales [., columns]; the swizzled order is nvfp4.swizzle's."""
    if SWIZZLED:
        tile = (row // 128) * ((columns + 3) // 4) + column // 4
        offset = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
    else:
        offset = row * columns + column
    tl.store(s8_ptr + offset, s8, mask=mask)


@triton.jit
def _write(place, block, mask, low, high, row, scale, out_ptr, codes_ptr, s8_ptr, row_blocks, count,
           RESIDUAL: tl.constexpr, CODES: tl.constexpr, SWIZZLED: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Quantise loaded blocks of a row, and (RESIDUAL) the residual of those placed below ``count``."""
    s8, step = block_scale(block_top(low, high), scale, FAST)
    step = step[:, None]
    VALUES: tl.constexpr = RESIDUAL or not CODES
    low_m, high_m, low_c, high_c, low, high = magnitudes(low, high, step, VALUES, FAST)
    columns = row_blocks + count
    if CODES:
        _store_codes(codes_ptr, block, low_c, high_c, low, high, mask)
        _store_s8(s8_ptr, row, block, columns, s8, mask, SWIZZLED)
    if VALUES:
        low_v, high_v = with_sign(low_m * step, low), with_sign(high_m * step, high)
    if RESIDUAL:
        chosen = mask & (place < count)
        low_r, high_r = low - low_v, high - high_v
        rest_s8, rest_step = block_scale(block_top(low_r, high_r), scale, FAST)
        rest_step = rest_step[:, None]
        low_m, high_m, low_c, high_c, low_r, high_r = magnitudes(low_r, high_r, rest_step, not CODES, FAST)
        if CODES:
            _store_codes(codes_ptr, row_blocks + place, low_c, high_c, low_r, high_r, chosen)
            _store_s8(s8_ptr, row, row_blocks + place, columns, rest_s8, chosen, SWIZZLED)
        else:
            low_v = tl.where(chosen[:, None], low_v + with_sign(low_m * rest_step, low_r), low_v)
            high_v = tl.where(chosen[:, None], high_v + with_sign(high_m * rest_step, high_r), high_v)
    if not CODES:
        store_pairs(out_ptr, block, low_v, high_v, mask)


@triton.jit
def _row_scale(top, scale_ptr, scale_out_ptr, row, OWN_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr,
               CODES: tl.constexpr):  # fmt: skip
    """The row's scale: its own from its largest magnitude ``top``, or the given one; kept beside CODES."""
    if OWN_SCALE:
        scale = tl.div_rn(top, SIX_E4M3_MAX)
    elif ROW_SCALE:
        scale = tl.load(scale_ptr + row)
    else:
        scale = tl.load(scale_ptr)
    if CODES:
        tl.store(scale_out_ptr + row, scale)
    return scale


@triton.jit
def _write_slowly(x, order_ptr, row, scale, out, codes, s8_ptr, row_blocks, count, RESIDUAL: tl.constexpr,
                  ORDERED: tl.constexpr, SILU: tl.constexpr, CODES: tl.constexpr, SWIZZLED: tl.constexpr,
                  SLOW: tl.constexpr):  # fmt: skip
    """The whole row, SLOW blocks at a time, with IEEE division: for scales outside the fast range."""
    for first in range(0, row_blocks, SLOW):
        place, block, mask, low, high = _load(x, order_ptr, row_blocks, first, row_blocks, ORDERED, SILU, SLOW)
        _write(place, block, mask, low, high, row, scale, out, codes, s8_ptr, row_blocks, count, RESIDUAL, CODES,
               SWIZZLED, False)  # fmt: skip


@triton.jit
def rows_kernel(x_ptr, x_stride, scale_ptr, order_ptr, out_ptr, codes_ptr, s8_ptr, scale_out_ptr, row_blocks, head,
                count, OWN_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, ORDERED: tl.constexpr,
                SILU: tl.constexpr, CODES: tl.constexpr, SWIZZLED: tl.constexpr, HEAD: tl.constexpr,
                TAIL: tl.constexpr, SLOW: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Row program_id(0) of x [tokens, 16 row_blocks] ([tokens, 32 row_blocks] with SILU).

    Its blocks in ``order`` (int32 [row_blocks]; as they lie unless ORDERED) have a residual below ``count``. The first
    ``head`` blocks are the tile HEAD, the rest TAIL; either may be 0. Writes DQ(Q(x)) + DQ(Q(r_S)) to ``out``, or (CODES)
    [Q(x) | Q(r_S)].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    FP32: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    x = x_ptr + row * x_stride
    out = out_ptr + row * row_blocks * 16
    codes = codes_ptr + row * (row_blocks + count) * 8
    top = 0.0
    if HEAD > 0:
        place, block, mask, low, high = _load(x, order_ptr, row_blocks, 0, head, ORDERED, SILU, HEAD)
        if OWN_SCALE:
            top = tl.maximum(top, tl.max(block_top(low, high), 0))
    if TAIL > 0:
        place2, block2, mask2, low2, high2 = _load(x, order_ptr, row_blocks, head, row_blocks, ORDERED, SILU, TAIL)
        if OWN_SCALE:
            top = tl.maximum(top, tl.max(block_top(low2, high2), 0))
    scale = _row_scale(top, scale_ptr, scale_out_ptr, row, OWN_SCALE, ROW_SCALE, CODES)
    if is_fast(scale, scale, FP32):
        if HEAD > 0:
            _write(place, block, mask, low, high, row, scale, out, codes, s8_ptr, row_blocks, count, True, CODES,
                   SWIZZLED, True)  # fmt: skip
        if TAIL > 0:
            _write(place2, block2, mask2, low2, high2, row, scale, out, codes, s8_ptr, row_blocks, count, False,
                   CODES, SWIZZLED, True)  # fmt: skip
    else:
        _write_slowly(x, order_ptr, row, scale, out, codes, s8_ptr, row_blocks, count, HEAD > 0, ORDERED, SILU, CODES,
                      SWIZZLED, SLOW)  # fmt: skip
