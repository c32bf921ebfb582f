"""An estimate with its interval: the one type that carries a number and its uncertainty through the whole package."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Interval:
    """A value with its interval: a 95% confidence interval where it was measured, a 90% error bar where it is a forecast.

    `low` and `high` are None where there is no interval, for example after a single round.

    >>> Interval(1.65, 1.64, 1.66).above_one, Interval(1.01, 0.99, 1.03).includes_one, Interval(2.0).known
    (True, True, False)
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None and self.high is not None

    @property
    def half_width(self) -> float:
        """Half the interval relative to the value: 0.01 is ±1%. Infinite where there is no interval, or it reaches zero."""
        if self.low is None or self.high is None or self.low <= 0:
            return float("inf")
        return (self.high - self.low) / 2 / self.value

    @property
    def above_one(self) -> bool:
        """Whether a ratio is certainly above one: faster."""
        return self.low is not None and self.low > 1

    @property
    def below_one(self) -> bool:
        """Whether a ratio is certainly below one: slower."""
        return self.high is not None and self.high < 1

    @property
    def includes_one(self) -> bool:
        """Whether a ratio is too close to call. A ratio without an interval says nothing either way."""
        return self.known and not self.above_one and not self.below_one

    def overlaps(self, other: Interval) -> bool:
        """Whether the intervals of two estimates overlap; no, where one of them has none."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return other.low <= self.high and self.low <= other.high

    def times(self, factor: float) -> Interval:
        """The same estimate in another unit."""
        ends = [end * factor if end is not None else None for end in (self.low, self.high)]
        return Interval(self.value * factor, *ends)

    def inverse(self, of: float = 1.0) -> Interval:
        """`of` over the estimate: a rate from a time, a slowdown from a speedup. An end that is not above zero has no inverse.

        >>> Interval(2.0, 1.6, 2.5).inverse()
        Interval(value=0.5, low=0.4, high=0.625)
        """
        low, high = (of / end if end is not None and end > 0 else None for end in (self.high, self.low))
        return Interval(of / self.value, low, high)


def chi_squared(freedom: float, quantile: float) -> float:
    """A quantile of chi-squared over its degrees of freedom, given as one of the normal distribution: Wilson and Hilferty's
    approximation.

    >>> round(chi_squared(6.0, 3.09), 2), round(chi_squared(100.0, 3.09), 2)
    (3.78, 1.5)
    """
    step = 2 / (9 * freedom)
    return float(max(1 - step + quantile * sqrt(step), 1e-3) ** 3)
