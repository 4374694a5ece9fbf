"""The demo's start: a tiny Qwen3-MoE checkpoint, a tokenizer built from the task's text, and the demo's settings."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import QuadsError
from .tasks import ReasoningGymTask, Task

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
TEMPLATE_SAMPLES = 256  # prompts read to find the generator's constant text


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the demo's model. heads x head_dim differs from the hidden size, as in Qwen3-30B-A3B."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    topk: int = 2
    moe_intermediate: int = 128
    context: int = 128
    init_std: float = 0.05
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class DemoDefaults:
    """Settings of ``make demo``, found by trial with a plain PyTorch copy of the model (W4A4 rollout, 50 % residuals).

    Sampled reward on 256 held-out words after warm-up, and after 5, 10, 15, 20 RL steps, for three model seeds:
    0.70 0.83 0.90 0.93 0.95, 0.58 0.66 0.73 0.76 0.78, 0.58 0.65 0.71 0.75 0.79. A trial without noise (words of
    7 to 10) moved from 0.53 to 0.55 only: in this budget RL removes wrong habits, it does not teach the task.
    """

    task: str = "spell_backward"
    task_config: dict[str, Any] = field(default_factory=lambda: {"min_word_len": 8, "max_word_len": 8})
    """Words of 8: the verifier gives 1/8 for each letter in place. A power of two makes that sum exact, and only then
    does the verifier see that a right word with letters after it is not right."""
    model: TinyModel = field(default_factory=TinyModel)

    warmup_steps: int = 220
    warmup_batch: int = 64
    warmup_lr: float = 3e-3
    """Peak: linear over ``warmup_ramp`` steps, then cosine down to a tenth."""
    warmup_ramp: int = 30
    demo_noise: float = 0.3
    """Share of wrong letters in the warm-up's demonstrations; RL has to unlearn them."""

    steps: int = 20
    groups: int = 32
    samples: int = 8
    max_tokens: int = 12
    temperature: float = 1.0
    lr: float = 5e-4
    """Linear over ``lr_ramp`` steps, then constant."""
    lr_ramp: int = 5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    heldout: int = 256

    def warmup_lr_at(self, step: int) -> float:
        """Learning rate of warm-up step ``step`` (0-based)."""
        ramp = min(1.0, (step + 1) / self.warmup_ramp)
        return self.warmup_lr * ramp * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / self.warmup_steps)))

    def lr_at(self, step: int) -> float:
        """Learning rate of RL step ``step`` (0-based)."""
        return self.lr * min(1.0, (step + 1) / self.lr_ramp)


def template_parts(prompts: list[str]) -> tuple[str, str]:
    """What all prompts begin and end with, cut back to whole words so that no part of a variable word is taken.

    >>> template_parts(["Spell sun now", "Spell sad now"])
    ('Spell ', ' now')
    """
    prefix = _common_prefix(prompts)
    prefix = prefix.rstrip(string.ascii_letters + string.digits + "-.")
    suffix = _common_prefix([p[len(prefix) :][::-1] for p in prompts])[::-1]
    return prefix, suffix.lstrip(string.ascii_letters + string.digits + "-.")


def build_tokenizer(task: Task) -> Any:
    """A ``PreTrainedTokenizerFast``: what all prompts begin and end with is one token each, the rest is characters.

    Each digit is a token. Deterministic; ids 0, 1, 2 are pad, EOS, unknown. The size is no multiple of 128.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    problems = [task.train(i) for i in range(TEMPLATE_SAMPLES)]
    parts = [p for p in template_parts([p.prompt_text for p in problems]) if len(p) > 1]
    text = "".join(p.prompt_text + p.answer for p in problems)
    characters = sorted(set(string.ascii_letters + string.digits + string.punctuation + " \n") | set(text))
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *dict.fromkeys(parts), *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    pattern = "|".join([*(_literal(p) for p in sorted(parts, key=len, reverse=True)), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_checkpoint(
    out: str | Path, seed: int = 0, *, task: Task | None = None, model: TinyModel | None = None
) -> Path:
    """Write an untrained tiny Qwen3-MoE in fp32 as a HF folder (weights, config, tokenizer), atomically; returns it.

    The same seed gives the same bytes. Raises QuadsError when K of an expert GEMM is not a multiple of 16.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    defaults = DemoDefaults()
    model = model or defaults.model
    task = task or ReasoningGymTask(defaults.task, defaults.task_config)
    for name in ("hidden", "moe_intermediate"):
        if getattr(model, name) % 16:
            raise QuadsError(
                f"{name} of {getattr(model, name)} is not a multiple of 16",
                where="tiny model",
                do="NVFP4 blocks hold 16",
            )
    tokenizer = build_tokenizer(task)
    settings: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden,
        intermediate_size=2 * model.hidden,
        moe_intermediate_size=model.moe_intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        num_experts=model.experts,
        num_experts_per_tok=model.topk,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=model.context,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=False,
        initializer_range=model.init_std,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).float()
    out = Path(out)
    with atomic.folder(out, marker={"kind": "tiny", "seed": seed}) as aside:
        network.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return out


def _common_prefix(texts: list[str]) -> str:
    low, high = min(texts), max(texts)  # what the extremes of the sorted order share, all share
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:same]


def _literal(text: str) -> str:
    """``text`` as a regular expression (Oniguruma) that matches just it."""
    return "".join("\\" + c if c in string.punctuation else c for c in text)
