"""The compact table of a sweep: the best recipe at every point, or at as many as fit a screen."""

from collections.abc import Sequence
from itertools import count

from gemmscope import units
from gemmscope.document.sweep_words import time_name, wording
from gemmscope.document.table import NOTHING, Cell, Column, Table, columns, number, speedup_cell, time_cell, without_empty
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.results.sweep import GpuSweep, MeasuredPoint, MeasuredSweep, SweepPoint

MOST_ROWS = 14
MOST_ACROSS = 10


def sweep_summary(sweeps: Sequence[GpuSweep]) -> Table | None:
    """One size: a row for each point. Two sizes: the plane of one GPU (of the first mode), or the best point of each."""
    if not any(sweep.points for sweep in sweeps):
        return None
    if len(sweeps[0].sizes) == 1:
        return _points(sweeps)
    return _plane(sweeps[0]) if len(sweeps) == 1 or sweeps[0].origin == "measured" else _best_points(sweeps)


def speedup_of(point: SweepPoint) -> float:
    """The speedup of the best recipe; 1 where that is BF16."""
    return point.winner.speedup.value if point.winner is not None and point.winner.speedup is not None else 1.0


def _points(sweeps: Sequence[GpuSweep]) -> Table:
    several, total = len(sweeps) > 1, sum(len(sweep.points) for sweep in sweeps)
    rows = [
        (*([Cell(wording(sweep).name)] if several else []), *_row(point))
        for sweep in sweeps
        for point in _spread_points(sweep.points, max(MOST_ROWS // len(sweeps), 3))
    ]
    time = time_name(sweeps[0])
    dropped = {time: 2, "Too close to call": 3, "Host-bound": 1, "Memory GB": 4, "Tokens/s/GPU": 5}
    sizes = columns((), sweeps[0].sizes)
    heads = columns(("Best recipe",), (f"Speedup over {BASELINE}",))
    rest = columns(("Too close to call", "Host-bound"), (time, "Tokens/s/GPU", "Memory GB"), dropped)
    left_out = f"{len(rows)} of {total:,} {'rows' if several else 'points'} are shown." if len(rows) < total else ""
    rest = (*rest, *(columns((), ("TFLOP/s",)) if isinstance(sweeps[0], MeasuredSweep) else ()))
    gpu = columns(("Mode" if isinstance(sweeps[0], MeasuredSweep) else "GPU",), ()) if several else ()
    return without_empty(Table(wording(sweeps[0]).summary, (*gpu, *sizes, *heads, *rest), tuple(rows), left_out))


def _spread_points(points: Sequence[SweepPoint], most: int) -> list[SweepPoint]:
    best = max(range(len(points)), key=lambda place: speedup_of(points[place]), default=0)
    return [points[place] for place in spread(len(points), most, best)]


def _row(point: SweepPoint) -> tuple[Cell, ...]:
    sizes = [number(value, str(value)) for value in point.values.values()]
    if point.winner is None:
        why_not = f"does not fit: {point.memory_gb:.0f} GB" if point.unfit and point.memory_gb else _why_not(point)
        return (*sizes, Cell(why_not, level="warning"), *[NOTHING] * 6, *_gemm_rate(point))
    rivals = Cell(", ".join(point.winner.rivals) or "-")
    baseline = time_cell(point.baseline_ms)
    rate = number(point.tokens_per_s, f"{point.tokens_per_s:,.0f}" if point.tokens_per_s else None)
    memory = number(point.memory_gb, f"{point.memory_gb:.0f}" if point.memory_gb else None)
    gain = speedup_cell(point.winner.speedup)
    return (*sizes, Cell(point.winner.best), gain, rivals, Cell(_host_bound(point)), baseline, rate, memory, *_gemm_rate(point))


def _gemm_rate(point: SweepPoint) -> tuple[Cell, ...]:
    """TFLOP/s of a measured GEMM; empty for the points of forecasts."""
    if not isinstance(point, MeasuredPoint):
        return ()
    return (number(point.tflops, units.tflops(point.tflops) if point.tflops is not None else None),)


def _why_not(point: SweepPoint) -> str:
    """The reason in a few words; the table of all points and the findings have all of it."""
    if isinstance(point, MeasuredPoint):
        return "does not fit in memory" if point.unfit else "not measured" if point.failure else "not possible"
    return point.why_not


def _host_bound(point: SweepPoint) -> str:
    every, bound = [BASELINE, *point.speedups], list(point.host_bound)
    if bound and bound in (every, every[1:]):
        return "all" if bound == every else f"all but {BASELINE}"
    return ", ".join(bound) or "-" if len(bound) < 3 else units.counted(len(bound), "recipe")


def _plane(sweep: GpuSweep) -> Table:
    """The best recipe as a letter with its speedup, for the values of both sizes."""
    down, across = (sorted({point.values[size] for point in sweep.points}) for size in sweep.sizes)
    by_values = {tuple(point.values[size] for size in sweep.sizes): point for point in sweep.points}
    rows = [down[place] for place in spread(len(down), MOST_ROWS)]
    shown = [across[place] for place in spread(len(across), MOST_ACROSS)]
    letters = _letters(sweep)
    cells = tuple((Cell(str(row), row), *(_field(by_values.get((row, column)), letters) for column in shown)) for row in rows)
    used = dict.fromkeys(point.winner.best for point in sweep.points if point.winner is not None)
    legend = [f"{letters[name]} = {name}" for name in used]
    legend += ["? = too close to call"] if any(point.winner and point.winner.rivals for point in sweep.points) else []
    legend += ["h = host-bound"] if any(_bound(point) for point in sweep.points) else []
    left_out = " Not all points are shown." if len(rows) * len(shown) < len(sweep.points) else ""
    heads = (Column(sweep.sizes[0]), *(Column(str(value)) for value in shown))
    title = f"{wording(sweep).plane}; columns: {sweep.sizes[1]}"
    return Table(title, heads, cells, f"{', '.join(legend)}.{left_out}")


def _letters(sweep: GpuSweep) -> dict[str, str]:
    """A letter or number for each recipe."""
    numbers = count(1)
    letters = {name: known.letter for name, known in recipes().items()}
    return {name: letters.get(name) or str(next(numbers)) for name in (BASELINE, *sweep.recipes)}


def _bound(point: SweepPoint) -> bool:
    return point.winner is not None and point.winner.best in point.host_bound


def _field(point: SweepPoint | None, letters: dict[str, str]) -> Cell:
    if point is None or point.winner is None:
        failed = isinstance(point, MeasuredPoint) and point.failure
        text = "no fit" if point is not None and point.unfit else "failed" if failed else ""
        return Cell(text, level="warning") if text else NOTHING
    gain = speedup_of(point)
    mark = ("?" if point.winner.rivals else "") + ("h" if _bound(point) else "")
    return Cell(f"{letters[point.winner.best]} {gain:.2f}{mark}", gain, level="" if point.gains else "warning")


def _best_points(sweeps: Sequence[GpuSweep]) -> Table:
    rows = []
    for sweep in sweeps:
        if sweep.points:
            best = max(sweep.points, key=speedup_of)
            rows.append((Cell(sweep.gpu), *_row(best)))
    heads = (*columns(("GPU",), sweeps[0].sizes), *columns(("Best recipe",), (f"Speedup over {BASELINE}",)))
    dropped = {"Host-bound": 1, "Memory GB": 4, "Tokens/s/GPU": 5}
    rest = columns(("Too close to call", "Host-bound"), (f"{BASELINE} step ms", "Tokens/s/GPU", "Memory GB"), dropped)
    return Table("The largest speedup of every GPU [90% error bar]", (*heads, *rest), tuple(rows))


def spread(length: int, most: int, also: int | None = None) -> list[int]:
    """Places spread over a list, both ends among them, and one more.

    >>> spread(4, 10), spread(100, 4), spread(100, 4, 50)
    ([0, 1, 2, 3], [0, 33, 66, 99], [0, 33, 50, 66, 99])
    """
    if length <= most:
        return list(range(length))
    places = {round(place * (length - 1) / (most - 1)) for place in range(most)}
    return sorted(places | ({also} if also is not None else set()))
