"""Charts of dots: the ranked values of a fleet with the limit of outliers, and speed against error of recipes and mixes."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator

from gemmscope.document.charts import Dot, RankChart, Ranked, ScatterChart, axis_ends
from gemmscope.units import difference
from gemmscope.writers import drawing
from gemmscope.writers.drawing import INK, NORMAL, SMALL, SOFT, WHISKER, dot, finite, style

PANEL_IN = 2.4  # height of a panel of ranks
SCATTER_IN = 2.7
MOST_INTERVALS = 100  # points that are drawn with their intervals
MOST_NAMES = 16  # points whose names stand along the axis
MOST_LABELS = 8  # outliers with their names beside them
LABEL_IN = 0.13  # height of such a name
CHOSEN: dict[str, Any] = {"marker": "*", "markersize": 11, "linestyle": "none", "markeredgecolor": INK, "markeredgewidth": 0.6}


def ranks_height(charts: Sequence[RankChart], _: float) -> float:
    """The height of all panels, one below the other."""
    return len(charts) * (PANEL_IN + 0.6) + sum(len(chart.points) <= MOST_NAMES for chart in charts) * 0.5 + 0.3


def ranks(figure: FigureBase, charts: Sequence[RankChart], width_in: float) -> None:
    """Panels one below the other: the lowest value of each is at the left."""
    for _, panel, chart in drawing.panels(figure.subplots(len(charts), 1, squeeze=False), charts):
        _ranks(panel, chart)
        drawing.title(panel, chart.title, width_in - 0.6)
    drawing.legend(figure, _handles(charts), width_in)


def _dot_style(*, called: bool) -> dict[str, Any]:
    return {
        "color": style("mark-loss" if called else "mark-total").light,
        "marker": "D" if called else "o",
        "markersize": 4.2 if called else 2.8,
        "linestyle": "none",
    }


def _handles(charts: Sequence[RankChart]) -> list[Line2D]:
    outlier = Line2D([], [], **_dot_style(called=True), label="outlier")
    limit = Line2D([], [], color=SOFT, linewidth=0.9, linestyle="--", label="limit of an outlier")
    return [
        Line2D([], [], **_dot_style(called=False), label="GPU"),
        *([outlier] if any(point.label for chart in charts for point in chart.points) else []),
        *([limit] if any(chart.limit is not None for chart in charts) else []),
    ]


def _ranks(panel: Axes, chart: RankChart) -> None:
    low, high, step = chart.ends
    panel.set_ylim(low, high)
    panel.axhline(1, color=SOFT, linewidth=0.8, zorder=0.9)
    for side in (-1, 1) if chart.limit is not None else ():
        panel.axhline(1 + side * (chart.limit or 0.0), color=SOFT, linewidth=0.9, linestyle="--", zorder=0.9)
    for called in (False, True):
        points = [point for point in chart.points if bool(point.label) is called]
        dot_style = _dot_style(called=called)
        x, y = [point.rank for point in points], [finite(point.value.value, 1.0) for point in points]
        if len(chart.points) <= MOST_INTERVALS and points:
            reach = [drawing.reach(point.value) for point in points]
            known = {**WHISKER, "ecolor": dot_style["color"], "capsize": 0}
            panel.errorbar(x, y, yerr=[[below for below, _ in reach], [above for _, above in reach]], **known, zorder=2)
        panel.plot(x, y, **dot_style, zorder=3 + called)
    margin = max(0.5, 0.02 * chart.count)
    panel.set_xlim(1 - margin, chart.count + margin)
    if len(chart.points) <= MOST_NAMES:
        labels = [drawing.short(point.name) for point in chart.points]
        panel.set_xticks([point.rank for point in chart.points], labels, rotation=30, ha="right", rotation_mode="anchor")
    else:
        drawing.numbers(panel.xaxis)
        panel.set_xlabel(f"{chart.axis}s in the order of their speed", fontsize=NORMAL)
        _names(panel, chart, (high - low) * LABEL_IN / PANEL_IN)
    panel.yaxis.set_major_locator(MultipleLocator(step, offset=1 % step))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: difference(value)))
    drawing.grid(panel)
    panel.set_ylabel("from the median", fontsize=NORMAL)


def _names(panel: Axes, chart: RankChart, height: float) -> None:
    """The outliers furthest from the median by name, one above the other where they are close."""
    called = sorted((point for point in chart.points if point.label), key=lambda point: -abs(point.value.value - 1))
    taken: list[float] = []
    for point in called[:MOST_LABELS]:
        at = finite(point.value.value, 1.0)
        while any(abs(at - other) < height for other in taken):
            at += height * 0.25
        taken.append(at)
        _name(panel, point, at, left=point.rank > chart.count / 2)


def _name(panel: Axes, point: Ranked, at: float, *, left: bool) -> None:
    where: dict[str, Any] = {"ha": "right" if left else "left", "va": "center", "fontsize": SMALL, "color": drawing.INK}
    panel.annotate(drawing.short(point.label), (point.rank, at), (-6 if left else 6, 0), textcoords="offset points", **where)


# --- speed against error ----------------------------------------------------------------------------------------------------


def scatters_height(charts: Sequence[ScatterChart], _: float) -> float:
    """The height of all panels, one below the other."""
    return len(charts) * (SCATTER_IN + 0.6) + 0.3


def scatters(figure: FigureBase, charts: Sequence[ScatterChart], width_in: float) -> None:
    """Panels with speedups to the right and errors upward: what is lower and further right is better."""
    handles: dict[str, Any] = {}
    for _, panel, chart in drawing.panels(figure.subplots(len(charts), 1, squeeze=False), charts):
        for handle in _scatter(panel, chart):
            handles.setdefault(str(handle.get_label()), handle)
        drawing.title(panel, chart.title, width_in - 0.6)
    drawing.legend(figure, list(handles.values()), width_in)


def _scatter(panel: Axes, chart: ScatterChart) -> list[Line2D]:
    every = [*chart.dots, *chart.mixes, *([chart.chosen] if chart.chosen is not None else [])]
    panel.set_xlim(*axis_ends([1.0, *(finite(end, 1.0) for point in every for end in _reach(point))]))
    panel.set_ylim(0, max([chart.bound or 0.0, *(finite(point.error) for point in every)]) * 1.12 or 1.0)
    handles = []
    if chart.bound is not None:
        panel.axhline(chart.bound, color=SOFT, linewidth=0.9, linestyle="--", zorder=1)
        label: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": SMALL, "color": SOFT}
        panel.annotate(
            "bound", (1, chart.bound), (-3, 2), xycoords=("axes fraction", "data"), textcoords="offset points", **label
        )
    if chart.mixes:
        x, y = [point.speedup.value for point in chart.mixes], [point.error for point in chart.mixes]
        settings: dict[str, Any] = {"color": style("mark-total").light, "linewidth": 0.8, "marker": ".", "markersize": 3.5}
        panel.plot(x, y, **settings, zorder=2)
        handles.append(Line2D([], [], **settings, label="Pareto front of mixes"))
    for point in chart.dots:
        settings = {**dot(chart.color(point.name), 6.5), "linestyle": "none"}
        below, above = drawing.reach(point.speedup)
        if point.speedup.known:
            panel.errorbar(
                point.speedup.value, point.error, xerr=[[below], [above]], **{**WHISKER, "ecolor": settings["color"]}, zorder=3
            )
        panel.plot(point.speedup.value, point.error, **settings, zorder=4)
        handles.append(Line2D([], [], **settings, label=point.name))
    if chart.chosen is not None:
        settings = {**CHOSEN, "color": style("mark-break-even").light}
        panel.plot(chart.chosen.speedup.value, chart.chosen.error, **settings, zorder=5)
        handles.append(Line2D([], [], **settings, label=drawing.short(chart.chosen.name, 70)))
    drawing.speedup_axis(panel.xaxis)
    drawing.share_axis(panel.yaxis)
    drawing.grid(panel)
    panel.xaxis.grid(visible=True, color=drawing.GRID, linewidth=0.6)
    panel.set_xlabel("speedup over BF16", fontsize=NORMAL)
    panel.set_ylabel("error", fontsize=NORMAL)
    return handles


def _reach(point: Dot) -> tuple[float, float]:
    below, above = drawing.reach(point.speedup)
    return point.speedup.value - below, point.speedup.value + above
