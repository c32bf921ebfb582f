"""The one rule for calling a winner, used by every command, page and figure.

The best candidate is the one with the highest speedup over BF16. It beats another one if the interval of *their ratio* lies above
one; an error that both sides share cancels in that ratio. Every candidate that it does not beat is a rival, BF16 among them: the
two are too close to call.
"""

from collections.abc import Callable, Collection, Mapping

from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Winner

Ratio = Callable[[str, str], Interval | None]


def find_winner(speedups: Mapping[str, Interval], ratio: Ratio) -> Winner:
    """`speedups`: each candidate over BF16. `ratio(a, b)`: how much faster `a` is than `b`; None if that is not known.

    A ratio without an interval cannot tell two candidates apart.

    >>> gains = {"A": Interval(1.50, 1.40, 1.60), "B": Interval(1.45, 1.35, 1.55)}
    >>> find_winner(gains, lambda a, b: gains[a] if b == "BF16" else Interval(1.034, 1.02, 1.05)).rivals
    ()
    >>> find_winner(gains, lambda a, b: gains[a] if b == "BF16" else Interval(1.034, 0.98, 1.09)).rivals
    ('B',)
    """
    best = max(speedups, key=lambda name: speedups[name].value, default=BASELINE)
    if best == BASELINE or speedups[best].value <= 1:
        close = tuple(name for name, gain in speedups.items() if not gain.below_one)
        return Winner(best=BASELINE, speedup=None, rivals=close)
    others = [BASELINE, *(name for name in speedups if name != best)]
    rivals = tuple(name for name in others if not _beats(speedups[best] if name == BASELINE else ratio(best, name)))
    return Winner(best=best, speedup=speedups[best], rivals=rivals)


def winner_among(speedups: Mapping[str, Interval], ratio: Ratio, left_out: Collection[str]) -> Winner | None:
    """The winner where some candidates do not count, because they do not fit in memory; None if none is left.

    Where BF16 itself is left out, the best of the others wins, still with its speedup over BF16.

    >>> gains = {"A": Interval(0.9, 0.8, 0.99), "B": Interval(0.5, 0.4, 0.6)}
    >>> winner_among(gains, lambda a, b: Interval(1.8, 1.5, 2.0), ["BF16"]).best
    'A'
    """
    counted = {name: gain for name, gain in speedups.items() if name not in left_out}
    if BASELINE not in left_out:
        return find_winner(counted, ratio)
    if not counted:
        return None
    best = max(counted, key=lambda name: counted[name].value)
    rivals = tuple(name for name in counted if name != best and not _beats(ratio(best, name)))
    return Winner(best=best, speedup=counted[best], rivals=rivals)


def too_close(ratio: Interval | None) -> bool:
    """Whether a ratio calls neither side the faster one: its interval includes one, or is not known."""
    return ratio is None or not (ratio.above_one or ratio.below_one)


def _beats(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.above_one
