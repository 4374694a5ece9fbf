"""The Triton kernels that ``quads bench kernels`` measures its floors with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty_kernel(x_ptr):
    """Nothing: what a launch costs."""
    return


@triton.jit
def read_kernel(x_ptr, out_ptr, words, WORDS: tl.constexpr):
    """Read int32 [words] once and write nothing, unless a program's maximum is the one value that the caller rules out."""
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    top = tl.max(tl.load(x_ptr + at, mask=at < words, other=0), 0)
    if top == 0x7FFFFFFF:
        tl.store(out_ptr, top)


@triton.jit
def copy_kernel(x_ptr, out_ptr, K: tl.constexpr):
    """A row of K, a power of two, copied by each program: the least that a kernel of one row a program does."""
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    tl.store(out_ptr + at, tl.load(x_ptr + at))
