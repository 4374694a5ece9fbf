"""Prometheus gauges on the ``/metrics`` of ``vllm serve``: which RAC the server runs. Entry point ``vllm.stat_logger_plugins``.

    quads_rac_info{model_name, engine, rac_version, activation, activation_scale, policy, kernel}   1
    quads_rac_ratio{model_name, engine}        the ratio that calibration was asked for
    quads_rac_flop_share{model_name, engine}   extra FLOPs of the selection, as a share of the quantised experts' FLOPs
    quads_rac_layers{model_name, engine}       layers with RAC metadata

``rac_version`` is the metadata's hash, empty without RAC. Nothing is reported for checkpoints that this project did not
export. vLLM makes the logger in the front end, after every worker built its layers: one that cannot run what is said
here does not start. ``kernel`` is chosen as the workers choose it, from the platform, the dtype and QUADS_KERNEL.
"""

from __future__ import annotations

import functools
from typing import Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from ..rac.select import flops_of
from .kernel_choice import choose_here
from .quant_config import ModelOptQuadsConfig

ENGINE = ("model_name", "engine")
INFO = ("rac_version", "activation", "activation_scale", "policy", "kernel")


@functools.cache
def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    """One per process: the registry refuses a second of the same name. Engines differ in their labels."""
    return Gauge(name, text, labels, multiprocess_mode="mostrecent")


class QuadsStatLogger(StatLoggerBase):
    """Sets the gauges once; vLLM's own loggers do the counting."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        running = vllm_config.quant_config
        if not isinstance(running, ModelOptQuadsConfig):
            return
        model, rac = vllm_config.model_config, running.rac
        name = model.served_model_name
        engine = (name[0] if isinstance(name, list) else str(name), str(engine_index))
        kernel = choose_here(str(model.dtype).removeprefix("torch."))
        info = (
            rac.content_hash if rac else "",
            "rac" if rac else "w4a4",
            running.activation_scale,
            rac.policy if rac else "",
            kernel,
        )
        _gauge("quads_rac_info", "Residual activation compensation that is served", ENGINE + INFO).labels(
            *engine, *info
        ).set(1)
        for gauge, text, value in (
            ("quads_rac_ratio", "RAC ratio asked for in calibration", rac.ratio if rac else 0.0),
            ("quads_rac_flop_share", "Extra FLOPs of RAC over those of the quantised experts", flops_of(rac) if rac else 0.0),
            ("quads_rac_layers", "Layers with RAC metadata", len(rac.layers) if rac else 0),
        ):  # fmt: skip
            _gauge(gauge, text, ENGINE).labels(*engine).set(value)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing changes from one iteration to the next."""

    def log_engine_initialized(self) -> None:
        """vLLM's loggers say that."""
