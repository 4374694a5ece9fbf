"""vLLM quantisation config that claims ModelOpt NVFP4 checkpoints exported by this project.

A checkpoint is claimed by its ``rac`` block (RAC) or by ``"quads": {"activations": "w4a4"}`` (quantised without RAC) in
config.json's quantization_config. Everything is checked while the model is built, inside each worker, so that a
checkpoint with RAC metadata is served with RAC or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

from ..config import ACTIVATION_SCALES
from ..errors import QuadsError
from ..rac.metadata import RacMetadata
from . import checks
from .kernel_choice import choose_here
from .moe import ModelOptQuadsMoEMethod

NAME = "modelopt_fp4_rac"


class ModelOptQuadsConfig(ModelOptNvFp4Config):
    """NVFP4 routed experts through ``ModelOptQuadsMoEMethod``; everything else as ModelOpt says (high precision)."""

    rac: RacMetadata | None
    # what an update brought in place of the checkpoint's selection, None before that
    brought: RacMetadata | None
    activation_scale: str
    _checked: bool

    def get_name(self) -> str:  # type: ignore[override]
        """Name under which vLLM knows this config."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The emulation computes in any of these."""
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The emulation needs no particular GPU."""
        return 0

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> str | None:  # type: ignore[override]
        """Claim a checkpoint that has a ``rac`` or ``quads`` block."""
        claimed = isinstance(hf_quant_cfg, dict) and ("rac" in hf_quant_cfg or checks.MARKER_KEY in hf_quant_cfg)
        return NAME if claimed else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelOptQuadsConfig:
        """Parse the quantization_config; raises QuadsError on bad metadata."""
        made = super().from_config(config)
        assert isinstance(made, ModelOptQuadsConfig)
        made.rac = RacMetadata.from_block(config["rac"], where="config.json") if "rac" in config else None
        made.activation_scale = made.rac.activation_scale if made.rac else _marker_scale(config[checks.MARKER_KEY])
        made.brought, made._checked = None, False
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Quantised routed experts get our method; RAC layers that would not get it raise QuadsError."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        self._check_folder()
        index = checks.layer_index(prefix)
        selected = self.rac is not None and index in self.rac.layers
        if self.is_layer_excluded(prefix):
            if selected:
                raise QuadsError(
                    f"RAC metadata selects layer {index}, which the ignore list leaves unquantised",
                    where=f"config.json quantization_config.ignore, {checks.experts_prefix(index)}",
                    do=checks.REEXPORT,
                )
            return super().get_quant_method(layer, prefix)
        if self.rac is not None and not selected:
            raise QuadsError(
                f"RAC metadata has no entry for quantised layer {index}",
                where=f"config.json quantization_config.rac.layers, {checks.experts_prefix(index)}",
                do="calibrate again",
            )
        kernel = choose_here(str(layer.moe_config.in_dtype).removeprefix("torch."))
        if kernel == "marlin":
            from .marlin import ModelOptQuadsMarlinMethod

            return ModelOptQuadsMarlinMethod(self, layer, index)
        if kernel == "native":
            from .native import ModelOptQuadsNativeMethod

            return ModelOptQuadsNativeMethod(self, layer, index)
        return ModelOptQuadsMoEMethod(self, layer, index)

    def _check_folder(self) -> None:
        """Once per worker: the sidecar and the model that the metadata was made for."""
        if self._checked:
            return
        model = get_current_vllm_config().model_config
        folder = Path(model.model)
        if not folder.is_dir():
            raise QuadsError(
                "a checkpoint of this project is served from a local folder", where=model.model, do="download it first"
            )
        checks.require_sidecar_match(self.rac, folder)
        if self.rac is not None:
            self.rac.require_model(checks.model_shape(model.hf_text_config), where=str(folder / "config.json"))
        self._checked = True


def _marker_scale(marker: Any) -> str:
    """Activation scale of a checkpoint without RAC: ``{"activations": "w4a4", "activation_scale": ...}``."""
    where = f"config.json quantization_config.{checks.MARKER_KEY}"
    if not isinstance(marker, dict) or marker.get("activations") != "w4a4":
        raise QuadsError(f"cannot serve {marker!r}: only activations w4a4 are known", where=where, do=checks.REEXPORT)
    scale = marker.get("activation_scale", "token")
    if scale not in ACTIVATION_SCALES:
        raise QuadsError(f"unknown activation_scale {scale!r}", where=where, do=checks.REEXPORT)
    return scale
