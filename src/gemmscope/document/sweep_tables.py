"""The tables of a sweep, forecast or measured, and how it is named in titles: FORECAST everywhere, or never."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import itemgetter

from gemmscope import units
from gemmscope.document.common import phrase
from gemmscope.document.table import Cell, Column, Table, across, grouped, rate_cell, table
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.results.sweep import GpuSweep, MeasuredPoint, MeasuredSweep, SweepPoint, Swept

MOST_ROWS = 14  # of the short view
MOST_ACROSS = 10  # values of the second size that are columns
OF: dict[Swept, str] = {"training step": "the training step", "linears": "the linears", "GEMM": "the GEMM"}


def mode_of(sweep: GpuSweep) -> str:
    """The mode of a measured sweep."""
    return sweep.mode if isinstance(sweep, MeasuredSweep) else ""


def about_sweep(sweep: GpuSweep, code: str) -> str:
    """A title, or a part of a sentence, about a sweep (`swept-` in `phrases.toml`): it says FORECAST everywhere, or never."""
    mode = mode_of(sweep)
    of = OF[sweep.subject]
    facts = {
        "gpu": sweep.gpu,
        "baseline": BASELINE,
        "of": of,
        "what": f"{sweep.subject[0].upper()}{sweep.subject[1:]}",
        "name": mode or sweep.gpu,
        "mode": f", {mode}" if mode else "",
        "in_mode": f" in {mode} mode" if mode else "",
        "at": f"{mode.capitalize()}: at" if mode else "At",
        "faster": f"{mode.capitalize()}: faster" if mode else "Faster",
    }
    return phrase(f"swept-{sweep.origin}-{code}", **facts)


def speedup_of(point: SweepPoint) -> float:
    """The speedup of the best recipe; 1 where that is BF16."""
    return point.winner.speedup.value if point.winner is not None and point.winner.speedup is not None else 1.0


def unsure(point: SweepPoint) -> bool:
    """Whether its best recipe may not fit in memory."""
    return point.winner is not None and point.winner.best in point.may_not_fit


def spread(length: int, most: int, also: int | None = None) -> list[int]:
    """Places spread over a list, both ends among them, and one more.

    >>> spread(4, 10), spread(100, 4), spread(100, 4, 50)
    ([0, 1, 2, 3], [0, 33, 66, 99], [0, 33, 50, 66, 99])
    """
    if length <= most:
        return list(range(length))
    return sorted({round(place * (length - 1) / (most - 1)) for place in range(most)} | ({also} if also is not None else set()))


def _time_head(sweep: GpuSweep) -> str:
    """The column of the baseline's time."""
    return f"{BASELINE} step ms" if sweep.subject == "training step" else f"{BASELINE} ms"


def _rate(point: SweepPoint) -> float | None:
    """TFLOP/s of a measured GEMM."""
    return point.tflops if isinstance(point, MeasuredPoint) else None


# --- the short view -------------------------------------------------------------------------------------------------------


