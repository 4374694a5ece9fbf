"""Entry point ``vllm.general_plugins``: runs in vLLM's front end and in every worker, possibly more than once."""

from __future__ import annotations

from ..errors import QuadsError

_registered = False


def register() -> None:
    """Register the quantisation configs, the file weight-transfer engine and, on CPU, the needed vLLM patches."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.quantization import register_quantization_config

    from ..checkpoint.quantization_config import FP8
    from .fp8_config import QuadsFp8Config
    from .quant_config import NAME, ModelOptQuadsConfig
    from .transfer import FileWeightTransferEngine
    from .types import TRANSFER_BACKEND

    register_quantization_config(NAME)(ModelOptQuadsConfig)
    register_quantization_config(FP8)(QuadsFp8Config)
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, FileWeightTransferEngine)
    _registered = True


def require_registered() -> None:
    """Load vLLM's plugins as vLLM does (it logs and skips one that fails) and raise QuadsError when ours is missing."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if not _registered:
        raise QuadsError(
            "vLLM did not load the megatron_quads plugin, so it would serve without RAC",
            where="VLLM_PLUGINS",
            do="unset VLLM_PLUGINS or add megatron_quads to it",
        )
