"""Verifiable tasks: a problem's prompt, and a verifier that scores a response in 0..1.

``ReasoningGymTask`` uses reasoning-gym's generators and verifiers as they are. ``JsonlTask`` reads users' own prompts
and scores them with math-verify. Both split by prompt text, so a held-out prompt can never be trained on.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import QuadsError

# reasoning-gym draws entry i of seed s from Random(s + i): seeds 1 and 2 are the same list shifted by one. Seeds are
# therefore spread out, and the split never relies on them.
SEED_STRIDE = 1 << 40
CANDIDATES = 64  # generator entries that one training index may look through for a prompt on its side of the split
INSTALL = "install the extra: pip install 'megatron-quads[cpu]'"


@dataclass(frozen=True)
class Problem:
    """One prompt with what its verifier needs. ``source`` says where it came from, for messages."""

    prompt_text: str
    entry: dict[str, Any]
    source: str = ""

    @property
    def answer(self) -> str:
        """The reference answer."""
        return str(self.entry["answer"])


class Task(Protocol):
    """A source of problems with a verifier. The training and the held-out prompts are disjoint."""

    name: str

    def train(self, index: int) -> Problem:
        """Training problem ``index`` (any int >= 0; the same index gives the same problem)."""

    def heldout(self, n: int) -> list[Problem]:
        """The first ``n`` held-out problems, prompts distinct."""

    def score(self, problem: Problem, response_text: str) -> float:
        """Reward of a response, 0..1."""


def is_heldout(prompt: str, share: float) -> bool:
    """Side of the split: a hash of the prompt text decides, so equal prompts are always on the same side."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


class ReasoningGymTask:
    """A reasoning-gym generator and its verifier.

    ``config`` holds the generator's own options, such as ``{"min_word_len": 8}``. ``heldout_share`` of all distinct
    prompts is held out. Raises QuadsError when reasoning-gym is missing, or refuses the name or the options.
    """

    def __init__(
        self, name: str, config: dict[str, Any] | None = None, *, seed: int = 0, heldout_share: float = 0.125
    ) -> None:
        if not 0.0 < heldout_share < 1.0:
            raise QuadsError(
                f"held-out share {heldout_share} is outside 0..1", where=name, do="give a share such as 0.1"
            )
        self.name, self.heldout_share = name, heldout_share
        self._dataset = _generator(name, {**(config or {}), "seed": seed * SEED_STRIDE, "size": 1 << 31})

    def _problem(self, index: int) -> Problem:
        entry = self._dataset[index]
        return Problem(entry["question"], entry, f"{self.name}[{index}]")

    def train(self, index: int) -> Problem:
        """Training problem ``index``. Raises QuadsError when the generator yields held-out prompts only."""
        for attempt in range(CANDIDATES):
            problem = self._problem(index * CANDIDATES + attempt)
            if not is_heldout(problem.prompt_text, self.heldout_share):
                return problem
        raise QuadsError(
            f"no training prompt among {CANDIDATES} generated ones",
            where=f"{self.name}, training index {index}",
            do="give the generator options with more distinct prompts",
        )

    def heldout(self, n: int) -> list[Problem]:
        """The first ``n`` distinct held-out prompts. Raises QuadsError when the generator does not have that many."""
        found: dict[str, Problem] = {}
        tries = int((n + 8) * 8 / self.heldout_share)
        for index in range(tries):
            if len(found) == n:
                break
            problem = self._problem(index)
            if is_heldout(problem.prompt_text, self.heldout_share):
                found.setdefault(problem.prompt_text, problem)
        if len(found) < n:
            raise QuadsError(
                f"only {len(found)} distinct held-out prompts among {tries} generated ones, {n} asked for",
                where=self.name,
                do="ask for fewer, or give the generator options with more distinct prompts",
            )
        return list(found.values())

    def score(self, problem: Problem, response_text: str) -> float:
        """reasoning-gym's own verifier on the response, outer white space removed."""
        return _checked(self._dataset.score_answer(response_text.strip(), problem.entry), problem)


