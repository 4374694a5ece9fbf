"""Qwen3-MoE: which HF tensors each Megatron parameter holds, and the layout both ways. Pure tensors, no communication.

A ``Unit`` is one Megatron parameter. Its local shard is a function of the full HF tensors (``shard``), and the HF
tensors are a function of all its shards (``merge``); the two are exact inverses. Layouts:

    vocab  rows split over TP, padded with zero rows to Megatron's vocabulary
    rows   rows split (column-parallel)                cols  columns split (row-parallel)
    qkv    rows [q of group 0, k 0, v 0, q of group 1, ...], groups split over TP
    glu    each shard is [gate rows; up rows] of its own part
    whole  the same on every rank
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import QuadsError
from .hf import HFModel

Layout = Literal["vocab", "rows", "cols", "qkv", "glu", "whole"]


@dataclass(frozen=True)
class Unit:
    """One Megatron parameter: ``key`` names it in any layout, ``names`` are the HF tensors it holds, in order."""

    key: str
    layout: Layout
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layer: int | None = None
    expert: int | None = None

    @property
    def exported(self) -> bool:
        """Tied embeddings: the last pipeline stage's copy is loaded but never written."""
        return self.key != "tied_output"


# Megatron name within a layer -> HF stem, layout
_LAYER = {
    "input_layernorm": ("input_layernorm", "whole"),
    "self_attention.linear_qkv": ("self_attn.qkv", "qkv"),
    "self_attention.q_layernorm": ("self_attn.q_norm", "whole"),
    "self_attention.k_layernorm": ("self_attn.k_norm", "whole"),
    "self_attention.linear_proj": ("self_attn.o_proj", "cols"),
    "pre_mlp_layernorm": ("post_attention_layernorm", "whole"),
    "mlp.router": ("mlp.gate", "whole"),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.weight")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)")
# with Transformer Engine: one module for all local experts, and the norm before attention inside the QKV layer
_GROUPED_NAME = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.linear_(fc1|fc2)\.weight(\d+)")
_FUSED_NORM = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.layer_norm_weight")
_TOP = {
    "embedding.word_embeddings.weight": "embedding",
    "decoder.final_layernorm.weight": "final_layernorm",
    "output_layer.weight": "output",
}


