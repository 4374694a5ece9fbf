"""Device tables of tensor addresses, so that one launch serves a list of tensors.

A table is int64 [n, FIELDS], one row a tensor, copied from pinned memory without a host sync and cached by its content
(equal addresses and shapes are an equal table, whoever owns them). A table that a CUDA graph uses is kept for good; one
that is first seen during capture is copied by a node of that graph, from a slice of a pinned arena that is never reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = 6  # x, out, codes, block scales (addresses), blocks of 16, group
CACHED = 256
ARENA = 1 << 20  # int64 slots

_cache: OrderedDict[tuple[object, ...], Table] = OrderedDict()
_captured: dict[tuple[object, ...], Table] = {}
_arena: dict[torch.device, tuple[Tensor, int]] = {}


@dataclass(frozen=True)
class Table:
    """``rows`` int64 [n, FIELDS] and ``tiles`` int64 [number of tiles, 2] (tensor, tile in it), None when uniform."""

    rows: Tensor
    tiles: Tensor | None
    per_tensor: int  # tiles of each tensor when uniform
    total: int  # tiles of all
    aligned: bool  # every address is a multiple of 16


def _upload(values: list[int], device: torch.device) -> Tensor:
    """int64 list -> device, without a host sync."""
    host = torch.tensor(values, dtype=torch.int64)
    if not torch.cuda.is_current_stream_capturing():
        if device not in _arena:
            _arena[device] = (torch.empty(ARENA, dtype=torch.int64, pin_memory=True), 0)
        return host.pin_memory().to(device, non_blocking=True)
    if device not in _arena:
        raise RuntimeError("NVFP4 kernels under CUDA graph capture need one call before the capture (warm-up)")
    arena, used = _arena[device]
    if used + len(values) > ARENA:
        raise RuntimeError("too many distinct NVFP4 tensor lists captured in CUDA graphs")
    _arena[device] = (arena, used + len(values))
    pinned = arena[used : used + len(values)]
    pinned.copy_(host)
    return pinned.to(device, non_blocking=True)


def build(rows: Sequence[tuple[int, ...]], tile: int, device: torch.device) -> Table:
    """``rows`` as FIELDS says; ``tile`` is the number of 16-blocks a program handles."""
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, torch.cuda.current_stream(device).cuda_stream, tile, *rows)
    found = _cache.get(key)
    if found is not None:
        _cache.move_to_end(key)
        if capturing:
            _captured[key] = found
        return found
    counts = [-(-row[4] // tile) for row in rows]
    uniform = min(counts) == max(counts)
    flat = [v for row in rows for v in row]
    tiles = [] if uniform else [v for i, n in enumerate(counts) for t in range(n) for v in (i, t)]
    both = _upload(flat + tiles, device)
    table = Table(
        rows=both[: len(flat)],
        tiles=None if uniform else both[len(flat) :],
        per_tensor=counts[0],
        total=sum(counts),
        aligned=all(v % 16 == 0 for row in rows for v in row[:4]),
    )
    if not capturing:
        _cache[key] = table
        while len(_cache) > CACHED:
            _cache.popitem(last=False)
    return table
