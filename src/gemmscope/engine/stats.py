"""Statistics on samples: pure functions, no clocks, no GPU.

At its power limit a GPU changes its clock by one or two percent about every 100 ms. Samples that are closer together share a
clock and are not independent. A burst is therefore cut into *pieces* of about that length, and each piece counts as one number,
the mean of its samples (training time depends on the average clock). Outliers are clipped.

The noise is estimated from everything that was measured together (`Noise`):

* The effective sample size is corrected for the correlation of pieces within a burst. Pieces of one burst can be similar, because
  the burst started hotter or after a heavier group. The correlation is estimated by analysis of variance (intraclass correlation)
  and enters through Kish's design effect. It can also be negative, where the power control oscillates with the period of a burst;
  a negative estimate is shrunk towards zero while it is based on few bursts.
* All bursts run on the same GPU, so their spread is about the same, and a few bursts alone estimate it badly. Each variance is
  therefore shrunk towards the common variance, with the weight of twelve pieces (an empirical Bayes estimate, as in the moderated
  t-test for microarrays), unless it is larger than chance explains, as for host-bound tasks.

Intervals come from a bootstrap over pieces, independently for both sides of a ratio, scaled to the estimated spread and widened
as Student's t for small samples.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmscope.interval import Interval, chi_squared

Floats = NDArray[np.float64]
RESAMPLES = 2000
CONFIDENCE = 0.95
FAR = 5.0  # an outlier: standard deviations (estimated by the median deviation), and at least this many percent
PIECE_MS = 100.0
Bursts = Sequence[Sequence[float]]  # of pieces


def pieces(samples: Sequence[float], duration_ms: float) -> list[float]:
    """Cut the samples of one burst of this total duration into pieces; each is the mean of its samples.

    >>> [round(piece, 4) for piece in pieces([1.0, 1.0, 1.1, 1.1], 200.0)], pieces([1.0, 1.0, 1.0, 9.0], 20.0)
    ([1.0, 1.1], [1.0125])
    """
    clipped = _clip_outliers(np.asarray(samples, dtype=float))
    count = min(max(round(duration_ms / PIECE_MS), 1), len(clipped))
    return [float(piece.mean()) for piece in np.array_split(clipped, count)]


def _clip_outliers(burst: Floats) -> Floats:
    """Clip samples that are far from the median; none is dropped."""
    median = float(np.median(burst))
    spread = 1.4826 * float(np.median(np.abs(burst - median)))
    reach = FAR * max(spread, 0.01 * median)
    outside = int((np.abs(burst - median) > reach).sum())
    if outside > max(1, 0.1 * len(burst)):  # too many for outliers: the GPU did run at this speed
        return burst
    return np.clip(burst, median - reach, median + reach)


PRIOR_PIECES = 12  # the weight of the common variance
PRIOR_BURSTS = 6  # the weight of zero against a negative correlation
LEAST_CORRELATION = 0.03  # where negative correlations are not allowed
LEAST_EFFECT = 0.25  # of the design: a standard error is never taken to be less than half that of independent pieces
ONE_IN_A_THOUSAND = 3.09  # normal quantile of 99.9%: a run estimates about thirty variances


@dataclass(frozen=True)
class Noise:
    """`correlation`: of the pieces of one burst. `spread`: the relative standard deviation of pieces; None if unknown.

    `freedom`: the degrees of freedom of the spread: the independent pieces it was estimated from, less one for each series.
    """

    correlation: float
    spread: float | None = None
    freedom: float = float("inf")


def noise_of(series: Iterable[Bursts], *, swings: bool = True) -> Noise:
    """The common noise of several series of bursts, each of one task.

    `swings`: whether the correlation may be negative; else it is at least slightly positive.

    >>> noise_of([[[1.0, 1.0], [2.0, 2.0]]]).correlation, round(noise_of([[[1.0, 2.0], [1.0, 2.0]]]).correlation, 2)
    (1.0, -0.14)
    """
    relative = [[np.asarray(burst) / _mean(bursts) for burst in bursts] for bursts in series if bursts]
    estimate = _correlation([bursts for bursts in relative if len(bursts) > 1])
    correlation = estimate if swings else max(estimate, LEAST_CORRELATION)
    squares = sum(float(((np.concatenate(bursts) - 1) ** 2).sum()) for bursts in relative)
    weight = sum(_unbiased(bursts, correlation) for bursts in relative)
    freedom = sum(_effective(bursts, correlation) - 1 for bursts in relative)
    return Noise(correlation, float(np.sqrt(squares / weight)) if weight > 0 else None, freedom)


def _unbiased(bursts: Sequence[Sequence[float] | Floats], correlation: float) -> float:
    """The divisor of the sum of squares for an unbiased variance: less than the pieces minus one where they correlate."""
    count = sum(len(burst) for burst in bursts)
    return count - count / _effective(bursts, correlation)


def _mean(bursts: Bursts) -> float:
    return float(np.mean([piece for burst in bursts for piece in burst]))


def _correlation(series: Sequence[Sequence[Floats]]) -> float:
    """The correlation of the pieces of one burst, given relative to the mean of their series.

    1 if it cannot be estimated; negative where bursts repeat better than independent pieces would.
    """
    bursts = [burst for task in series for burst in task if len(burst) > 1]
    between_freedom = sum(sum(len(burst) > 1 for burst in task) - 1 for task in series)
    if not bursts or between_freedom < 1:
        return 1.0
    between = sum(len(burst) * float(burst.mean() - 1) ** 2 for burst in bursts) / between_freedom
    within = sum(float(((burst - burst.mean()) ** 2).sum()) for burst in bursts) / sum(len(burst) - 1 for burst in bursts)
    total = between + (float(np.mean([len(burst) for burst in bursts])) - 1) * within
    correlation = (between - within) / total if total else 1.0
    return float(correlation if correlation >= 0 else correlation * between_freedom / (between_freedom + PRIOR_BURSTS))


def time_interval(bursts: Bursts, noise: Noise | None = None, seed: int = 0) -> Interval:
    """The mean time with its interval. `noise`: a better estimate of the noise than these bursts alone give."""
    return interval_of([bursts], lambda means: means[0], noise or Noise(noise_of([bursts]).correlation), seed)


def ratio_interval(slow: Bursts, fast: Bursts, noise: Noise | None = None, seed: int = 0) -> Interval:
    """The speedup of `fast` over `slow`."""
    known = noise or Noise(noise_of([slow, fast]).correlation)
    return interval_of([slow, fast], lambda means: means[0] / means[1], known, seed)


def interval_of(sides: Sequence[Bursts], estimate: Callable[[list[Floats]], Floats], noise: Noise, seed: int) -> Interval:
    """The interval of anything computed from the means of several series: a percentile bootstrap over pieces.

    With an effective sample size of about one, there is no interval.
    """
    value = float(estimate([np.array([_mean(side)]) for side in sides])[0])
    if any(_effective(side, noise.correlation) <= 1.5 for side in sides):
        return Interval(value)
    rng = np.random.default_rng(seed)
    means = [_mean(side) * (1 + _draws(side, rng) * _standard_error(side, noise)) for side in sides]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(estimate(means), [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def _draws(bursts: Bursts, rng: np.random.Generator) -> Floats:
    """Means of resampled pieces, in standard deviations from the mean: the shape of the distribution."""
    flat = np.array([piece for burst in bursts for piece in burst])
    drawn = flat[rng.integers(0, len(flat), size=(RESAMPLES, len(flat)))].mean(axis=1) - flat.mean()
    deviation = float(drawn.std())
    return drawn / deviation if deviation else rng.standard_normal(RESAMPLES)


def _standard_error(bursts: Bursts, noise: Noise) -> float:
    """The relative standard error of the mean, widened as Student's t."""
    flat = np.array([piece for burst in bursts for piece in burst])
    effective = _effective(bursts, noise.correlation)
    squares = float(((flat / flat.mean() - 1) ** 2).sum())
    freedom, variance = effective - 1, squares / _unbiased(bursts, noise.correlation)
    if noise.spread is not None:
        prior = min(PRIOR_PIECES, noise.freedom)
        noisier = variance > noise.spread**2 * chi_squared(max(freedom, 1.0), ONE_IN_A_THOUSAND)
        if not noisier:
            variance = (freedom * variance + prior * noise.spread**2) / (freedom + prior)
        freedom += prior if not noisier else 0
    return float(np.sqrt(variance / effective)) * student(freedom) / _NORMAL


