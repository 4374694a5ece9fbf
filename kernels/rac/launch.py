"""Launches of the row kernels: which one, its tiles and warps."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..nvfp4.device import NO_CONTRACTION
from ..nvfp4.triton import capability, is_sm90
from .packed import packed_rows_kernel
from .triton import SLOW_BLOCKS, rows_kernel

FEW = 512  # rows
PDL_K = 2048  # below, a row is so short that starting programs early holds up more than it saves


def tiles(tokens: int, blocks: int, count: int) -> tuple[int, int, int]:
    """How many blocks come first, and the two tiles' sizes: split where that costs no more than one tile of all.

    A few rows are not split: two tiles take turns, and latency is what counts.
    """
    whole = max(2, triton.next_power_of_2(blocks))
    if count == 0:
        return 0, 0, whole
    head, tail = (max(2, triton.next_power_of_2(n)) if n else 0 for n in (count, blocks - count))
    return (count, head, tail) if tail and head + tail <= whole and tokens > FEW else (blocks, whole, 0)


def warps(tokens: int, blocks: int) -> int:
    """32 elements a thread; half as many for a few rows, where latency is what counts.

    Never more: with triton 3.6 a thread of 64 elements wrote wrong codes (cause not found), which is what bounds MAX_K.
    """
    return max(1, min(16, blocks // (32 if tokens <= FEW else 64)))


def packed_options(tokens: int, head: int, tail: int, values: bool, silu: bool, major: int) -> tuple[int, int | None]:
    """``packed_rows_kernel``'s warps and register limit: 4 blocks a thread, 2 with silu, one for a few rows; measured on an H200."""
    if tokens <= FEW:
        return max(1, min(16, (head + tail) // 32)), None
    whole = values and head > 0 and tail == 0  # values with a residual of every block need most registers
    limit = None if silu or whole or (head and not values) else 128 if head else 80
    return max(1, min(16, (head + tail) // (64 if whole or silu else 128))), limit if major == 9 else None


def is_packed(x: Tensor) -> bool:
    """Whether ``packed_rows_kernel`` serves x: its instructions are on BF16, from sm_90 on."""
    return x.dtype == torch.bfloat16 and is_sm90(x.device)


def rows(
    x: Tensor,
    k: int,
    scale: Tensor | None,
    order: Tensor | None,
    count: int,
    silu: bool,
    out: Tensor | None,
    codes: Tensor | None = None,
    s8: Tensor | None = None,
    scale_out: Tensor | None = None,
    swizzled: bool = False,
) -> None:
    """Launch over x [tokens, K] (or [tokens, 2 K] with silu), whose last stride is 1."""
    tokens = x.shape[0]
    if not tokens:
        return
    if x.data_ptr() % (2 * x.element_size()) or x.stride(0) % 2:
        x = x.clone(memory_format=torch.contiguous_format)  # values are read in pairs
    head, head_tile, tail_tile = tiles(tokens, k // 16, count)
    # pointers that are not used stand in as x: a null pointer would be another specialisation
    tensors = [x if t is None else t for t in (scale, order, out, codes, s8, scale_out)]
    common: dict[str, Any] = {
        "OWN_SCALE": scale is None, "ROW_SCALE": scale is not None and scale.numel() > 1, "ORDERED": order is not None,
        "SILU": silu, "CODES": codes is not None, "SWIZZLED": swizzled, "HEAD": head_tile, "TAIL": tail_tile, "SLOW": SLOW_BLOCKS,
        **NO_CONTRACTION,
    }  # fmt: skip
    pdl = is_sm90(x.device) and (tokens <= FEW or k >= PDL_K)
    if is_packed(x):
        n, limit = packed_options(tokens, head_tile, tail_tile, out is not None, silu, capability(x.device)[0])
        packed_rows_kernel[(tokens,)](
            x, x.stride(0), *tensors, k // 16, head, count, **common, PDL=pdl, launch_pdl=pdl, num_warps=n, maxnreg=limit,
        )  # fmt: skip
    else:
        rows_kernel[(tokens,)](
            x, x.stride(0), *tensors, k // 16, head, count, **common, PDL=pdl, launch_pdl=pdl,
            num_warps=warps(tokens, head_tile + tail_tile),
        )  # fmt: skip
