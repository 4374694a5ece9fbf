"""Intervals by bootstrap, differences of two arms, and the step at which one leaves another's band. numpy only.

Every draw comes from a generator with a fixed seed, so the same logs give the same intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]
DRAWS = 2000
LEVEL = 0.95
REACH = 2  # blocks to either side from which one is drawn
BAND = 3.0  # half-width of a band, in standard deviations


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % bootstrap interval around it."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, mean: float, draws: Array) -> Interval:
        """Percentile interval of ``draws``."""
        tail = (1 - LEVEL) / 2
        return cls(mean, float(np.quantile(draws, tail)), float(np.quantile(draws, 1 - tail)))

    def overlaps(self, other: Interval) -> bool:
        """Whether the two have a value in common."""
        return self.low <= other.high and other.low <= self.high

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies within it."""
        return self.low <= value <= self.high


def steps_interval(values: Array, weights: Array) -> Interval:
    """Weighted mean of ``values`` [seeds, steps], e.g. per-token gaps and token counts.

    Seeds are drawn with replacement, and within each drawn seed blocks of about sqrt(steps) neighbouring steps (steps
    are not independent of each other), each from near its own place: the local block bootstrap of Paparoditis and
    Politis (2002). A gap that falls as the policy learns is no uncertainty of its mean; drawn from anywhere it would be.
    """
    seeds, steps = _draw_steps(*values.shape)
    return Interval.of(_mean(values, weights), _means(values, weights, seeds, steps))


def steps_difference(a: tuple[Array, Array], b: tuple[Array, Array]) -> Interval:
    """Mean of a minus mean of b, each (values, weights) [seeds, steps] of the same seeds and steps.

    Both are drawn with the same seeds and blocks, so what the two have in common (prompts, trend) cancels.
    """
    seeds, steps = _draw_steps(*a[0].shape)
    return Interval.of(_mean(*a) - _mean(*b), _means(*a, seeds, steps) - _means(*b, seeds, steps))


def problems_interval(solved: Array) -> Interval:
    """Mean of ``solved`` [seeds, problems] under redrawn seeds and problems; every seed has the same problems."""
    seeds, problems = _draw_problems(*solved.shape)
    return Interval.of(float(solved.mean()), solved[seeds[:, :, None], problems[:, None, :]].mean((1, 2)))


def problems_difference(a: Array, b: Array) -> Interval:
    """Mean of a minus mean of b, both [seeds, problems] of the same seeds and problems, drawn alike."""
    seeds, problems = _draw_problems(*a.shape)
    difference = a - b
    return Interval.of(float(difference.mean()), difference[seeds[:, :, None], problems[:, None, :]].mean((1, 2)))


def _draw_steps(seeds: int, steps: int) -> tuple[Index, Index]:
    """Seeds [draws, seeds] and steps [draws, seeds, steps], the latter in blocks from up to REACH blocks away."""
    generator = np.random.default_rng(0)
    length = max(1, round(steps**0.5))
    blocks = -(-steps // length)
    place = np.arange(blocks)[:, None] * length
    moved = generator.integers(-REACH * length, REACH * length + 1, (DRAWS, seeds, blocks, 1))
    at = np.clip(place + moved, 0, steps - length) + np.arange(length)
    return generator.integers(0, seeds, (DRAWS, seeds)), at.reshape(DRAWS, seeds, -1)[:, :, :steps]


def _draw_problems(seeds: int, problems: int) -> tuple[Index, Index]:
    generator = np.random.default_rng(0)
    return generator.integers(0, seeds, (DRAWS, seeds)), generator.integers(0, problems, (DRAWS, problems))


def _mean(values: Array, weights: Array) -> float:
    return float((values * weights).sum() / weights.sum())


def _means(values: Array, weights: Array, seeds: Index, steps: Index) -> Array:
    at = seeds[:, :, None], steps
    chosen = weights[at]
    means: Array = (values[at] * chosen).sum((1, 2)) / chosen.sum((1, 2))
    return means


def window(steps: int) -> int:
    """Length of the running mean for a series of ``steps``."""
    return max(1, round(steps**0.5))


def smooth(values: Array, length: int) -> Array:
    """Centred running mean of ``length`` over the last axis; shorter at both ends."""
    n = values.shape[-1]
    before, after = length // 2, length - length // 2
    first = np.maximum(np.arange(n) - before, 0)
    last = np.minimum(np.arange(n) + after, n)
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
    means: Array = (sums[..., last] - sums[..., first]) / (last - first)
    return means


def band(reference: Array) -> tuple[Array, Array]:
    """Where the running mean of one more run like ``reference`` [seeds, steps] would be: (low, high) [steps].

    The seeds' mean, give or take BAND standard deviations: the noise of a running mean, and the spread between seeds.
    """
    length = window(reference.shape[1])
    middle = smooth(reference, length)
    variance = (reference - middle).var() / length
    if len(reference) > 1:
        variance += middle.var(0, ddof=1).mean()
    return middle.mean(0) - BAND * variance**0.5, middle.mean(0) + BAND * variance**0.5


def departure(values: Array, limits: tuple[Array, Array], *, above: bool) -> int | None:
    """Step (from 1) from which the running mean of ``values`` [steps] stays above (below) the band for good.

    None when it ends inside, or has been outside for less than a window of steps.
    """
    steps = len(values)
    low, high = (limit[:steps] for limit in limits)
    means = smooth(values, window(steps))
    inside = means <= high if above else means >= low
    last_inside = np.flatnonzero(inside)
    first_outside = int(last_inside[-1]) + 1 if len(last_inside) else 0
    return first_outside + 1 if steps - first_outside >= window(steps) else None
