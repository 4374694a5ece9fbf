"""Which 16-blocks of K have a residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..nvfp4 import reference as nvfp4


def _check_index(index: Tensor, k: int) -> None:
    """ValueError unless int64 [S], distinct, from 0 to below K/16. Syncs with the host."""
    if index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(f"blocks must be int64 [S], got {index.dtype} {tuple(index.shape)}")
    found = index.tolist()
    if len(set(found)) != len(found) or any(not 0 <= b < k // nvfp4.BLOCK for b in found):
        raise ValueError(f"blocks must be distinct and from 0 to {k // nvfp4.BLOCK - 1}, got {sorted(found)}")


@dataclass(frozen=True)
class Blocks:
    """The selected 16-blocks of K, prepared once for a device so that calls neither launch nor sync for them.

    A bare index tensor is prepared anew, with a host sync, at every call: not under CUDA graph capture.

    ``index`` int64 [S], the order of the residual's blocks; ``order`` int32 [K/16], they and then the others; ``listed``
    is False when the blocks are the leading ones, so that ``order`` says nothing.
    """

    index: Tensor
    order: Tensor
    listed: bool

    @classmethod
    def of(cls, index: Tensor, k: int) -> Blocks:
        """From int64 indices [S], distinct and below K/16. Syncs with the host to check that."""
        _check_index(index, k)
        blocks = torch.arange(k // nvfp4.BLOCK, device=index.device)
        place = blocks + index.numel()
        place[index] = torch.arange(index.numel(), device=index.device)
        return cls(index, place.argsort().to(torch.int32), True)

    @classmethod
    def prefix(cls, count: int, k: int, device: torch.device | str) -> Blocks:
        """The ``count`` leading blocks, as down_proj's are."""
        if not 0 <= count <= k // nvfp4.BLOCK:
            raise ValueError(f"{count} leading blocks of a K of {k}")
        blocks = torch.arange(k // nvfp4.BLOCK, device=device)
        return cls(blocks[:count], blocks.to(torch.int32), False)


Selection = Tensor | Blocks | None


def prepare(blocks: Selection, k: int, device: torch.device) -> Blocks | None:
    """The selection for K and a device; None where no block is selected. ValueError when it is for another."""
    if blocks is None:
        return None
    found = blocks if isinstance(blocks, Blocks) else Blocks.of(blocks, k)
    if found.order.numel() != k // nvfp4.BLOCK:
        raise ValueError(f"blocks were prepared for K = {found.order.numel() * nvfp4.BLOCK}, not {k}")
    if found.order.device != device:
        raise ValueError(f"blocks are on {found.order.device}, x on {device}")
    return found if found.index.numel() else None


def order_of(found: Blocks | None) -> tuple[Tensor | None, int]:
    """The kernels' arguments: ``order`` where it is not the identity, and the number of residual blocks."""
    if found is None:
        return None, 0
    return found.order if found.listed else None, found.index.numel()


def checked_index(blocks: Selection, k: int, device: torch.device) -> Tensor | None:
    """The selected blocks for the reference, checked as the kernels' are."""
    if isinstance(blocks, Blocks):
        prepare(blocks, k, device)
        return blocks.index
    if blocks is not None:
        _check_index(blocks, k)
    return blocks