class JsonlTask:
    """Users' own prompts, one JSON object a line: ``{"prompt": "...", "answer": "..."}``, scored with math-verify.

    ``heldout_share`` of the distinct prompts (at least one) is held out. Training indices walk the rest in a new order
    each epoch. Raises QuadsError on an empty file, naming the line on a malformed one, and when math-verify is missing.
    """

    def __init__(self, path: str | Path, *, heldout_share: float = 0.125) -> None:
        self.path = Path(path)
        self.name = self.path.name
        problems = _read_jsonl(self.path)
        prompts = sorted({p.prompt_text for p in problems}, key=lambda t: hashlib.sha256(t.encode()).digest())
        if len(prompts) < 2:
            raise QuadsError(
                "one distinct prompt cannot be split into training and held-out prompts",
                where=str(self.path),
                do="give at least two prompts",
            )
        held = set(prompts[: min(max(1, round(heldout_share * len(prompts))), len(prompts) - 1)])
        self._train = [p for p in problems if p.prompt_text not in held]
        by_prompt = {p.prompt_text: p for p in reversed(problems)}
        self._heldout = [by_prompt[t] for t in prompts if t in held]

    def train(self, index: int) -> Problem:
        """Training problem ``index``: position ``index % n`` of epoch ``index // n``'s order."""
        epoch, position = divmod(index, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"{self.name}/{epoch}").shuffle(order)
        return self._train[order[position]]

    def heldout(self, n: int) -> list[Problem]:
        """Up to ``n`` held-out problems: all there are when the file has fewer."""
        return self._heldout[:n]

    def score(self, problem: Problem, response_text: str) -> float:
        """1 when math-verify finds the response equal to the answer, else 0."""
        parse, verify = _math_verify()
        # math-verify bounds its work with SIGALRM, which exists in the main thread only
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        response = parse(response_text, parsing_timeout=limit)
        return _checked(float(verify(problem.entry["gold"], response, timeout_seconds=limit)), problem)


def make_task(spec: str, config: dict[str, Any] | None = None, *, seed: int = 0) -> Task:
    """A task from its name: the path of a ``.jsonl`` file, or a reasoning-gym generator."""
    if spec.endswith(".jsonl"):
        return JsonlTask(spec)
    return ReasoningGymTask(spec, config, seed=seed)


def _generator(name: str, config: dict[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, on its first import
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise QuadsError(f"reasoning-gym is not importable: {e}", where=f"task {name!r}", do=INSTALL) from e
    if name not in DATASETS:
        raise QuadsError(
            f"unknown task {name!r}",
            where="--task",
            do="give a reasoning-gym dataset such as spell_backward, or a .jsonl file",
        )
    try:
        return reasoning_gym.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as e:
        raise QuadsError(
            f"the generator refuses its options: {e}", where=f"task {name!r}", do="correct the options"
        ) from e


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as e:
        raise QuadsError(f"math-verify is not importable: {e}", where="scoring a .jsonl task", do=INSTALL) from e
    return parse, verify


def _read_jsonl(path: Path) -> list[Problem]:
    parse, _ = _math_verify()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise QuadsError(
            f"cannot read the prompts: {e}", where=str(path), do="give a readable UTF-8 .jsonl file"
        ) from e
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as e:
            raise QuadsError(
                f"line is not JSON: {e}", where=where, do='write {"prompt": "...", "answer": "..."}'
            ) from e
        fields = ("prompt", "answer")
        if not isinstance(row, dict) or not all(isinstance(row.get(k), str) and row[k].strip() for k in fields):
            raise QuadsError(
                "line needs a non-empty text for both prompt and answer",
                where=where,
                do='write {"prompt": "...", "answer": "..."}, numbers as text',
            )
        # the reference is the whole field, so it is boxed; a response is searched for its final answer
        gold = parse(f"\\boxed{{{row['answer'].strip()}}}", parsing_timeout=None)
        if not gold:
            raise QuadsError("math-verify cannot read the answer", where=where, do="write it as a number or as LaTeX")
        problems.append(Problem(row["prompt"], {"answer": row["answer"], "gold": gold}, where))
    if not problems:
        raise QuadsError(
            "the prompt file is empty", where=str(path), do="give at least two prompts, one JSON object a line"
        )
    return problems


def _checked(reward: float, problem: Problem) -> float:
    reward = float(reward)
    if not math.isfinite(reward):
        raise QuadsError(
            f"the verifier returned {reward}", where=problem.source, do="report it to the verifier's project"
        )
    return min(max(reward, 0.0), 1.0)
