"""Statistics on samples: pure functions, no clocks, no GPU.

A sample set is a list of rounds, each round the times of one burst. Times within a burst share its clock and temperature, so
they are not independent; rounds are. Each burst therefore counts as one number, its median (a stray slow sample does not move
it), and every interval comes from resampling whole rounds: a cluster bootstrap. A speedup is resampled on both sides together.

A handful of rounds varies less than what it was drawn from, and the bootstrap with it, so its interval is widened by what
Student's t is wider than the normal distribution for as many rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Relative to the value: 0.01 is plus or minus one per cent."""
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True)
class Summary:
    """A distribution of times. Outliers lie more than 1.5 quartile ranges outside the quartiles; none is dropped."""

    median: float
    q1: float
    q3: float
    outliers: int
    count: int


def summarise(samples: Sequence[float]) -> Summary:
    """Median, quartiles, outliers.

    >>> summarise([1.0, 2.0, 3.0, 4.0, 100.0]).outliers
    1
    """
    values = np.asarray(samples, dtype=float)
    q1, median, q3 = (float(value) for value in np.percentile(values, [25, 50, 75]))
    reach = 1.5 * (q3 - q1)
    outliers = int(((values < q1 - reach) | (values > q3 + reach)).sum())
    return Summary(median, q1, q3, outliers, len(values))


def per_round(rounds: Sequence[Sequence[float]]) -> Floats:
    """One number per burst: its median."""
    return np.array([np.median(burst) for burst in rounds], dtype=float)


def time_interval(rounds: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """The typical time, and how far it would move with other rounds."""
    centres = per_round(rounds)
    return _interval(centres[:, None], lambda draws: draws[:, :, 0].mean(axis=1), seed)


def ratio_interval(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """How many times faster `fast` is, from rounds in which both were measured."""
    count = min(len(slow), len(fast))
    centres = np.stack([per_round(slow)[:count], per_round(fast)[:count]], axis=1)
    return _interval(centres, lambda draws: draws[:, :, 0].mean(axis=1) / draws[:, :, 1].mean(axis=1), seed)


def _interval(centres: Floats, estimate: Any, seed: int) -> Interval:
    """Percentile bootstrap over rounds. `centres` is rounds x sides; one round alone has no interval but itself."""
    value = float(estimate(centres[None, :, :])[0])
    if len(centres) == 1:
        return Interval(value, 0.0, float("inf"))
    rng = np.random.default_rng(seed)
    draws = centres[rng.integers(0, len(centres), size=(RESAMPLES, len(centres)))]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(estimate(draws), [tail, 100 - tail])
    widen = _small_sample_factor(len(centres))
    return Interval(value, value - (value - float(low)) * widen, value + (float(high) - value) * widen)


# Two-sided 95% points of Student's t for 1 to 10 degrees of freedom; beyond that the expansion below is good to 0.1%.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.960


def _small_sample_factor(rounds: int) -> float:
    """How much wider t is than normal, and how much a sample's spread falls short of the truth's.

    >>> round(_small_sample_factor(8), 2), round(_small_sample_factor(1000), 2)
    (1.29, 1.0)
    """
    freedom = rounds - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL + 2.37 / freedom + 2.82 / freedom**2
    return student / _NORMAL * float(np.sqrt(rounds / freedom))
