"""The NVFP4 contract as Triton device functions, shared by the weight kernels and the activation kernels.

To be compiled without multiply-add contraction (``NO_CONTRACTION``), so that fp32 rounds where the reference rounds. A
tile of [blocks, 16] elements is held as two fp32 tensors [blocks, 8], ``low`` (even columns) and ``high`` (odd columns):
the nibbles of a packed byte.

Division is where the time would go. Under an ordinary scale (``is_fast``) a block's elements share one correctly rounded
reciprocal and take three more steps, two fewer than ``div.rn.f32``. Their quotient may be off by an ulp where a / b lies
within 2^-22 ulp of the middle between two floats; but it falls on the same side of every rounding boundary of E2M1 and
E4M3 as the IEEE quotient does (tests/test_kernels_division.py looks at all pairs that could differ), so codes and scales
are the contract's. Nothing under- or overflows on the way:

* the scale is at least 2^-80, so the step is at least 2^-89 and the residuals that decide near a boundary are exact;
* magnitudes are cut at 6 steps (block maxima at 512) first, beyond which the result is the same;
* the scale is at most 2^7, or 2^-10 for FP32 input, so that no quotient of a nonzero element underflows to zero, where
  the sign would have to go. x is at least 2^-133 (BF16) or 2^-149 (FP32) and a residual of 16-bit values as large.

Under any other scale, tiles are walked in small pieces with ``tl.div_rn``.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_CONTRACTION = {"enable_fp_fusion": False}

# jit functions see only constexpr globals
E2M1_MAX = tl.constexpr(6.0)
E4M3_MAX = tl.constexpr(448.0)
SIX_E4M3_MAX = tl.constexpr(2688.0)
E4M3_MIN = tl.constexpr(2.0**-9)
FAST_MIN = tl.constexpr(2.0**-80)
FAST_MAX = tl.constexpr(2.0**7)
FAST_MAX_FP32 = tl.constexpr(2.0**-10)
EXPONENT = tl.constexpr(0x7F800000)
SIGN = tl.constexpr(-0x80000000)
MAGIC = tl.constexpr(2.0**22 + 3)


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def load_pairs(x_ptr, block, mask):
    """Elements of the 16-blocks ``block`` [B] as fp32 (low, high) [B, 8]; -0 becomes +0. Masked ones are 0.

    Two neighbours are loaded as one integer; adding +0 is what turns -0 into +0.
    """
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    if x_ptr.dtype.element_ty == tl.float32:
        word = tl.load(x_ptr.to(tl.pointer_type(tl.int64)) + at, mask=mask[:, None], other=0)
        low = word.to(tl.int32).to(tl.float32, bitcast=True)
        high = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        word = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask[:, None], other=0)
        if x_ptr.dtype.element_ty == tl.bfloat16:
            low = (word << 16).to(tl.float32, bitcast=True)
            high = (word & -0x10000).to(tl.float32, bitcast=True)
        else:
            low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low + 0.0, high + 0.0


@triton.jit
def store_pairs(out_ptr, block, low, high, mask):
    """The inverse of ``load_pairs``, rounding to the output's dtype."""
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    if out_ptr.dtype.element_ty == tl.float32:
        word = (bits(high).to(tl.int64) << 32) | (bits(low).to(tl.int64) & 0xFFFFFFFF)
        tl.store(out_ptr.to(tl.pointer_type(tl.int64)) + at, word, mask=mask[:, None])
    else:
        if out_ptr.dtype.element_ty == tl.bfloat16:
            word = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            word = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
            )
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + at, word, mask=mask[:, None])


@triton.jit
def block_top(low, high):
    """Largest magnitude of each block [B]."""
    return tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)


@triton.jit
def reciprocal(b):
    """1 / b, correctly rounded for every significand of b: what div.rn.f32 starts from."""
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(y, tl.fma(-b, y, 1.0), y)


@triton.jit
def _quotient(a, negative_b, y):
    """a / b for y = reciprocal(b): rounded as an IEEE division, or on the same side of every rounding boundary."""
    q = a * y
    return tl.fma(tl.fma(q, negative_b, a), y, q)


@triton.jit
def block_scale(top, scale, FAST: tl.constexpr):
    """Block maxima [B] and the FP32 scale (scalar or [B]) -> E4M3 block scales [B], fp32 steps [B]."""
    six = scale * E2M1_MAX
    if FAST:
        ratio = _quotient(tl.minimum(top, six * 512.0), -six, reciprocal(six))
        ratio = tl.where(top == 0, 1.0, ratio)
    else:
        ratio = tl.div_rn(top, six)
        ratio = tl.where((ratio == 0) | (scale == 0), 1.0, ratio)
    s8 = tl.minimum(tl.maximum(ratio, E4M3_MIN), E4M3_MAX).to(tl.float8e4nv)
    return s8, s8.to(tl.float32) * scale


