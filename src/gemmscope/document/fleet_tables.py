"""The tables and charts of a fleet: outliers, figures, nodes, GPUs and their health; its GPUs in the order of their speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from gemmscope import units
from gemmscope.document.charts import HeatCell, HeatMap, RankChart, Ranked
from gemmscope.document.common import facts, phrase
from gemmscope.document.table import (
    NOTHING,
    Cell,
    Column,
    Facts,
    Table,
    Value,
    across,
    difference_cell,
    ends_text,
    estimated,
    grouped,
    table,
)
from gemmscope.interval import Interval
from gemmscope.results.fleet import FleetFigure, FleetGpu, FleetResult, Outlier

MOST_LISTED, MOST_ALIKE = 6, 8  # rows of the short table: beside warnings, and without outliers
MOST_FAILED = 2  # of these rows, for GPUs that were not measured: a warning lists them too
LEAST_THROTTLED = 0.05  # reasons with a smaller share of bursts are not named
MOST_CHARTS = 3
MOST_POINTS = 300  # of one chart; outliers are always drawn
MOST_ENDS = 40  # points at either end that are always drawn
MOST_NODES = 32  # rows of the heat map
MOST_LABELED = 16  # columns of a heat map whose cells have room for text
ON_CPU = "CPU"


@dataclass(frozen=True)
class Standing:
    """A figure of one GPU, relative to the median of its group: below one is slow. A GPU that is alone in its group has none."""

    figure: FleetFigure
    ratio: Interval


@dataclass(frozen=True)
class FleetView:
    """What the tables and charts of a fleet share."""

    result: FleetResult

    @cached_property
    def groups(self) -> dict[str, int]:
        """The groups of GPUs that are compared with each other, and how many each has; the largest first."""
        return dict(Counter(gpu.group for gpu in self.result.gpus if gpu.group).most_common())

    @cached_property
    def kind(self) -> str:
        """What is measured: GPUs, or CPUs to try out the command."""
        return ON_CPU if self.groups and all(name.startswith(ON_CPU) for name in self.groups) else "GPU"

    @cached_property
    def nodes(self) -> dict[str, tuple[FleetGpu, ...]]:
        """The GPUs of every node."""
        return grouped((gpu.node, gpu) for gpu in self.result.gpus)

    @cached_property
    def _called(self) -> dict[tuple[str, bool], tuple[Outlier, ...]]:
        """The outliers by their place, or by their node if they are whole nodes."""
        return grouped(((outlier.where, outlier.whole_node), outlier) for outlier in self.result.outliers)

    @cached_property
    def slowest_nodes(self) -> list[str]:
        """The nodes, those with the slowest GPUs first."""
        return list(dict.fromkeys(gpu.node for gpu in self.ordered))

    def outliers_of(self, gpu: FleetGpu) -> list[Outlier]:
        """The outliers of a GPU: its own, and those of its whole node."""
        return [*self._called.get((gpu.place, False), ()), *self._called.get((gpu.node, True), ())]

    def is_slow(self, gpu: FleetGpu) -> bool:
        return any(outlier.side == "slow" for outlier in self.outliers_of(gpu))

    @cached_property
    def slow(self) -> list[Outlier]:
        """The slow GPUs and nodes, the slowest first."""
        return sorted((one for one in self.result.outliers if one.side == "slow"), key=lambda one: one.ratio.value)

    @cached_property
    def fast(self) -> list[Outlier]:
        """The fast GPUs and nodes, the fastest first."""
        return sorted((one for one in self.result.outliers if one.side == "fast"), key=lambda one: -one.ratio.value)

    @cached_property
    def standings(self) -> Mapping[str, list[Standing]]:
        """For every place, each of its figures relative to the median."""

        def known(gpu: FleetGpu) -> Iterator[Standing]:
            for name, value in gpu.figures.items():
                figure = self.result.figure(name, gpu.group)
                if figure is not None and figure.gpus > 1 and (ratio := relative(value, figure)) is not None:
                    yield Standing(figure, ratio)

        return {gpu.place: list(known(gpu)) for gpu in self.result.gpus}

    def worst(self, gpu: FleetGpu) -> Standing | None:
        """The metric to show of a GPU: the one in which it is an outlier, else the time in which it is slowest."""
        standings = self.standings[gpu.place]
        called = [outlier.figure for outlier in self.outliers_of(gpu)[:1]]
        among = [standing for standing in standings if standing.figure.name in called] or times_of(standings)
        return min(among, key=lambda standing: standing.ratio.value, default=None)

    @cached_property
    def ordered(self) -> list[FleetGpu]:
        """Slow outliers, then GPUs that were not measured, then the others; the slowest first in each."""

        def order(gpu: FleetGpu) -> tuple[int, float]:
            worst = self.worst(gpu)
            return 1 if gpu.failure else 0 if self.is_slow(gpu) else 2, (worst.ratio.value if worst is not None else math.inf)

        return sorted(self.result.gpus, key=order)


def relative(value: Interval, figure: FleetFigure) -> Interval | None:
    """The speed of a GPU in one metric, relative to the median GPU; None if one of them is not a positive number."""
    center = figure.center.value
    if not 0 < center < math.inf or not 0 < value.value < math.inf:
        return None
    return value.times(1 / center) if figure.higher_is_better else value.inverse(center)


def times_of(standings: list[Standing]) -> list[Standing]:
    """The times, or all metrics if there are none: a low speedup is not a slow GPU."""
    return [standing for standing in standings if standing.figure.unit == "ms"] or standings


def gpu_column(gpu: FleetGpu) -> str:
    """The column of a GPU in the heat map: its index on its node."""
    return ON_CPU if gpu.index is None else str(gpu.index)


def value_cell(value: Interval | None, unit: str, *, both: bool = False) -> Cell:
    """A metric in its own unit. `both`: the ends of its interval instead of its value."""
    if value is None:
        return NOTHING
    if both:
        return estimated(units.ends(value, units.ratio_decimals(value) if unit == "x" else units.fixed(value, most=3)), value)
    return estimated(units.short_speedup(value) if unit == "x" else units.milliseconds(value), value)


def value_text(value: Interval, figure: FleetFigure) -> str:
    """A value of a metric with its unit, in a sentence."""
    return value_cell(value, figure.unit).text + ("" if figure.unit == "x" else f" {figure.unit}")


def figure_name(figure: FleetFigure) -> str:
    """The name of a metric with its unit, for a column."""
    return figure.name if figure.unit == "x" else f"{figure.name} {figure.unit}"


def throttled_text(gpu: FleetGpu) -> str | None:
    """Why the clock was below its maximum, the most frequent reason first."""
    reasons = sorted(gpu.condition.throttled.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {100 * share:.0f}%" for reason, share in reasons if share >= LEAST_THROTTLED) or None


def _warn(text: str | None, value: float | None = None, *, warn: bool) -> Cell:
    """A text or a dash, marked if it must not be overlooked."""
    return Cell(text or "-", value, level="warning" if warn else "")


def _difference(view: FleetView, gpu: FleetGpu, *, warn: bool = False) -> Cell:
    """How far the metric to show of a GPU is from the median."""
    worst = view.worst(gpu)
    return difference_cell(worst.ratio if worst is not None else None, "warning" if warn and view.is_slow(gpu) else "")


def _metric(view: FleetView, gpu: FleetGpu) -> str | None:
    worst = view.worst(gpu)
    return worst.figure.name if worst is not None else None


def _side(view: FleetView, gpu: FleetGpu) -> str:
    called = view.outliers_of(gpu)
    return called[0].side if called else ""


def summary_table(view: FleetView) -> Table | None:
    """The GPUs to look at first: outliers, those that were not measured, then the slowest others."""
    quiet, kind = not view.result.outliers and len(view.result.measured) == len(view.result.gpus), view.kind
    failed = [gpu for gpu in view.ordered if gpu.failure]
    left_out = {gpu.place for gpu in failed[MOST_FAILED:]} if len(failed) < len(view.ordered) else set()
    listed = [gpu for gpu in view.ordered if gpu.place not in left_out][: MOST_ALIKE if quiet else MOST_LISTED]

    def verdict(gpu: FleetGpu) -> Cell:
        return _warn("not measured" if gpu.failure else _side(view, gpu), warn=bool(gpu.failure) or view.is_slow(gpu))

    more = len(view.result.gpus) - len(listed)
    compared = any(view.worst(gpu) is not None for gpu in listed)
    notes = [phrase("fleet-not-shown", gpus=units.counted(more, f"more {kind}"))] if more > 0 else []
    notes += [phrase("fleet-speed", kind=kind)] if compared else []
    shown = table(
        "summary",
        f"{kind}s, slowest first" if compared else f"{kind}s",
        listed,
        Column(kind, lambda gpu: gpu.place),
        Column("Outlier", verdict),
        Column("Speed", lambda gpu: _difference(view, gpu, warn=True), "of 1"),
        Column("Metric", lambda gpu: _metric(view, gpu)),
        Column("MHz", lambda gpu: gpu.condition.sm_mhz, ".0f", drop=1),
        Column("W", lambda gpu: gpu.condition.power_w, ".0f", drop=3),
        Column("°C", lambda gpu: gpu.condition.temperature_c, ".0f", drop=2),
        Column("Limited by", throttled_text, drop=4),
        note=" ".join(notes),
        sparse=True,
    )
    return shown if listed and len(shown.columns) > 1 else None


def outlier_table(view: FleetView) -> Table:
    """Every outlier in every figure."""
    return table(
        "outliers",
        "Outliers",
        [*view.slow, *view.fast],
        Column("GPU", lambda outlier: f"{outlier.where} (whole node)" if outlier.whole_node else outlier.where),
        Column("Metric", lambda outlier: outlier.figure),
        Column("Outlier", lambda outlier: _warn(outlier.side, warn=outlier.side == "slow")),
        Column("Speed", lambda outlier: difference_cell(outlier.ratio, "warning" if outlier.side == "slow" else ""), "of 1"),
        Column("95% interval", lambda outlier: ends_text(outlier.ratio)),
        Column("Score", lambda outlier: outlier.score, ".1f"),
        Column("Other metrics", lambda one: ", ".join(f"{name} {units.difference(x)}" for name, x in one.also.items()) or None),
        Column("Also different", lambda outlier: " ".join(dict.fromkeys(fact.text for fact in outlier.evidence)) or None),
        note=phrase("fleet-outliers"),
        sparse=True,
    )


def figure_table(view: FleetView) -> Table:
    """The median of every figure, and how far GPUs are from it."""
    kind = view.kind

    return table(
        "metrics",
        f"Metrics over all {kind}s",
        view.result.figures,
        Column("Metric", figure_name),
        Column(f"{kind} type", lambda figure: figure.group if len(view.groups) > 1 else None),
        Column(f"{kind}s", lambda figure: figure.gpus, ",d"),
        Column("Median", lambda figure: value_cell(figure.center, figure.unit), "ms"),
        Column("TFLOP/s", _rate, "TFLOP/s"),
        Column(f"Range of another {kind}, 90%", lambda figure: value_cell(figure.another, figure.unit, both=True), "ms"),
        Column("Chip-to-chip spread", lambda figure: _share_range(figure.spread), "%"),
        Column(f"Noise of one {kind}", lambda figure: figure.noise, "%"),
        Column("Outlier limit", lambda figure: figure.limit, "%"),
        note=phrase("fleet-metrics", kind=kind),
        sparse=True,
    )


def _rate(figure: FleetFigure) -> float | None:
    """The rate of the median GPU in TFLOP/s."""
    if not figure.flops or not figure.center.value > 0:
        return None
    return figure.flops / figure.center.value / 1e9


def _share_range(share: Interval | None) -> Value:
    if share is None or not share.known:
        return share.value if share is not None else None
    return estimated(f"{100 * share.value:.2f}% [{100 * (share.low or 0.0):.2f}, {100 * (share.high or 0.0):.2f}]", share)


def node_table(view: FleetView) -> Table | None:
    """A row for each node, the one with the slowest GPU first."""
    if len(view.nodes) < 2:
        return None
    kind = view.kind

    def slowest(gpus: Sequence[FleetGpu]) -> tuple[str, Interval] | tuple[None, None]:
        known = [(gpu.place, worst.ratio) for gpu in gpus if (worst := view.worst(gpu)) is not None]
        return min(known, key=lambda pair: pair[1].value, default=(None, None))

    def middle(gpus: Sequence[FleetGpu]) -> Interval | None:
        own = [standing.ratio.value for gpu in gpus for standing in times_of(view.standings[gpu.place])]
        return Interval(median(own)) if own else None

    def counted(gpus: Sequence[bool]) -> Cell:
        return _warn(str(sum(gpus)) if any(gpus) else None, float(sum(gpus)), warn=any(gpus))

    rows: list[Sequence[FleetGpu]] = [view.nodes[node] for node in view.slowest_nodes]
    return table(
        "nodes",
        f"Nodes, by their slowest {kind}",
        rows,
        Column("Node", lambda gpus: gpus[0].node),
        Column(f"{kind}s", lambda gpus: len(gpus), "g"),
        Column("Slow", lambda gpus: counted([view.is_slow(gpu) for gpu in gpus]), "d"),
        Column("Not measured", lambda gpus: counted([bool(gpu.failure) for gpu in gpus]), "d"),
        Column("Speed, median of times", middle, "of 1"),
        Column("Speed of the slowest", lambda gpus: slowest(gpus)[1], "of 1"),
        Column("Hottest °C", lambda gpus: max(filter(None, (gpu.condition.temperature_c for gpu in gpus)), default=None), ".0f"),
        Column(f"Slowest {kind}", lambda gpus: slowest(gpus)[0]),
        note=phrase("fleet-node-speed", kind=kind),
        sparse=True,
    )


def gpu_table(view: FleetView) -> Table:
    """A row for each GPU with all its figures, the slowest first."""
    kind = view.kind
    varying = dict.fromkeys(name for gpu in view.result.gpus for name in gpu.versions)
    versions = {gpu.place: view.result.versions_of(gpu) for gpu in view.result.gpus} if varying else {}

    return table(
        "gpus",
        f"Every {kind}, slowest first",
        view.ordered,
        Column(kind, lambda gpu: gpu.place),
        Column(f"{kind} type", lambda gpu: gpu.group or None),
        Column("Outlier", lambda gpu: _warn(_side(view, gpu), warn=view.is_slow(gpu))),
        Column("Speed", lambda gpu: _difference(view, gpu), "of 1"),
        Column("Slowest metric", lambda gpu: _metric(view, gpu)),
        *across(
            {figure.name: figure for figure in view.result.figures}.values(),
            lambda gpu, figure: value_cell(gpu.figures.get(figure.name), figure.unit),
            "ms",
            head=figure_name,
        ),
        Column("SM clock MHz", lambda gpu: gpu.condition.sm_mhz, ".0f"),
        Column("Power W", lambda gpu: gpu.condition.power_w, ".0f"),
        Column("Power limit W", lambda gpu: gpu.condition.power_limit_w, ".0f"),
        Column("Temperature °C", lambda gpu: gpu.condition.temperature_c, ".0f"),
        Column("Repeats", lambda gpu: gpu.repeats, "g"),
        Column("Limited by", throttled_text),
        *across(varying, lambda gpu, name: versions[gpu.place].get(name) or None),
        Column("Not measured because", lambda gpu: _warn(gpu.failure, warn=bool(gpu.failure))),
        Column("UUID", lambda gpu: gpu.uuid or None),
        Column("Run file", lambda gpu: gpu.file or None),
        note=phrase("fleet-conditions"),
        sparse=True,
    )


def health_table(view: FleetView) -> Table | None:
    """Memory errors and the state of links, as the drivers report them."""
    names = dict.fromkeys((*view.result.health, *(name for gpu in view.result.gpus for name in gpu.condition.health)))
    if not names:
        return None
    health = {gpu.place: gpu.condition.health if gpu.failure else view.result.health_of(gpu) for gpu in view.ordered}

    return table(
        "health",
        "Memory errors and links of every GPU",
        view.ordered,
        Column("GPU", lambda gpu: gpu.place),
        *across(names, lambda gpu, name: _state(health[gpu.place].get(name)), "d", head=lambda name: name.replace("_", " ")),
        sparse=True,
    )


def _state(value: int | str | None) -> Value:
    return value if value is None else Cell(str(value), float(value) if isinstance(value, int) else None)


def rank_charts(view: FleetView) -> Iterator[RankChart]:
    """The GPUs by their speed relative to the median: first the figure with the clearest outlier."""
    scores = grouped(((outlier.group, outlier.figure), abs(outlier.score)) for outlier in view.result.outliers)
    tested = view.result.rule.figures
    shown = [figure for figure in view.result.figures if figure.gpus and (not tested or figure.name in tested)]
    shown.sort(key=lambda figure: (-max(scores.get((figure.group, figure.name), (0.0,))), figure.unit == "x"))
    for place, figure in enumerate(shown[:MOST_CHARTS]):
        if chart := rank_chart(view, figure, main=place == 0):
            yield chart


def rank_chart(view: FleetView, figure: FleetFigure, *, main: bool) -> RankChart | None:
    """All GPUs of one product in one figure, the slowest first."""
    standings = [
        (gpu, standing) for gpu in view.result.measured for standing in view.standings[gpu.place] if standing.figure is figure
    ]
    if not standings:
        return None
    standings.sort(key=lambda pair: pair[1].ratio.value)
    called = {
        gpu.place
        for gpu, _ in standings
        if any(figure.name in (outlier.figure, *outlier.also) for outlier in view.outliers_of(gpu))
    }
    kept = set(thinned([gpu.place in called for gpu, _ in standings]))
    ranked = [
        Ranked(gpu.place, rank, own.ratio, label=gpu.place if gpu.place in called else "", facts=_facts(gpu, own))
        for rank, (gpu, own) in enumerate(standings, start=1)
        if rank - 1 in kept
    ]
    group = f" ({figure.group})" if len(view.groups) > 1 else ""
    limit = phrase("fleet-limit", limit=figure.limit) if figure.limit is not None else phrase("fleet-no-limit", kind=view.kind)
    some = (
        f" {phrase('fleet-some-shown', shown=len(ranked), gpus=len(standings), kind=view.kind)}"
        if (len(ranked) < len(standings))
        else ""
    )
    return RankChart(
        f"rank {figure.name}{group}",
        f"{figure.name}{'' if figure.unit == 'x' else ': speed'} relative to the median {view.kind}{group}",
        axis=view.kind,
        points=tuple(ranked),
        count=len(standings),
        limit=figure.limit,
        note=limit + some,
        main=main,
    )


def thinned(called: Sequence[bool], most: int = MOST_POINTS, ends: int = MOST_ENDS) -> list[int]:
    """The indices of the points to draw: all that are called outliers, both ends, and evenly spaced others.

    >>> thinned([False] * 4), thinned([True, False, False, True, False, False], most=3, ends=1)
    ([0, 1, 2, 3], [0, 3, 5])
    """
    count = len(called)
    if count <= most:
        return list(range(count))
    kept = {*range(ends), *range(count - ends, count), *range(0, count, (-(-count // max(most - 2 * ends, 1))))}
    return sorted(kept | {place for place, is_called in enumerate(called) if is_called})


def _facts(gpu: FleetGpu, standing: Standing) -> Facts:
    condition = gpu.condition
    return facts(
        ("difference from the median", units.difference(standing.ratio.value)),
        (standing.figure.name, value_text(gpu.figures[standing.figure.name], standing.figure)),
        ("SM clock", f"{condition.sm_mhz:.0f} MHz" if condition.sm_mhz is not None else ""),
        ("power", f"{condition.power_w:.0f} W" if condition.power_w is not None else ""),
        ("temperature", f"{condition.temperature_c:.0f} °C" if condition.temperature_c is not None else ""),
        ("limited by", throttled_text(gpu)),
    )


def heat_map(view: FleetView) -> HeatMap | None:
    """How much slower than the median each GPU is, in the metric where it is slowest: nodes with the slowest GPUs on top."""
    across = sorted({gpu_column(gpu) for gpu in view.result.gpus}, key=lambda name: (name == ON_CPU, len(name), name))
    if len(view.nodes) < 2 or len(across) < 2:
        return None
    nodes = view.slowest_nodes
    shown = nodes[:MOST_NODES][::-1]  # the last row is on top
    cells = []
    for node in shown:
        by_column = {gpu_column(gpu): gpu for gpu in view.nodes[node]}
        cells.append(tuple(_heat_cell(view, by_column.get(name), len(across)) for name in across))
    left = len(nodes) - len(shown)
    more = f" {phrase('not-shown', rows=units.counted(left, 'more node'))}" if left else ""
    return HeatMap(
        "map",
        f"Slowdown of GPUs: the slowest {len(shown)} of {len(nodes):,} nodes" if left else "Slowdown of every GPU, by node",
        row_name="node",
        column_name="GPU",
        rows=tuple(shown),
        columns=tuple(across),
        cells=tuple(cells),
        note=phrase("fleet-slowdown") + more,
        main=True,
        measure="slowdown relative to the median",
        unit="%",
        line="outlier",
        line_meaning="slower than chance allows",
        blank="not measured, or no GPU",
        top_first=True,
    )


def _heat_cell(view: FleetView, gpu: FleetGpu | None, across: int) -> HeatCell:
    if gpu is None:
        return HeatCell(certain=True, text="")
    worst = view.worst(gpu)
    if gpu.failure or worst is None:
        return HeatCell(certain=True, text="not measured" if gpu.failure else "")
    slower = max(1 - worst.ratio.value, 0.0)
    text = f"{100 * slower:.1f}%"
    return HeatCell(text if across <= MOST_LABELED else "", slower, not view.is_slow(gpu), f"{text} ({worst.figure.name})")
