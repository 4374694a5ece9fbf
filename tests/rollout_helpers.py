"""Shared by the rollout tests: NVFP4 folders written straight from HF weights (no trainer), and HF as the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_quads import atomic
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.kernels import nvfp4, rac
from megatron_quads.rac.metadata import SIDECAR, GemmSelection, LayerSelection, RacMetadata

Mutate = Callable[[dict[str, Tensor], dict], None]


def half_metadata(source: Path, layers: list[int], *, offset: int = 0, scale: str = "token") -> RacMetadata:
    """RAC on every second block of gate/up and on the leading half of down."""
    hf = read_model_config(source)
    amax = 30.0 if scale == "static" else None
    selection = LayerSelection(
        gate_up=GemmSelection(blocks=list(range(offset, hf.hidden_size // 16, 2)), static_amax=amax),
        down=GemmSelection(prefix=hf.moe_intermediate_size // 32, static_amax=amax),
    )
    return RacMetadata(
        model=hf.shape,
        activation_scale=scale,
        policy="uniform",
        ratio=0.5,
        sorted=False,
        layers=dict.fromkeys(layers, selection),
    )


def pack_experts(weights: dict[str, Tensor], keep: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """HF weights -> ModelOpt NVFP4 tensors; layers in ``keep`` stay as they are."""
    out: dict[str, Tensor] = {}
    for name, w in weights.items():
        if ".experts." not in name or any(f"layers.{i}." in name for i in keep):
            out[name] = w
            continue
        base = name.removesuffix(".weight")
        gate, up = (name.replace(p, q) for p, q in (("up_proj", "gate_proj"), ("gate_proj", "up_proj")))
        pair = [w] if "down_proj" in name else [weights[gate], weights[up]]
        scale = nvfp4.tensor_scale(nvfp4.amax(*pair))
        out[name], out[f"{base}.weight_scale"] = nvfp4.quantize(w, scale)
        out[f"{base}.weight_scale_2"] = scale.reshape(())
        out[f"{base}.input_scale"] = torch.tensor(0.01)
    return out


def dequantized(weights: dict[str, Tensor], keep: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """The HF weights that a W4A16 engine multiplies with."""
    packed = pack_experts(weights, keep)
    out = {}
    for name, w in weights.items():
        base = name.removesuffix(".weight")
        quantised = f"{base}.weight_scale" in packed
        scales = (packed[f"{base}.weight_scale"], packed[f"{base}.weight_scale_2"]) if quantised else ()
        out[name] = nvfp4.dequantize(packed[name], *scales) if quantised else w
    return out


def write_export(
    source: Path,
    target: Path,
    *,
    metadata: RacMetadata | None = None,
    keep: tuple[int, ...] = (),
    quantized: bool = True,
    version: int = 0,
    mutate: Mutate | None = None,
) -> Path:
    """A committed two-shard export of ``source``. ``mutate`` damages (tensors, config) before they are written."""
    weights = load_file(source / "model.safetensors")
    tensors = pack_experts(weights, keep) if quantized else weights
    config = json.loads((source / "config.json").read_text())
    if quantized:
        ignore = ["lm_head", "*mlp.gate", "*self_attn*", *(f"model.layers.{i}.mlp.experts*" for i in keep)]
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "ignore": ignore,
            "producer": {"name": "modelopt", "version": "0.47.0"},
        }
        block = {"rac": metadata.to_block()} if metadata else {"quads": {"activations": "w4a4"}}
        config["quantization_config"] |= block
    if mutate:
        mutate(tensors, config)
    with atomic.folder(target, marker={"version": version}) as folder:
        for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / file, folder)
        (folder / "config.json").write_text(json.dumps(config))
        weight_map = {}
        for i in range(2):
            part = {n: tensors[n].contiguous() for n in sorted(tensors)[i::2]}
            file = f"model-{i + 1:05d}-of-00002.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        if metadata is not None:
            atomic.write_json(folder / SIDECAR, metadata.to_block())
    return target


def reference_experts(
    x: Tensor, ids: Tensor, probs: Tensor, w13: Tensor, w2: Tensor, act: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """Routed experts written for reading: one token and one expert at a time. x [tokens, H] -> [tokens, H]."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if e < 0:
                continue
            gate, up = F.linear(act("gate_up", x[t : t + 1]), w13[e]).chunk(2, -1)
            out[t] += (F.linear(act("down", F.silu(gate) * up), w2[e]) * probs[t, k])[0]
    return out


class HFReference:
    """Transformers' Qwen3-MoE with given weights, scoring in fp32; ``activation`` as a rollout's mode."""

    def __init__(self, folder: Path, weights: dict[str, Tensor], metadata: RacMetadata | None, scratch: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        (scratch / "model.safetensors").unlink(missing_ok=True)
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        self.model = Qwen3MoeForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
        self.metadata, self.mode = metadata, "w4a16"
        for i, layer in enumerate(self.model.model.layers):
            experts = layer.mlp.experts

            def forward(
                x: Tensor, ids: Tensor, probs: Tensor, i: int = i, experts: torch.nn.Module = experts
            ) -> Tensor:
                act = lambda gemm, a: self._activate(i, gemm, a)  # noqa: E731
                shape = x.shape
                y = grouped_reference(
                    x.reshape(-1, shape[-1]), ids, probs, experts.gate_up_proj, experts.down_proj, act
                )
                return y.view(shape)

            experts.forward = forward

    def _activate(self, layer: int, gemm: str, x: Tensor) -> Tensor:
        selection = self.metadata.layers.get(layer) if self.metadata else None
        if self.mode == "w4a16" or selection is None:
            return x
        chosen = getattr(selection, gemm).indices() if self.mode == "rac" else []
        return rac.qdq_with_residual(x, nvfp4.row_scale(x), torch.tensor(chosen, dtype=torch.int64))

    @torch.no_grad()
    def score(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> log-probs [b, s - 1]."""
        logits = self.model(tokens).logits.float().log_softmax(-1)
        return logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


def grouped_reference(
    x: Tensor, ids: Tensor, probs: Tensor, w13: Tensor, w2: Tensor, act: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """``reference_experts``, one expert at a time: per-token scales make rows independent."""
    out = torch.zeros_like(x)
    for e in range(w13.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        if t.numel():
            gate, up = F.linear(act("gate_up", x[t]), w13[e]).chunk(2, -1)
            out.index_add_(0, t, F.linear(act("down", F.silu(gate) * up), w2[e]) * probs[t, k, None])
    return out