def sweep_summary(sweeps: Sequence[GpuSweep]) -> Table | None:
    """One size: a row for each point, or as many as fit a screen. Two sizes: the plane of every GPU, or of the first mode."""
    if not any(sweep.points for sweep in sweeps):
        return None
    first, measured = sweeps[0], isinstance(sweeps[0], MeasuredSweep)
    if len(first.sizes) == 2:
        return _planes([first] if measured else sweeps)
    rows = [(sweep, point) for sweep in sweeps for point in _spread_points(sweep.points, max(MOST_ROWS // len(sweeps), 3))]
    of_point: list[Column[SweepPoint]] = [
        *across(first.sizes, lambda point, size: point.values[size], "d"),
        Column("Best recipe", lambda point: point.winner.best if point.winner else Cell(_why_not(point), level="warning")),
        Column(f"Speedup over {BASELINE}", lambda point: point.winner.speedup if point.winner else None, "x"),
        Column(
            "Too close to call",
            lambda point: ", ".join(point.winner.rivals) or None if point.winner else None,
            drop=3,
        ),
        Column("Host-bound", lambda point: _few_host_bound(point) if point.winner else None, drop=1),
        Column(_time_head(first), lambda point: point.baseline_ms if point.winner else None, "ms", drop=2),
        Column("Tokens/s/GPU", lambda point: _tokens(point) if point.winner else None, ",.0f", drop=5),
        Column("Memory GB", _memory, ".0f", drop=0 if any(unsure(point) for _, point in rows) else 4),
        Column("TFLOP/s", _rate, "TFLOP/s", when=measured),
    ]

    total = sum(len(sweep.points) for sweep in sweeps)
    shown = phrase("sweep-rows" if len(sweeps) > 1 else "sweep-points", shown=len(rows), points=total)
    return table(
        "summary",
        about_sweep(first, "summary"),
        rows,
        Column("Mode" if measured else "GPU", lambda row: about_sweep(row[0], "name"), when=len(sweeps) > 1),
        *(column.of(itemgetter(1)) for column in of_point),
        note=shown if len(rows) < total else "",
        sparse=True,
    )


def _tokens(point: SweepPoint) -> Cell | None:
    """The rate of the best recipe, whose time is known about as well as that in BF16."""
    return rate_cell(point.tokens_per_s, point.baseline_ms.half_width) if point.tokens_per_s and point.baseline_ms else None


def _memory(point: SweepPoint) -> Cell | None:
    """What the best recipe needs, marked where it may not fit."""
    if point.winner is None or point.memory_gb is None:
        return None
    text = f"{point.memory_gb:.0f}"
    return Cell(f"{text}, may not fit" if unsure(point) else text, point.memory_gb, level="warning" if unsure(point) else "")


def _spread_points(points: Sequence[SweepPoint], most: int) -> list[SweepPoint]:
    return [
        points[place]
        for place in spread(len(points), most, max(range(len(points)), key=lambda place: speedup_of(points[place]), default=0))
    ]


def _why_not(point: SweepPoint) -> str:
    """The reason in a few words; the table of all points and the findings have all of it."""
    if point.unfit and point.memory_gb:
        return f"does not fit: {point.memory_gb:.0f} GB"
    if isinstance(point, MeasuredPoint):
        return "does not fit in memory" if point.unfit else "not measured" if point.failure else "not possible"
    return point.why_not


def _host_bound(point: SweepPoint, every: str = "all") -> str | None:
    """The host-bound recipes: all of them, or all but the baseline, in few words."""
    low, bound = list(point.speedups), list(point.host_bound)
    if bound == [BASELINE, *low]:
        return every
    return f"all but {BASELINE}" if bound and bound == low else ", ".join(bound) or None


def _few_host_bound(point: SweepPoint) -> str | None:
    """The same in the short view: many are counted."""
    names = _host_bound(point)
    return units.counted(len(point.host_bound), "recipe") if names is not None and names.count(",") > 1 else names


def _planes(sweeps: Sequence[GpuSweep]) -> Table:
    """The best recipe as a letter with its speedup, for the values of both sizes; one GPU after the other."""
    first, points = sweeps[0], [point for sweep in sweeps for point in sweep.points]
    down, right = (sorted({point.values[size] for point in points}) for size in first.sizes)
    by_values = {(sweep.gpu, *(point.values[size] for size in first.sizes)): point for sweep in sweeps for point in sweep.points}
    rows = [(sweep.gpu, down[place]) for sweep in sweeps for place in spread(len(down), max(MOST_ROWS // len(sweeps), 3))]
    shown = [right[place] for place in spread(len(right), MOST_ACROSS)]
    numbers = count(1)
    of_recipes = {name: known.letter for name, known in recipes().items()}
    names = dict.fromkeys(name for sweep in sweeps for name in (BASELINE, *sweep.recipes))
    letters = {name: of_recipes.get(name) or str(next(numbers)) for name in names}

    winners = [point.winner for point in points if point.winner is not None]
    legend = [f"{letters[name]} = {name}" for name in dict.fromkeys(winner.best for winner in winners)]
    legend += ["? = too close to call"] if any(winner.rivals for winner in winners) else []
    legend += ["h = host-bound"] if any(map(_bound, points)) else []
    legend += ["m = may not fit in memory"] if any(map(unsure, points)) else []
    left_out = f" {phrase('sweep-some-points')}" if len(rows) * len(shown) < len(points) else ""

    return table(
        "summary",
        f"{about_sweep(first, 'plane')}; columns: {first.sizes[1]}",
        rows,
        Column("GPU", lambda row: row[0], when=len(sweeps) > 1),
        Column(first.sizes[0], lambda row: row[1], "d"),
        *across(shown, lambda row, value: _field(by_values.get((*row, value)), letters), "x"),
        note=f"{', '.join(legend)}.{left_out}",
    )


def _bound(point: SweepPoint) -> bool:
    return point.winner is not None and point.winner.best in point.host_bound


def _field(point: SweepPoint | None, letters: Mapping[str, str]) -> Cell | None:
    if point is None or point.winner is None:
        text = (
            "no fit"
            if point is not None and point.unfit
            else "failed"
            if (isinstance(point, MeasuredPoint) and point.failure)
            else ""
        )
        return Cell(text, level="warning") if text else None
    gain = speedup_of(point)
    mark = ("?" if point.winner.rivals else "") + ("h" if _bound(point) else "") + ("m" if unsure(point) else "")
    return Cell(f"{letters[point.winner.best]} {gain:.2f}{mark}", gain, level="" if point.gains else "warning")


# --- everything -----------------------------------------------------------------------------------------------------------


def points_table(sweep: GpuSweep) -> Table:
    """A row for each point: the best recipe, its rivals, its limits. For one size, the curves have the speedups."""
    measured = isinstance(sweep, MeasuredSweep)
    low = [name for name in sweep.recipes if name != BASELINE and len(sweep.sizes) > 1]

    def listed(names: Iterable[str]) -> str | None:
        return ", ".join(names) or None

    return table(
        f"points {mode_of(sweep)}",
        about_sweep(sweep, "points"),
        sweep.points,
        *across(sweep.sizes, lambda point, size: point.values[size], "d"),
        Column(_time_head(sweep), lambda point: point.baseline_ms, "ms"),
        *across(low, lambda point, name: point.speedups.get(name), "x"),
        Column("Tokens/s/GPU, best", _tokens, ",.0f"),
        Column("Memory GB, best", lambda point: point.memory_gb, ".0f"),
        Column("Largest speedup", lambda point: point.winner.speedup if point.winner else None, "x"),
        Column("Best", lambda point: point.winner.best if point.winner else None),
        Column(f"Faster than {BASELINE}", lambda point: ("yes" if point.gains else "no") if point.winner else None),
        Column("Too close to call against", lambda point: listed(point.winner.rivals) if point.winner else None),
        Column("Host-bound", lambda point: _host_bound(point, "all recipes") if point.winner else None),
        Column(
            "Does not fit",
            lambda point: (
                Cell(", ".join(point.unfit) if point.winner else "all recipes", level="warning") if point.unfit else None
            ),
        ),
        Column(about_sweep(sweep, "not-ranked"), lambda point: listed(point.not_possible) if point.winner else point.reason),
        Column("TFLOP/s, best", _rate, "TFLOP/s", when=measured),
        Column("GPU", lambda point: (isinstance(point, MeasuredPoint) and point.gpu) or None, when=measured),
        Column("GPU UUID", lambda point: (isinstance(point, MeasuredPoint) and point.uuid) or None, when=measured),
        sparse=measured,
    )


def break_even_table(sweep: GpuSweep) -> Table:
    """Where each recipe becomes faster than BF16: for two sizes, a row for all values of the second one with the same answer."""
    groups = grouped(((edge.recipe, edge.since), str(edge.at)) for edge in sweep.break_even)
    return table(
        f"break_even {mode_of(sweep)}",
        about_sweep(sweep, "break-even"),
        groups.items(),
        Column("Recipe", lambda group: group[0][0]),
        Column(f"From {sweep.sizes[0]}", lambda group: "nowhere" if group[0][1] is None else group[0][1], "d"),
        Column(f"At {sweep.sizes[-1]}", lambda group: ", ".join(group[1]), when=len(sweep.sizes) > 1),
    )
