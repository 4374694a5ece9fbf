"""Triton kernels of the NVFP4 contract: bit-identical to ``reference.py`` on CUDA GPUs from sm_89 on.

Compiled without multiply-add contraction, so that fp32 rounds where the reference rounds. A tile of [blocks, 16] elements
is held as two fp32 tensors [blocks, 8], ``low`` (even columns) and ``high`` (odd columns): the nibbles of a packed byte.

Division is where the time would go. Under an ordinary scale (``is_fast``) a block's elements share one reciprocal and
take the three remaining steps of ``div.rn.f32``, whose quotient is correctly rounded as nothing under- or overflows:

* the scale is at least 2^-80, so the step is at least 2^-89 and the residuals that decide near a boundary are exact;
* magnitudes are cut at 6 steps (block maxima at 512) first, beyond which the result is the same;
* the scale is at most 2^7, or 2^-10 for FP32 input, so that no quotient of a nonzero element underflows to zero, where
  the sign would have to go. x is at least 2^-133 (BF16) or 2^-149 (FP32) and a residual of 16-bit values as large.

Under any other scale, tiles are walked in small pieces with ``tl.div_rn``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import table

# blocks in a tile, warps, tiles a program walks, and how many of them are in flight; measured on an H200
QDQ_SHAPE = (512, 8, 1, 1)
PACK_SHAPE = (256, 4, 4, 3)
BOTH_SHAPE = (256, 4, 1, 1)
SINGLE_BLOCKS, SINGLE_WARPS = 256, 4
AMAX_WORDS = 8192
AMAX_WARPS = 8
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

    Two neighbours are loaded as one integer.
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
def _reciprocal(b):
    """The reciprocal that div.rn.f32 starts from."""
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(y, tl.fma(-b, y, 1.0), y)


@triton.jit
def _quotient(a, negative_b, y):
    """a / b for y = _reciprocal(b), as div.rn.f32 ends."""
    q = a * y
    return tl.fma(tl.fma(q, negative_b, a), y, q)


@triton.jit
def block_scale(top, scale, FAST: tl.constexpr):
    """Block maxima [B] and the FP32 scale (scalar or [B]) -> E4M3 block scales [B], fp32 steps [B, 1]."""
    six = scale * E2M1_MAX
    if FAST:
        ratio = _quotient(tl.minimum(top, six * 512.0), -six, _reciprocal(six))
        ratio = tl.where(top == 0, 1.0, ratio)
    else:
        ratio = tl.div_rn(top, six)
        ratio = tl.where((ratio == 0) | (scale == 0), 1.0, ratio)
    s8 = tl.minimum(tl.maximum(ratio, E4M3_MIN), E4M3_MAX).to(tl.float8e4nv)
    return s8, (s8.to(tl.float32) * scale)[:, None]


@triton.jit
def _round_e2m1(q):
    """fp32 quotients in [0, 6] -> the E2M1 grid, ties to the even code; and the sum that did the rounding, for ``pack``.

    Adding about 2^22 times the power of two below q (1 at least) leaves two significant bits of q, or halves below 1.
    """
    power = (bits(tl.maximum(q, 1.0)) & EXPONENT).to(tl.float32, bitcast=True)
    total = tl.fma(power, MAGIC, q)
    return tl.fma(power, -MAGIC, total), total


@triton.jit
def magnitudes(low, high, step, FAST: tl.constexpr):
    """E2M1 magnitudes of both halves, their rounding sums, and the halves: +0 where a negative quotient underflows."""
    if FAST:
        y, negative, top = _reciprocal(step), -step, step * E2M1_MAX
        low_q = _quotient(tl.minimum(tl.abs(low), top), negative, y)
        high_q = _quotient(tl.minimum(tl.abs(high), top), negative, y)
    else:
        low_q = tl.where(step == 0, 0.0, tl.minimum(tl.div_rn(tl.abs(low), step), E2M1_MAX))
        high_q = tl.where(step == 0, 0.0, tl.minimum(tl.div_rn(tl.abs(high), step), E2M1_MAX))
        low = tl.where(low_q == 0, 0.0, low)
        high = tl.where(high_q == 0, 0.0, high)
    low_m, low_t = _round_e2m1(low_q)
    high_m, high_t = _round_e2m1(high_q)
    return low_m, high_m, low_t, high_t, low, high


@triton.jit
def with_sign(magnitude, x):
    return (bits(magnitude) | (bits(x) & SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def pack(low_total, high_total, low, high):
    """Packed codes uint8 from the rounding sums of ``_round_e2m1`` and the signs of low and high.

    A sum's mantissa counts steps from 6 (halves, ones or twos as its exponent is 149, 150 or 151): that count and twice
    the exponent add up to the code modulo 8.
    """
    low_code = bits(low_total) + (bits(low_total) >> 22)
    high_code = bits(high_total) + (bits(high_total) >> 22)
    code = (low_code & 7) | ((high_code << 4) & 0x70) | ((bits(low) >> 28) & 8) | ((bits(high) >> 24) & 0x80)
    # as 8-bit arithmetic LLVM's vectoriser gets it wrong (seen with triton 3.6: wrong codes from 4 blocks a thread up)
    packed = tl.inline_asm_elementwise(
        "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410;}",
        "=r,r,r,r,r", [code], dtype=tl.int8, is_pure=True, pack=4,
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


@triton.jit
def _tile(x_ptr, out_ptr, codes_ptr, s8_ptr, scale, inside, QDQ: tl.constexpr, CODES: tl.constexpr, FAST: tl.constexpr,
          BLOCKS: tl.constexpr):  # fmt: skip
    """Quantise the BLOCKS blocks at the pointers, of which ``inside`` exist; scale is a scalar or [BLOCKS]."""
    block = tl.arange(0, BLOCKS)
    mask = block < inside
    low, high = load_pairs(x_ptr, block, mask)
    s8, step = block_scale(block_top(low, high), scale, FAST)
    low_m, high_m, low_t, high_t, low, high = magnitudes(low, high, step, FAST)
    if QDQ:
        store_pairs(out_ptr, block, with_sign(low_m * step, low), with_sign(high_m * step, high), mask)
    if CODES:
        code = pack(low_t, high_t, low, high)
        tl.store(codes_ptr + (block[:, None] * 8 + tl.arange(0, 8)[None, :]), code, mask=mask[:, None])
        tl.store(s8_ptr + block, s8, mask=mask)


@triton.jit
def single_kernel(x_ptr, scale_ptr, out_ptr, codes_ptr, s8_ptr, blocks, row_blocks, ROWS: tl.constexpr,
                  QDQ: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, SLOW: tl.constexpr):  # fmt: skip
    """One contiguous tensor of ``blocks`` 16-blocks, an FP32 scale for it or (ROWS) for every row of ``row_blocks``."""
    FP32: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    if ROWS:
        block = first + tl.arange(0, BLOCKS)
        # outside the tensor the scale is 2^-20: it must neither fault nor push the tile off the fast way
        scale = tl.load(scale_ptr + block // row_blocks, mask=block < blocks, other=0.00000095367431640625)
        fast = is_fast(tl.min(scale, 0), tl.max(scale, 0), FP32)
    else:
        scale = tl.load(scale_ptr)
        fast = is_fast(scale, scale, FP32)
    if fast:
        _tile(x_ptr + first * 16, out_ptr + first * 16, codes_ptr + first * 8, s8_ptr + first, scale, blocks - first,
              QDQ, CODES, True, BLOCKS)  # fmt: skip
    else:
        for sub in range(0, BLOCKS, SLOW):
            at = first + sub
            here = at + tl.arange(0, SLOW)
            part = tl.load(scale_ptr + (here // row_blocks if ROWS else here * 0), mask=here < blocks, other=1.0)
            _tile(x_ptr + at * 16, out_ptr + at * 16, codes_ptr + at * 8, s8_ptr + at, part, blocks - at, QDQ, CODES,
                  False, SLOW)  # fmt: skip


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _find(tiles_ptr, program, per_tensor, UNIFORM: tl.constexpr):
    """The tensor (int64) and the tile in it of a program."""
    if UNIFORM:
        tensor = (program // per_tensor).to(tl.int64)
        tile = (program % per_tensor).to(tl.int64)
    else:
        tensor = tl.load(tiles_ptr + program * 2)
        tile = tl.load(tiles_ptr + program * 2 + 1)
    return tensor, tile


@triton.jit
def grouped_kernel(rows_ptr, tiles_ptr, amax_ptr, per_tensor, X: tl.constexpr, OUT: tl.constexpr, UNIFORM: tl.constexpr,
                   QDQ: tl.constexpr, CODES: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr,
                   REPEAT: tl.constexpr, STAGES: tl.constexpr, SLOW: tl.constexpr):  # fmt: skip
    """A list of contiguous tensors, given the FP32 amax of each one's group (see table.py for the list's form)."""
    # last tiles first: after an amax pass these are still in the L2 cache
    tensor, tile = _find(tiles_ptr, tl.num_programs(0) - 1 - tl.program_id(0), per_tensor, UNIFORM)
    row = rows_ptr + tensor * 6
    first = tile * (BLOCKS * REPEAT)
    x_ptr = _pointer(tl.load(row) + first * (16 * X.primitive_bitwidth // 8), X, ALIGNED)
    out_ptr = _pointer(tl.load(row + 1) + first * (16 * OUT.primitive_bitwidth // 8), OUT, ALIGNED)
    codes_ptr = _pointer(tl.load(row + 2) + first * 8, tl.uint8, ALIGNED)
    s8_ptr = _pointer(tl.load(row + 3) + first, tl.float8e4nv, ALIGNED)
    inside = (tl.load(row + 4) - first).to(tl.int32)
    scale = tl.div_rn(tl.load(amax_ptr + tl.load(row + 5)), SIX_E4M3_MAX)
    if is_fast(scale, scale, tl.float32 == X):
        for part in tl.range(0, REPEAT * BLOCKS, BLOCKS, num_stages=STAGES):
            _tile(x_ptr + part * 16, out_ptr + part * 16, codes_ptr + part * 8, s8_ptr + part, scale, inside - part, QDQ,
                  CODES, True, BLOCKS)  # fmt: skip
    else:
        for sub in range(0, REPEAT * BLOCKS, SLOW):
            _tile(x_ptr + sub * 16, out_ptr + sub * 16, codes_ptr + sub * 8, s8_ptr + sub, scale, inside - sub, QDQ,
                  CODES, False, SLOW)  # fmt: skip


@triton.jit
def amax_kernel(rows_ptr, tiles_ptr, out_ptr, per_tensor, X: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr,
                WORDS: tl.constexpr):  # fmt: skip
    """Largest |x| as fp32 bits by integer maximum, so that Inf and NaN win; out is int32, zero at the start."""
    tensor, tile = _find(tiles_ptr, tl.program_id(0), per_tensor, UNIFORM)
    row = rows_ptr + tensor * 6
    blocks = tl.load(row + 4)
    group = tl.load(row + 5)
    at = tile * WORDS + tl.arange(0, WORDS)
    PAIRED: tl.constexpr = tl.bfloat16 == X  # two values in each word
    if PAIRED:
        word = tl.load(_pointer(tl.load(row), tl.int32, ALIGNED) + at, mask=at < blocks * 8, other=0)
        top = tl.max(tl.maximum(word & 0x7FFF0000, (word << 16) & 0x7FFF0000), 0)
    else:
        x = tl.load(_pointer(tl.load(row), X, ALIGNED) + at, mask=at < blocks * 16, other=0.0).to(tl.float32)
        top = tl.max(bits(x) & 0x7FFFFFFF, 0)
    tl.atomic_max(out_ptr + group, top, sem="relaxed")


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SLOW_BLOCKS = 64


def word_aligned(x: Tensor) -> Tensor:
    """x, or a copy when its values cannot be read in pairs."""
    return x if x.data_ptr() % (2 * x.element_size()) == 0 else x.clone()


def amax_(xs: list[Tensor], groups: list[int], out: Tensor) -> None:
    """out fp32 [G] := the largest magnitude of each group's tensors (contiguous, one dtype); 0 for an empty group."""
    out.zero_()
    xs = [word_aligned(x) for x in xs]
    rows = [(x.data_ptr(), 0, 0, 0, x.numel() // 16, g) for x, g in zip(xs, groups, strict=True) if x.numel()]
    if not rows:
        return
    per_block = 8 if xs[0].dtype == torch.bfloat16 else 16
    t = table.build(rows, AMAX_WORDS // per_block, out.device)
    amax_kernel[(t.total,)](
        t.rows, t.tiles, out.view(torch.int32), t.per_tensor, X=TYPES[xs[0].dtype], UNIFORM=t.tiles is None,
        ALIGNED=t.aligned, WORDS=AMAX_WORDS, num_warps=AMAX_WARPS,
    )  # fmt: skip


def grouped_(
    xs: list[Tensor], amax: Tensor, groups: list[int], out: list[Tensor], codes: list[Tensor], s8: list[Tensor]
) -> None:
    """Write DQ(Q(x)) to ``out`` and the packed form to ``codes`` and ``s8``, whichever lists are not empty."""
    if any(t.data_ptr() % (2 * t.element_size()) for t in out):
        raise ValueError("out must start at a multiple of two elements: values are written in pairs")
    xs = [word_aligned(x) for x in xs]
    none: list[Tensor | None] = [None] * len(xs)
    rows = [
        (x.data_ptr(), *(0 if t is None else t.data_ptr() for t in written), x.numel() // 16, g)
        for x, g, *written in zip(xs, groups, out or none, codes or none, s8 or none, strict=True)
        if x.numel()
    ]
    if not rows:
        return
    tile, warps, repeat, stages = QDQ_SHAPE if not codes else BOTH_SHAPE if out else PACK_SHAPE
    t = table.build(rows, tile * repeat, amax.device)
    x_type = xs[0].dtype
    grouped_kernel[(t.total,)](
        t.rows, t.tiles, amax, t.per_tensor, X=TYPES[x_type], OUT=TYPES[out[0].dtype if out else x_type],
        UNIFORM=t.tiles is None, QDQ=bool(out), CODES=bool(codes), ALIGNED=t.aligned, BLOCKS=tile,
        REPEAT=repeat, STAGES=stages, SLOW=SLOW_BLOCKS, num_warps=warps, **NO_CONTRACTION,
    )  # fmt: skip


def single(x: Tensor, scale: Tensor, out: Tensor | None, codes: Tensor | None, s8: Tensor | None) -> None:
    """One contiguous tensor [..., K]; scale fp32 with one value, or one for each row."""
    blocks = x.numel() // 16
    if not blocks:
        return
    x = word_aligned(x)
    tile = min(SINGLE_BLOCKS, triton.next_power_of_2(max(blocks // 132, 32)))
    # pointers that are not written stand in as x: a null pointer would be another specialisation
    single_kernel[(triton.cdiv(blocks, tile),)](
        x, scale, x if out is None else out, x if codes is None else codes, x if s8 is None else s8, blocks,
        x.shape[-1] // 16, ROWS=scale.numel() > 1, QDQ=out is not None, CODES=codes is not None, BLOCKS=tile,
        SLOW=min(SLOW_BLOCKS, tile), num_warps=max(1, tile * SINGLE_WARPS // SINGLE_BLOCKS), **NO_CONTRACTION,
    )  # fmt: skip
