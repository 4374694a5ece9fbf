"""The paper's orders as checks on the logs: each holds, fails, or lacks its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..proof.compare import GAP_MEAN
from .logs import QUANTISED_TRAINER, Array, Logs, RunLog
from .stats import Interval, problems_difference, problems_interval, steps_difference, steps_interval

Outcome = Literal["holds", "fails", "not run"]
Order = Literal["apart", "resolved", "above", "not below"]
"""apart: the means in order and the intervals without overlap; resolved: the interval of the difference above 0;
above: the means in order; not below: the means in order, or 0 within the interval of the difference."""
MIN_STEPS = 10  # of a run to compare: fewer say nothing
NAMES = {
    "bf16": "BF16 floor",
    "naive": "naive",
    "qat": "QAT only",
    "ours-50": "QUADS 50 % (ours)",
    "paper-50": "QUADS 50 % (uniform, unsorted)",
    "quads-100": "QUADS 100 %",
    "symmetric": "symmetric W4A4 QAT",
    "symmetric-rac": "RAC on both sides",
}
PAIRS: list[tuple[str, str, Order]] = [
    ("naive", "qat", "apart"),
    ("qat", "ours-50", "apart"),
    ("ours-50", "quads-100", "above"),
    ("quads-100", "bf16", "not below"),
    ("paper-50", "ours-50", "resolved"),
]
SEEN: list[tuple[str, str]] = [("symmetric", "qat"), ("symmetric-rac", "ours-50")]
"""Pairs that are shown and not checked; of both the paper's argument is that the first has the larger gap."""
WORDS: dict[Order, str] = {
    "apart": "{} > {}, intervals apart",
    "resolved": "{} > {} at equal budget, difference above 0",
    "above": "{} > {}",
    "not below": "{} >= {}",
}


@dataclass(frozen=True)
class Check:
    """A statement that must hold, what came of it, and on what."""

    statement: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Pair:
    """Mean gaps of two arms over the steps that all their runs have."""

    upper: str
    lower: str
    steps: int
    seeds: tuple[int, int]
    means: tuple[Interval, Interval]
    difference: Interval
    unfinished: list[str]

    def meets(self, order: Order) -> bool:
        """Whether upper > lower in the sense of ``order``."""
        first, second = self.means
        if order == "resolved":
            return self.difference.low > 0
        if order == "not below":
            return first.mean >= second.mean or self.difference.holds(0.0)
        return first.mean > second.mean and (order == "above" or not first.overlaps(second))

    @property
    def detail(self) -> str:
        """The figures, in one line."""
        first, second = self.means
        text = f"{_show(first)} against {_show(second)}, difference {_show(self.difference)}; "
        text += f"steps 1..{self.steps}, {self.seeds[0]} and {self.seeds[1]} seeds"
        return text + (f"; unfinished: {', '.join(self.unfinished)}" if self.unfinished else "")


def common(runs: Sequence[RunLog]) -> int:
    """Steps that all of them have."""
    return min(run.steps for run in runs)


def enough(runs: Sequence[RunLog]) -> list[RunLog]:
    """Those that have steps enough to compare."""
    return [run for run in runs if run.steps >= MIN_STEPS]


def matrix(runs: Sequence[RunLog], name: str, steps: int) -> Array:
    """A metric of several runs [runs, steps]."""
    return np.stack([run.column(name)[:steps] for run in runs])


def last_evaluation(runs: Sequence[RunLog]) -> int | None:
    """Newest step, after the start, at which all of them were evaluated."""
    shared = set.intersection(*(set(run.evals) for run in runs))
    return max((step for step in shared if step > 0), default=None)


