"""Statistics on samples: pure functions, no clocks, no GPU.

At the power limit a chip moves its clock by a per cent or two about every 100 ms. Samples that are closer together share a clock
and are not independent; so a burst is cut into *pieces* of about that length, and each piece counts as one number, the mean of
its samples (training pays for the average clock). A stray sample counts as no more than a far outlier would.

Pieces of one burst may still be alike: it began hotter, or after a heavier neighbour. How much is estimated from the pieces
themselves (intraclass correlation, by analysis of variance), and they then count as fewer (Kish's design effect). Intervals come
from resampling pieces, both sides of a ratio independently, and are widened for that, and as Student's t is for small numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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


FAR = 5.0  # standard deviations, as the median deviation estimates them, and at least so many per cent


PIECE_MS = 100.0
Bursts = Sequence[Sequence[float]]  # of pieces


def pieces(samples: Sequence[float], duration_ms: float) -> list[float]:
    """Cut the samples of one burst, which took so long in all, into pieces; each is the mean of its samples.

    >>> [round(piece, 4) for piece in pieces([1.0, 1.0, 1.1, 1.1], 200.0)], pieces([1.0, 1.0, 1.0, 9.0], 20.0)
    ([1.0, 1.1], [1.0125])
    """
    fenced = _fenced(np.asarray(samples, dtype=float))
    count = min(max(round(duration_ms / PIECE_MS), 1), len(fenced))
    return [float(piece.mean()) for piece in np.array_split(fenced, count)]


def _fenced(burst: Floats) -> Floats:
    """Draw stray samples in to the fence; none is dropped."""
    median = float(np.median(burst))
    spread = 1.4826 * float(np.median(np.abs(burst - median)))
    reach = FAR * max(spread, 0.01 * median)
    return np.clip(burst, median - reach, median + reach)


LEAST_CORRELATION = 0.2  # of neighbouring pieces, as seen on an H200; a few bursts cannot prove that it is less


def correlation(series: Iterable[Bursts]) -> float:
    """How alike the pieces of one burst are, from 0.2 to 1, over several series of bursts.

    >>> correlation([[[1.0, 1.0], [2.0, 2.0]]]), correlation([[[1.0, 2.0], [1.0, 2.0]]])
    (1.0, 0.2)
    """
    between = within = between_freedom = within_freedom = 0.0
    sizes = []
    for bursts in series:
        relative = [
            np.asarray(burst) / np.mean([piece for each in bursts for piece in each]) for burst in bursts if len(burst) > 1
        ]
        if len(relative) < 2:
            continue
        centre = np.mean(np.concatenate(relative))
        between += sum(len(burst) * float(burst.mean() - centre) ** 2 for burst in relative)
        within += sum(float(((burst - burst.mean()) ** 2).sum()) for burst in relative)
        between_freedom += len(relative) - 1
        within_freedom += sum(len(burst) - 1 for burst in relative)
        sizes += [len(burst) for burst in relative]
    if not sizes:
        return 1.0
    size, between, within = float(np.mean(sizes)), between / between_freedom, within / within_freedom
    total = between + (size - 1) * within
    return float(np.clip((between - within) / total if total else 1.0, LEAST_CORRELATION, 1.0))


def time_interval(bursts: Bursts, alike: float | None = None, seed: int = 0) -> Interval:
    """The typical time, and how far it would move with other bursts. `alike`: the correlation, where it is known better."""
    known = correlation([bursts]) if alike is None else alike
    return _interval([bursts], lambda means: means[0], known, seed)


def ratio_interval(slow: Bursts, fast: Bursts, alike: float | None = None, seed: int = 0) -> Interval:
    """How many times faster `fast` is."""
    known = correlation([slow, fast]) if alike is None else alike
    return _interval([slow, fast], lambda means: means[0] / means[1], known, seed)


def _interval(sides: Sequence[Bursts], estimate: Callable[[list[Floats]], Floats], alike: float, seed: int) -> Interval:
    """Percentile bootstrap over pieces; what counts as one piece alone has no interval."""
    flat = [np.array([piece for burst in side for piece in burst]) for side in sides]
    value = float(estimate([np.array([side.mean()]) for side in flat])[0])
    if any(len(side) < 2 or _effective(bursts, alike) <= 1.5 for side, bursts in zip(flat, sides, strict=True)):
        return Interval(value, 0.0, float("inf"))
    rng = np.random.default_rng(seed)
    means = []
    for side, bursts in zip(flat, sides, strict=True):
        drawn = side[rng.integers(0, len(side), size=(RESAMPLES, len(side)))].mean(axis=1)
        means.append(side.mean() + (drawn - side.mean()) * _widen(len(side), _effective(bursts, alike)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(estimate(means), [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def _effective(bursts: Bursts, alike: float) -> float:
    """As how many independent pieces these count.

    >>> _effective([[1.0, 1.0, 1.0]] * 4, 1.0), round(_effective([[1.0, 1.0, 1.0]] * 4, 0.2), 1)
    (4.0, 8.6)
    """
    return sum(len(burst) / (1 + (len(burst) - 1) * alike) for burst in bursts)


def _widen(count: int, effective: float) -> float:
    """What a resampled mean falls short of the truth's spread: fewer effective pieces, a sample's spread, Student's t.

    >>> round(_widen(8, 8.0), 2), round(_widen(1000, 1000.0), 2)
    (1.29, 1.0)
    """
    return _student(effective - 1) / _NORMAL * float(np.sqrt(count / (count - 1) * count / effective))


# Two-sided 95% points of Student's t for 1 to 10 degrees of freedom; beyond that the expansion below is good to 0.1%.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.960


def _student(freedom: float) -> float:
    """Student's 95% point; between whole numbers, a straight line.

    >>> _student(1), round(_student(7.5), 3), round(_student(1e9), 2)
    (12.706, 2.336, 1.96)
    """
    if freedom >= len(_STUDENT):
        return _NORMAL + 2.37 / freedom + 2.82 / freedom**2
    return float(np.interp(freedom, range(1, len(_STUDENT) + 1), _STUDENT))
