"""The one interval: what it says of a ratio, and how it scales."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmscope.interval import Interval

POSITIVE = st.floats(1e-6, 1e6)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    """A value inside its interval, or without one."""
    low, value, high = sorted(draw(st.tuples(POSITIVE, POSITIVE, POSITIVE)))
    return draw(st.sampled_from([Interval(value, low, high), Interval(value)]))


@given(intervals())
def test_a_known_ratio_is_above_below_or_around_one_and_an_unknown_one_is_neither(ratio: Interval) -> None:
    assert [ratio.above_one, ratio.below_one, ratio.includes_one].count(True) == ratio.known


@given(intervals())
def test_above_one_means_that_the_value_is_too(ratio: Interval) -> None:
    assert not ratio.above_one or ratio.value > 1
    assert not ratio.below_one or ratio.value < 1


@given(intervals(), st.floats(1e-3, 1e3))
def test_another_unit_does_not_change_the_relative_width(interval: Interval, factor: float) -> None:
    scaled = interval.times(factor)
    assert scaled.known == interval.known
    assert scaled.value == pytest.approx(interval.value * factor)
    assert scaled.half_width == pytest.approx(interval.half_width)


@given(POSITIVE, st.floats(0, 0.5))
def test_half_width_is_relative(value: float, width: float) -> None:
    assume(value * (1 - width) > 0)
    assert Interval(value, value * (1 - width), value * (1 + width)).half_width == pytest.approx(width, abs=1e-9)


def test_half_width_of_nothing_known_is_infinite() -> None:
    assert math.isinf(Interval(1.5).half_width)
    assert math.isinf(Interval(1.5, -0.1, 3.0).half_width)
    assert not Interval(1.5, 1.4, None).known
