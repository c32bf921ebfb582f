"""Statistics on distributions with known answers, and on runs recorded on real chips."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.bench.measurements import Measurements
from gemmscope.choices import MODES
from gemmscope.engine.messages import Round, Sampled
from gemmscope.engine.rule import StoppingRule
from gemmscope.engine.stats import Noise, noise_of, pieces, ratio_interval, time_interval
from gemmscope.workload.cases import Case, Task
from support.recorded_bursts import BASELINE, MACHINES

TRIALS = int(os.environ.get("GEMMSCOPE_TRIALS", "20"))  # of whole measurements with each clock


def bursts(rng: np.random.Generator, centre: float, rounds: int, spread: float) -> list[list[float]]:
    """Rounds that differ by `spread` (relative), each with five samples close together: what a clock that drifts gives."""
    return [list(rng.normal(centre * (1 + rng.normal(0, spread)), centre * 0.002, size=5)) for _ in range(rounds)]


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    trials = 300
    intervals = [ratio_interval(bursts(rng, 2.0, 10, 0.01), bursts(rng, 1.0, 10, 0.01), seed=trial) for trial in range(trials)]
    covered = sum(interval.low <= 2.0 <= interval.high for interval in intervals)
    assert 0.89 <= covered / trials <= 0.99


def test_samples_of_one_burst_are_not_taken_for_independent() -> None:
    """A hundred samples in each of four bursts have the uncertainty of four values, not of four hundred."""
    rng = np.random.default_rng(1)
    rounds = [list(rng.normal(1 + shift, 0.0001, size=100)) for shift in (-0.02, -0.01, 0.01, 0.02)]
    assert time_interval(rounds).half_width > 0.008


def test_pieces_that_are_independent_count_as_more() -> None:
    """Four bursts of three independent pieces give narrower intervals than four values."""
    rng = np.random.default_rng(3)
    trials, covered, widths = 300, 0, []
    for trial in range(trials):
        slow, fast = (rng.normal(centre, 0.01 * centre, size=(4, 3)).tolist() for centre in (2.0, 1.0))
        interval = ratio_interval(slow, fast, Noise(correlation=0.2), seed=trial)
        covered += interval.low <= 2.0 <= interval.high
        widths.append(interval.half_width)
    assert covered / trials >= 0.93
    assert np.mean(widths) < 0.013


@pytest.mark.parametrize("spreads", [(0.01,) * 6, (0.006, 0.008, 0.01, 0.01, 0.012, 0.014)])
def test_common_noise_narrows_without_lying(spreads: tuple[float, ...]) -> None:
    """Six tasks on one chip, three bursts of three pieces each: intervals have their nominal coverage, also if spreads differ."""
    rng = np.random.default_rng(4)
    trials, covered, with_common, alone = 200, 0, 0.0, 0.0
    for trial in range(trials):
        series = [rng.normal(index + 1, (index + 1) * spread, size=(3, 3)).tolist() for index, spread in enumerate(spreads)]
        common = noise_of(series)
        for index in range(1, 6):
            interval = ratio_interval(series[index], series[0], common, seed=trial)
            covered += interval.low <= index + 1 <= interval.high
            with_common += interval.half_width
            alone += ratio_interval(series[index], series[0], Noise(common.correlation), seed=trial).half_width
    assert 0.93 <= covered / trials / 5 <= 0.995
    assert with_common < alone


@pytest.mark.parametrize(("rounds", "alike"), [(3, 0.3), (3, 0.6), (6, 0.6)])
def test_intervals_hold_where_pieces_of_a_burst_are_alike(rounds: int, alike: float) -> None:
    """Six tasks with few bursts. The three pieces of a burst share a random shift."""
    rng = np.random.default_rng(5)
    trials, covered = 200, 0
    for trial in range(trials):
        series = []
        for index in range(6):
            shift = rng.normal(0, 0.01 * alike**0.5, size=(rounds, 1))
            series.append(((index + 1) * (1 + shift + rng.normal(0, 0.01 * (1 - alike) ** 0.5, size=(rounds, 3)))).tolist())
        common = noise_of(series)
        intervals = [ratio_interval(series[index], series[0], common, seed=trial) for index in range(1, 6)]
        covered += sum(interval.low <= index <= interval.high for index, interval in enumerate(intervals, start=2))
    assert covered / trials / 5 >= 0.9


def test_one_round_has_no_interval() -> None:
    assert time_interval([[1.0, 1.1]], Noise(correlation=1.0)).half_width == float("inf")
    assert time_interval([[1.0]]).half_width == float("inf")


def test_more_rounds_narrow_it() -> None:
    rng = np.random.default_rng(2)
    few, many = time_interval(bursts(rng, 1.0, 5, 0.01)), time_interval(bursts(rng, 1.0, 80, 0.01))
    assert many.half_width < few.half_width


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40), st.floats(1.0, 1000.0))
def test_pieces_stay_within_the_samples(samples: list[float], duration_ms: float) -> None:
    split = pieces(samples, duration_ms)
    assert 1 <= len(split) <= len(samples)
    assert all(min(samples) * 0.999999 <= piece <= max(samples) * 1.000001 for piece in split)


@given(st.floats(0.5, 3.0), st.floats(1.5, 10.0))
def test_ratio_does_not_depend_on_units(ratio: float, unit: float) -> None:
    slow = [[ratio * value] for value in (1.0, 1.01, 0.99, 1.02)]
    fast = [[value] for value in (1.0, 1.01, 0.99, 1.02)]
    plain = ratio_interval(slow, fast)
    scaled = ratio_interval([[unit * v for v in burst] for burst in slow], [[unit * v for v in burst] for burst in fast])
    assert plain.value == pytest.approx(ratio)
    assert scaled.value == pytest.approx(plain.value)
    assert scaled.low == pytest.approx(plain.low)


def white(rng: np.random.Generator) -> Callable[[], float]:
    return lambda: float(rng.normal(0, 0.009))


def swinging(rng: np.random.Generator) -> Callable[[], float]:
    """A power control that swings with a period of eight pieces, and drifts in phase."""
    phase = float(rng.uniform(0, 2 * np.pi))

    def piece() -> float:
        nonlocal phase
        phase += 2 * np.pi / 8 + float(rng.normal(0, 0.25))
        return 0.012 * float(np.sin(phase)) + float(rng.normal(0, 0.003))

    return piece


def sticky(rng: np.random.Generator) -> Callable[[], float]:
    """Neighbouring pieces are correlated."""
    last = 0.0

    def piece() -> float:
        nonlocal last
        last = 0.3 * last + float(rng.normal(0, 0.0086))
        return last

    return piece


@pytest.mark.parametrize("clock", [white, swinging, sticky])
def test_intervals_hold_where_they_decide_when_to_stop(clock: Callable[[np.random.Generator], Callable[[], float]]) -> None:
    """Intervals keep their coverage, and speedups have no bias, although intervals decide when to stop and what to measure next.

    Four recipes in two modes run for two rounds, then those with the widest intervals until all are known to 1%.
    `GEMMSCOPE_TRIALS=200 pytest tests/engine/test_stats.py` runs more trials.
    """
    names, case, covered, errors = ["BF16", "FP8Current", "FP8Delayed", "FP8Block"], Case("MLP Up", 1, 1, 1), 0, []
    truth = dict(zip(names, (100.0, 63.0, 60.0, 74.0), strict=True))
    tasks = {task.group: task for mode in MODES for task in (Task(case, name, mode) for name in names)}
    for trial in range(TRIALS):
        rng = np.random.default_rng(trial)
        moved, results, rule = clock(rng), Measurements(tasks.values()), StoppingRule(least_rounds=2, longest_s=float("inf"))
        done = False
        while not done:
            first = [tuple(group) for group in rng.permutation(list(tasks)).tolist()]
            for group in first if results.complete_rounds < 2 or not rule.open else rule.open:
                if not done:
                    moved()  # warm-up, which a burst drops
                    burst = [truth[group[0]] * (1 + moved()) for _ in range(round(750 / truth[group[0]]))]
                    results.take(Sampled({tasks[group].key: burst}, {}))
                    known = partial(results.uncertainties, names, MODES, rule.target)
                    done = rule.done(results.complete_rounds, known)
            results.take(Round(0))
        for recipe, mode in ((name, mode) for name in names[1:] for mode in MODES):
            speedup, exact = results.speedup(recipe, mode), truth["BF16"] / truth[recipe]
            assert speedup is not None
            covered += speedup.low <= exact <= speedup.high
            errors.append(speedup.value / exact - 1)
    assert covered / len(errors) >= 0.92
    assert abs(float(np.mean(errors))) < 0.0015


def test_intervals_hold_on_real_chips() -> None:
    """Consecutive runs on one chip, each stopped by its own intervals, agree with their mean as often as the intervals say."""
    deviations, widths = [], []
    for runs in MACHINES:
        for name in runs[0].keys() - {BASELINE}:
            intervals = []
            for run in runs:
                series = {key: [pieces(burst, sum(burst)) for burst in bursts] for key, bursts in run.items()}
                intervals.append(ratio_interval(series[BASELINE], series[name], noise_of(series.values())))
            middle = float(np.mean([interval.value for interval in intervals]))
            scale = (1 - 1 / len(intervals)) ** 0.5  # each run is part of the mean that it is compared with
            deviations += [(interval.value / middle - 1) / scale for interval in intervals]
            widths += [interval.half_width for interval in intervals]
    assert len(widths) > 100
    assert np.mean(np.abs(deviations) <= widths) >= 0.95
    assert 2 * float(np.std(deviations)) > 0.5 * float(np.mean(widths))  # and the intervals are not too wide to be useful
