"""Many configurations at once: the best recipe at each, its speedup of the training step, and where speedups begin."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from gemmscope import signals
from gemmscope.findings import Finding, finding
from gemmscope.forecast.communication import Network, cluster
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import memory_of
from gemmscope.forecast.processes import computed, no_garbage_collection, processes_for
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import GB, GpuSpec
from gemmscope.grouping import grouped
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import winner_among
from gemmscope.results.sweep import GpuSweep, SweepPoint, break_evens
from gemmscope.workload.derive import derive

AT_A_TIME = 200
WORTH_SHARING = 3000  # points
MOST_KEPT = 50_000  # GEMMs remembered from one batch to the next
Point = TypeVar("Point")
Configuration = tuple[dict[str, int], ModelSpec, RunSpec]


def forecast_sweep(
    forecaster: Forecaster,
    possible: Sequence[Configuration],
    impossible: Sequence[SweepPoint],
    recipes: Sequence[str],
    network: Network | None = None,
    findings: Iterable[Finding] = (),
    on_points: Callable[[int], None] = lambda _: None,
    before: int = 0,
) -> list[GpuSweep]:
    """Forecast every configuration on one GPU, sorted by size; impossible ones are included. `findings`: more about this GPU.

    After a signal, returns the points computed so far, without the break-even; nothing if there are none. `on_points` is called
    with the number of points so far, and of those `before`.
    """
    points: list[SweepPoint] = []
    function, shares = partial(points_of, forecaster, possible, recipes, network, _point), range(0, len(possible), AT_A_TIME)
    with signals.defer_signals() as pending:
        for some in computed(function, shares, processes_for(len(possible), WORTH_SHARING), pending):
            points += some
            on_points(before + len(points))
    if not points:
        return []
    complete = len(points) == len(possible)
    points += impossible
    points.sort(key=lambda point: tuple(point.values.values()))
    return [
        GpuSweep(
            gpu=forecaster.chip.name,
            sizes=tuple(points[0].values),
            recipes=tuple(recipes),
            points=tuple(points),
            break_even=break_evens(points, recipes) if complete else (),
            findings=(*_findings(points, forecaster.chip), *findings),
        )
    ]


@no_garbage_collection()
def points_of(
    forecaster: Forecaster,
    wanted: Sequence[Configuration],
    recipes: Sequence[str],
    network: Network | None,
    point: Callable[[dict[str, int], ModelSpec, StepForecast, Sequence[str]], Point],
    first: int,
) -> list[Point]:
    """The points of one share, as `point` makes them. Its GEMMs are collected first and computed in one batch."""
    some = wanted[first : first + AT_A_TIME]
    steps = [StepForecast(forecaster, model, run, derive(model, run), network) for _, model, run in some]
    forecaster.prepare((case for step in steps for case in step.cases), [BASELINE, *recipes])
    points = [point(values, model, step, recipes) for (values, model, _), step in zip(some, steps, strict=True)]
    forecaster.forget(beyond=MOST_KEPT)
    return points


def _point(values: dict[str, int], model: ModelSpec, forecast: StepForecast, recipes: Sequence[str]) -> SweepPoint:
    reasons = {name: forecast.why_not(name) for name in recipes if name != BASELINE}
    able = [name for name, reason in reasons.items() if not reason]
    steps = {name: forecast.step(name) for name in (BASELINE, *able)}

    ratio = partial(forecast.speedup, steps)
    run, chip = forecast.run, forecast.forecaster.chip
    needed = memory_of(model).rank(run, steps, chip)
    unfit, unsure = (tuple(name for name in steps if needed[name].fit == fit) for fit in ("does not fit", "may not fit"))
    fitting = {name: step for name, step in steps.items() if name not in unfit}
    speedups = {name: ratio(name, BASELINE) for name in able if name not in unfit}
    # What may not fit is recommended only where nothing else is left.
    winner = winner_among(speedups, ratio, (*unfit, *unsure) if len(unfit) + len(unsure) < len(steps) else unfit)
    failed = {name: reason for name, reason in reasons.items() if reason}
    point = partial(SweepPoint, values=values, unfit=unfit, may_not_fit=unsure, gpus=run.gpus, not_possible=failed)
    if winner is None:
        needed_gb = min(memory.total_bytes for memory in needed.values()) / GB
        why_not = f"does not fit: needs about {needed_gb:.0f} GB, and one GPU has {chip.memory_bytes / GB:.0f} GB"
        return point(why_not=why_not, memory_gb=needed_gb)
    return point(
        baseline_step_ms=steps[BASELINE].interval,
        speedups=speedups,
        winner=winner,
        host_bound=tuple(name for name, step in fitting.items() if step.host_bound),
        memory_gb=needed[winner.best].total_bytes / GB,
        tokens_per_s=run.tokens_per_gpu / steps[winner.best].time_ms * 1000,
    )


def _findings(points: Sequence[SweepPoint], chip: GpuSpec) -> Iterator[Finding]:
    """Findings about points that do not fit in memory, are host-bound, or cannot run a recipe: one for each set of recipes."""
    memory_gb = chip.memory_bytes / GB
    unfit = grouped((() if point.winner is None else point.unfit, point.place) for point in points if point.unfit)
    for recipes, places in unfit.items():
        if recipes:
            yield finding("sweep-recipe-does-not-fit", recipes=list(recipes), places=places, memory_gb=memory_gb)
        else:
            yield finding("sweep-does-not-fit", places=places, memory_gb=memory_gb)
    if unsure := [point.place for point in points if point.may_not_fit]:
        yield finding("sweep-may-not-fit", places=unsure, memory_gb=memory_gb)
    if bound := {point.place: point.host_bound for point in points if point.host_bound}:
        names = list(dict.fromkeys(chain(*bound.values())))
        layer_ms = cluster()["host"]["layer_ms"]["other"]
        yield finding("sweep-host-bound", recipes=names, places=list(bound), layer_ms=layer_ms)
    for failed, where in grouped((tuple(point.not_possible), point) for point in points if point.not_possible).items():
        places, reason = [point.place for point in where], where[0].not_possible[failed[0]]
        yield finding("sweep-recipe-not-possible", recipes=list(failed), places=places, reason=reason)