def _effective(bursts: Sequence[Sequence[float] | Floats], correlation: float) -> float:
    """The effective sample size.

    >>> _effective([[1.0, 1.0, 1.0]] * 4, 1.0), _effective([[1.0, 1.0, 1.0]] * 4, 0.0)
    (4.0, 12.0)
    """
    return sum(len(burst) / _design_effect(len(burst), correlation) for burst in bursts)


def _design_effect(count: int, correlation: float) -> float:
    """The variance of the mean of this many pieces of one burst over that of independent ones (Kish).

    >>> _design_effect(1, 0.5), _design_effect(3, 0.5), _design_effect(11, -0.05)
    (1.0, 2.0, 0.5)
    """
    return max(1 + (count - 1) * correlation, LEAST_EFFECT)


# Two-sided 95% points of Student's t for 1 to 10 degrees of freedom; beyond that the expansion below is good to 0.1%.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.960


def student(freedom: float) -> float:
    """Student's 95% point, interpolated between whole numbers.

    >>> student(1), round(student(7.5), 3), round(student(1e9), 2)
    (12.706, 2.336, 1.96)
    """
    if freedom >= len(_STUDENT):
        return _NORMAL + 2.37 / freedom + 2.82 / freedom**2
    return float(np.interp(freedom, range(1, len(_STUDENT) + 1), _STUDENT))
