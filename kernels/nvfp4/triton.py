"""Triton kernels of the NVFP4 contract for weights: bit-identical to ``reference.py`` on CUDA GPUs from sm_89 on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import table
from .device import (
    NO_CONTRACTION,
    SIX_E4M3_MAX,
    bits,
    block_scale,
    block_top,
    is_fast,
    load_pairs,
    magnitudes,
    pack,
    store_pairs,
    with_sign,
)
from .packed import packed_tile

# blocks in a tile, warps, tiles a program walks, and how many of them are in flight; measured on an H200
VALUES_SHAPE = (256, 4, 1, 1)
PACK_SHAPE = (256, 4, 4, 1)
SINGLE_BLOCKS, SINGLE_WARPS = 256, 4
AMAX_WORDS = 8192
AMAX_WARPS = 8


@triton.jit
def _tile(x_ptr, out_ptr, codes_ptr, s8_ptr, scale, inside, QDQ: tl.constexpr, CODES: tl.constexpr, FAST: tl.constexpr,
          BLOCKS: tl.constexpr):  # fmt: skip
    """Quantise the BLOCKS blocks at the pointers, of which ``inside`` exist; scale is a scalar or [BLOCKS]."""
    block = tl.arange(0, BLOCKS)
    mask = block < inside
    low, high = load_pairs(x_ptr, block, mask)
    s8, step = block_scale(block_top(low, high), scale, FAST)
    step = step[:, None]
    low_m, high_m, low_c, high_c, low, high = magnitudes(low, high, step, QDQ, FAST)
    if QDQ:
        store_pairs(out_ptr, block, with_sign(low_m * step, low), with_sign(high_m * step, high), mask)
    if CODES:
        code = pack(low_c, high_c, low, high)
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
                   REPEAT: tl.constexpr, STAGES: tl.constexpr, SLOW: tl.constexpr, PACKED: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """A list of contiguous tensors, given the FP32 amax of each one's group (see table.py for the list's form)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
            if PACKED:
                packed_tile(x_ptr + part * 16, out_ptr + part * 16, codes_ptr + part * 8, s8_ptr + part, scale,
                            inside - part, QDQ, CODES, BLOCKS)  # fmt: skip
            else:
                _tile(x_ptr + part * 16, out_ptr + part * 16, codes_ptr + part * 8, s8_ptr + part, scale, inside - part,
                      QDQ, CODES, True, BLOCKS)  # fmt: skip
    else:
        for sub in range(0, REPEAT * BLOCKS, SLOW):
            _tile(x_ptr + sub * 16, out_ptr + sub * 16, codes_ptr + sub * 8, s8_ptr + sub, scale, inside - sub, QDQ,
                  CODES, False, SLOW)  # fmt: skip


@triton.jit
def amax_kernel(rows_ptr, tiles_ptr, out_ptr, per_tensor, X: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr,
                WORDS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Largest |x| as fp32 bits by integer maximum, so that Inf and NaN win; out is int32, zero at the start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of the GPU."""
    return torch.cuda.get_device_capability(device)


def is_sm90(device: torch.device) -> bool:
    """Whether the GPU starts a kernel's programs before the last kernel has ended, and knows packed.py's instructions."""
    return capability(device) >= (9, 0)


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
    run_amax(amax_table(rows, xs[0].dtype, out.device), xs[0].dtype, out)


def amax_table(rows: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> table.Table:
    """The table that ``run_amax`` takes, for rows as table.py says."""
    return table.build(rows, AMAX_WORDS // (8 if dtype == torch.bfloat16 else 16), device)


def run_amax(t: table.Table, dtype: torch.dtype, out: Tensor) -> None:
    """Launch; ``out`` is zero at the start."""
    pdl = is_sm90(out.device)
    amax_kernel[(t.total,)](
        t.rows, t.tiles, out.view(torch.int32), t.per_tensor, X=TYPES[dtype], UNIFORM=t.tiles is None,
        ALIGNED=t.aligned, WORDS=AMAX_WORDS, num_warps=AMAX_WARPS, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


def registers(major: int, values: bool) -> int | None:
    """The register limit of the grouped kernel: on sm_90 packing takes 72 without, and 3 % longer."""
    return 64 if major == 9 and not values else None


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
    x_type = xs[0].dtype
    out_type = out[0].dtype if out else x_type
    t, tiling = grouped_table(rows, bool(out), bool(codes), amax.device)
    run_grouped(t, tiling, amax, x_type, out_type, bool(out), bool(codes))


def grouped_table(
    rows: Sequence[tuple[int, ...]], values: bool, codes: bool, device: torch.device
) -> tuple[table.Table, tuple[int, int, int, int]]:
    """The table that ``run_grouped`` takes, for rows as table.py says, and its tiling."""
    tiling = VALUES_SHAPE if values else PACK_SHAPE
    return table.build(rows, tiling[0] * tiling[2], device), tiling


def run_grouped(
    t: table.Table, tiling: tuple[int, int, int, int], amax: Tensor, x_type: torch.dtype, out_type: torch.dtype,
    values: bool, codes: bool,
) -> None:  # fmt: skip
    """Launch."""
    tile, warps, repeat, stages = tiling
    pdl = is_sm90(amax.device)
    packed = pdl and x_type == torch.bfloat16 == out_type
    limit = registers(capability(amax.device)[0], values)
    grouped_kernel[(t.total,)](
        t.rows, t.tiles, amax, t.per_tensor, X=TYPES[x_type], OUT=TYPES[out_type],
        UNIFORM=t.tiles is None, QDQ=values, CODES=codes, ALIGNED=t.aligned, BLOCKS=tile, REPEAT=repeat, STAGES=stages,
        SLOW=SLOW_BLOCKS, num_warps=warps, maxnreg=limit, PACKED=packed, PDL=pdl, launch_pdl=pdl, **NO_CONTRACTION,
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
