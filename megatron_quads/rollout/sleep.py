"""vLLM's sleep mode and what a worker may do after it: nothing from weights that a level 2 sleep discarded.

Level 1 keeps the weights on the host and puts them back: version and RAC selection stay. After level 2 the memory holds
anything: the worker has no version, its next forward pass is refused, until an update is acknowledged, which also
rewrites the RAC selection. ``patches/vllm_sleep.py`` calls ``slept`` and ``woke`` however the sleep was asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import QuadsError
from .types import half_loaded

TAGS = frozenset({"weights", "kv_cache"})
WHERE = "rollout worker"


def slept(worker: Any, level: int) -> None:
    """Note a sleep before it happens, so that one that breaks off is refused, too."""
    worker._quads_asleep = TAGS
    if level < 2:
        return
    if (engine := _ours(worker)) is not None:
        engine.discard()
    worker.execute_model = partial(_refuse, worker)


def woke(worker: Any, tags: list[str] | None) -> None:
    """Note a wake-up of some memory, or all."""
    worker._quads_asleep = asleep(worker) - (TAGS if tags is None else frozenset(tags))


def asleep(worker: Any) -> frozenset[str]:
    """What of ``TAGS`` is not in GPU memory."""
    found: frozenset[str] = getattr(worker, "_quads_asleep", frozenset())
    return found


def require_awake(worker: Any, tags: frozenset[str] = frozenset({"weights"})) -> None:
    """Raise QuadsError while one of ``tags`` is not in GPU memory."""
    if missing := asleep(worker) & tags:
        raise QuadsError(f"the engine sleeps ({', '.join(sorted(missing))})", where=WHERE, do="wake it up first")


def require_whole(worker: Any) -> None:
    """Raise QuadsError unless the worker holds the weights of one version, in GPU memory."""
    require_awake(worker)
    engine = _ours(worker)
    if engine is not None and engine.version is None:
        raise _discarded() if engine.discarded else half_loaded(WHERE)


def _discarded() -> QuadsError:
    return QuadsError("a level 2 sleep discarded the weights", where=WHERE, do="refit it, or update from a folder")


def _ours(worker: Any) -> Any:
    from .transfer import FileWeightTransferEngine

    engine = worker.weight_transfer_engine
    return engine if isinstance(engine, FileWeightTransferEngine) else None


def _refuse(worker: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``execute_model`` after a level 2 sleep; goes once an update was acknowledged."""
    engine = _ours(worker)
    if engine is None or engine.version is None:
        raise _discarded()
    del worker.execute_model
    return worker.execute_model(*args, **kwargs)
