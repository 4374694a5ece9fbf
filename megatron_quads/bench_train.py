"""``quads bench train``: a step of Megatron's trainer with and without quantised experts, on one GPU.

Both arms are the same model with the recipe switched on and off, step by step in turn, so that clocks and routing are
the same. A step is Megatron's schedule over the micro-batches, DDP with the distributed optimizer, and the optimizer.
``qdq_ms`` is the time between CUDA events around amax and DQ(Q(.)) of all local experts, within the quantised steps.
``ratio`` is the median of the pairs' ratios, ``ratio_low`` and ``ratio_high`` their quartiles. ``noise`` is the same of a
plain step over the plain one before it: what the machine alone does to such a ratio. ``gpu_ms`` is the time in which the GPU
works within one profiled step: far below ``step_ms`` the step waits for the host, and the quotient of two arms' ``gpu_ms``
says what quantising costs where it does not.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import atomic
from .config import QuadsConfig
from .errors import QuadsError
from .te import single
from .te.arguments import TE_CUSTOM_RECIPE
from .te.cache import Mode, WeightGroup
from .te.scratch import Scratch

GIB = 1 << 30
# Qwen3-30B-A3B; 16 experts: what one GPU holds under EP8, with as many routed tokens as there
_MODEL = {"hidden": 2048, "heads": 32, "groups": 4, "head_dim": 128, "topk": 8, "inner": 768, "vocab": 32768}
_BATCH = {"sequence": 4096, "tokens": 8192}
ARMS: tuple[tuple[str, str, Mode], ...] = (
    ("substitute", "substitute", "copy"),
    ("packed", "substitute", "packed"),
    ("recipe", "recipe", "copy"),
)  # all but the first with 128 experts and without recomputation only


@dataclass
class Row:
    """One arm of one configuration. ``ratio``: step time over BF16's, median of pairs."""

    config: str
    arm: str
    step_ms: float
    qdq_share: float
    peak_gib: float
    gpu_ms: float
    qdq_ms: float = 0.0
    ratio: float = 1.0
    ratio_low: float = 1.0
    ratio_high: float = 1.0
    noise: float = 0.0
    pairs: int = 0


def train(
    out: Path, *, layers: int = 8, pairs: int = 20, seconds: float = 20.0, experts: tuple[int, ...] = (16, 128)
) -> None:
    """Run all configurations; write ``out`` after each one. QuadsError without a GPU or Transformer Engine.

    ``pairs``: of steps for each configuration, fewer (3 at least) when they take longer than ``seconds``.
    """
    if not torch.cuda.is_available():
        raise QuadsError("no CUDA GPU", where="quads bench train", do="run it on a machine with one")
    from .te.arguments import require_te

    version = require_te("substitute")
    single.start()
    rows: list[Row] = []
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": str(version),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("NVTE_")},
    }
    for count in experts:
        for row in _model(count, layers, pairs, seconds, version >= TE_CUSTOM_RECIPE):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
            atomic.write_json(out, {**about, "rows": [asdict(r) for r in rows]})
    single.finish()


