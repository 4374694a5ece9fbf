"""Read Hugging Face checkpoints: the model's configuration and its safetensors shards, lazily and fail-closed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import QuadsError
from ..rac.metadata import ModelShape

MODEL_TYPES = ("qwen3_moe",)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
# (key, value that this build computes, absent means): anything else would be silently computed wrongly
_FIXED = (
    ("hidden_act", "silu", "silu"),
    ("attention_bias", False, False),
    ("use_sliding_window", False, False),
    ("decoder_sparse_step", 1, 1),
)


@dataclass(frozen=True)
class HFModel:
    """A HF folder's architecture. ``config`` is config.json as read; the other fields are what the trainer needs."""

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    topk: int
    moe_intermediate_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_word_embeddings: bool
    norm_topk_prob: bool

    @property
    def shape(self) -> ModelShape:
        """What RAC metadata is bound to."""
        return ModelShape(
            model_type=self.model_type,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; raises QuadsError when the file is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text())
    except OSError as e:
        raise QuadsError(
            f"cannot read: {e.strerror}", where=str(path), do="give a Hugging Face checkpoint folder"
        ) from e
    except ValueError as e:
        raise QuadsError(f"not JSON: {e}", where=str(path), do="fetch the checkpoint again") from e
    if not isinstance(value, dict):
        raise QuadsError("not a JSON object", where=str(path), do="fetch the checkpoint again")
    return value


def read_model_config(path: str | Path) -> HFModel:
    """Read ``path/config.json`` (a Qwen3-MoE checkpoint, quantised or not); QuadsError on any other architecture."""
    path = Path(path)
    where = str(path / "config.json")
    config = read_json(path / "config.json")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise QuadsError(
            f"model_type {model_type!r} is not supported", where=where, do=f"give one of {', '.join(MODEL_TYPES)}"
        )
    for key, value, absent in _FIXED:
        if config.get(key, absent) != value:
            raise QuadsError(f"{key} = {config[key]!r} is not supported", where=where, do=f"only {value!r} is")
    if config.get("mlp_only_layers"):
        raise QuadsError(
            "dense layers (mlp_only_layers) are not supported", where=where, do="give an all-MoE checkpoint"
        )
    # transformers 5 moved rope_theta into rope_parameters; older checkpoints have it at the top, beside rope_scaling
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta"),
    }
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise QuadsError(
            f"RoPE type {rope_type!r} is not supported", where=where, do="give a checkpoint with plain RoPE"
        )
    try:
        return HFModel(
            path=path,
            config=config,
            model_type=str(model_type),
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            num_heads=int(config["num_attention_heads"]),
            num_kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            num_experts=int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
            topk=int(config["num_experts_per_tok"]),
            moe_intermediate_size=int(config["moe_intermediate_size"]),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or 10000.0),
            max_position=int(config["max_position_embeddings"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        )
    except KeyError as e:
        raise QuadsError(f"key {e} is missing", where=where, do="fetch the checkpoint again") from e
    except (TypeError, ValueError) as e:
        raise QuadsError(f"a value has the wrong type: {e}", where=where, do="fetch the checkpoint again") from e


class SafetensorsFolder:
    """Lazy reader of ``model.safetensors`` or of the shards that ``model.safetensors.index.json`` lists.

    Every shard is opened (header and length checked, data untouched) at construction, so a missing or truncated shard
    raises a QuadsError naming the file before anything is loaded.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = self.path / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise QuadsError("the index has no weight_map", where=str(index), do="fetch the checkpoint again")
            self._file_of = {name: self.path / file for name, file in weight_map.items()}
            for file in sorted(set(self._file_of.values())):
                self._open[file] = _open(file)
            have = {file: set(handle.keys()) for file, handle in self._open.items()}
            for name, file in self._file_of.items():
                if name not in have[file]:
                    raise QuadsError(f"shard lacks {name}, which the index lists", where=str(file), do="fetch it again")
        else:
            file = self.path / SINGLE
            self._open[file] = _open(file)
            self._file_of = dict.fromkeys(self._open[file].keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU, in its stored dtype; QuadsError when there is none of that name."""
        return self._handle(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header alone."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype, from the header alone."""
        kind = self._handle(name).get_slice(name).get_dtype()
        if kind not in _DTYPES:
            raise QuadsError(
                f"{name} has dtype {kind}", where=str(self._file_of[name]), do="only float and int tensors"
            )
        return _DTYPES[kind]

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise QuadsError(f"tensor {name} is missing", where=str(self.path), do="is it a checkpoint of this model?")
        return self._open[self._file_of[name]]


def _open(file: Path) -> Any:
    if not file.is_file():
        raise QuadsError("shard is missing", where=str(file), do="fetch the checkpoint again")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as e:
        raise QuadsError(f"shard is truncated or damaged ({e})", where=str(file), do="fetch it again") from e
    except OSError as e:
        raise QuadsError(f"cannot read: {e}", where=str(file), do="check the file's permissions") from e
