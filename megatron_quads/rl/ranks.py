"""Rank 0 knows, every rank learns: values, and the launcher's wish to stop, reach all ranks at the same point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .control import StopRequested


def share(value: Any) -> Any:
    """Rank 0's value on every rank (others pass anything)."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_rank0(work: Callable[[], Any]) -> Any:
    """What ``work`` returns on rank 0, on every rank. StopRequested in it is raised on every rank alike."""
    out: Any = None
    if dist.get_rank() == 0:
        try:
            out = work()
        except StopRequested as e:
            out = e
    out = share(out)
    if isinstance(out, StopRequested):
        raise out
    return out
