"""Numbers as text: they can be read back, stay short, and never mislead."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope import units
from gemmscope.interval import Interval

PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@given(st.floats(0, 9e17))
def test_si_keeps_four_digits(value: float) -> None:
    text = units.si(value, "B")
    number, unit = text.split()
    assert float(number) * PREFIXES[unit.removesuffix("B")] == pytest.approx(
        value, rel=5.1e-4 if value >= 1 else 1e-5, abs=1e-300
    )
    assert len(number.replace(".", "")) == 4 or value < 1e3
    assert value < 1e3 or value >= 9.9e17 or float(number) < 1000


@given(st.integers(0, 10**13))
def test_parameters(count: int) -> None:
    text = units.parameters(count)
    number = float(text.rstrip("MB").replace(",", ""))
    scale = 1e9 if text.endswith("B") else 1e6 if text.endswith("M") else 1
    assert number * scale == pytest.approx(count, rel=0.06, abs=0.5)


@given(st.floats(0, 1))
def test_percent_of_something_is_never_zero(share: float) -> None:
    text = units.percent(share)
    assert (text == "0.0%") == (share == 0)
    if text != "<0.1%":
        assert float(text.removesuffix("%")) / 100 == pytest.approx(share, abs=0.0005)


@given(st.floats(1e-3, 1e6))
def test_milliseconds_are_precise_enough_for_a_speedup(time_ms: float) -> None:
    assert float(units.milliseconds(time_ms)) == pytest.approx(time_ms, rel=0.006)


@given(st.floats(0.01, 1e5))
def test_tflops(rate: float) -> None:
    assert float(units.tflops(rate)) == pytest.approx(rate, rel=0.06)


@given(st.floats(0.01, 1e3), st.floats(-0.5, 0.5), st.floats(0, 0.5))
def test_speedups_and_amounts_have_their_interval(value: float, below: float, above: float) -> None:
    low = value * (1 - 2 * abs(below)) - 0.01
    interval = Interval(value, low, value * (1 + above))
    for text in (units.speedup(interval), units.amount(interval)):
        numbers = [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)]
        assert len(numbers) == 3
        assert min(numbers) >= 0  # times and money cannot be negative
        assert text.endswith("]")


def test_what_is_not_known_is_a_question_mark() -> None:
    assert units.ends(Interval(1.0)) == units.ends(Interval(1.0, 0.5, None)) == "[?]"


@given(st.lists(st.text(st.characters(categories=["L"]), min_size=1, max_size=5), max_size=20))
def test_names_are_each_named_once(items: list[str]) -> None:
    text = units.names(items, 4)
    distinct = list(dict.fromkeys(items))
    assert text.startswith(", ".join(distinct[:4]))
    assert text.endswith(f" and {len(distinct) - 4} more") == (len(distinct) > 4)


@given(st.text())
def test_slugs_are_safe(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", units.slug(text))