@triton.jit
def _round_e2m1(q):
    """fp32 quotients in [0, 6] -> the E2M1 grid, ties to the even code; and the code in the low 3 bits of an int32.

    Adding about 2^22 times the power of two below q (1 at least) leaves two significant bits of q, or halves below 1. The
    sum's mantissa counts steps from 6 (halves, ones or twos as its exponent is 149, 150 or 151): that count and twice the
    exponent add up to the code modulo 8.
    """
    power = (bits(tl.maximum(q, 1.0)) & EXPONENT).to(tl.float32, bitcast=True)
    total = tl.fma(power, MAGIC, q)
    return tl.fma(power, -MAGIC, total), bits(total) + (bits(total) >> 22)


@triton.jit
def _code(x, y, negative_b):
    """The E2M1 code of |x| / b, in the low 3 bits of an int32, for y = reciprocal(b): the same quotient as ``_quotient``'s.

    All on the FMA pipe, which has twice the ALU's rate. The quotient is kept an eighth as large, so that saturation to
    [0, 1] cuts it at 8. Then it is split at 2 and 4 into parts of [0, 2], of which the first counts halves, the second
    ones and the third a two: their rounded counts, summed below 2^23 * 1.5, are the code, ties to even and 7 at most.
    """
    return tl.inline_asm_elementwise(
        "{.reg .f32 a, q, r, s, t, u;"
        "abs.f32 a, $1;"
        "mul.rn.sat.f32 q, a, $2;"
        "fma.rn.f32 r, q, $3, a;"
        "fma.rn.sat.f32 q, r, $2, q;"
        "mul.rn.sat.f32 s, q, 0f40800000;"
        "fma.rn.sat.f32 t, q, 0f40800000, 0fBF800000;"
        "fma.rn.sat.f32 u, q, 0f40800000, 0fC0000000;"
        "fma.rn.f32 s, s, 0f40800000, 0f4B400000;"
        "fma.rn.f32 s, t, 0f40000000, s;"
        "add.rn.f32 $0, u, s;}",
        "=r,f,f,f", [x, y * 0.125, negative_b * 8.0], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def magnitudes(low, high, step, VALUES: tl.constexpr, FAST: tl.constexpr):
    """Under the steps [B, 1]: E2M1 values (VALUES) and codes of both halves' magnitudes, and the halves: +0 where a negative quotient underflows.

    Codes are int32 whose low 3 bits count. Without VALUES the values are codes too, of no use.
    """
    if FAST:
        y, negative, top = reciprocal(step), -step, step * E2M1_MAX
        if VALUES:
            low_q = _quotient(tl.minimum(tl.abs(low), top), negative, y)
            high_q = _quotient(tl.minimum(tl.abs(high), top), negative, y)
            low_m, low_c = _round_e2m1(low_q)
            high_m, high_c = _round_e2m1(high_q)
        else:
            low_c, high_c = _code(low, y, negative), _code(high, y, negative)
            low_m, high_m = low_c, high_c
    else:
        low_q = tl.where(step == 0, 0.0, tl.minimum(tl.div_rn(tl.abs(low), step), E2M1_MAX))
        high_q = tl.where(step == 0, 0.0, tl.minimum(tl.div_rn(tl.abs(high), step), E2M1_MAX))
        low = tl.where(low_q == 0, 0.0, low)
        high = tl.where(high_q == 0, 0.0, high)
        low_m, low_c = _round_e2m1(low_q)
        high_m, high_c = _round_e2m1(high_q)
    return low_m, high_m, low_c, high_c, low, high


@triton.jit
def with_sign(magnitude, x):
    return (bits(magnitude) | (bits(x) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def pack(low_code, high_code, low, high):
    """Packed codes uint8 from the low 3 bits of int32 codes and the signs of low and high.

    Assembled nibble by nibble, four bytes at a time.
    """
    packed = tl.inline_asm_elementwise(
        "{.reg .b32 s, n; mov.b32 n, 0;"
        "shr.u32 s, $9, 28; lop3.b32 s, s, $1, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $13, 28; lop3.b32 s, s, $5, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $10, 28; lop3.b32 s, s, $2, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $14, 28; lop3.b32 s, s, $6, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $11, 28; lop3.b32 s, s, $3, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $15, 28; lop3.b32 s, s, $7, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $12, 28; lop3.b32 s, s, $4, 7, 0xD8; shf.r.wrap.b32 n, n, s, 4;"
        "shr.u32 s, $16, 28; lop3.b32 s, s, $8, 7, 0xD8; shf.r.wrap.b32 $0, n, s, 4;}",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [low_code, high_code, bits(low), bits(high)], dtype=tl.int8, is_pure=True,
        pack=4,
    )  # fmt: skip
    return packed.to(tl.uint8, bitcast=True)


@triton.jit
def is_fast(lowest, highest, FP32: tl.constexpr):
    """Whether scales in [lowest, highest] allow FAST: see the module's docstring."""
    if FP32:
        fast = (lowest >= FAST_MIN) & (highest <= FAST_MAX_FP32)
    else:
        fast = (lowest >= FAST_MIN) & (highest <= FAST_MAX)
    return fast
