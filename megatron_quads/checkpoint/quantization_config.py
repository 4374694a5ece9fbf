"""The JSON that tells readers what an export holds: ``hf_quant_config.json`` and config.json's ``quantization_config``.

Modules are ignored by exact name. Patterns are a trap: readers differ (ModelOpt globs, vLLM exact names, substrings and
then globs), and one that swallows a ``gate_up_proj`` turns a rollout BF16 without a word. Even an exact ``mlp.gate``
does so for a dense layer's ``mlp.gate_up_proj`` in vLLM: harmless here, models with dense layers are refused on reading.
"""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..config import QuadsConfig
from ..errors import QuadsError
from ..kernels import nvfp4
from ..rac.metadata import RacMetadata
from .hf import HFModel

QUANT_ALGO = "NVFP4"
MARKER_KEY = "quads"
FP8 = "quads_fp8"  # quant_method of exports of recipe fp8
_FP8_FORM = {"weights": "e4m3, one fp32 scale per output row", "activations": "e4m3, one fp32 scale per token"}
_PRODUCER = {"name": "megatron-quads", "version": __version__}


def ignored_modules(hf: HFModel, quantized_layers: list[int]) -> list[str]:
    """Exact names of every linear module that is not NVFP4: head, attention, routers, and unquantised layers' experts.

    Of an unquantised layer both the experts' container (what fused implementations look up) and each projection.
    """
    out = ["lm_head"]
    for layer in range(hf.num_layers):
        p = f"model.layers.{layer}."
        out += [f"{p}self_attn.{x}_proj" for x in "qkvo"] + [p + "mlp.gate"]
        if layer not in quantized_layers:
            out.append(p + "mlp.experts")
            for expert in range(hf.num_experts):
                out += [f"{p}mlp.experts.{expert}.{x}_proj" for x in ("gate", "up", "down")]
    return out


def hf_quant_config(hf: HFModel, quantized_layers: list[int]) -> dict[str, Any]:
    """Content of ``hf_quant_config.json`` (ModelOpt's own file)."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": QUANT_ALGO,
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": ignored_modules(hf, quantized_layers),
        },
    }


def quantization_config(
    hf: HFModel, quantized_layers: list[int], quads: QuadsConfig, rac: RacMetadata | None
) -> dict[str, Any]:
    """config.json's ``quantization_config``: what ModelOpt writes, plus ``rac`` or else ``quads``, by which the rollout
    of this project claims the checkpoint. Other readers skip both and serve without compensation.
    """
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    own: dict[str, Any] = {"rac": rac.to_block()} if rac else {}
    if rac is None:
        own[MARKER_KEY] = {"activations": "w4a4", "activation_scale": quads.activation_scale}
    return {
        "quant_method": "modelopt",
        "quant_algo": QUANT_ALGO,
        "kv_cache_scheme": None,
        "group_size": nvfp4.BLOCK,
        "config_groups": {
            "group_0": {"input_activations": dict(args), "weights": dict(args), "targets": ["Linear"]},
        },
        "ignore": ignored_modules(hf, quantized_layers),
        "producer": _PRODUCER,
        **own,
    }


def fp8_config(layers: list[int]) -> dict[str, Any]:
    """config.json's ``quantization_config`` of recipe fp8: the weights beside it are in high precision, the rollout
    quantises the routed experts of ``layers`` when it loads them. Other readers do not know the method and refuse.
    """
    return {"quant_method": FP8, **_FP8_FORM, "layers": layers, "producer": _PRODUCER}


def fp8_layers(block: dict[str, Any], *, where: str) -> list[int] | None:
    """The layers of ``fp8_config``'s block; None for another one. QuadsError when it is malformed."""
    if block.get("quant_method") != FP8:
        return None
    layers = block.get("layers")
    whole = isinstance(layers, list) and all(type(i) is int and i >= 0 for i in layers) and bool(layers)
    if not whole or any(block.get(k) != v for k, v in _FP8_FORM.items()):
        raise QuadsError(f"cannot serve {block!r}", where=where, do="export the checkpoint again")
    assert isinstance(layers, list)
    return layers
