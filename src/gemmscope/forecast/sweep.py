"""Many configurations at once: the best precision at each, what it gains in the training step, and where gains begin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast, launching_ms, speedup
from gemmscope.interval import Interval
from gemmscope.measure.findings import too_close
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.workload.derive import derive


@dataclass(frozen=True)
class Point:
    """One configuration: milliseconds of the baseline's step, and the speedup of every recipe that can run it.

    `host_bound` names the recipes whose step takes a CPU longer to launch than the GPU to run: their gain is not to be had.
    `cannot` says of the others why they cannot.
    """

    values: tuple[int, ...]
    step_ms: float = 0.0
    speedups: tuple[tuple[str, Interval], ...] = ()
    why_not: str = ""
    host_bound: tuple[str, ...] = ()
    cannot: tuple[tuple[str, str], ...] = ()

    @property
    def best(self) -> tuple[str, Interval]:
        """The fastest recipe; the baseline where none gains."""
        none = (BASELINE, Interval(1.0, 1.0, 1.0))
        return max([none, *self.speedups], key=lambda each: each[1].value)

    @property
    def rivals(self) -> list[str]:
        """Recipes that cannot be told apart from the best one: their error bars overlap."""
        best, gain = self.best
        if best == BASELINE:
            return [name for name, each in self.speedups if each.high >= 1.0]
        return rivals_of(best, gain, self.speedups)

    @property
    def certain(self) -> bool:
        """Whether the best one is so for all its doubt."""
        return not self.rivals

    def of(self, name: str) -> Interval | None:
        return dict(self.speedups).get(name)


def rivals_of(best: str, gain: Interval, all_gains: Iterable[tuple[str, Interval]]) -> list[str]:
    """Which recipes may be as fast as the best one, the baseline among them.

    >>> rivals_of("A", Interval(1.2, 1.1, 1.3), [("A", Interval(1.2, 1.1, 1.3)), ("B", Interval(1.1, 1.0, 1.15))])
    ['B']
    """
    close = [BASELINE] if too_close(gain) else []
    return close + [name for name, each in all_gains if name != best and each.high > gain.low]


AT_A_TIME = 400
WORTH_SHARING, MOST_CORES = 3000, 8
MOST_KEPT = 50_000  # products remembered from one batch to the next
Configuration = tuple[tuple[int, ...], ModelSpec, RunSpec]


def forecast_points(forecaster: Forecaster, wanted: Sequence[Configuration], recipes: Sequence[str], dp: int = 1) -> list[Point]:
    """All of them; thousands are shared among the machine's cores."""
    cores = min(os.cpu_count() or 1, MOST_CORES)
    if len(wanted) < WORTH_SHARING or cores == 1:
        return _points(forecaster, wanted, recipes, dp)
    shares = [wanted[len(wanted) * core // cores : len(wanted) * (core + 1) // cores] for core in range(cores)]
    try:
        with ProcessPoolExecutor(cores) as pool:
            found = [pool.submit(_points, forecaster, share, recipes, dp) for share in shares]
            return [point for each in found for point in each.result()]
    except (OSError, BrokenProcessPool):  # a machine that grants no further processes, or ends them
        return _points(forecaster, wanted, recipes, dp)


def _points(forecaster: Forecaster, wanted: Sequence[Configuration], recipes: Sequence[str], dp: int) -> list[Point]:
    """Some hundreds at a time: their products are gathered first and computed together."""
    points: list[Point] = []
    for first in range(0, len(wanted), AT_A_TIME):
        some = wanted[first : first + AT_A_TIME]
        steps = [StepForecast(forecaster, model, run, derive(model, run), dp) for _, model, run in some]
        forecaster.prepare((case for step in steps for case in step.cases), [BASELINE, *recipes])
        points += [_point(values, step, recipes) for (values, _, _), step in zip(some, steps, strict=True)]
        forecaster.forget(beyond=MOST_KEPT)
    return points


def _point(values: tuple[int, ...], step: StepForecast, recipes: Sequence[str]) -> Point:
    reasons = {name: step.why_not(name) for name in recipes if name != BASELINE}
    able = [name for name, why in reasons.items() if not why]
    found = {name: step.step(name) for name in (BASELINE, *able)}
    gains = tuple((name, speedup(found[BASELINE], found[name]).interval()) for name in able)
    bound = tuple(name for name, each in found.items() if launching_ms(step, name) > each.total.value)
    cannot = tuple((name, why) for name, why in reasons.items() if why)
    return Point(values, found[BASELINE].total.value, gains, host_bound=bound, cannot=cannot)


def break_even(points: Sequence[Point], name: str) -> int | None:
    """The first value of the first size from which a recipe gains to the end, error bar included; None if it never does.

    A point that is host-bound gains nothing.

    >>> gains = [Interval(0.9, 0.8, 1.0), Interval(1.2, 1.1, 1.3)]
    >>> break_even([Point((1,), 1.0, (("FP8", gains[0]),)), Point((2,), 1.0, (("FP8", gains[1]),))], "FP8")
    2
    """
    since: int | None = None
    for point in points:
        found = point.of(name)
        if point.why_not:
            continue
        if found is None or found.low <= 1.0 or name in point.host_bound:
            since = None
        elif since is None:
            since = point.values[0]
    return since
