"""The one rule for calling a winner."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Winner, find_winner

NAMES = ("FP8Current", "FP8Delayed", "FP8Block", "MXFP8")
GAINS = st.floats(0.5, 3)
WIDTHS = st.none() | st.floats(0.001, 0.4)


def around(value: float, width: float | None) -> Interval:
    return Interval(value) if width is None else Interval(value, value * (1 - width), value * (1 + width))


@st.composite
def candidates(draw: st.DrawFn) -> tuple[dict[str, Interval], dict[tuple[str, str], Interval | None]]:
    """Speedups over BF16, and the ratios of all pairs, some of them not known."""
    gains = draw(st.dictionaries(st.sampled_from(NAMES), GAINS, max_size=4))
    speedups = {name: around(gain, draw(WIDTHS)) for name, gain in gains.items()}
    ratios = {
        (one, other): draw(st.none() | WIDTHS.map(lambda width, one=one, other=other: around(gains[one] / gains[other], width)))
        for one, other in permutations(gains, 2)
    }
    return speedups, ratios


def winner(speedups: dict[str, Interval], ratios: dict[tuple[str, str], Interval | None]) -> Winner:
    return find_winner(speedups, lambda one, other: ratios[one, other])


@given(candidates())
def test_the_best_has_the_highest_speedup_and_bf16_wins_where_none_is_faster(
    given_: tuple[dict[str, Interval], dict[tuple[str, str], Interval | None]],
) -> None:
    speedups, ratios = given_
    result = winner(speedups, ratios)
    certain = [gain for gain in speedups.values() if gain.above_one]
    highest = max((gain.value for gain in certain or speedups.values()), default=0.0)
    if highest > 1:
        assert result.speedup is not None
        assert result.speedup.value == highest
        assert result.speedup == speedups[result.best]
    else:
        assert (result.best, result.speedup) == (BASELINE, None)


@given(candidates())
def test_a_rival_is_whoever_is_not_beaten_beyond_the_interval_of_the_ratio(
    given_: tuple[dict[str, Interval], dict[tuple[str, str], Interval | None]],
) -> None:
    speedups, ratios = given_
    result = winner(speedups, ratios)
    assert result.best not in result.rivals
    for name in (BASELINE, *speedups):
        if name == result.best:
            continue
        if result.best == BASELINE:
            beaten = speedups[name].below_one
        else:
            ratio = speedups[result.best] if name == BASELINE else ratios[result.best, name]
            beaten = ratio is not None and ratio.above_one
        assert (name in result.rivals) == (not beaten)
    assert result.beats_baseline == (result.best != BASELINE and BASELINE not in result.rivals)


@given(candidates(), st.randoms())
def test_the_order_of_candidates_does_not_matter(
    given_: tuple[dict[str, Interval], dict[tuple[str, str], Interval | None]], random: st.RandomModule
) -> None:
    speedups, ratios = given_
    if len({gain.value for gain in speedups.values()}) < len(speedups):
        return  # two equal speedups: the first is named
    names = list(speedups)
    random.shuffle(names)  # type: ignore[attr-defined]
    first, second = winner(speedups, ratios), winner({name: speedups[name] for name in names}, ratios)
    assert (first.best, first.speedup, set(first.rivals)) == (second.best, second.speedup, set(second.rivals))


def test_an_error_that_both_share_cancels_in_their_ratio() -> None:
    """Two recipes with wide, overlapping intervals over BF16 can still be told apart by their own ratio."""
    speedups = {"FP8Current": Interval(1.60, 1.40, 1.80), "FP8Block": Interval(1.50, 1.30, 1.70)}
    ratio = {("FP8Current", "FP8Block"): Interval(1.067, 1.05, 1.08)}
    assert winner(speedups, ratio).rivals == ()
    assert winner(speedups, {("FP8Current", "FP8Block"): Interval(1.067, 0.99, 1.14)}).rivals == ("FP8Block",)


def test_a_ratio_without_an_interval_does_not_call_a_winner() -> None:
    assert winner({"FP8Current": Interval(1.6)}, {}).rivals == (BASELINE,)
