"""Statistics that up to half of the values cannot spoil: the median and the scale Qn.

Qn (Rousseeuw and Croux, 1993, "Alternatives to the Median Absolute Deviation") is a low quantile of the distances between all
pairs. It needs no center, breaks down only when half of the values are wrong, and has 82% of the efficiency of the standard
deviation for normal values, where the median absolute deviation has 37%. With few GPUs that counts: the limit that holds the rate
of false alarms is 20% lower with Qn than with the median absolute deviation for 8 to 16 GPUs.
"""

from math import comb

import numpy as np
from numpy.typing import NDArray

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
        pairs = int((np.searchsorted(ordered, ordered + middle, side="right") - own).sum())
        low, high = (low, middle) if pairs >= rank else (middle, high)
    return high
