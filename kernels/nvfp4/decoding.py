"""Triton kernel of the NVFP4 contract's last step: packed codes and block scales back to values, for a list of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import NO_CONTRACTION, SIX_E4M3_MAX, bits, store_pairs
from .table import Table
from .triton import TYPES, _find, _pointer

BLOCKS, WARPS = 512, 8  # 16-blocks of a program, its warps


@triton.jit
def _value(code, step):
    """4-bit codes int32 -> value * step in fp32, with the code's sign also on zero."""
    code_m = code & 7
    # exponent and mantissa bits of an E2M1 number at a float's places; 0 and one half are its subnormals
    normal = ((code_m << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(code_m < 2, code_m.to(tl.float32) * 0.5, normal)
    return (bits(magnitude * step) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def decode_kernel(rows_ptr, tiles_ptr, amax_ptr, per_tensor, OUT: tl.constexpr, UNIFORM: tl.constexpr,
                  ALIGNED: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """A list of contiguous tensors (see table.py), given the FP32 amax of each one's group."""
    tensor, tile = _find(tiles_ptr, tl.program_id(0), per_tensor, UNIFORM)
    row = rows_ptr + tensor * 6
    first = tile * BLOCKS
    out_ptr = _pointer(tl.load(row + 1) + first * (16 * OUT.primitive_bitwidth // 8), OUT, ALIGNED)
    codes_ptr = _pointer(tl.load(row + 2) + first * 8, tl.uint8, ALIGNED)
    s8_ptr = _pointer(tl.load(row + 3) + first, tl.float8e4nv, ALIGNED)
    block = tl.arange(0, BLOCKS)
    mask = block < tl.load(row + 4) - first
    scale = tl.div_rn(tl.load(amax_ptr + tl.load(row + 5)), SIX_E4M3_MAX)
    step = (tl.load(s8_ptr + block, mask=mask, other=0.0).to(tl.float32) * scale)[:, None]
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    code = tl.load(codes_ptr + at, mask=mask[:, None], other=0).to(tl.int32)
    store_pairs(out_ptr, block, _value(code & 15, step), _value(code >> 4, step), mask)


def run(t: Table, amax: Tensor, dtype: torch.dtype) -> None:
    """Launch for a table built with ``BLOCKS``; values are written in pairs."""
    decode_kernel[(t.total,)](
        t.rows, t.tiles, amax, t.per_tensor, OUT=TYPES[dtype], UNIFORM=t.tiles is None, ALIGNED=t.aligned, BLOCKS=BLOCKS,
        num_warps=WARPS, **NO_CONTRACTION,
    )  # fmt: skip
