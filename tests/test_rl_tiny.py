"""The demo's checkpoint and tokenizer, as transformers and this project's own reader see them; the demo's settings."""

from __future__ import annotations

import hashlib
import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_quads import atomic
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.errors import QuadsError
from megatron_quads.rl.data import encode_prompts, warmup_batch
from megatron_quads.rl.tasks import ReasoningGymTask
from megatron_quads.rl.tiny import DemoDefaults, TinyModel, build_tokenizer, make_tiny_checkpoint, template_parts

DEMO = DemoDefaults()


@pytest.fixture(scope="module")
def task() -> ReasoningGymTask:
    return ReasoningGymTask(DEMO.task, DEMO.task_config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, task: ReasoningGymTask) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "init", 0, task=task)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_same_seed_same_bytes(folder: Path, task: ReasoningGymTask) -> None:
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    again = make_tiny_checkpoint(folder.parent / "again", 0)
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's random state is its own
    other = make_tiny_checkpoint(folder.parent / "other", 1, task=task)
    assert digests(folder) == digests(again)
    assert digests(folder)["model.safetensors"] != digests(other)["model.safetensors"]
    assert digests(folder)["tokenizer.json"] == digests(other)["tokenizer.json"]
    assert atomic.is_committed(folder)


def test_the_projects_reader_understands_it(folder: Path) -> None:
    hf, m = read_model_config(folder), DEMO.model
    got = (hf.num_layers, hf.hidden_size, hf.num_heads, hf.num_kv_heads, hf.head_dim, hf.num_experts, hf.topk)
    assert got == (m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.experts, m.topk)
    assert (hf.moe_intermediate_size, hf.max_position, hf.rope_theta) == (m.moe_intermediate, m.context, m.rope_theta)
    assert hf.num_heads * hf.head_dim != hf.hidden_size
    assert hf.vocab_size % 128 and hf.norm_topk_prob and not hf.tie_word_embeddings
    assert {w.dtype for w in load_file(folder / "model.safetensors").values()} == {torch.float32}


def test_transformers_runs_it_offline(folder: Path, task: ReasoningGymTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(task.train(0).prompt_text, return_tensors="pt")["input_ids"]
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], len(tokenizer)) and torch.isfinite(logits).all()
    # close to uniform: nothing is learned yet
    assert (logits.log_softmax(-1).exp().amax(-1) < 0.2).all()


@pytest.mark.parametrize("name", ["spell_backward", "chain_sum", "caesar_cipher", "number_sorting"])
def test_tokenizer_round_trips_any_generator(name: str, tmp_path: Path) -> None:
    task = ReasoningGymTask(name)
    build_tokenizer(task).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    for problem in [*(task.train(i) for i in range(500, 520)), *task.heldout(20)]:
        for text in (problem.prompt_text, problem.answer):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text and not set(ids) & {0, 1, 2}
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_prompts_are_compact_and_digits_are_tokens(folder: Path, task: ReasoningGymTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode(task.train(0).prompt_text)) == 1 + 8  # the sentence around the word is one token
    digits = [tokenizer.encode(d) for d in string.digits]
    assert all(len(d) == 1 for d in digits) and len({d[0] for d in digits}) == 10
    assert tokenizer.encode("2026") == [d for c in "2026" for d in digits[int(c)]]
    assert tokenizer.encode("\u00e9") == [tokenizer.unk_token_id]


def test_template_parts_leave_variable_words_whole() -> None:
    assert template_parts(["Spell: sun now", "Spell: sad now"]) == ("Spell: ", " now")
    assert template_parts(["Add 10 =", "Add 12 ="]) == ("Add ", " =")
    assert template_parts(["abc", "abd"]) == ("", "")
    assert template_parts(["Say it", "Say it"]) == ("Say ", "")


def test_k_not_a_multiple_of_16_is_refused(tmp_path: Path, task: ReasoningGymTask) -> None:
    with pytest.raises(QuadsError, match="moe_intermediate of 100 is not a multiple of 16"):
        make_tiny_checkpoint(tmp_path / "x", task=task, model=TinyModel(moe_intermediate=100))
    assert not (tmp_path / "x").exists()


def test_demo_settings_fit_the_model(folder: Path, task: ReasoningGymTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = task.heldout(DEMO.heldout)
    encode_prompts(problems, tokenizer.encode, context=DEMO.model.context, max_tokens=DEMO.max_tokens)
    assert all(len(tokenizer.encode(p.answer)) + 1 <= DEMO.max_tokens for p in problems)
    batch = warmup_batch(
        task,
        tokenizer.encode,
        seed=0,
        step=0,
        n=DEMO.warmup_batch,
        eos_id=1,
        pad_id=0,
        context=DEMO.model.context,
        noise=DEMO.demo_noise,
    )
    assert batch["tokens"].max() < json.loads((folder / "config.json").read_text())["vocab_size"]
    assert not (batch["tokens"][:, 1:][batch["mask"].bool()] == 2).any()


def test_learning_rates() -> None:
    rates = [DEMO.warmup_lr_at(s) for s in range(DEMO.warmup_steps)]
    assert max(rates) <= DEMO.warmup_lr and rates[0] < DEMO.warmup_lr / 10
    assert 0.09 * DEMO.warmup_lr < rates[-1] < 0.11 * DEMO.warmup_lr
    assert [DEMO.lr_at(s) / DEMO.lr for s in (0, DEMO.lr_ramp - 1, 1000)] == [1 / DEMO.lr_ramp, 1.0, 1.0]
