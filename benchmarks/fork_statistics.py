"""From paired losses to a gap, from a loss curve to its slope, and from both to the time to the same loss: pure functions.

Part of `fork_loop.py`, a prototype that has not run on a GPU.

The difference of two trainings on the same batches is noise of the batches, most of it independent from step to step, and luck:
two trainings that differ in one bit drift apart, and their difference stays for many steps. `regression` therefore models the
noise as white noise plus an autoregressive part. How strong that part is and how long it lasts is not known: the interval is
averaged over all possibilities of a grid, each with the weight that the data give it (REML). The intervals cover the true value
in 90% of simulated trainings (`loss_coverage.py` has the table).

The slope of the loss is that of its local regression along a power law of the step, which counts the tokens. A recipe whose loss
is higher by `gap` reaches the loss of the base after exp(gap / slope) times the tokens, where the loss follows the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gemmscope.errors import UserError
from gemmscope.interval import Interval

Floats = NDArray[np.float64]
LEAST_STEPS = 40  # of a fork
MOST_BLOCKS = 60  # of steps: a block counts as one number, its mean
CORRELATIONS = (0.3, 0.6, 0.8, 0.9, 0.95, 0.98)  # of neighboring blocks, in the autoregressive part
WHITE = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95)  # shares of the variance
WHITE_ALONE = 24  # how many kinds of the grid white noise counts for beforehand
DRAWS = 20_000
TAIL = 0.05  # of each side: intervals are 90%
_Z = NormalDist().inv_cdf(1 - TAIL)
WINDOW = 0.35  # the share of the steps before a checkpoint whose losses give its slope
BEND = 0.3  # the slope flattens along the window as that of a power law with this exponent: training curves have 0.1 to 0.5
LEAST_POINTS = 20
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015)  # two-sided 90% points for 1 to 5 degrees of freedom
MEASURED = NormalDist().inv_cdf(0.975)  # standard deviations to each end of a measured interval, which is 95%
UNKNOWN = 0.5  # a slope whose interval reaches down to this share of its value is not known


@dataclass(frozen=True)
class LossGap:
    """The loss of one fork minus that of the base, on the same batches. Intervals are 90%."""

    recipe: str
    steps: int
    """That the fork ran."""
    gap: Interval
    """The mean over the second half of the steps."""
    trend: Interval
    """What the gap gains in 100 steps, over the same half."""
    validation: Interval | None = None
    """The gap of the held-out batches."""
    effective: float = 0.0
    """How many independent steps know as much about the gap as those of the second half."""
    tokens: Interval | None = None
    """Tokens to the same loss over those of the base; None where the slope of the loss is not known."""
    speedup: Interval | None = None
    """Over the base, as it was given."""
    ratio: Interval | None = None
    """Speedup over tokens: time to the same loss in the base over that in the recipe."""


def separated(difference: Interval) -> bool:
    """Whether the interval of a difference excludes zero."""
    return difference.low is not None and difference.high is not None and not difference.low <= 0 <= difference.high


def loss_gap(
    recipe: str, base: Sequence[float], losses: Sequence[float], validation: tuple[Sequence[float], Sequence[float]] = ((), ())
) -> LossGap:
    """The gap of two forks over the second half of their common steps. `validation`: losses of the base and of the other fork."""
    steps = min(len(base), len(losses))
    differences = np.subtract(losses[:steps], base[:steps])[steps // 2 :]
    at = (np.arange(len(differences)) - (len(differences) - 1) / 2) / 100
    (gap, spread), (trend, _) = (
        regression(differences, at[:, None] ** powers)[-1] for powers in (np.array([0]), np.array([0, 1]))
    )
    held_out = np.subtract(validation[1], validation[0]) if len(validation[0]) == len(validation[1]) > 1 else np.empty(0)
    return LossGap(
        recipe=recipe,
        steps=steps,
        gap=gap,
        trend=trend,
        validation=regression(held_out, np.ones((len(held_out), 1)), white=True)[0][0] if len(held_out) else None,
        effective=float(differences.var() / spread**2) if spread else float(len(differences)),
    )


def luck_of(controls: Sequence[LossGap]) -> float:
    """What luck that outlasts a fork adds to the half-width of every gap: nothing where the gaps of the controls include zero,
    else Student's t (90%) times their root mean square, because the differences within a fork do not show such luck."""
    if not any(separated(gap.gap) for gap in controls):
        return 0.0
    return STUDENT[min(len(controls), len(STUDENT)) - 1] * float(np.sqrt(np.mean([gap.gap.value**2 for gap in controls])))