def _model(experts: int, layers: int, pairs: int, seconds: float, with_recipe: bool) -> Iterator[Row]:
    from .patches import megatron_te, registry
    from .te.install import install

    registry.apply((megatron_te.OUTPUT_LAYER,))
    shape = single.Shape(layers=layers, experts=experts, **_MODEL, **_BATCH)
    model = single.build(
        shape, gradient_accumulation_fusion=True, moe_permute_fusion=True, moe_router_dtype="fp32",
        bias_activation_fusion=True,
    )  # fmt: skip
    training = single.Training(model, shape, lr=1e-6)
    cases = [(n, recompute) for recompute in (False, True) for n in (1, 8)]
    peaks = [_peak(training, n, recompute) for n, recompute in cases]
    for arm, hook, cache in ARMS:
        if hook == "recipe" and not with_recipe:
            continue
        _uninstall(model)
        done = install([training.model], QuadsConfig(recipe="qat"), hook=hook, cache=cache)
        switch = Switch(training.model, hook, done.groups)
        for (n, recompute), base_peak in zip(cases, peaks, strict=True):
            if arm != ARMS[0][0] and (recompute or experts != 128):
                continue
            name = f"{experts} experts, {layers} layers, {n} x {shape.tokens} tokens, recompute {'on' if recompute else 'off'}"
            peak = _peak(training, n, recompute)
            plain, quads, qdq = _paired(training, switch, n, pairs, seconds)
            ratios = [q / p for p, q in zip(plain, quads, strict=True)]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            again = [max(b / a, a / b) - 1 for a, b in itertools.pairwise(plain)]
            base, mine = statistics.median(plain), statistics.median(quads)
            switch.set(False)
            base_gpu = _gpu_time(training, n)
            switch.set(True)
            gpu = _gpu_time(training, n)
            switch.taken()
            yield Row(name, f"bf16 (beside {arm})", round(base, 3), 0.0, round(base_peak, 2), round(base_gpu, 3))
            yield Row(name, f"quads ({arm})", round(mine, 3), round(qdq / mine, 5), round(peak, 2), round(gpu, 3),
                      round(qdq, 3), round(ratio, 5), round(low, 5), round(high, 5), round(statistics.median(again), 5), len(plain))  # fmt: skip
        switch.set(False)
        del done, switch
    _uninstall(model)
    training.close()
    del training, model
    gc.collect()
    torch.cuda.empty_cache()


def _uninstall(model: Any) -> None:
    """Plain modules again, without what an arm has kept."""
    for module in model.modules():
        if module.__dict__.pop("quads_weights", None) is not None:
            module.te_quant_params = None
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    Scratch.release()
    gc.collect()
    torch.cuda.empty_cache()


class Switch:
    """Turns an installed recipe off and on, and takes the time of its quantisations."""

    def __init__(self, model: Any, hook: str, groups: Sequence[WeightGroup]) -> None:
        self.hook = hook
        self.modules = [m for m in model.modules() if getattr(m, "quads_weights", None) is not None]
        self.params = [getattr(m, "te_quant_params", None) for m in self.modules]
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for group in groups:
            group._refresh = self._timed(group._refresh)  # type: ignore[method-assign]
            group.write = self._timed(group.write)  # type: ignore[method-assign]

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            out = run(*args, **kwargs)
            end.record()
            self.events.append((begin, end))
            return out

        return timed

    def taken(self) -> float:
        """Milliseconds since the last time."""
        torch.cuda.synchronize()
        total = sum(begin.elapsed_time(end) for begin, end in self.events)
        self.events.clear()
        return total

    def set(self, on: bool) -> None:
        """Both arms keep the same memory."""
        for module, params in zip(self.modules, self.params, strict=True):
            if self.hook == "substitute":
                module.quads_weights.substituted = on
            else:
                module.te_quant_params = params if on else None


def _recompute(training: single.Training, on: bool) -> None:
    config = training.config
    config.recompute_granularity = "full" if on else None
    config.recompute_method, config.recompute_num_layers = ("uniform", 1) if on else (None, None)


def _peak(training: single.Training, n: int, recompute: bool) -> float:
    _recompute(training, recompute)
    training.step(list(range(n)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step(list(range(n)))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def _timed(training: single.Training, n: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    training.step(list(range(n)))
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _gpu_time(training: single.Training, n: int) -> float:
    """Milliseconds of one step in which the GPU runs something."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        training.step(list(range(n)))
        torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in profile.events() or ()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]
    return covered(spans) / 1e3


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end): work on several streams at once counts once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _paired(
    training: single.Training, switch: Switch, n: int, pairs: int, seconds: float
) -> tuple[list[float], list[float], float]:
    """Milliseconds of plain and quantised steps, in turn, and the median of their quantisations; the first pair warms up."""
    plain: list[float] = []
    quads: list[float] = []
    qdq: list[float] = []
    begin = time.monotonic()
    for pair in range(pairs + 1):
        if pair > 3 and time.monotonic() - begin > seconds:
            break
        for on in (False, True) if pair % 2 else (True, False):
            switch.set(on)
            (quads if on else plain).append(_timed(training, n))
            if on:
                qdq.append(switch.taken())
    switch.set(True)
    return plain[1:], quads[1:], statistics.median(qdq[1:])
