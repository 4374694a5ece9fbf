"""What a worker holds: its expert layers, whether RAC is active, and the weights that its GEMMs see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts

from ..checkpoint.quantization_config import fp8_layers
from ..errors import QuadsError
from ..rac.metadata import SIDECAR, RacMetadata
from . import checks
from .backends import GEMMS
from .fp8 import QuadsFp8MoEMethod
from .fp8_config import QuadsFp8Config
from .moe import ModelOptQuadsMoEMethod, global_experts
from .quant_config import ModelOptQuadsConfig
from .types import RolloutInfo
from .unquantized import plain_weights


def expert_layers(model: torch.nn.Module) -> dict[int, RoutedExperts]:
    """Global layer index -> routed experts of this worker."""
    found = ((name, m) for name, m in model.named_modules() if isinstance(m, RoutedExperts))
    return {checks.layer_index(name): module for name, module in found}


def quantized_methods(model: torch.nn.Module) -> dict[int, ModelOptQuadsMoEMethod]:
    """Global layer index -> our method, for the layers that have it."""
    methods = ((i, layer.quant_method) for i, layer in expert_layers(model).items())
    return {i: m for i, m in methods if isinstance(m, ModelOptQuadsMoEMethod)}


def fp8_methods(model: torch.nn.Module) -> dict[int, QuadsFp8MoEMethod]:
    """Global layer index -> recipe fp8's method, for the layers that have it."""
    methods = ((i, layer.quant_method) for i, layer in expert_layers(model).items())
    return {i: m for i, m in methods if isinstance(m, QuadsFp8MoEMethod)}


def assert_active(model: torch.nn.Module, vllm_config: Any, *, any_mode: bool = False) -> None:
    """Raise QuadsError unless this worker computes what the checkpoint's metadata, or the last update's, asks for.

    ``any_mode`` accepts layers that ``set_activation`` switched to another mode.
    """
    folder = Path(vllm_config.model_config.model)
    config = checks.read_quantization_config(folder)
    running = vllm_config.quant_config
    if (layers := fp8_layers(config, where=str(folder / "config.json"))) is not None:
        _assert_fp8(model, running, layers, folder)
    if "rac" not in config and checks.MARKER_KEY not in config:
        checks.require_sidecar_match(None, folder)
        return
    if not isinstance(running, ModelOptQuadsConfig):
        raise QuadsError(
            f"this checkpoint asks for {'RAC' if 'rac' in config else 'W4A4'} but vLLM runs {type(running).__name__}",
            where=str(folder / SIDECAR),
            do="install megatron-quads where vLLM runs and do not exclude it in VLLM_PLUGINS",
        )
    want = RacMetadata.from_block(config["rac"], where=str(folder / "config.json")) if "rac" in config else None
    want = want and (running.brought or want)
    have = running.rac
    if (want and want.content_hash) != (have and have.content_hash):
        raise QuadsError(
            "the running RAC metadata is not the checkpoint's", where=str(folder), do="restart the rollout"
        )
    methods = quantized_methods(model)
    needed = {i for i in expert_layers(model) if want is None or i in want.layers}
    mode = "rac" if want else "w4a4"
    for i in sorted(needed):
        method = methods.get(i)
        if method is None and want is None:
            continue  # the ignore list keeps it unquantised
        running_mode = method.plan.mode if method is not None and method.ready and method.plan else None
        if running_mode is None or not (any_mode or running_mode == mode):
            state = "stock vLLM" if method is None else (running_mode or "without weights")
            raise QuadsError(
                f"layer {i} runs {state}, the checkpoint asks for {mode}",
                where=checks.experts_prefix(i),
                do="restart the rollout",
            )
        if want is not None and method is not None and running_mode == "rac":
            selected = {gemm: getattr(want.layers[i], gemm).indices() for gemm in GEMMS}
            if method.quant_config.rac != want or method.selection() != selected:
                raise QuadsError(
                    f"layer {i} computes with another selection than that of the metadata",
                    where=checks.experts_prefix(i),
                    do="restart the rollout",
                )
    if want is None and not methods:
        raise QuadsError("no layer of this W4A4 checkpoint is quantised", where=str(folder), do=checks.REEXPORT)


