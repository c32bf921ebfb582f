"""The spread from chip to chip as an uncertainty of its own, and where another GPU of the fleet would be measured.

Up to half of the values cannot spoil the median and the scale Qn. Qn (Rousseeuw and Croux, 1993, "Alternatives to the Median
Absolute Deviation") is a low quantile of the distances between all pairs. It needs no center, breaks down only when half of the
values are wrong, and has 82% of the efficiency of the standard deviation for normal values, where the median absolute deviation
has 37%. With few GPUs that counts: the limit that holds the rate of false alarms is 20% lower with Qn than with the median
absolute deviation for 8 to 16 GPUs.

The spread is the standard deviation of the chips' true speeds: the variance over the GPUs (without outliers) less that of the
measurement. Its interval is Bonett's (2006, "Approximate confidence interval for standard deviation of nonnormal distributions"),
which estimates the kurtosis and so holds for chips that are not normal. The uncertainty of the noise, where that is estimated
from repeats, is added by the method of variance estimates recovery (Zou and Donner, 2008).

Where another GPU would be measured: from 19 GPUs on by the order statistics of all GPUs, which holds for every distribution; with
fewer, by Student's prediction interval of those that are not outliers.
"""

from __future__ import annotations

from math import comb, exp, inf, log, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gemmscope.interval import Interval, chi_squared

LEAST_GPUS = 3
LEAST_ORDERED = 19  # the lowest and the highest of 19 contain the next one with a probability of 90%
NORMAL_95 = 1.959964
# One-sided 95% points of Student's t for 2 to 17 degrees of freedom.
STUDENT_90 = (2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740)


def chip_spread(speeds: Floats, noise: float = 0.0, freedom: float = inf) -> Interval | None:
    """The standard deviation of the logarithms of these speeds without the noise, with a 95% interval; None for too few GPUs.

    `noise`: the standard error of one speed. `freedom`: the degrees of freedom that it is estimated from.

    >>> chip_spread(np.array([0.0, 0.01])) is None, chip_spread(np.array([0.0, 0.01, -0.01]), noise=0.02).value
    (True, 0.0)
    """
    if len(speeds) < LEAST_GPUS:
        return None
    total = float(np.var(speeds, ddof=1))
    low, high = _variance_interval(speeds, total)
    removed = noise**2
    least, most = (removed * removed_share for removed_share in _chi_squared_interval(freedom))
    chips = total - removed
    bottom = chips - sqrt((total - low) ** 2 + (most - removed) ** 2)
    return Interval(
        *(sqrt(max(variance, 0.0)) for variance in (chips, bottom, (chips + sqrt((high - total) ** 2 + (removed - least) ** 2))))
    )


def _variance_interval(values: Floats, variance: float) -> tuple[float, float]:
    """A 95% interval of the variance: Bonett's, and at least as wide as that of normal values."""
    count = len(values)
    if variance <= 0:
        return 0.0, 0.0
    low, high = (variance * share for share in _chi_squared_interval(count - 1))
    if count < 5:
        return low, high
    trimmed = int(count / (2 * sqrt(count - 4)))
    kept = np.sort(values)[trimmed : count - trimmed] if 2 * trimmed < count else values
    kurtosis = count * float(((values - kept.mean()) ** 4).sum()) / ((count - 1) * variance) ** 2
    factor = count / (count - NORMAL_95)
    reach = NORMAL_95 * factor * sqrt(max(kurtosis - (count - 3) / count, 0.0) / (count - 1))
    middle = log(factor * variance)
    return min(low, exp(middle - reach)), max(high, exp(middle + reach))


def _chi_squared_interval(freedom: float) -> tuple[float, float]:
    """The 95% interval of a variance over its estimate with so many degrees of freedom, for normal values.

    >>> [round(share, 2) for share in _chi_squared_interval(10)], _chi_squared_interval(inf)
    ([0.49, 3.1], (1.0, 1.0))
    """
    return 1 / chi_squared(freedom, NORMAL_95), 1 / chi_squared(freedom, -NORMAL_95)


def another_gpu(speeds: Floats, outliers: NDArray[np.bool_]) -> tuple[float, float] | None:
    """The interval that contains the measured speed (its logarithm) of another GPU with 90% probability; None for too few."""
    if len(speeds) >= LEAST_ORDERED:
        low, high = np.quantile(speeds, (0.05, 0.95), method="weibull")
        return float(low), float(high)
    healthy = speeds[~outliers]
    count = len(healthy)
    if count < LEAST_GPUS:
        return None
    center = float(healthy.mean())
    reach = STUDENT_90[count - LEAST_GPUS] * float(healthy.std(ddof=1)) * sqrt(1 + 1 / count)
    return center - reach, center + reach


def median_interval(speeds: Floats, chance: float = 0.05) -> tuple[float, float] | None:
    """An interval that misses the median with this probability at most, by order statistics; None for too few values: with 5%,
    fewer than six.

    >>> median_interval(np.arange(1.0, 10.0)), median_interval(np.arange(5.0)), median_interval(np.arange(8.0), 0.01)
    ((2.0, 8.0), None, (0.0, 7.0))
    """
    count = len(speeds)
    if count > 1000:
        rank = int((count - NormalDist().inv_cdf(1 - chance / 2) * sqrt(count)) / 2)
    else:
        rank, outside, term = 0, 0.0, 0.5**count
        while outside + term <= chance / 2:
            outside += term
            rank += 1
            term *= (count - rank + 1) / rank
    if rank < 1:
        return None
    ordered = np.sort(speeds)
    return float(ordered[rank - 1]), float(ordered[count - rank])


Floats = NDArray[np.float64]

NORMAL_QN = 2.2219  # makes Qn the standard deviation of normal values, for many values
# For few values (Croux and Rousseeuw, 1992, "Time-efficient algorithms for two highly robust estimators of scale").
FEW_QN = {2: 0.399, 3: 0.994, 4: 0.512, 5: 0.844, 6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
MOST_PAIRS_LISTED = 100_000  # above that, distances are counted instead of listed
BISECTIONS = 42  # to 12 digits of the range


def unbiased_qn(count: int) -> float:
    """The factor that turns the quantile of the distances into a standard deviation."""
    if count in FEW_QN:
        return NORMAL_QN * FEW_QN[count]
    return NORMAL_QN * count / (count + (1.4 if count % 2 else 3.8))


def qn_scale(values: Floats) -> float:
    """The robust standard deviation of these values; 0 for fewer than two.

    >>> round(qn_scale(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 1000.0])), 2)
    2.72
    """
    count = len(values)
    if count < 2:
        return 0.0
    rank = comb(count // 2 + 1, 2)
    ordered = np.sort(values)
    if comb(count, 2) <= MOST_PAIRS_LISTED:
        left, right = np.triu_indices(count, 1)
        distance = float(np.partition(ordered[right] - ordered[left], rank - 1)[rank - 1])
    else:
        distance = _distance(ordered, rank)
    return unbiased_qn(count) * distance


def _distance(ordered: Floats, rank: int) -> float:
    """The distance of this rank among those of all pairs, by bisection: pairs up to a distance are counted, not listed."""
    low, high = 0.0, float(ordered[-1] - ordered[0])
    own = np.arange(1, len(ordered) + 1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if int((np.searchsorted(ordered, ordered + middle, side="right") - own).sum()) >= rank
            else (middle, high)
        )
    return high
