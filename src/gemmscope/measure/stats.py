"""Statistics on samples: pure functions, no clocks, no GPU.

At the power limit a chip moves its clock by a per cent or two about every 100 ms. Samples that are closer together share a clock
and are not independent; so a burst is cut into *pieces* of about that length, and each piece counts as one number, the mean of
its samples (training pays for the average clock). A stray sample counts as no more than a far outlier would.

What is known of the noise comes from everything that was measured together (`Noise`):

* Pieces of one burst may be alike: it began hotter, or after a heavier neighbour. How much is estimated by analysis of variance
  (intraclass correlation), and pieces then count as fewer (Kish's design effect). They may also make up for each other, where
  the control swings as fast as a burst is long: then they count as more. That is believed by halves while few bursts say so.
* It is one chip whose clock moves, so all bursts spread about alike, and a handful of them tells its own spread badly. Each
  estimate is therefore drawn towards the common spread, as if twelve more pieces had been seen that have it (an empirical Bayes
  estimate of the variance, as the moderated t of microarrays has it); unless it is noisier than chance would have it, as what
  the host paces is.

Intervals come from resampling pieces, both sides of a ratio independently, scaled to the spread so estimated, and widened as
Student's t is for small numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmscope.interval import Interval

Floats = NDArray[np.float64]
RESAMPLES = 2000
CONFIDENCE = 0.95


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
    outside = int((np.abs(burst - median) > reach).sum())
    if outside > max(1, 0.1 * len(burst)):  # too many to be strays: the chip did run so
        return burst
    return np.clip(burst, median - reach, median + reach)


PRIOR_PIECES = 12  # that the common spread counts for
PRIOR_BURSTS = 6  # that owe their pieces nothing: what the others say of pieces that make up for each other is weighed with them
LEAST_ALIKE = 0.03  # where that is not counted on
LEAST_EFFECT = 0.25  # and a mean is never taken to be more than twice as sure as independent pieces would make it


@dataclass(frozen=True)
class Noise:
    """`alike`: the correlation of pieces of one burst; below 0 where they make up for each other.

    `spread`: the relative standard deviation of pieces; None if unknown. `freedom`: how many independent pieces it was estimated
    from, less one for each series.
    """

    alike: float
    spread: float | None = None
    freedom: float = float("inf")


def noise_of(series: Iterable[Bursts], *, swings: bool = True) -> Noise:
    """What several series of bursts, each of one thing, tell of the noise that they share.

    `swings`: whether pieces of a burst may make up for each other; else they are a little alike, whatever they say.

    >>> noise_of([[[1.0, 1.0], [2.0, 2.0]]]).alike, round(noise_of([[[1.0, 2.0], [1.0, 2.0]]]).alike, 2)
    (1.0, -0.14)
    """
    relative = [[np.asarray(burst) / _mean(bursts) for burst in bursts] for bursts in series if bursts]
    found = _correlation([bursts for bursts in relative if len(bursts) > 1])
    alike = found if swings else max(found, LEAST_ALIKE)
    squares = sum(float(((np.concatenate(bursts) - 1) ** 2).sum()) for bursts in relative)
    weight = sum(_unbiased(bursts, alike) for bursts in relative)
    freedom = sum(_effective(bursts, alike) - 1 for bursts in relative)
    return Noise(alike, float(np.sqrt(squares / weight)) if weight > 0 else None, freedom)


def _unbiased(bursts: Sequence[Sequence[float] | Floats], alike: float) -> float:
    """What the sum of squares is divided by: fewer than the pieces less one, where they are alike."""
    count = sum(len(burst) for burst in bursts)
    return count - count / _effective(bursts, alike)


def _mean(bursts: Bursts) -> float:
    return float(np.mean([piece for burst in bursts for piece in burst]))


def _correlation(series: Sequence[Sequence[Floats]]) -> float:
    """Of the pieces of one burst, which are relative to the mean of their series: up to 1; 1 if nothing tells; below 0 where
    bursts repeat better than independent pieces would let them."""
    bursts = [burst for each in series for burst in each if len(burst) > 1]
    between_freedom = sum(sum(len(burst) > 1 for burst in each) - 1 for each in series)
    if not bursts or between_freedom < 1:
        return 1.0
    between = sum(len(burst) * float(burst.mean() - 1) ** 2 for burst in bursts) / between_freedom
    within = sum(float(((burst - burst.mean()) ** 2).sum()) for burst in bursts) / sum(len(burst) - 1 for burst in bursts)
    total = between + (float(np.mean([len(burst) for burst in bursts])) - 1) * within
    found = (between - within) / total if total else 1.0
    return float(found if found >= 0 else found * between_freedom / (between_freedom + PRIOR_BURSTS))


def time_interval(bursts: Bursts, noise: Noise | None = None, seed: int = 0) -> Interval:
    """The typical time, and how far it would move with other bursts. `noise`: where more is known of it than from these alone."""
    return interval_of([bursts], lambda means: means[0], noise or Noise(noise_of([bursts]).alike), seed)


def ratio_interval(slow: Bursts, fast: Bursts, noise: Noise | None = None, seed: int = 0) -> Interval:
    """How many times faster `fast` is."""
    known = noise or Noise(noise_of([slow, fast]).alike)
    return interval_of([slow, fast], lambda means: means[0] / means[1], known, seed)


def interval_of(sides: Sequence[Bursts], estimate: Callable[[list[Floats]], Floats], noise: Noise, seed: int) -> Interval:
    """Of anything computed from the means of several series: percentile bootstrap over pieces.

    What counts as one piece alone has no interval.
    """
    value = float(estimate([np.array([_mean(side)]) for side in sides])[0])
    if any(_effective(side, noise.alike) <= 1.5 for side in sides):
        return Interval(value)
    rng = np.random.default_rng(seed)
    means = [_mean(side) * (1 + _draws(side, rng) * _standard_error(side, noise)) for side in sides]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(estimate(means), [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def _draws(bursts: Bursts, rng: np.random.Generator) -> Floats:
    """Means of resampled pieces, in standard deviations from the mean: the shape of the uncertainty."""
    flat = np.array([piece for burst in bursts for piece in burst])
    drawn = flat[rng.integers(0, len(flat), size=(RESAMPLES, len(flat)))].mean(axis=1) - flat.mean()
    deviation = float(drawn.std())
    return drawn / deviation if deviation else rng.standard_normal(RESAMPLES)


def _standard_error(bursts: Bursts, noise: Noise) -> float:
    """The relative standard error of the mean, widened as Student's t is for small numbers."""
    flat = np.array([piece for burst in bursts for piece in burst])
    effective = _effective(bursts, noise.alike)
    squares = float(((flat / flat.mean() - 1) ** 2).sum())
    freedom, variance = effective - 1, squares / _unbiased(bursts, noise.alike)
    if noise.spread is not None:
        prior = min(PRIOR_PIECES, noise.freedom)
        noisier = variance > noise.spread**2 * _chance(max(freedom, 1.0))
        if not noisier:
            variance = (freedom * variance + prior * noise.spread**2) / (freedom + prior)
        freedom += prior if not noisier else 0
    return float(np.sqrt(variance / effective)) * _student(freedom) / _NORMAL


def _chance(freedom: float) -> float:
    """How many times the common variance an estimate from so few pieces would exceed once in a thousand times (some thirty are
    looked at in a run): the 99.9% point of chi-squared over its degrees of freedom, as Wilson and Hilferty approximate it.

    >>> round(_chance(6.0), 2), round(_chance(100.0), 2)
    (3.78, 1.5)
    """
    step = 2 / (9 * freedom)
    return float((1 - step + 3.09 * np.sqrt(step)) ** 3)


def _effective(bursts: Sequence[Sequence[float] | Floats], alike: float) -> float:
    """As how many independent pieces these count.

    >>> _effective([[1.0, 1.0, 1.0]] * 4, 1.0), _effective([[1.0, 1.0, 1.0]] * 4, 0.0)
    (4.0, 12.0)
    """
    return sum(len(burst) / _design_effect(len(burst), alike) for burst in bursts)


def _design_effect(count: int, alike: float) -> float:
    """How many times the variance of a mean of so many pieces of one burst is that of independent ones (Kish).

    >>> _design_effect(1, 0.5), _design_effect(3, 0.5), _design_effect(11, -0.05)
    (1.0, 2.0, 0.5)
    """
    return max(1 + (count - 1) * alike, LEAST_EFFECT)


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