def _assert_fp8(model: torch.nn.Module, running: Any, layers: list[int], folder: Path) -> None:
    if not isinstance(running, QuadsFp8Config):
        raise QuadsError(
            f"this checkpoint asks for FP8 experts but vLLM runs {type(running).__name__}",
            where=str(folder),
            do="install megatron-quads where vLLM runs and do not exclude it in VLLM_PLUGINS",
        )
    methods = fp8_methods(model)
    for i in sorted(expert_layers(model).keys() & set(layers)):
        if i not in methods or not methods[i].ready:
            raise QuadsError(f"layer {i} does not run FP8", where=checks.experts_prefix(i), do="restart the rollout")
    if not methods:
        raise QuadsError("no layer of this FP8 checkpoint is quantised", where=str(folder), do=checks.REEXPORT)


def bring_selection(vllm_config: Any, rac: RacMetadata) -> None:
    """Make ``rac`` the running metadata; layers compute with it from their next (re)load on. Only within an update.

    QuadsError, with nothing changed, unless it has the running one's form.
    """
    running = vllm_config.quant_config
    if not isinstance(running, ModelOptQuadsConfig) or running.rac is None:
        raise QuadsError("this worker runs without RAC", where="RAC selection", do="start it from an export with RAC")
    running.rac.require_same_form(rac, where="RAC selection")
    running.rac = running.brought = rac


def describe(model: torch.nn.Module, vllm_config: Any, version: int | None) -> RolloutInfo:
    """This worker's state."""
    methods = quantized_methods(model)
    plans = {i: m.plan for i, m in methods.items() if m.plan is not None}
    running = vllm_config.quant_config
    rac = running.rac if isinstance(running, ModelOptQuadsConfig) else None
    w8a8 = fp8_methods(model)
    modes = {p.mode for p in plans.values()} or {"w8a8" if w8a8 else "unquantised"}
    kernels = {m.kernel for m in methods.values()} | {m.kernel for m in w8a8.values()}
    return RolloutInfo(
        version=version,
        rac_hash=rac.content_hash if rac else None,
        rac_active_layers=sorted(i for i, p in plans.items() if p.mode == "rac" and methods[i].ready),
        quantized_layers=sorted({*methods, *w8a8}),
        quant_method=running.get_name() if running is not None else "none",
        activation="/".join(sorted(modes)),
        activation_scale=running.activation_scale if isinstance(running, ModelOptQuadsConfig) else "none",
        backend="/".join(sorted(kernels)) or "vllm",
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        saturated_rows={f"{i}.{g}": int(n) for i, p in plans.items() for g, n in p.saturated.items()},
    )


def set_activation(model: torch.nn.Module, mode: str) -> None:
    """Switch every quantised layer; raises QuadsError for ``rac`` without metadata."""
    for method in quantized_methods(model).values():
        method.set_mode(mode)


def expert_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor that the GEMM multiplies with [N, K], compute dtype) of this worker's experts.

    Of an FP8 layer the codes e4m3 [N, K], and under the name of the weight plus ``_scale`` the row scales fp32 [N].
    """
    for i, layer in expert_layers(model).items():
        method = layer.quant_method
        if isinstance(method, QuadsFp8MoEMethod):
            held = method.held()
            for suffix, part in (("", 0), ("_scale", 1)):
                for name, tensor in _by_projection(i, layer, held["w13"][part], held["w2"][part]):
                    yield name + suffix, tensor
            continue
        w13, w2 = method.weights() if isinstance(method, ModelOptQuadsMoEMethod) else plain_weights(layer)
        yield from _by_projection(i, layer, w13, w2)


def _by_projection(index: int, layer: RoutedExperts, w13: Tensor, w2: Tensor) -> Iterator[tuple[str, Tensor]]:
    for local, expert in enumerate(global_experts(layer)):
        gate, up = w13[local].chunk(2, 0)
        for projection, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", w2[local])):
            yield f"{checks.experts_prefix(index)}.{expert}.{projection}.weight", tensor
