"""Load-time checks: the engine refuses to start, or to take an update, with one line naming key and layer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import QuadsError
from ..kernels import nvfp4
from ..rac.metadata import SIDECAR, ModelShape, RacMetadata, load_sidecar

PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
REEXPORT = "export the checkpoint again"
MARKER_KEY = "quads"


def layer_index(prefix: str) -> int:
    """``model.layers.3.mlp.experts`` -> 3; raises QuadsError when there is no layer number."""
    found = re.search(r"\blayers\.(\d+)\b", prefix)
    if not found:
        raise QuadsError("cannot tell the layer of a routed-experts module", where=prefix, do="use a supported model")
    return int(found.group(1))


def experts_prefix(layer: int) -> str:
    """HF module name of one layer's experts."""
    return f"model.layers.{layer}.mlp.experts"


def read_quantization_config(folder: Path) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint folder's config.json, {} when there is none."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text()).get("quantization_config") or {}
    except (OSError, ValueError) as e:
        raise QuadsError(f"cannot read config.json: {e}", where=str(path), do="give a checkpoint folder") from e


def read_rac(folder: Path) -> RacMetadata | None:
    """RAC metadata of a checkpoint folder's config.json, None when it has none; QuadsError when it is malformed."""
    config = read_quantization_config(folder)
    return RacMetadata.from_block(config["rac"], where=str(folder / "config.json")) if "rac" in config else None


def require_sidecar_match(rac: RacMetadata | None, folder: Path) -> None:
    """The sidecar must exist exactly when config.json has a ``rac`` block, with the same hash; else QuadsError."""
    sidecar = load_sidecar(folder)
    where = str(folder / SIDECAR)
    if rac is None and sidecar is not None:
        raise QuadsError("RAC metadata is present but config.json has no rac block", where=where, do=REEXPORT)
    if rac is not None and sidecar is None:
        raise QuadsError("the RAC sidecar of this checkpoint is missing", where=where, do=REEXPORT)
    if rac is not None and sidecar is not None and rac.content_hash != sidecar.content_hash:
        raise QuadsError(
            f"RAC hash {rac.content_hash[:12]} in config.json is not the sidecar's {sidecar.content_hash[:12]}",
            where=where,
            do=REEXPORT,
        )


def preflight(folder: Path) -> None:
    """What can be told before vLLM starts: the metadata is readable and the sidecar agrees; else QuadsError."""
    require_sidecar_match(read_rac(folder), folder)


def model_shape(hf_config: Any) -> ModelShape:
    """Shape of the model that a HF config describes."""
    return ModelShape(
        model_type=hf_config.model_type,
        num_layers=hf_config.num_hidden_layers,
        num_experts=hf_config.num_experts,
        hidden_size=hf_config.hidden_size,
        moe_intermediate_size=hf_config.moe_intermediate_size,
    )


def packed_shapes(hidden: int, inter: int) -> dict[tuple[str, str], tuple[int, ...]]:
    """(shard w1|w2|w3, parameter kind) -> shape that the checkpoint must have for one expert."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for shard in PROJECTIONS:
        rows, k = (hidden, inter) if shard == "w2" else (inter, hidden)
        shapes[shard, "weight"] = (rows, k // 2)
        shapes[shard, "weight_scale"] = (rows, k // nvfp4.BLOCK)
        shapes[shard, "weight_scale_2"] = ()
        shapes[shard, "input_scale"] = ()
    return shapes


def require_finite_experts(layer: int, first_expert: list[int], tensors: dict[str, Tensor]) -> None:
    """Check the scales of one layer's packed tensors (``w13_weight``, ...); ``first_expert``: local -> global ids.

    Refuses NaN, Inf, negative, and zero scales (a zero weight_scale_2 is legal only for an all-zero tensor), and gate
    and up with different weight_scale_2.
    """
    prefix = experts_prefix(layer)
    for stem, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        for name, part in _split(tensors, stem, shards):
            for local, expert in enumerate(first_expert):
                key = f"{prefix}.{expert}.{PROJECTIONS[name]}"
                _require_scales(key, layer, {kind: t[local] for kind, t in part.items()})
    pair = tensors["w13_weight_scale_2"]
    for local in (pair[:, 0] != pair[:, 1]).nonzero().flatten().tolist():
        raise QuadsError(
            f"gate and up of an expert have different weight_scale_2 in layer {layer}",
            where=f"{prefix}.{first_expert[local]}.gate_proj.weight_scale_2",
            do=REEXPORT,
        )


def _split(tensors: dict[str, Tensor], stem: str, shards: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Fused engine tensors -> per projection {kind: [E, ...]}."""
    for i, shard in enumerate(shards):
        part: dict[str, Tensor] = {}
        for kind in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            t = tensors[f"{stem}_{kind}"]
            if len(shards) == 1:
                part[kind] = t
            elif kind in ("weight", "weight_scale"):
                part[kind] = t.chunk(len(shards), 1)[i]
            else:
                part[kind] = t[:, i]
        yield shard, part


def _require_scales(key: str, layer: int, part: dict[str, Tensor]) -> None:
    def refuse(kind: str, what: str) -> None:
        raise QuadsError(f"{kind} {what} in layer {layer}", where=f"{key}.{kind}", do=REEXPORT)

    for kind in ("weight_scale", "weight_scale_2", "input_scale"):
        scale = part[kind].float()
        if not bool(torch.isfinite(scale).all()):
            refuse(kind, "is not finite")
        if bool((scale < 0).any()):
            refuse(kind, "is negative")
        # every E4M3 block scale is at least 2^-9, also in all-zero blocks
        zero = bool((scale == 0).any())
        if zero and (kind != "weight_scale_2" or bool((part["weight"] & 0x77).any())):
            refuse(kind, "is zero")


def fill_dummy(tensors: dict[str, Tensor]) -> None:
    """Weights of ``load_format="dummy"``: random codes; values up to 1e-3, as vLLM's."""
    for stem in ("w13", "w2"):
        tensors[f"{stem}_weight"].random_(0, 256)
        tensors[f"{stem}_weight_scale"].copy_(torch.full_like(tensors[f"{stem}_weight_scale"], 448.0))
        tensors[f"{stem}_weight_scale_2"].fill_(1e-3 / (6 * 448))
        tensors[f"{stem}_input_scale"].fill_(1.0)
