"""vLLM worker extension (``worker_extension_cls``): one RPC that the in-process and the HTTP client both use."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..digest import Digests, queued_differing_bits
from ..errors import QuadsError
from ..launch.health import identity
from . import sleep
from .types import TRANSFER_BACKEND, stop_tokens

EXTENSION = "megatron_quads.rollout.worker.QuadsWorkerExtension"


class QuadsWorkerExtension:
    """Mixed into vLLM's worker. Arguments and results are JSON, so that the HTTP route can carry them."""

    def quads_call(self, name: str, arguments: str = "{}") -> dict[str, Any]:
        """``{"ok": value}`` or ``{"error": [what, where, do]}``: a refusal must not look like an engine fault."""
        if name not in _CALLS:
            return {"error": [f"unknown worker call {name!r}", "rollout", "use matching versions"]}
        try:
            return {"ok": _CALLS[name](self, **json.loads(arguments))}
        except QuadsError as e:
            return {"error": [e.what, e.where, e.do]}


def _engine(worker: Any) -> Any:
    from .transfer import FileWeightTransferEngine

    engine = worker.weight_transfer_engine
    if not isinstance(engine, FileWeightTransferEngine):
        raise QuadsError(
            "the engine was started without our weight-transfer backend",
            where="weight_transfer_config",
            do=f"start vLLM with --weight-transfer-config.backend={TRANSFER_BACKEND}",
        )
    return engine


def _require_serving(worker: Any) -> None:
    _engine(worker)
    sleep.require_awake(worker, sleep.TAGS)
    sleep.require_whole(worker)


def _info(worker: Any) -> dict[str, Any]:
    from . import state

    found = state.describe(worker.get_model(), worker.vllm_config, _engine(worker).version)
    return {**dataclasses.asdict(found), **identity()}


def _stop_tokens(worker: Any) -> list[int]:
    return stop_tokens(Path(worker.vllm_config.model_config.model))


def _assert_active(worker: Any) -> None:
    from . import state

    _engine(worker)
    sleep.require_awake(worker)  # the selection is read where the kernels read it
    state.assert_active(worker.get_model(), worker.vllm_config)


def _audit(worker: Any) -> dict[str, str]:
    from . import state

    _engine(worker)
    sleep.require_whole(worker)
    found = Digests()
    for name, tensor in state.expert_weights(worker.get_model()):
        found.add(name, tensor)
    return found.finish()


def _count_bits(worker: Any, file: str) -> dict[str, int]:
    from . import state

    _engine(worker)
    sleep.require_whole(worker)
    out: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as reader:
            names = set(reader.keys())
            for name, tensor in state.expert_weights(worker.get_model()):
                if name not in names:
                    raise QuadsError(f"tensor {name} is missing", where=file, do="write every expert's weights")
                other = reader.get_tensor(name)
                if other.shape != tensor.shape or other.dtype != tensor.dtype:
                    raise QuadsError(
                        f"{name} is {list(other.shape)} {other.dtype}, rollout {list(tensor.shape)} {tensor.dtype}",
                        where=file,
                        do="compare what the trainer multiplies with, in the rollout's dtype",
                    )
                out[name] = queued_differing_bits(tensor, other)
    except (OSError, SafetensorError) as e:
        raise QuadsError(f"cannot read: {e}", where=file, do="give a safetensors file") from e
    return dict(zip(out, torch.stack([*out.values()]).tolist(), strict=True)) if out else {}


def _set_activation(worker: Any, mode: str) -> None:
    from . import state

    state.set_activation(worker.get_model(), mode)


def _check_update(worker: Any, folder: str, version: int, rac_hash: str | None = None) -> None:
    sleep.require_awake(worker)
    _engine(worker).check(Path(folder), version, rac_hash)


def _check_selection(worker: Any) -> None:
    """An engine of a version that knows this call takes another selection with an update."""
    if _engine(worker).rac_hash is None:
        raise QuadsError("a worker runs without RAC", where="rollout", do="start it from an export with RAC")


def _check_flat(worker: Any, rac_hash: str | None, rac: dict[str, Any] | None = None) -> str | None:
    """Where the weights lie: the GPU's UUID, None on a CPU."""
    engine = _engine(worker)
    sleep.require_awake(worker)
    engine.check_flat(rac_hash, rac)
    device = next(engine.model.parameters()).device
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _weights_hash(worker: Any) -> str | None:
    _engine(worker)
    sleep.require_whole(worker)
    return _engine(worker).weights_hash


def _statistics_start(worker: Any, kind: str, scale: str, static_amax: dict[str, float]) -> None:
    from . import observe

    _require_serving(worker)
    observe.start(worker, kind, scale, static_amax)


def _statistics_stop(worker: Any, folder: str) -> dict[str, Any]:
    from . import observe

    return observe.stop(worker, folder)


def _record_start(worker: Any) -> None:
    routers = _routers(worker)
    worker._quads_routes = {i: [] for i in routers}
    for i, router in routers.items():
        router.set_capture_fn(partial(_note, worker._quads_routes[i]))


def _note(store: list[list[list[int]]], topk_ids: Any) -> None:
    store.append(topk_ids.tolist())


def _record_stop(worker: Any) -> list[list[list[list[int]]]]:
    """Per MoE layer, in layer order, the chosen experts of each forward pass [tokens][k]."""
    for router in _routers(worker).values():
        router.set_capture_fn(None)
    routes = [passes for _, passes in sorted(worker._quads_routes.items())]
    worker._quads_routes = {}
    return routes


def _routers(worker: Any) -> dict[int, Any]:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from . import checks

    modules = worker.get_model().named_modules()
    return {checks.layer_index(name): m.router for name, m in modules if isinstance(m, MoERunner)}


_CALLS: dict[str, Callable[..., Any]] = {
    "info": _info,
    "require_serving": _require_serving,
    "assert_active": _assert_active,
    "audit": _audit,
    "count_bits": _count_bits,
    "set_activation": _set_activation,
    "check_update": _check_update,
    "check_flat": _check_flat,
    "check_selection": _check_selection,
    "weights_hash": _weights_hash,
    "statistics_start": _statistics_start,
    "statistics_stop": _statistics_stop,
    "record_start": _record_start,
    "record_stop": _record_stop,
    "stop_tokens": _stop_tokens,
}