def units(hf: HFModel) -> list[Unit]:
    """Every unit of the whole model in canonical order: embedding, layers ascending (experts ascending), norm, head."""
    h, inter, d = hf.hidden_size, hf.moe_intermediate_size, hf.head_dim
    q, kv = hf.num_heads * d, hf.num_kv_heads * d
    whole: dict[str, tuple[int, ...]] = {"input_layernorm": (h,), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    whole |= {"post_attention_layernorm": (h,), "mlp.gate": (hf.num_experts, h), "self_attn.o_proj": (h, q)}
    embedding = ("model.embed_tokens.weight",)
    vocab = ((hf.vocab_size, h),)
    out = [Unit("embedding", "vocab", embedding, vocab)]
    for layer in range(hf.num_layers):
        p = f"model.layers.{layer}."
        for name, (stem, layout) in _LAYER.items():
            names: tuple[str, ...] = (f"{p}{stem}.weight",)
            shapes: tuple[tuple[int, ...], ...]
            if layout == "qkv":
                names = tuple(f"{p}self_attn.{x}_proj.weight" for x in "qkv")
                shapes = ((q, h), (kv, h), (kv, h))
            else:
                shapes = (whole[stem],)
            out.append(Unit(f"{layer}.{name}", layout, names, shapes, layer))  # type: ignore[arg-type]
        for expert in range(hf.num_experts):
            e = f"{p}mlp.experts.{expert}."
            fc1 = (e + "gate_proj.weight", e + "up_proj.weight")
            out.append(Unit(f"{layer}.{expert}.fc1", "glu", fc1, ((inter, h), (inter, h)), layer, expert))
            out.append(Unit(f"{layer}.{expert}.fc2", "cols", (e + "down_proj.weight",), ((h, inter),), layer, expert))
    out.append(Unit("final_layernorm", "whole", ("model.norm.weight",), ((h,),)))
    if hf.tie_word_embeddings:
        out.append(Unit("tied_output", "vocab", embedding, vocab))
    else:
        out.append(Unit("output", "vocab", ("lm_head.weight",), vocab))
    return out


def unit_key(name: str, *, layer_of: Sequence[int], first_expert: int, hf: HFModel) -> str:
    """Megatron parameter name within a model chunk -> ``Unit.key``; QuadsError when it has no HF counterpart.

    ``layer_of``: the chunk's layers -> global layer index. ``first_expert``: global id of the rank's first expert.
    """
    if name in _TOP:
        key = _TOP[name]
        return "tied_output" if key == "output" and hf.tie_word_embeddings else key
    if grouped := _GROUPED_NAME.fullmatch(name):
        return f"{layer_of[int(grouped[1])]}.{first_expert + int(grouped[3])}.{grouped[2]}"
    if norm := _FUSED_NORM.fullmatch(name):
        return f"{layer_of[int(norm[1])]}.input_layernorm"
    if found := _LAYER_NAME.fullmatch(name):
        layer, inner = layer_of[int(found[1])], found[2]
        if inner in _LAYER:
            return f"{layer}.{inner}"
        if expert := _EXPERT_NAME.fullmatch(inner):
            return f"{layer}.{first_expert + int(expert[1])}.{expert[2]}"
    raise QuadsError(
        "parameter has no counterpart in a Hugging Face Qwen3-MoE checkpoint",
        where=name,
        do="build the model without biases, shared experts or adapters",
    )


def shard(unit: Unit, tensors: Sequence[Tensor], hf: HFModel, *, rank: int, size: int, rows: int) -> Tensor:
    """Full HF tensors (``unit.names`` order) -> the local shard of ``rank`` of ``size``; ``rows``: its row count.

    Only a vocabulary unit uses ``rows``: it says how far Megatron padded.
    """
    if unit.layout == "vocab":
        (full,) = tensors
        padded = rows * size
        if padded < full.shape[0]:
            raise QuadsError(f"vocabulary {full.shape[0]} does not fit {padded} rows", where=unit.names[0])
        lo, hi = rank * rows, min((rank + 1) * rows, full.shape[0])
        part = full[lo : max(lo, hi)]
        return F.pad(part, (0, 0, 0, rows - part.shape[0]))
    if unit.layout == "whole":
        return tensors[0]
    if unit.layout == "rows":
        return _split(unit, tensors[0], 0, size)[rank]
    if unit.layout == "cols":
        return _split(unit, tensors[0], 1, size)[rank]
    if unit.layout == "glu":
        return torch.cat([_split(unit, t, 0, size)[rank] for t in tensors])
    groups = [t.view(hf.num_kv_heads, -1, t.shape[-1]) for t in tensors]
    return torch.cat([_split(unit, t, 0, size)[rank] for t in groups], 1).flatten(0, 1)


def merge(unit: Unit, shards: Sequence[Tensor], hf: HFModel) -> list[Tensor]:
    """All shards in rank order -> full HF tensors (``unit.names`` order), contiguous; inverse of ``shard``."""
    if unit.layout == "vocab":
        return [torch.cat(list(shards))[: hf.vocab_size].contiguous()]
    if unit.layout == "whole":
        return [shards[0].contiguous()]
    if unit.layout == "rows":
        return [torch.cat(list(shards))]
    if unit.layout == "cols":
        return [torch.cat(list(shards), 1)]
    if unit.layout == "glu":
        halves = [s.chunk(2) for s in shards]
        return [torch.cat([pair[i] for pair in halves]) for i in range(2)]
    full = torch.cat(list(shards))
    heads = hf.num_heads // hf.num_kv_heads
    grouped = full.view(hf.num_kv_heads, (heads + 2) * hf.head_dim, full.shape[-1])
    parts = grouped.split([heads * hf.head_dim, hf.head_dim, hf.head_dim], 1)
    return [p.reshape(-1, full.shape[-1]) for p in parts]


def _split(unit: Unit, full: Tensor, dim: int, size: int) -> list[Tensor]:
    if full.shape[dim] % size:
        raise QuadsError(
            f"{full.shape[dim]} cannot be split over {size} tensor-parallel ranks",
            where=", ".join(unit.names),
            do="lower the (expert) tensor parallel size",
        )
    return list(full.chunk(size, dim))
