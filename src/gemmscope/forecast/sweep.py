"""Many configurations at once: the best precision at each, what it gains in the training step, and where gains begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast, speedup
from gemmscope.measure.stats import Interval
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.workload.derive import derive


@dataclass(frozen=True)
class Point:
    """One configuration: milliseconds of the baseline's step, and the speedup of every recipe that can run it."""

    values: tuple[int, ...]
    step_ms: float = 0.0
    speedups: tuple[tuple[str, Interval], ...] = ()
    why_not: str = ""

    @property
    def best(self) -> tuple[str, Interval]:
        """The fastest recipe; the baseline where none gains."""
        none = (BASELINE, Interval(1.0, 1.0, 1.0))
        return max([none, *self.speedups], key=lambda each: each[1].value)

    @property
    def certain(self) -> bool:
        """Whether the best one gains for all its doubt, or nothing does."""
        name, found = self.best
        return found.low > 1.0 if name != BASELINE else all(each.high < 1.0 for _, each in self.speedups)

    def of(self, name: str) -> Interval | None:
        return dict(self.speedups).get(name)


AT_A_TIME = 400
MOST_KEPT = 50_000  # products remembered from one batch to the next
Configuration = tuple[tuple[int, ...], ModelSpec, RunSpec]


def forecast_points(forecaster: Forecaster, wanted: Sequence[Configuration], recipes: Sequence[str], dp: int = 1) -> list[Point]:
    """All of them, some hundreds at a time: their products are gathered first and computed together."""
    points: list[Point] = []
    for first in range(0, len(wanted), AT_A_TIME):
        some = wanted[first : first + AT_A_TIME]
        steps = [StepForecast(forecaster, model, run, derive(model, run), dp) for _, model, run in some]
        forecaster.prepare((case for step in steps for case in step.cases), [BASELINE, *recipes])
        points += [_point(values, step, recipes) for (values, _, _), step in zip(some, steps, strict=True)]
        forecaster.forget(beyond=MOST_KEPT)
    return points


def _point(values: tuple[int, ...], step: StepForecast, recipes: Sequence[str]) -> Point:
    baseline = step.step(BASELINE)
    able = [name for name in recipes if name != BASELINE and not step.why_not(name)]
    gains = tuple((name, speedup(baseline, step.step(name)).interval()) for name in able)
    return Point(values, baseline.total.value, gains)


def break_even(points: Sequence[Point], name: str) -> int | None:
    """The first value of the first size from which a recipe gains to the end, error bar included; None if it never does.

    >>> gains = [Interval(0.9, 0.8, 1.0), Interval(1.2, 1.1, 1.3)]
    >>> break_even([Point((1,), 1.0, (("FP8", gains[0]),)), Point((2,), 1.0, (("FP8", gains[1]),))], "FP8")
    2
    """
    since: int | None = None
    for point in points:
        found = point.of(name)
        if point.why_not:
            continue
        if found is None or found.low <= 1.0:
            since = None
        elif since is None:
            since = point.values[0]
    return since
