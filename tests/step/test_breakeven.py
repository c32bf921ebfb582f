"""From which batch on a precision wins."""

from __future__ import annotations

import pytest

from gemmscope.interval import Interval
from gemmscope.step.breakeven import AtBatch, wins_from, words


def batches(*gains: float) -> list[AtBatch]:
    """Micro-batches 1, 2, 4, … with these speedups, each known to 0.02."""
    return [AtBatch(2**index, 512, {"FP8": Interval(gain, gain - 0.02, gain + 0.02)}) for index, gain in enumerate(gains)]


@pytest.mark.parametrize(
    ("gains", "first", "sentence"),
    [
        ((0.9, 1.01, 1.1, 1.2), 4, "wins from a batch of 4 x 512 tokens on"),
        ((1.1, 1.2), 1, "wins already at the smallest batch"),
        ((0.9, 0.99), None, "does not win at any batch"),
        (
            (1.2, 0.99),
            None,
            "does not win at the largest batch that was measured, 2 x 512 tokens",
        ),  # what is below does not count
        ((1.2, 0.9, 1.2), 4, "wins from a batch of 4 x 512 tokens on"),
    ],
)
def test_the_smallest_batch_that_wins(gains: tuple[float, ...], first: int | None, sentence: str) -> None:
    measured = batches(*gains)
    found = wins_from(measured, "FP8")
    assert (found.micro_batch_size if found else None) == first
    assert sentence in words(measured, "FP8")


def test_a_batch_it_could_not_be_measured_on_says_nothing() -> None:
    measured = [AtBatch(1, 500, {}), *batches(1.2)]
    assert words(measured, "FP8") == "FP8 wins already at the smallest batch that was measured, 1 x 512 tokens"
