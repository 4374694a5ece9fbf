"""From problems to token batches. Every choice is a function of (seed, step), so a resumed run sees the same data.

Convention: log-probs, masks and entropies are [b, s - 1] for ``tokens`` [b, s]; column t speaks about token t + 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import QuadsError
from ..rollout.types import Sample
from .tasks import Problem, Task

WARMUP_BASE = 0  # training indices: the warm-up and every seed of the RL steps have a range of their own
RL_BASE = 1 << 40
SEED_RANGE = 1 << 28


def step_prompts(task: Task, seed: int, step: int, n: int) -> list[Problem]:
    """The ``n`` training problems of RL step ``step``; deterministic, and different for every (seed, step)."""
    first = RL_BASE + seed * SEED_RANGE + step * n
    return [task.train(first + i) for i in range(n)]


def warmup_prompts(task: Task, seed: int, step: int, n: int) -> list[Problem]:
    """The ``n`` training problems of warm-up step ``step``."""
    first = WARMUP_BASE + seed * SEED_RANGE + step * n
    return [task.train(first + i) for i in range(n)]


def encode_prompts(
    problems: Sequence[Problem], encode: Callable[[str], list[int]], *, context: int, max_tokens: int
) -> list[list[int]]:
    """Prompt token ids. Raises QuadsError naming the first prompt (its file and line) that is empty or leaves less than
    ``max_tokens`` of the ``context`` for the response."""
    out = []
    for problem in problems:
        ids = list(encode(problem.prompt_text))
        if not ids:
            raise QuadsError("a prompt has no tokens", where=problem.source, do="remove it or change the tokenizer")
        if len(ids) + max_tokens > context:
            raise QuadsError(
                f"a prompt of {len(ids)} tokens and a response of up to {max_tokens} exceed the context of {context}",
                where=problem.source,
                do="shorten the prompt, allow fewer response tokens, or raise the context",
            )
        out.append(ids)
    return out


def score_samples(
    task: Task,
    problems: Sequence[Problem],
    samples: Sequence[Sequence[Sample]],
    decode: Callable[[list[int]], str],
    eos_id: int,
) -> Tensor:
    """Rewards fp32 [b], b = prompts x samples, a prompt's samples being neighbours. A closing EOS is not decoded."""
    rewards = []
    for problem, group in zip(problems, samples, strict=True):
        for sample in group:
            ids = list(sample.token_ids)
            if ids and ids[-1] == eos_id:
                ids.pop()
            rewards.append(task.score(problem, decode(ids)))
    return torch.tensor(rewards, dtype=torch.float32)


def rollout_batch(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Sample]], *, pad_id: int, multiple: int = 1
) -> dict[str, Tensor]:
    """Right-padded batch of all samples, a prompt's samples being neighbours.

    Returns tokens int64 [b, s], and fp32 [b, s - 1]: mask (1 on response tokens, EOS included) and rollout_logprobs
    (0 elsewhere). s is rounded up to ``multiple``. Raises QuadsError when a response is empty or its log-probs are
    missing or not finite.
    """
    rows, starts, logprobs = [], [], []
    for i, (prompt, group) in enumerate(zip(prompts, samples, strict=True)):
        for j, sample in enumerate(group):
            where = f"prompt {i}, sample {j}"
            if not sample.token_ids or len(sample.token_ids) != len(sample.logprobs):
                raise QuadsError(
                    f"the rollout returned {len(sample.token_ids)} tokens and {len(sample.logprobs)} log-probs",
                    where=where,
                    do="check the rollout's log",
                )
            if not all(math.isfinite(x) for x in sample.logprobs):
                raise QuadsError("the rollout returned a non-finite log-prob", where=where, do="check its weights")
            rows.append([*prompt, *sample.token_ids])
            starts.append(len(prompt))
            logprobs.append(sample.logprobs)
    tokens, mask = _pad(rows, starts, pad_id, multiple)
    rollout = torch.zeros_like(mask)
    rollout[mask.bool()] = torch.tensor([x for row in logprobs for x in row], dtype=torch.float32)
    return {"tokens": tokens, "mask": mask, "rollout_logprobs": rollout}


def whole_sequences(batch: dict[str, Tensor]) -> list[list[int]]:
    """Prompt and response of each row of a batch, without its padding."""
    columns = torch.arange(1, batch["mask"].shape[1] + 1)
    last = (batch["mask"].cpu() * columns).amax(1).long()  # column t speaks about token t + 1
    return [row[: n + 1] for row, n in zip(batch["tokens"].tolist(), last.tolist(), strict=True)]


def warmup_batch(
    task: Task,
    encode: Callable[[str], list[int]],
    *,
    seed: int,
    step: int,
    n: int,
    eos_id: int,
    pad_id: int,
    context: int,
    noise: float = 0.0,
    multiple: int = 1,
) -> dict[str, Tensor]:
    """Supervised batch of ``n`` demonstrations: prompt, answer, EOS; tokens int64 [n, s], mask fp32 [n, s - 1] on
    answer and EOS.

    With ``noise`` each answer token is, with that probability, one drawn from the batch's answers instead: imperfect
    demonstrations, as a pretrained model has seen. The model then knows the task but samples wrong tokens as often,
    which leaves RL something to improve. Raises QuadsError as ``encode_prompts`` does, and on an empty answer.
    """
    if not 0.0 <= noise < 1.0:
        raise QuadsError(
            f"demonstration noise {noise} is outside 0..1", where="--demo-noise", do="give a share such as 0.2"
        )
    problems = warmup_prompts(task, seed, step, n)
    answers = [list(encode(p.answer)) for p in problems]
    prompts = [
        encode_prompts([p], encode, context=context, max_tokens=len(a) + 1)[0]
        for p, a in zip(problems, answers, strict=True)
    ]
    for problem, answer in zip(problems, answers, strict=True):
        if not answer:
            raise QuadsError("an answer has no tokens", where=problem.source, do="remove it or change the tokenizer")
    pool = [token for answer in answers for token in answer]
    rng = random.Random(f"{seed}/{step}")
    noisy = [[rng.choice(pool) if rng.random() < noise else token for token in answer] for answer in answers]
    rows = [[*p, *a, eos_id] for p, a in zip(prompts, noisy, strict=True)]
    tokens, mask = _pad(rows, [len(p) for p in prompts], pad_id, multiple)
    return {"tokens": tokens, "mask": mask}


def _pad(rows: list[list[int]], starts: list[int], pad_id: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Right-padded tokens int64 [b, s], and the mask fp32 [b, s - 1] of the tokens from each row's start on."""
    length = -(-max(len(row) for row in rows) // multiple) * multiple
    tokens = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), length - 1, dtype=torch.float32)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, start - 1 : len(row) - 1] = 1.0
    return tokens, mask
