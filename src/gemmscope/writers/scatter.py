"""Speed against error: a dot for each recipe, the mixes between them, and the one to use."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D

from gemmscope.document.charts import Dot, ScatterChart, axis_ends
from gemmscope.writers import drawing
from gemmscope.writers.drawing import INK, NORMAL, SMALL, SOFT, WHISKER, dot, finite, style

PANEL_IN = 2.7  # height of a panel
CHOSEN: dict[str, Any] = {"marker": "*", "markersize": 11, "linestyle": "none", "markeredgecolor": INK, "markeredgewidth": 0.6}


def scatter_size(charts: Sequence[ScatterChart]) -> float:
    """The height of all panels, one below the other."""
    return len(charts) * (PANEL_IN + 0.6) + 0.3


def scatters(figure: FigureBase, charts: Sequence[ScatterChart], width_in: float) -> None:
    """Panels with speedups to the right and errors upward: what is lower and further right is better."""
    axes = figure.subplots(len(charts), 1, squeeze=False)
    handles: dict[str, Any] = {}
    for panel, chart in zip(axes.flat, charts, strict=True):
        for handle in _scatter(panel, chart):
            handles.setdefault(str(handle.get_label()), handle)
        drawing.title(panel, chart.title, width_in - 0.6)
    drawing.legend(figure, list(handles.values()), width_in)


def _scatter(panel: Axes, chart: ScatterChart) -> list[Line2D]:
    every = [*chart.dots, *chart.mixes, *([chart.chosen] if chart.chosen is not None else [])]
    panel.set_xlim(*axis_ends([1.0, *(finite(end, 1.0) for point in every for end in _reach(point))]))
    top = max([chart.bound or 0.0, *(finite(point.error) for point in every)])
    panel.set_ylim(0, top * 1.12 or 1.0)
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
