"""Faults of the kernels' arguments: a ValueError before any launch, on every device alike."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from . import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAME = attrgetter("dtype", "device")


def check(x: Tensor, name: str = "x") -> None:
    """ValueError unless x is a BF16, FP16 or FP32 tensor [..., K] with K a multiple of 16."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % reference.BLOCK:
        raise ValueError(f"NVFP4 needs K to be a multiple of {reference.BLOCK}, got {name} of shape {tuple(x.shape)}")


def check_scale(scale: Tensor, x: Tensor) -> Tensor:
    """The FP32 scale, contiguous: one value, or one for each row of x. ValueError unless it holds one value or broadcasts to [..., 1]."""
    rows = (*x.shape[:-1], 1)
    if scale.numel() != 1:
        if scale.dim() != x.dim() or scale.shape[-1] != 1:
            raise ValueError(
                f"scale must hold one value or be [..., 1] for x {tuple(x.shape)}, got {tuple(scale.shape)}"
            )
        if any(a not in (1, b) for a, b in zip(scale.shape, rows, strict=True)):
            raise ValueError(f"scale {tuple(scale.shape)} does not match the rows of x {tuple(x.shape)}")
        scale = scale.expand(rows)
    if scale.device != x.device:
        raise ValueError(f"x is on {x.device} but its scale on {scale.device}")
    if scale.dtype == torch.float32 and scale.is_contiguous():
        return scale
    return scale.float().reshape(-1).contiguous()


def check_list(xs: Sequence[Tensor], name: str) -> None:
    """ValueError naming the first that is not [..., K] as ``check`` says, contiguous, of the list's dtype and device."""
    if (
        not torch.compiler.is_compiling()
        and len(set(map(_SAME, xs))) == 1
        and xs[0].dtype in DTYPES
        and all(map(Tensor.is_contiguous, xs))
        and all(x.dim() and x.shape[-1] % reference.BLOCK == 0 for x in xs)
    ):
        return  # a tensor at a time only where something is wrong
    for i, x in enumerate(xs):
        check(x, f"{name}[{i}]")
        if x.dtype != xs[0].dtype or x.device != xs[0].device:
            raise ValueError(f"{name}[{i}] is {x.dtype} on {x.device}, {name}[0] is {xs[0].dtype} on {xs[0].device}")
        if not x.is_contiguous():
            raise ValueError(f"{name}[{i}] of shape {tuple(x.shape)} is not contiguous (strides {x.stride()})")


def check_groups(xs: Sequence[Tensor], groups: Sequence[int] | None, count: int | None) -> list[int]:
    """The group of each tensor, its own by default; ValueError unless there is one for each, below ``count`` if given."""
    found = list(range(len(xs))) if groups is None else [int(g) for g in groups]
    if len(found) != len(xs):
        raise ValueError(f"groups must name a group for each of {len(xs)} tensors, got {len(found)}")
    if any(g < 0 or (count is not None and g >= count) for g in found):
        limit = "" if count is None else f" below {count}, one of amax's,"
        raise ValueError(f"groups must be numbers from 0 on{limit} got {min(found)} to {max(found)}")
    return found
