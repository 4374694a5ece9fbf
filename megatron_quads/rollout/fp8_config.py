"""vLLM quantisation config that claims exports of recipe fp8: high-precision weights whose routed experts it quantises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..checkpoint.quantization_config import FP8, fp8_layers
from . import checks
from .fp8 import QuadsFp8MoEMethod


class QuadsFp8Config(QuantizationConfig):
    """Claims exports of recipe fp8 by their ``quant_method``. ``layers``: whose routed experts are quantised."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = frozenset(layers)

    def get_name(self) -> str:  # type: ignore[override]
        """Name under which vLLM knows this config."""
        return FP8

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Any: inputs are quantised in fp32."""
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """None of its own; CUDA graphs need one, which each layer checks."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """All is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuadsFp8Config:
        """Parse the quantization_config; raises QuadsError when it is malformed."""
        layers = fp8_layers(config, where="config.json quantization_config")
        assert layers is not None
        return cls(layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Routed experts of the chosen layers get our method, all else stays in high precision."""
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if not isinstance(layer, RoutedExperts):
            return None
        index = checks.layer_index(prefix)
        return QuadsFp8MoEMethod(layer, index) if index in self.layers else UnquantizedFusedMoEMethod(layer.moe_config)
