"""The tables of a fleet: outliers, versions that differ, figures, nodes, GPUs, and their health."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

from gemmscope import units
from gemmscope.document.fleet_view import FleetView, times_of
from gemmscope.document.table import NOTHING, Cell, Table, columns, difference_cell, number, share_cell, without_empty
from gemmscope.interval import Interval
from gemmscope.results.fleet import FleetFigure, FleetGpu, Outlier

MOST_LISTED, MOST_ALIKE = 6, 8  # rows of the short table: beside warnings, and without outliers
MOST_FAILED = 2  # of these rows, for GPUs that were not measured: a warning lists them too
LEAST_THROTTLED = 0.05  # reasons with a smaller share of bursts are not named
SHORT_DROPS = {"Limited by": 4, "°C": 2, "W": 3, "MHz": 1}
OUTLIER_NOTE = (
    "Speed is relative to the median GPU of the same type: minus is slower in every metric. The score is in robust standard "
    "deviations. Other differences are evidence of a cause, not proof."
)
FIGURE_NOTE = (
    "Median over the {kind}s. The chip-to-chip spread is a standard deviation, with the measurement noise removed; the noise "
    "is the standard error of one {kind}'s metric. An outlier is further from the median than the limit."
)


def value_cell(value: Interval | None, unit: str, *, both: bool = False) -> Cell:
    """A metric in its own unit. `both`: the ends of its interval instead of its value."""
    if value is None:
        return NOTHING
    if both:
        digits = units.ratio_decimals(value) if unit == "x" else units.fixed(value, most=3)
        return Cell(units.ends(value, digits), value.value, value.low, value.high)
    return Cell(units.short_speedup(value) if unit == "x" else units.milliseconds(value), value.value, value.low, value.high)


def figure_name(figure: FleetFigure) -> str:
    """The name of a metric with its unit, for a column."""
    return figure.name if figure.unit == "x" else f"{figure.name} {figure.unit}"


def throttled_text(gpu: FleetGpu) -> str:
    """Why the clock was below its maximum, the most frequent reason first."""
    reasons = sorted(gpu.condition.throttled.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {100 * share:.0f}%" for reason, share in reasons if share >= LEAST_THROTTLED) or "-"


def evidence_text(outliers: Sequence[Outlier]) -> str:
    """What else differs at these outliers, without repetition."""
    return " ".join(dict.fromkeys(fact.text for outlier in outliers for fact in outlier.evidence)) or "-"


def _level(view: FleetView, gpu: FleetGpu) -> Literal["warning", ""]:
    return "warning" if view.is_slow(gpu) else ""


def summary_table(view: FleetView) -> Table | None:
    """The GPUs to look at first: outliers, those that were not measured, then the slowest others."""
    quiet = not view.result.outliers and len(view.result.measured) == len(view.result.gpus)
    failed = [gpu for gpu in view.ordered if gpu.failure]
    left_out = {gpu.place for gpu in failed[MOST_FAILED:]} if len(failed) < len(view.ordered) else set()
    listed = [gpu for gpu in view.ordered if gpu.place not in left_out][: MOST_ALIKE if quiet else MOST_LISTED]
    if not listed:
        return None
    rows = []
    for gpu in listed:
        worst, condition = view.worst(gpu), gpu.condition
        called, level = view.outliers_of(gpu), _level(view, gpu)
        state = (
            *(number(value, f"{value:.0f}" if value is not None else None) for value in (condition.sm_mhz, condition.power_w)),
            number(condition.temperature_c, f"{condition.temperature_c:.0f}" if condition.temperature_c is not None else None),
        )
        verdict = "not measured" if gpu.failure else called[0].side if called else "-"
        rows.append(
            (
                Cell(gpu.place),
                Cell(verdict, level="warning" if gpu.failure or level else ""),
                difference_cell(worst.ratio if worst is not None else None, level=level),
                Cell(worst.figure.name if worst is not None else "-"),
                *state,
                Cell(throttled_text(gpu)),
            )
        )
    heads = (
        *columns((view.kind, "Outlier"), ("Speed",)),
        *columns(("Metric",), ()),
        *columns((), ("MHz", "W", "°C"), SHORT_DROPS),
        *columns(("Limited by",), (), SHORT_DROPS),
    )
    more = len(view.result.gpus) - len(listed)
    note = f"{units.counted(more, f'more {view.kind}')} not shown here. " if more > 0 else ""
    compared = any(view.worst(gpu) is not None for gpu in listed)
    note += f"Speed: difference from the median {view.kind}." if compared else ""
    title = f"{view.kind}s, slowest first" if compared else f"{view.kind}s"
    table = without_empty(Table(title, heads, tuple(rows), note.strip()))
    return table if len(table.columns) > 1 else None


def outlier_table(view: FleetView) -> Table | None:
    """Every outlier in every figure."""
    listed = [*view.slow, *view.fast]
    if not listed:
        return None
    rows = tuple(
        (
            Cell(f"{outlier.where} (whole node)" if outlier.whole_node else outlier.where),
            Cell(outlier.figure),
            Cell(outlier.side, level="warning" if outlier.side == "slow" else ""),
            difference_cell(outlier.ratio, level="warning" if outlier.side == "slow" else ""),
            Cell(_ends(outlier.ratio)),
            number(outlier.score, f"{outlier.score:.1f}"),
            Cell(", ".join(f"{name} {units.difference(ratio)}" for name, ratio in outlier.also.items()) or "-"),
            Cell(evidence_text([outlier])),
        )
        for outlier in listed
    )
    heads = (
        *columns(("GPU", "Metric", "Outlier"), ("Speed",)),
        *columns(("95% interval",), ()),
        *columns((), ("Score",)),
        *columns(("Other metrics", "Also different"), ()),
    )
    return without_empty(Table("Outliers", heads, rows, OUTLIER_NOTE))


def _ends(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return "-"
    return f"{units.difference(ratio.low)} to {units.difference(ratio.high)}"


def difference_table(view: FleetView) -> Table | None:
    """Versions and limits that are not the same everywhere."""
    if not view.result.differences:
        return None
    most = max(len(row.values) for row in view.result.differences)
    rows = tuple(
        (Cell(row.name), *(Cell(value or "-") for value in row.values), *[NOTHING] * (most - len(row.values)))
        for row in view.result.differences
    )
    heads = ("Most common", *(f"Value {place}" for place in range(2, most + 1)))
    return Table("Versions and limits that differ", columns(("What", *heads), ()), rows)


def figure_table(view: FleetView) -> Table | None:
    """The median of every figure, and how far GPUs are from it."""
    if not view.result.figures:
        return None
    rows = tuple(
        (
            Cell(figure_name(figure)),
            Cell(figure.group if len(view.groups) > 1 else "-"),
            number(figure.gpus, f"{figure.gpus:,}"),
            value_cell(figure.center, figure.unit),
            _rate_cell(figure),
            value_cell(figure.another, figure.unit, both=True),
            _share_range(figure.spread),
            share_cell(figure.noise),
            share_cell(figure.limit),
        )
        for figure in view.result.figures
    )
    kind = view.kind
    numbers = (
        f"{kind}s",
        "Median",
        "TFLOP/s",
        f"Range of another {kind}, 90%",
        "Chip-to-chip spread",
        f"Noise of one {kind}",
        "Outlier limit",
    )
    heads = columns(("Metric", f"{kind} type"), numbers)
    return without_empty(Table(f"Metrics over all {kind}s", heads, rows, FIGURE_NOTE.format(kind=kind)))


def _rate_cell(figure: FleetFigure) -> Cell:
    """The rate of the median GPU in TFLOP/s."""
    if not figure.flops or not figure.center.value > 0:
        return NOTHING
    rate = figure.flops / figure.center.value / 1e9
    return number(rate, units.tflops(rate))


def _share_range(share: Interval | None) -> Cell:
    if share is None or not share.known:
        return share_cell(share.value if share is not None else None)
    text = f"{100 * share.value:.2f}% [{100 * (share.low or 0.0):.2f}, {100 * (share.high or 0.0):.2f}]"
    return Cell(text, share.value, share.low, share.high)


def node_table(view: FleetView) -> Table | None:
    """A row for each node, the one with the slowest GPU first."""
    if len(view.nodes) < 2:
        return None
    places = {gpu.place: place for place, gpu in enumerate(view.ordered)}
    rows = []
    for node, gpus in sorted(view.nodes.items(), key=lambda item: min(places[gpu.place] for gpu in item[1])):
        standings = {gpu.place: worst for gpu in gpus if (worst := view.worst(gpu)) is not None}
        slowest = min(standings, key=lambda place: standings[place].ratio.value, default="")
        own = [standing for gpu in gpus for standing in times_of(view.standings[gpu.place])]
        heat = [gpu.condition.temperature_c for gpu in gpus if gpu.condition.temperature_c is not None]
        called = sum(view.is_slow(gpu) for gpu in gpus)
        failed = sum(bool(gpu.failure) for gpu in gpus)
        rows.append(
            (
                Cell(node),
                number(len(gpus)),
                Cell(str(called) if called else "-", float(called), level="warning" if called else ""),
                Cell(str(failed) if failed else "-", float(failed), level="warning" if failed else ""),
                difference_cell(Interval(median(standing.ratio.value for standing in own)) if own else None),
                difference_cell(standings[slowest].ratio if slowest else None),
                number(max(heat, default=None), f"{max(heat):.0f}" if heat else None),
                Cell(slowest or "-"),
            )
        )
    kind = view.kind
    numbers = (f"{kind}s", "Slow", "Not measured", "Speed, median of times", "Speed of the slowest", "Hottest °C")
    heads = (*columns(("Node",), numbers), *columns((f"Slowest {kind}",), ()))
    note = f"Speed is the difference from the median {kind} of the fleet: minus is slower."
    return without_empty(Table(f"Nodes, by their slowest {kind}", heads, tuple(rows), note))


def gpu_table(view: FleetView) -> Table:
    """A row for each GPU with all its figures, the slowest first."""
    varying = list(dict.fromkeys(name for gpu in view.result.gpus for name in gpu.versions))
    unit_of = {figure.name: figure.unit for figure in view.result.figures}
    titles = {figure.name: figure_name(figure) for figure in view.result.figures}
    rows = []
    for gpu in view.ordered:
        worst, condition = view.worst(gpu), gpu.condition
        called, versions = view.outliers_of(gpu), view.result.versions_of(gpu) if varying else {}
        rows.append(
            (
                Cell(gpu.place),
                Cell(gpu.group or "-"),
                Cell(called[0].side if called else "-", level="warning" if view.is_slow(gpu) else ""),
                difference_cell(worst.ratio if worst is not None else None),
                Cell(worst.figure.name if worst is not None else "-"),
                *(value_cell(gpu.figures.get(name), unit_of[name]) for name in view.names),
                *_numbers(condition.sm_mhz, condition.power_w, condition.power_limit_w, condition.temperature_c),
                number(gpu.repeats),
                Cell(throttled_text(gpu)),
                *(Cell(versions.get(name) or "-") for name in varying),
                Cell(gpu.failure or "-", level="warning" if gpu.failure else ""),
                Cell(gpu.uuid or "-"),
                Cell(gpu.file or "-"),
            )
        )
    states = ("SM clock MHz", "Power W", "Power limit W", "Temperature °C", "Repeats")
    heads = (
        *columns((view.kind, f"{view.kind} type", "Outlier"), ("Speed",)),
        *columns(("Slowest metric",), (*(titles[name] for name in view.names), *states)),
        *columns(("Limited by", *varying, "Not measured because", "UUID", "Run file"), ()),
    )
    note = "Clock, power and temperature are medians over the bursts. Percentages are the share of bursts under each limit."
    return without_empty(Table(f"Every {view.kind}, slowest first", heads, tuple(rows), note))


def _numbers(*values: float | None) -> Iterator[Cell]:
    for value in values:
        yield number(value, f"{value:.0f}" if value is not None else None)


def health_table(view: FleetView) -> Table | None:
    """Memory errors and the state of links, as the drivers report them."""
    own = (name for gpu in view.result.gpus for name in gpu.condition.health)
    names = list(dict.fromkeys((*view.result.health, *own)))
    if not names:
        return None
    rows = []
    for gpu in view.ordered:
        health = view.result.health_of(gpu) if not gpu.failure else gpu.condition.health
        values = [health.get(name) for name in names]
        cells = [Cell("-" if value is None else str(value), _plain(value)) for value in values]
        rows.append((Cell(gpu.place), *cells))
    return without_empty(
        Table("Memory errors and links of every GPU", columns(("GPU",), [name.replace("_", " ") for name in names]), tuple(rows))
    )


def _plain(value: int | str | None) -> float | None:
    return float(value) if isinstance(value, int) else None
