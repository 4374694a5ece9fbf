"""Shared by tests: a tiny Qwen3-MoE checkpoint and a launcher of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_quads.launch.local import free_port
from megatron_quads.rac.metadata import GemmSelection, LayerSelection, ModelShape, RacMetadata

TIMES = {"step_s", "rollout_s", "logprobs_s", "update_s", "refit_s", "prove_s", "tokens_per_s"}
"""Of a row of metrics.jsonl: what a clock gives."""
VOCAB = 500  # not a multiple of 128: Megatron pads it


def tiny_config(**over: object) -> dict:
    """config.json of the tiny model. heads * head_dim differs from hidden, so a flat QKV mapping cannot pass."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.05,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return {**config, **over}


def tiny_weights(config: dict, seed: int = 0, std: float = 0.05) -> dict[str, Tensor]:
    """HF-named fp32 weights: random norms (a wrong mapping shows), outlier channels, a sharp router."""
    gen = torch.Generator().manual_seed(seed)
    h, d, inter = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=gen) * (std * scale)

    def norm(n: int) -> Tensor:
        return torch.rand(n, generator=gen) * 0.8 + 0.6

    out = {"model.embed_tokens.weight": normal(config["vocab_size"], h), "model.norm.weight": norm(h)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(config["vocab_size"], h, scale=2.0)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        out[p + "input_layernorm.weight"] = norm(h)
        out[p + "post_attention_layernorm.weight"] = norm(h)
        out[p + "post_attention_layernorm.weight"][torch.randperm(h, generator=gen)[: h // 16]] *= 6.0
        for name, rows, cols in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            out[p + f"self_attn.{name}_proj.weight"] = normal(rows, cols)
        out[p + "self_attn.q_norm.weight"], out[p + "self_attn.k_norm.weight"] = norm(d), norm(d)
        out[p + "mlp.gate.weight"] = normal(config["num_experts"], h, scale=3.0)
        for expert in range(config["num_experts"]):
            e = p + f"mlp.experts.{expert}."
            out[e + "gate_proj.weight"], out[e + "up_proj.weight"] = normal(inter, h), normal(inter, h)
            out[e + "down_proj.weight"] = normal(h, inter)
    return out


def write_hf(folder: Path, config: dict, weights: dict[str, Tensor], *, shards: int = 1) -> Path:
    """Write a HF folder (weights, config, tokenizer); ``shards`` > 1 writes an index too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {n: weights[n] for n in names[i::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(w.nbytes for w in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {w: i for i, w in enumerate(special)} | {f"t{i}": i for i in range(len(special), size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make_tiny_hf(
    folder: Path,
    *,
    seed: int = 0,
    std: float = 0.05,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **over: object,
) -> Path:
    """Write a tiny Qwen3-MoE checkpoint; ``over`` replaces config.json keys."""
    config = tiny_config(dtype=str(dtype).removeprefix("torch."), **over)
    weights = {n: w.to(dtype) for n, w in tiny_weights(config, seed, std).items()}
    return write_hf(folder, config, weights, shards=shards)


def tiny_rac(shape: ModelShape) -> RacMetadata:
    """Uniform 50 % metadata for every layer of a model, with made-up calibrated amax values."""
    gate_up = GemmSelection(blocks=list(range(0, shape.hidden_size // 16, 2)), static_amax=7.5)
    down = GemmSelection(prefix=shape.moe_intermediate_size // 32, static_amax=2.25)
    layers = {i: LayerSelection(gate_up=gate_up, down=down) for i in range(shape.num_layers)}
    return RacMetadata(model=shape, activation_scale="token", policy="uniform", ratio=0.5, sorted=False, layers=layers)


@dataclass(frozen=True)
class RankResult:
    """One finished process."""

    returncode: int
    stdout: str
    stderr: str


def quads(*words: str | Path, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    program = [sys.executable, "-m", "megatron_quads.cli", *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, timeout=timeout)


def run_ranks(
    n: int,
    target: str | Path,
    args: list[str] | tuple[str, ...] = (),
    *,
    timeout: float = 300,
    env: dict[str, str] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Run ``target`` (a .py file, or a module name) in ``n`` processes as one torch.distributed world on localhost.

    Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. When a rank fails the others are
    killed after 5 s (they may wait for it in a collective). With ``check`` a failure raises AssertionError holding
    the failing rank's stderr; the first rank to fail comes first.
    """
    base = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    base |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
    }
    base |= env or {}
    program = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
    with tempfile.TemporaryDirectory() as logs:
        files = [(open(f"{logs}/{r}.out", "w+"), open(f"{logs}/{r}.err", "w+")) for r in range(n)]  # noqa: SIM115
        procs = [
            subprocess.Popen(
                [sys.executable, *program, *map(str, args)],
                env={**base, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=out,
                stderr=err,
            )
            for r, (out, err) in enumerate(files)
        ]
        deadline, first_failed = time.monotonic() + timeout, None
        try:
            while any(p.poll() is None for p in procs):
                now = time.monotonic()
                if first_failed is None and (bad := [r for r, p in enumerate(procs) if p.poll()]):
                    first_failed, deadline = bad[0], min(deadline, now + 5)
                if now > deadline:
                    break
                time.sleep(0.05)
        finally:
            late = [r for r, p in enumerate(procs) if p.poll() is None]
            for r in late:
                procs[r].kill()
            for p in procs:
                p.wait()
        results = []
        for p, pair in zip(procs, files, strict=True):
            texts = []
            for f in pair:
                f.seek(0)
                texts.append(f.read())
                f.close()
            results.append(RankResult(p.returncode, texts[0], texts[1]))
    if check and any(r.returncode for r in results):
        worst = first_failed if first_failed is not None else next(r for r, x in enumerate(results) if x.returncode)
        bad_rank = results[worst]
        why = (
            f"exit code {bad_rank.returncode}"
            if first_failed is not None
            else f"no end within {timeout} s (ranks {late})"
        )
        raise AssertionError(f"rank {worst} of {n}: {why}\n{bad_rank.stdout[-2000:]}\n{bad_rank.stderr[-6000:]}")
    return results
