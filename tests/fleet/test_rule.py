"""The rule that calls outliers: its invariances, its limits, and its rate of false alarms."""

from __future__ import annotations

from math import comb, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemmscope.fleet.rule import Sample, apply_rule, call_group, critical_value, rule_data
from gemmscope.fleet.spread import Floats, qn_scale, unbiased_qn

LEAST = rule_data()["least_gpus"]
speeds = st.lists(st.floats(-0.2, 0.2), min_size=LEAST, max_size=40).map(np.array)


def sample(values: Floats, error: float = 0.0, name: str = "BF16 step") -> Sample:
    return Sample(name, np.asarray(values, dtype=float), np.full(len(values), error))


def naive_qn(values: Floats) -> float:
    """The definition: the distance of rank C(n/2 + 1, 2) among all pairs."""
    distances = sorted(abs(a - b) for i, a in enumerate(values) for b in values[:i])
    return distances[comb(len(values) // 2 + 1, 2) - 1]


@given(speeds)
def test_qn_is_the_distance_of_its_rank(values: Floats) -> None:
    assert qn_scale(values) == pytest.approx(unbiased_qn(len(values)) * naive_qn(values))


def test_qn_counted_is_qn_listed() -> None:
    """Above some hundred GPUs, pairs are counted by bisection."""
    values = np.random.default_rng(0).standard_normal(500)
    left, right = np.triu_indices(500, 1)
    listed = np.sort(np.abs(values[left] - values[right]))[comb(251, 2) - 1]
    assert qn_scale(values) == pytest.approx(unbiased_qn(500) * listed)


def test_qn_of_normal_values_is_their_standard_deviation() -> None:
    rng = np.random.default_rng(1)
    for count in (6, 9, 20, 600):
        scales = [qn_scale(rng.standard_normal(count)) for _ in range(40_000 // count)]
        assert np.mean(scales) == pytest.approx(1.0, abs=0.05), count


@given(speeds, st.floats(-3.0, 3.0), st.permutations(range(LEAST)))
def test_neither_the_unit_nor_the_order_matters(values: Floats, shift: float, first: list[int]) -> None:
    """A factor on all times is a shift of the logarithms."""
    order = [*first, *range(len(first), len(values))]
    plain = apply_rule(sample(values), 0.01, 0.02)
    moved = apply_rule(sample((values + shift)[order]), 0.01, 0.02)
    assume(np.all(np.abs(np.abs(plain.scores) - plain.critical) > 1e-6))  # neither exactly at the limit
    assume(np.all(np.abs(np.abs(np.expm1(plain.deviations)) - 0.02) > 1e-9))
    assert moved.outside.tolist() == plain.outside[order].tolist()
    assert moved.limit == pytest.approx(plain.limit)


@given(speeds, st.floats(1.0, 8.0))
def test_scores_do_not_depend_on_the_size_of_the_spread(values: Floats, factor: float) -> None:
    assume(qn_scale(values) > rule_data()["least_scale"])
    plain, wide = apply_rule(sample(values), 0.01, 0.02), apply_rule(sample(values * factor), 0.01, 0.02)
    np.testing.assert_allclose(wide.scores, plain.scores, rtol=1e-6, atol=1e-9)


@given(speeds, st.floats(0.0, 0.1), st.floats(0.0, 0.01))
def test_no_gpu_within_the_tolerance_is_called(values: Floats, tolerance: float, error: float) -> None:
    verdict = apply_rule(sample(values, error), 0.01, tolerance)
    ratios = np.exp(values - np.median(values))
    assert np.all(np.abs(ratios[verdict.outside] - 1) >= tolerance - 1e-12)


@given(st.integers(LEAST, 200), st.sampled_from([0.0, 0.002, 0.01, 0.02]), st.floats(0.02, 0.5), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_one_slow_gpu_is_found_or_within_the_limit(count: int, spread: float, slowdown: float, seed: int) -> None:
    values = spread * np.random.default_rng(seed).standard_normal(count)
    values[0] -= slowdown
    verdict = apply_rule(sample(values), 0.01, 0.02)
    slower = -np.expm1(verdict.deviations[0])
    assert verdict.outside[0] == (slower > verdict.limit - 1e-12) or slower == pytest.approx(verdict.limit)


@given(st.integers(1, LEAST - 1), st.floats(0.1, 2.0))
def test_too_few_gpus_are_never_called(count: int, slowdown: float) -> None:
    values = np.zeros(count)
    values[0] = -slowdown
    verdict = call_group([sample(values)], "BF16 step", ["a"] * count, alarms=0.01, tolerance=0.02, least=LEAST)
    assert not verdict.calls
    assert not verdict.figures


@pytest.mark.parametrize("count", [9, 16, 65, 200])
def test_nearly_half_may_be_slow(count: int) -> None:
    """All of them are called, and none of the others; with more than half slow, the others are called fast."""
    slow = (count - 1) // 2
    values = 0.004 * np.random.default_rng(count).standard_normal(count)
    values[:slow] -= 0.12
    verdict = apply_rule(sample(values), 0.01, 0.02)
    assert verdict.outside.tolist() == [True] * slow + [False] * (count - slow)
    values[slow : slow + 2] -= 0.12
    verdict = apply_rule(sample(values), 0.01, 0.02)
    assert np.all(verdict.deviations[verdict.outside] > 0)


@pytest.mark.parametrize("count", [LEAST, 8, 11, 60])
def test_the_rate_of_false_alarms_holds(count: int) -> None:
    """1% of fleets of normal chips have a false alarm, or fewer. benchmarks/fleet_critical.py --check simulates many more."""
    fleets = 1500
    rng = np.random.default_rng(count)
    alarms = sum(apply_rule(sample(rng.standard_normal(count)), 0.01, 0.0).outside.any() for _ in range(fleets))
    assert alarms <= 0.01 * fleets + 3.1 * sqrt(0.01 * fleets)


@given(st.integers(5, 100_000), st.floats(1e-5, 0.01))
def test_critical_values_grow_as_alarms_get_rarer(count: int, alarms: float) -> None:
    value = critical_value(count, alarms)
    assert 3.0 < value < 400.0
    assert critical_value(count, alarms / 2) >= value


def test_critical_values_of_many_gpus_are_the_normal_ones() -> None:
    assert critical_value(100_000, 0.01) == pytest.approx(5.33, abs=0.01)  # the normal quantile of 1 - 0.01 / 200,000
    assert critical_value(1024, 0.01) < critical_value(1100, 0.01)


def test_a_gpu_that_was_measured_badly_is_not_called_for_it() -> None:
    values, errors = np.zeros(64), np.full(64, 0.003)
    values += 0.004 * np.random.default_rng(0).standard_normal(64)
    values[0], errors[0] = -0.05, 0.02
    assert not apply_rule(Sample("x", values, errors), 0.01, 0.02).outside[0]
    errors[0] = 0.003
    assert apply_rule(Sample("x", values, errors), 0.01, 0.02).outside[0]


def test_gpus_that_are_all_the_same_have_no_outlier() -> None:
    assert not apply_rule(sample(np.zeros(20)), 0.01, 0.0).outside.any()


def test_a_gpu_without_the_figure_is_not_called() -> None:
    values = np.append(np.zeros(10), np.nan)
    verdict = apply_rule(sample(values), 0.01, 0.0)
    assert not verdict.outside.any()


def test_the_page_has_the_limits_of_the_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
    alarms = rule_data()["false_alarms"] * rule_data()["share_of_baseline"]
    texts = {share: [f"{critical_value(count, alarms / share):.1f}" for count in (6, 8, 16, 1000)] for share in (1, 4)}
    assert f"| BF16 time | {' | '.join(texts[1])} |" in page
    assert f"| another time or a speedup | {' | '.join(texts[4])} |" in page
