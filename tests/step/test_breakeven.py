"""From which batch on a recipe wins."""

from __future__ import annotations

import pytest

from gemmscope.interval import Interval
from gemmscope.results.step import AtBatch
from gemmscope.step.waterfall import break_even_finding


def at_batch(micro_batch_size: int, sequence_length: int, **speedups: Interval) -> AtBatch:
    return AtBatch(micro_batch_size=micro_batch_size, sequence_length=sequence_length, speedups=speedups)


def batches(*gains: float) -> list[AtBatch]:
    """Micro-batches 1, 2, 4, … with these speedups, each known to 0.02."""
    return [at_batch(2**index, 512, FP8=Interval(gain, gain - 0.02, gain + 0.02)) for index, gain in enumerate(gains)]


@pytest.mark.parametrize(
    ("gains", "code", "batch"),
    [
        ((0.9, 1.01, 1.1, 1.2), "break-even-from", "4 x 512"),
        ((1.1, 1.2), "break-even-at-smallest", "1 x 512"),
        ((0.9, 0.99), "break-even-never", None),
        ((1.2, 0.99), "break-even-not-at-largest", "2 x 512"),  # a win below does not count
        ((1.2, 0.9, 1.2), "break-even-from", "4 x 512"),
    ],
)
def test_the_smallest_batch_that_wins(gains: tuple[float, ...], code: str, batch: str | None) -> None:
    result = break_even_finding(batches(*gains), "FP8")
    assert (result.code, result.facts.get("batch")) == (code, batch)
    assert "FP8" in result.text


def test_a_batch_that_was_not_measured_says_nothing() -> None:
    result = break_even_finding([at_batch(1, 500), *batches(1.2)], "FP8")
    assert (result.code, result.facts["batch"]) == ("break-even-at-smallest", "1 x 512")


def test_a_speedup_without_interval_is_no_win() -> None:
    assert break_even_finding([at_batch(1, 512, FP8=Interval(2.0))], "FP8").code == "break-even-never"
