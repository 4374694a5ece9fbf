"""Triton kernel of ``megatron_quads.digest``: both sums of a tensor's words in one launch, near the speed of reading them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, WARPS = 8, 8  # rows of 1,024 words of a program, its warps


@triton.jit
def _odd(at):
    """``digest._odd``: pseudo-random odd int64 of int64 positions."""
    z = (at + 1) * -7046029254386353131
    z = (z ^ (z >> 30)) * -4658895280553007687
    z = (z ^ (z >> 27)) * -7723592293110705685
    return (z ^ (z >> 31)) | 1


@triton.jit
def digest_kernel(words_ptr, columns_ptr, sums_ptr, words, ROWS: tl.constexpr):
    """Add to int64 sums [2]: words int32 [words], times the weights of their column (int64 [2, 1024]) and of their row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 1024)
    at = row[:, None] * 1024 + column[None, :]
    word = tl.load(words_ptr + at, mask=at < words, other=0).to(tl.int64)
    place = _odd(row)
    first = tl.sum(word * tl.load(columns_ptr + column)[None, :], 1)
    tl.atomic_add(sums_ptr, tl.sum(first * place, 0), sem="relaxed")
    second = tl.sum(word * tl.load(columns_ptr + 1024 + column)[None, :], 1)
    tl.atomic_add(sums_ptr + 1, tl.sum(second * _odd(place), 0), sem="relaxed")


def add_sums(words: Tensor, columns: Tensor, sums: Tensor) -> None:
    """Add the sums of words int32 [n], n > 0, to sums int64 [2]; columns int64 [2, 1024]. All contiguous, on one GPU."""
    grid = (-(-words.numel() // (ROWS * 1024)),)
    digest_kernel[grid](words, columns, sums, words.numel(), ROWS=ROWS, num_warps=WARPS)
