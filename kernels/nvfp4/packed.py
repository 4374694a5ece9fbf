"""The NVFP4 contract on whole blocks of BF16: one thread, one 16-block, its eight words of two values. sm_90 and newer.

Bit-identical to ``device.py``, with about two thirds of its instructions (``packed_ptx.py``). Scales are those of
``device.is_fast``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import E2M1_MAX, block_scale, reciprocal
from .packed_ptx import (
    CLEAN,
    CLEAN_IO,
    ENCODE,
    ENCODE_IO,
    ENCODE_RESIDUAL,
    ENCODE_RESIDUAL_IO,
    GIVE,
    RESIDUAL,
    RESIDUAL_IO,
    SUM,
    SUM_IO,
    TAKE,
    TAKE_IO,
    THRESHOLDS,
    THRESHOLDS_IO,
    VALUES,
    VALUES_IO,
)


@triton.jit
def lanes(BLOCKS: tl.constexpr):
    """For threads [BLOCKS]: which two places they load a half of, and ``odd``: whether they then own the second.

    Neighbouring threads load the halves of a block, so that a warp's loads are contiguous, and exchange them. Thread i
    must be lane i % 32: a tensor [BLOCKS] of one element a thread, which is what Triton makes of a power of two.
    """
    GROUP: tl.constexpr = BLOCKS if BLOCKS < 32 else 32
    i = tl.arange(0, BLOCKS)
    one = i // GROUP * GROUP + i % GROUP // 2
    return one, one + GROUP // 2, i % 2


@triton.jit
def _four(x):
    """[B, 4] -> its columns."""
    a, b = tl.reshape(x, (x.shape[0], 2, 2)).split()
    w0, w2 = a.split()
    w1, w3 = b.split()
    return w0, w1, w2, w3


@triton.jit
def load_words(x_ptr, one, two, odd, mask_one, mask_two):
    """The words of an own 16-block [B] of blocks ``one`` and ``two`` [B]: eight int32 [B], 0 where masked.

    The first four are the half that the thread loaded, its block's second half if ``odd``.
    """
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    first = tl.load(x_ptr + ((one * 2 + odd)[:, None] * 4 + tl.arange(0, 4)[None, :]), mask=mask_one[:, None], other=0)
    second = tl.load(x_ptr + ((two * 2 + odd)[:, None] * 4 + tl.arange(0, 4)[None, :]), mask=mask_two[:, None], other=0)
    a, b = _four(first), _four(second)
    return tl.inline_asm_elementwise(
        TAKE, TAKE_IO, [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], odd],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def store_words(out_ptr, one, two, odd, w, mask_one, mask_two):
    """The inverse of ``load_words``."""
    r = tl.inline_asm_elementwise(
        GIVE, TAKE_IO, [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], odd],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    out_ptr = out_ptr.to(tl.pointer_type(tl.int32))
    first = tl.reshape(tl.join(tl.join(r[0], r[2]), tl.join(r[1], r[3])), (odd.shape[0], 4))
    second = tl.reshape(tl.join(tl.join(r[4], r[6]), tl.join(r[5], r[7])), (odd.shape[0], 4))
    tl.store(out_ptr + ((one * 2 + odd)[:, None] * 4 + tl.arange(0, 4)[None, :]), first, mask=mask_one[:, None])
    tl.store(out_ptr + ((two * 2 + odd)[:, None] * 4 + tl.arange(0, 4)[None, :]), second, mask=mask_two[:, None])


@triton.jit
def clean(w):
    """Words with -0 made +0, and the largest magnitude fp32 [B]."""
    r = tl.inline_asm_elementwise(
        CLEAN, CLEAN_IO, [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[0] * 0],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return (r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]), r[8].to(tl.float32, bitcast=True)


@triton.jit
def encode(w, step):
    """Packed codes of words under ``step`` [B], two int32 [B], and the codes' values as eight words."""
    t = tl.inline_asm_elementwise(
        THRESHOLDS, THRESHOLDS_IO, [step, -step], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    r = tl.inline_asm_elementwise(
        ENCODE, ENCODE_IO,
        [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], t[0], t[1], t[2], t[3], tl.full(step.shape, 0x7E807E80, tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return (r[0], r[1]), (r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9])


@triton.jit
def residual(w, v, step):
    """x - value * step of words and values: sixteen fp32 [B], and the largest magnitude [B]."""
    r = tl.inline_asm_elementwise(
        RESIDUAL, RESIDUAL_IO,
        [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], step],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, 
               tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return (r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15]), r[16]


@triton.jit
def _reciprocal_pair(b):
    """1 / b as y + rest: y correctly rounded, rest its error's first bits. The square of e does decide at times."""
    y = reciprocal(b)
    e = tl.fma(-b, y, 1.0)
    return y, tl.fma(e, e, e) * y


@triton.jit
def encode_residual(r, step):
    """Packed codes of sixteen fp32 [B] under ``step``: two int32 [B]."""
    y, rest = _reciprocal_pair(step)
    c = tl.inline_asm_elementwise(
        ENCODE_RESIDUAL, ENCODE_RESIDUAL_IO,
        [r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15],
         y * 0.125, rest * 0.125],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return c


@triton.jit
def values(v, step):
    """BF16 words of value * step."""
    return tl.inline_asm_elementwise(
        VALUES, VALUES_IO, [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], step],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def values_and_residual(v, step, r, rest_step, chosen):
    """BF16 words of value * step + DQ(Q(r)), without the second where not ``chosen`` [B]."""
    y, rest = _reciprocal_pair(rest_step)
    return tl.inline_asm_elementwise(
        SUM, SUM_IO,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9],
         r[10], r[11], r[12], r[13], r[14], r[15], step, y, rest, rest_step * E2M1_MAX,
         tl.where(chosen, rest_step, 0.0)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def store_codes(codes_ptr, block, odd, codes, mask):
    """Both words of each own block's codes."""
    first, second = tl.where(odd == 1, codes[1], codes[0]), tl.where(odd == 1, codes[0], codes[1])
    pair = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    tl.store(codes_ptr.to(tl.pointer_type(tl.int64)) + block, pair, mask=mask)


@triton.jit
def packed_tile(x_ptr, out_ptr, codes_ptr, s8_ptr, scale, inside, QDQ: tl.constexpr, CODES: tl.constexpr,
                BLOCKS: tl.constexpr):  # fmt: skip
    """``triton._tile`` for BF16 in and out, under a fast scalar scale."""
    one, two, odd = lanes(BLOCKS)
    block = tl.where(odd == 1, two, one)
    words, top = clean(load_words(x_ptr, one, two, odd, one < inside, two < inside))
    s8, step = block_scale(top, scale, True)
    codes, v = encode(words, step)
    if QDQ:
        store_words(out_ptr, one, two, odd, values(v, step), one < inside, two < inside)
    if CODES:
        store_codes(codes_ptr, block, odd, codes, block < inside)
        tl.store(s8_ptr + block, s8, mask=block < inside)
