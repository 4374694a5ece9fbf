"""Intervals, differences, bands and departures on series with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_quads.reproduce.stats import (
    Array,
    Interval,
    band,
    departure,
    problems_difference,
    problems_interval,
    smooth,
    steps_difference,
    steps_interval,
)

GENERATOR_SEED = 5


def noise(*shape: int) -> Array:
    """Standard normal numbers, the same in every run."""
    return np.random.default_rng(GENERATOR_SEED).standard_normal(shape)


def width(interval: Interval) -> float:
    """Of an interval."""
    return interval.high - interval.low


def test_a_constant_series_has_no_interval() -> None:
    found = steps_interval(np.full((2, 50), 0.25), np.full((2, 50), 7.0))
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


def test_tokens_weigh_the_mean() -> None:
    values = np.array([[1.0, 3.0]])
    assert steps_interval(values, np.array([[1.0, 3.0]])).mean == 2.5


def test_white_noise_has_the_interval_of_its_standard_error() -> None:
    found = steps_interval(noise(1, 400), np.ones((1, 400)))
    assert width(found) == pytest.approx(2 * 1.96 / 20, rel=0.2)


def test_neighbouring_steps_that_resemble_each_other_widen_it() -> None:
    slow = np.repeat(noise(1, 40), 10, axis=1)
    shuffled = np.random.default_rng(0).permutation(slow, axis=1)
    ones = np.ones_like(slow)
    assert width(steps_interval(slow, ones)) > 2 * width(steps_interval(shuffled, ones))


def test_a_trend_that_both_have_does_not_hide_a_difference() -> None:
    trend = np.linspace(3.0, 1.0, 260)[None, :]
    upper, lower = trend * 1.2 + 0.1 * noise(1, 260), trend + 0.1 * noise(2, 260)[1:]
    a, b = (steps_interval(x, np.ones_like(x)) for x in (upper, lower))
    assert a.mean == pytest.approx(2.4, abs=0.03) and b.mean == pytest.approx(2.0, abs=0.03)
    assert not a.overlaps(b)


def test_seeds_that_differ_widen_it() -> None:
    apart = np.stack([np.full(50, 1.0), np.full(50, 2.0)])
    found = steps_interval(apart, np.ones_like(apart))
    assert (found.low, found.mean, found.high) == (1.0, 1.5, 2.0)


def test_a_difference_is_free_of_what_both_sides_share() -> None:
    shared = 10 * noise(2, 100)
    ones = np.ones_like(shared)
    found = steps_difference((shared + 1, ones), (shared, ones))
    assert (found.low, found.high) == pytest.approx((1.0, 1.0))
    assert steps_interval(shared + 1, ones).overlaps(steps_interval(shared, ones))


def test_problems_are_redrawn_for_all_seeds_at_once() -> None:
    solved = np.tile((np.arange(100) < 40).astype(float), (3, 1))  # each problem is solved by all seeds or by none
    found = problems_interval(solved)
    assert found.mean == pytest.approx(0.4)
    assert width(found) == pytest.approx(2 * 1.96 * (0.4 * 0.6 / 100) ** 0.5, rel=0.15)
    assert width(problems_difference(solved, solved)) == 0.0


def test_the_same_numbers_come_out_twice() -> None:
    values, ones = noise(3, 60), np.ones((3, 60))
    assert steps_interval(values, ones) == steps_interval(values, ones)


def test_overlap_counts_a_common_end() -> None:
    assert Interval(1.0, 0.5, 1.5).overlaps(Interval(2.0, 1.5, 2.5))
    assert not Interval(1.0, 0.5, 1.5).overlaps(Interval(2.0, 1.6, 2.5))
    assert Interval(1.0, 0.5, 1.5).holds(1.5) and not Interval(1.0, 0.5, 1.5).holds(1.51)


def test_the_running_mean_is_centred_and_short_at_the_ends() -> None:
    assert smooth(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist() == [1.5, 3.0, 6.0, 7.5]
    assert smooth(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]


def test_departure_finds_the_step_of_a_lasting_fall() -> None:
    limits = band(0.8 + 0.01 * noise(2, 100))
    arm = 0.8 + 0.01 * noise(3, 100)[2]
    assert departure(arm, limits, above=False) is None
    arm[60:] -= 0.3
    found = departure(arm, limits, above=False)
    assert found is not None and abs(found - 61) <= 5  # half of the running mean's window of 10
    assert departure(arm, limits, above=True) is None


def test_departure_ignores_what_comes_back_and_what_has_only_begun() -> None:
    limits = band(0.8 + 0.01 * noise(2, 100))
    arm = 0.8 + 0.01 * noise(3, 100)[2]
    arm[40:60] -= 0.3
    assert departure(arm, limits, above=False) is None
    arm[96:] -= 0.9
    assert departure(arm, limits, above=False) is None


def test_a_series_outside_from_the_start_departs_at_step_one() -> None:
    assert departure(np.full(50, 2.0), band(np.ones((1, 50))), above=True) == 1


def test_seeds_that_spread_widen_the_band() -> None:
    one = 0.8 + 0.01 * noise(1, 100)
    low, high = band(np.concatenate([one, one + 0.2]))
    narrow = band(one)
    assert (high - low).min() > 5 * (narrow[1] - narrow[0]).max()
