"""What Megatron-Core's checkpoints need here, on any machine."""

from __future__ import annotations

import functools
import queue
from typing import Any

from .registry import Patch

_MEGATRON = ("megatron-core", ">=0.19.2,<0.20")
_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"


def _without_step(original: Any) -> Any:
    """``step`` is marked as absent: the original skips what is not a tensor."""

    @functools.wraps(original)
    def wrapper(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, {"step": None, **tensors})

    return wrapper


def _in_process_queue(original: Any) -> Any:
    """One queue of this process: a synchronous save fills and empties it in the same thread."""
    results: queue.Queue[Any] = queue.Queue()

    @functools.wraps(original)
    def wrapper(mp_mode: str = "spawn") -> queue.Queue[Any]:
        return results

    return wrapper


SYNCHRONOUS_SAVE: tuple[Patch, ...] = (
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        *_MEGATRON,
        "(mp_mode: str = 'spawn') -> <bound method BaseContext.Queue of <multiprocessing.context.DefaultContext object>>",
        "even a synchronous save starts a manager process per rank for its results, which imports __main__ again: "
        "seconds per save, and a hang when __main__ has no guard",
        _UPSTREAM,
        "synchronous saves use a plain queue",
        _in_process_queue,
    ),
)

TORCH_ADAM: tuple[Patch, ...] = (
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        *_MEGATRON,
        "(self, model_param, tensors)",
        "without Transformer Engine and apex the optimizer is torch's Adam, and loading a fully reshardable state looks "
        "up its 'step' among the saved tensors, where it is left out",
        _UPSTREAM,
        "the method skips 'step'",
        _without_step,
    ),
)
