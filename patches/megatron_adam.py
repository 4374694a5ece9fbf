"""What Megatron-Core's distributed optimizer needs to resume with torch's own Adam (no Transformer Engine, no apex)."""

from __future__ import annotations

import functools
from typing import Any

from .registry import Patch


def _without_step(original: Any) -> Any:
    """``step`` is marked as absent: the original skips what is not a tensor."""

    @functools.wraps(original)
    def wrapper(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, {"step": None, **tensors})

    return wrapper


PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        "megatron-core",
        ">=0.19.2,<0.20",
        "(self, model_param, tensors)",
        "loading a fully reshardable state looks up 'step' of torch's Adam among the saved tensors, where it is left out",
        "https://github.com/NVIDIA/Megatron-LM",
        "the method skips 'step'",
        _without_step,
    ),
)
