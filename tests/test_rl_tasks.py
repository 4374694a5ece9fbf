"""Tasks against the real generators and verifiers, the split, users' own prompts, and batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_quads.errors import QuadsError
from megatron_quads.rl.data import (
    encode_prompts,
    rollout_batch,
    score_samples,
    step_prompts,
    warmup_batch,
    warmup_prompts,
)
from megatron_quads.rl.tasks import JsonlTask, ReasoningGymTask, make_task
from megatron_quads.rollout.types import Sample

WORDS = {"min_word_len": 8, "max_word_len": 8}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sums(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(n)]


@pytest.mark.parametrize(
    ("name", "config"),
    [("spell_backward", WORDS), ("chain_sum", {"max_terms": 2, "max_digits": 1}), ("caesar_cipher", {})],
)
def test_train_and_heldout_never_share_a_prompt(name: str, config: dict[str, int]) -> None:
    # chain_sum of two digits has 200 prompts: a split by seed or by index would share nearly all of them
    task = ReasoningGymTask(name, config)
    held = [p.prompt_text for p in task.heldout(12)]
    assert len(set(held)) == 12
    other_seed = ReasoningGymTask(name, config, seed=1)
    train = {t.train(i).prompt_text for t in (task, other_seed) for i in range(400)}
    train |= {p.prompt_text for p in step_prompts(task, 3, 5, 64)} | {
        p.prompt_text for p in warmup_prompts(task, 3, 5, 64)
    }
    assert not train & set(held)


def test_problems_are_a_function_of_seed_and_step() -> None:
    task, again = ReasoningGymTask("spell_backward", WORDS), ReasoningGymTask("spell_backward", WORDS)
    assert step_prompts(task, 0, 4, 8) == step_prompts(again, 0, 4, 8)
    assert task.heldout(5) == again.heldout(8)[:5]
    texts = [
        tuple(p.prompt_text for p in prompts)
        for prompts in (
            step_prompts(task, 0, 4, 8),
            step_prompts(task, 0, 5, 8),
            step_prompts(task, 1, 4, 8),
            warmup_prompts(task, 0, 4, 8),
            step_prompts(ReasoningGymTask("spell_backward", WORDS, seed=1), 0, 4, 8),
        )
    ]
    assert len(set(texts)) == len(texts)


def test_the_real_verifier_scores() -> None:
    task = ReasoningGymTask("spell_backward", WORDS)
    problem = task.train(0)
    word = problem.entry["metadata"]["word"]
    assert problem.answer == word[::-1] and problem.prompt_text.endswith(word)
    assert task.score(problem, problem.answer) == 1.0
    assert task.score(problem, f" {problem.answer}\n") == 1.0
    assert task.score(problem, "") == 0.0
    assert task.score(problem, problem.answer[:4] + "####") == pytest.approx(0.5)
    assert task.score(problem, problem.answer + "x") == pytest.approx(0.8)  # why the demo's words have 8 letters

    total = ReasoningGymTask("chain_sum", {})
    problem = total.train(0)
    assert total.score(problem, problem.answer) == 1.0
    assert total.score(problem, str(int(problem.answer) + 1)) < 1.0


def test_unknown_task_and_options_are_refused() -> None:
    with pytest.raises(QuadsError, match=r"unknown task 'spell_sideways'"):
        make_task("spell_sideways")
    with pytest.raises(QuadsError, match=r"refuses its options.*no_such_option"):
        make_task("spell_backward", {"no_such_option": 1})
    with pytest.raises(QuadsError, match=r"refuses its options"):
        make_task("spell_backward", {"min_word_len": 9, "max_word_len": 8})


def test_too_few_distinct_prompts_are_refused() -> None:
    task = ReasoningGymTask("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    with pytest.raises(QuadsError, match=r"distinct held-out prompts.*500 asked for"):
        task.heldout(500)


def test_jsonl_is_scored_by_value(tmp_path: Path) -> None:
    rows = [*sums(12), {"prompt": "Half?", "answer": "\\frac{1}{2}"}, {"prompt": "Half again?", "answer": "1/2"}]
    task = make_task(str(write_lines(tmp_path / "own.jsonl", *rows)))
    problems = [task.train(i) for i in range(12)] + task.heldout(9)
    assert {p.prompt_text for p in problems} == {str(r["prompt"]) for r in rows}
    halves = [p for p in problems if p.prompt_text.startswith("Half")]
    for problem in halves:
        assert task.score(problem, "So the answer is \\boxed{0.5}.") == 1.0
        assert task.score(problem, "So the answer is 2.") == 0.0
        assert task.score(problem, "no idea") == 0.0


def test_jsonl_split_and_epochs(tmp_path: Path) -> None:
    rows = sums(40)
    task = JsonlTask(write_lines(tmp_path / "own.jsonl", *rows, *rows[:5]))  # repeated lines stay on their side
    held = {p.prompt_text for p in task.heldout(99)}
    assert len(held) == 5 and len(task.heldout(2)) == 2
    n = len(task._train)
    first, second = ([task.train(e * n + i).prompt_text for i in range(n)] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second
    assert not held & set(first) and held | set(first) == {r["prompt"] for r in rows}


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_empty_jsonl(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(QuadsError, match=r"prompt file is empty.*own\.jsonl"):
        JsonlTask(write_lines(tmp_path / "own.jsonl", *lines))


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ('{"prompt": "a", "answer": ', "not JSON"),
        ('["a", "b"]', "non-empty text"),
        ('{"prompt": "a"}', "non-empty text"),
        ('{"prompt": "a", "answer": 3}', "non-empty text"),
        ('{"prompt": " ", "answer": "3"}', "non-empty text"),
        ('{"prompt": "a", "answer": "$$"}', "cannot read the answer"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, bad: str, what: str) -> None:
    path = write_lines(tmp_path / "own.jsonl", *sums(2), "", bad, *sums(1))
    with pytest.raises(QuadsError, match=rf"{what}.*own\.jsonl:4\]"):
        JsonlTask(path)


def test_missing_jsonl_and_single_prompt(tmp_path: Path) -> None:
    with pytest.raises(QuadsError, match=r"cannot read the prompts.*none\.jsonl"):
        JsonlTask(tmp_path / "none.jsonl")
    with pytest.raises(QuadsError, match="one distinct prompt"):
        JsonlTask(write_lines(tmp_path / "own.jsonl", *sums(1), *sums(1)))


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_long_prompt_names_its_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", *sums(3), {"prompt": "long " * 10, "answer": "1"})
    task = JsonlTask(path)
    problems = [task.train(i) for i in range(3)] + task.heldout(1)
    assert [decode(p) for p in encode_prompts(problems, encode, context=60, max_tokens=10)]
    with pytest.raises(QuadsError, match=r"50 tokens.*context of 59.*own\.jsonl:4\]"):
        encode_prompts(problems, encode, context=59, max_tokens=10)


def test_rollout_batch_alignment() -> None:
    prompts = [[5, 6, 7], [8]]
    samples = [
        [Sample([1, 2], [-0.1, -0.2], "stop"), Sample([3], [-0.3], "length")],
        [Sample([4, 5, 6, 2], [-0.4, -0.5, -0.6, -0.7], "stop"), Sample([2], [-0.8], "stop")],
    ]
    batch = rollout_batch(prompts, samples, pad_id=0, multiple=4)
    assert batch["tokens"].tolist() == [
        [5, 6, 7, 1, 2, 0, 0, 0],
        [5, 6, 7, 3, 0, 0, 0, 0],
        [8, 4, 5, 6, 2, 0, 0, 0],
        [8, 2, 0, 0, 0, 0, 0, 0],
    ]
    targets = batch["tokens"][:, 1:]
    picked = [row[m.bool()].tolist() for row, m in zip(targets, batch["mask"], strict=True)]
    assert picked == [[1, 2], [3], [4, 5, 6, 2], [2]]
    got = batch["rollout_logprobs"]
    torch.testing.assert_close(got[0], torch.tensor([0.0, 0, -0.1, -0.2, 0, 0, 0]))
    torch.testing.assert_close(got[2], torch.tensor([-0.4, -0.5, -0.6, -0.7, 0, 0, 0]))
    assert batch["tokens"].dtype == torch.int64 and got.dtype == batch["mask"].dtype == torch.float32


@pytest.mark.parametrize(
    "bad", [Sample([], [], "stop"), Sample([1, 2], [-0.1], "stop"), Sample([1], [float("nan")], "stop")]
)
def test_rollout_batch_refuses_broken_samples(bad: Sample) -> None:
    with pytest.raises(QuadsError, match="prompt 0, sample 1"):
        rollout_batch([[5]], [[Sample([1], [-0.1], "stop"), bad]], pad_id=0)


def test_score_samples_drops_one_eos() -> None:
    task = ReasoningGymTask("spell_backward", WORDS)
    problem = task.train(0)
    right = encode(problem.answer)
    samples = [[Sample([*right, 1], [0.0] * 9, "stop"), Sample(right, [0.0] * 8, "length"), Sample([1], [0.0], "stop")]]
    assert score_samples(task, [problem], samples, decode, eos_id=1).tolist() == [1.0, 1.0, 0.0]


def warm(noise: float, step: int = 0) -> dict[str, torch.Tensor]:
    task = ReasoningGymTask("spell_backward", WORDS)
    return warmup_batch(task, encode, seed=0, step=step, n=128, eos_id=1, pad_id=0, context=128, noise=noise)


def test_warmup_batch_shows_prompt_then_answer_then_eos() -> None:
    task = ReasoningGymTask("spell_backward", WORDS)
    batch = warm(0.0)
    for problem, row, mask in zip(warmup_prompts(task, 0, 0, 128), batch["tokens"], batch["mask"], strict=True):
        answer = row[1:][mask.bool()].tolist()
        assert answer == [*encode(problem.answer), 1]
        assert decode(row[: -len(answer)].tolist()) == problem.prompt_text


def test_demonstration_noise_has_the_asked_share() -> None:
    clean, noisy, again = warm(0.0), warm(0.4), warm(0.4)
    assert torch.equal(noisy["tokens"], again["tokens"]) and torch.equal(clean["mask"], noisy["mask"])
    assert not torch.equal(noisy["tokens"], warm(0.4, step=1)["tokens"])
    letters = clean["mask"].bool() & (clean["tokens"][:, 1:] != 1)
    changed = clean["tokens"][:, 1:] != noisy["tokens"][:, 1:]
    assert not changed[~letters].any()  # neither prompt nor EOS
    assert 0.3 < changed[letters].float().mean() < 0.4  # 40 % redrawn, some of them alike
    with pytest.raises(QuadsError, match=r"outside 0\.\.1"):
        warm(1.0)