def pair(logs: Logs, upper: str, lower: str) -> Pair | str:
    """Two arms, given by role; what is missing when they cannot be compared."""
    sides = []
    for role in (upper, lower):
        runs = enough(logs.of(logs.roles[role])) if role in logs.roles else []
        if not runs:
            return f"no run of {NAMES[role]} with {MIN_STEPS} steps"
        sides.append(runs)
    steps = common([*sides[0], *sides[1]])
    seeds = sorted({r.seed for r in sides[0]} & {r.seed for r in sides[1]})
    if not seeds:
        return f"{NAMES[upper]} and {NAMES[lower]} have no seed in common"
    own = [(matrix(runs, GAP_MEAN, steps), matrix(runs, "tokens", steps)) for runs in sides]
    same = [[run for run in runs if run.seed in seeds] for runs in sides]
    a, b = ((matrix(runs, GAP_MEAN, steps), matrix(runs, "tokens", steps)) for runs in same)
    means = steps_interval(*own[0]), steps_interval(*own[1])
    return Pair(
        NAMES[upper],
        NAMES[lower],
        steps,
        (len(sides[0]), len(sides[1])),
        means,
        steps_difference(a, b),
        _unfinished(logs, upper, lower),
    )


def _unfinished(logs: Logs, *roles: str) -> list[str]:
    wanted = [logs.roles[role] for role in roles]
    return [f"{r.arm}/seed-{r.seed} ({r.steps})" for r in logs.runs.values() if r.arm in wanted and not r.done]


def all_checks(logs: Logs) -> list[Check]:
    """All that must hold."""
    return [*(_order(logs, *given) for given in PAIRS), _pass_check(logs), _bits_check(logs)]


def _order(logs: Logs, upper: str, lower: str, order: Order) -> Check:
    statement = "mean gap: " + WORDS[order].format(NAMES[upper], NAMES[lower])
    found = pair(logs, upper, lower)
    if isinstance(found, str):
        return Check(statement, "not run", found)
    return Check(statement, "holds" if found.meets(order) else "fails", found.detail)


def _pass_check(logs: Logs) -> Check:
    statement = "pass@1: QUADS 50 % (ours) within the interval of BF16"
    sides = [enough(logs.of(logs.roles[role])) if role in logs.roles else [] for role in ("ours-50", "bf16")]
    step = last_evaluation([*sides[0], *sides[1]]) if all(sides) else None
    if step is None:
        return Check(statement, "not run", "no held-out evaluation after the same step of both")
    ours, floor = (np.stack([run.solved(step) for run in runs]) for runs in sides)
    interval, mean = problems_interval(floor), float(ours.mean())
    detail = f"{mean:.3g} against {_show(interval)} after step {step}"
    seeds = sorted({r.seed for r in sides[0]} & {r.seed for r in sides[1]})
    if seeds:
        a, b = (np.stack([run.solved(step) for run in runs if run.seed in seeds]) for runs in sides)
        detail += f", difference {_show(problems_difference(a, b))}"
    if rest := _unfinished(logs, "ours-50", "bf16"):
        detail += f"; unfinished: {', '.join(rest)}"
    return Check(statement, "holds" if interval.holds(mean) else "fails", detail)


def _bits_check(logs: Logs) -> Check:
    statement = "weights: 0 bits differ in every arm with a quantised trainer"
    arms = [name for name in logs.arms if logs.config.arms[name].recipe in QUANTISED_TRAINER]
    runs = [run for arm in arms for run in logs.of(arm)]
    if not runs:
        return Check(statement, "not run", "no run of such an arm")
    faults = {f"{r.arm}/seed-{r.seed}": r.audit_fault(logs.config.arms[r.arm]) for r in runs}
    if found := [f"{name}: {fault}" for name, fault in faults.items() if fault is not None]:
        return Check(statement, "fails", "; ".join(found))
    missing = [arm for arm in arms if not logs.of(arm)]
    detail = f"{sum(len(run.audit) for run in runs)} refits of {len(runs)} runs"
    if missing:
        return Check(statement, "not run", f"{detail}; no run of {', '.join(missing)}")
    return Check(statement, "holds", detail)


def _show(interval: Interval) -> str:
    return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
