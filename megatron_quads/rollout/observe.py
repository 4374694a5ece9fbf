"""Calibration's statistics inside the worker: what each expert of this worker gets, by the engine's own routing.

A layer's method shows its input and the router's choice before it computes. The input of down_proj is rebuilt from the
weights that the GEMMs read, so every kernel is seen alike: ``silu(gate) * up`` before the router's weight, in the
engine's dtype. Needs mode w4a16, as calibration does: the statistics are of the unquantised activations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ..errors import QuadsError
from ..rac.statistics import Moments, ResidualEnergy
from ..rac.store import unit_of
from . import checks
from .state import quantized_methods

WHERE = "calibration in vLLM"


class Observer:
    """Feeds a worker's statistic; ``layer``: vLLM's routed experts. ``pairs``: (token, expert) pairs seen, by layer."""

    def __init__(self, statistic: Moments | ResidualEnergy) -> None:
        self.statistic = statistic
        self.pairs: dict[int, int] = {}

    def __call__(self, layer: Any, method: Any, x: Tensor, topk_ids: Tensor) -> None:
        """x [tokens, H] and global topk_ids [tokens, k] of one call; other workers' experts are theirs."""
        from .moe import global_experts

        local = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        w13, _ = method.weights()
        seen = self.pairs.get(method.index, 0)
        for slot, expert in enumerate(global_experts(layer)):
            rows = x[(local == slot).any(1)]
            seen += rows.shape[0]
            if rows.shape[0]:
                gate, up = F.linear(rows, w13[slot]).chunk(2, -1)
                self.statistic(method.index, expert, "gate_up", rows)
                self.statistic(method.index, expert, "down", F.silu(gate) * up)
        self.pairs[method.index] = seen


def require_observable(kernel: str, eager: bool, mode: str | None) -> None:
    """Raise QuadsError when a layer's method would not be called for every token, or sees quantised activations."""
    if kernel != "emulation" and not eager:
        raise QuadsError("CUDA graphs do not call the observer", where=WHERE, do="start the engine with enforce_eager")
    if mode != "w4a16":
        raise QuadsError(f"the layers run {mode}, not w4a16", where=WHERE, do='call set_activation("w4a16") first')


def start(worker: Any, kind: str, scale: str, static_amax: dict[str, float]) -> None:
    """Observe every quantised layer from now on. ``kind``: moments | residual; ``static_amax`` by "layer.gemm"."""
    methods = quantized_methods(worker.get_model())
    for method in methods.values():
        require_observable(method.kernel, method.eager, method.plan.mode if method.plan else None)
    shape = checks.model_shape(worker.vllm_config.model_config.hf_text_config)
    if kind == "moments":
        statistic: Moments | ResidualEnergy = Moments(shape)
    elif scale in ("token", "static"):
        amax = {unit_of(name): top for name, top in static_amax.items()}
        statistic = ResidualEnergy(shape, "static" if scale == "static" else "token", amax)
    else:
        raise QuadsError(f"a {scale} scale depends on what shares a batch", where=WHERE, do="calibrate in the trainer")
    worker._quads_observer = Observer(statistic)
    for method in methods.values():
        method.observer = worker._quads_observer


def stop(worker: Any, folder: str) -> dict[str, Any]:
    """Stop observing and write this worker's part of the statistics: ``file``, and ``pairs`` seen by layer."""
    observer: Observer | None = getattr(worker, "_quads_observer", None)
    if observer is None:
        raise QuadsError("nothing is observed", where=WHERE, do="start it first")
    for method in quantized_methods(worker.get_model()).values():
        method.observer = None
    worker._quads_observer = None
    file = Path(folder) / f"worker{worker.rank}.safetensors"
    try:
        save_file(observer.statistic.tables(), str(file))
    except OSError as e:
        raise QuadsError(f"cannot write: {e}", where=str(file), do="give a folder that the workers can write") from e
    return {"file": str(file), "pairs": {str(layer): n for layer, n in observer.pairs.items()}}