def widened(gap: Interval, luck: float) -> Interval:
    """A gap whose interval includes luck.

    >>> widened(Interval(0.0, -0.003, 0.003), 0.004)
    Interval(value=0.0, low=-0.005, high=0.005)
    """
    below, above = (float(np.hypot(end - gap.value, luck)) for end in (gap.low or 0.0, gap.high or 0.0))
    return Interval(gap.value, gap.value - below, gap.value + above)


def local_slope(steps: Sequence[float], losses: Sequence[float], at: float) -> Interval:
    """What the loss loses while the tokens grow by 1%, at a step of the training, from the steps before it."""
    near = [(step, loss) for step, loss in zip(steps, losses, strict=True) if at * (1 - WINDOW) <= step <= at]
    if len(near) < LEAST_POINTS:
        between = f"between steps {at * (1 - WINDOW):,.0f} and {at:,.0f}"
        raise UserError(f"the log has {len(near)} losses {between}, and {LEAST_POINTS} are needed for a slope")
    x, y = np.array(near).T
    slope, _ = regression(y, np.stack([np.ones_like(x), 100 * ((x / at) ** -BEND - 1) / BEND], axis=1))[1]
    return slope


def tokens_and_ratio(gap: Interval, slope: Interval, speedup: Interval | None, z: float) -> tuple[Interval, Interval | None]:
    """Tokens to the same loss over those of the base, and the speedup over them. `z`: how many standard deviations of its
    logarithm the interval of the speedup reaches to each side."""
    rng = np.random.default_rng(0)
    gaps, slopes = (one.value + _deviation(one) * rng.standard_normal(DRAWS) for one in (gap, slope))
    logarithms = gaps / (100 * np.maximum(slopes, 1e-3 * slope.value))
    tokens = _interval(float(np.exp(gap.value / (100 * slope.value))), np.exp(np.minimum(logarithms, 50)))
    if speedup is None or not speedup.known:
        return tokens, None
    width = np.log(speedup.high / speedup.low) / 2 / z  # type: ignore[operator]
    ratios = speedup.value * np.exp(width * rng.standard_normal(DRAWS) - logarithms)
    return tokens, _interval(speedup.value / tokens.value, ratios)


def is_known(slope: Interval) -> bool:
    """Whether a slope is known well enough to turn a gap into tokens."""
    return slope.low is not None and slope.low > UNKNOWN * slope.value > 0


def regression(values: Floats, terms: Floats, *, white: bool = False) -> list[tuple[Interval, float]]:
    """The coefficients of `terms` [steps, coefficients], with their intervals and standard errors, in correlated noise.

    `white`: the noise is independent.
    """
    size = -(-len(values) // MOST_BLOCKS)
    count = len(values) // size
    y, x = (part[len(part) - count * size :].reshape(count, size, -1).mean(axis=1) for part in (values, terms))
    y = y[:, 0]
    freedom = count - x.shape[1]
    weights, coefficients, errors = [], [], []
    for whiten in _noises(count)[: 1 if white else None]:
        a, b = whiten @ x, whiten @ y
        inverse = np.linalg.inv(a.T @ a)
        solved = inverse @ (a.T @ b)
        variance = float(((b - a @ solved) ** 2).sum()) / freedom or 1e-300
        weights.append(np.log(np.diag(whiten)).sum() + np.linalg.slogdet(inverse)[1] / 2 - freedom / 2 * np.log(variance))
        coefficients.append(solved)
        errors.append(np.sqrt(variance * np.diag(inverse)))
    weights[0] += np.log(WHITE_ALONE)
    likely = np.exp(np.array(weights) - max(weights))
    likely /= likely.sum()
    rng = np.random.default_rng(0)
    chosen, t = rng.choice(len(likely), DRAWS, p=likely), rng.standard_t(freedom, DRAWS)
    means, spreads = np.array(coefficients), np.array(errors)
    drawn = [means[chosen, place] + spreads[chosen, place] * t for place in range(x.shape[1])]
    return [(_interval(float(likely @ means[:, place]), one), float(one.std())) for place, one in enumerate(drawn)]


@lru_cache(maxsize=8)
def _noises(count: int) -> tuple[Floats, ...]:
    """The matrices that make each kind of noise white: white noise itself, then the grid."""
    apart = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    kinds = [np.eye(count)] + [
        share * np.eye(count) + (1 - share) * correlation**apart for correlation in CORRELATIONS for share in WHITE
    ]
    return tuple(np.linalg.inv(np.linalg.cholesky(kind)) for kind in kinds)


def _deviation(estimate: Interval) -> float:
    low, high = (end if end is not None else estimate.value for end in (estimate.low, estimate.high))
    return (high - low) / 2 / _Z


def _interval(value: float, draws: Floats) -> Interval:
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return Interval(value, float(low), float(high))
