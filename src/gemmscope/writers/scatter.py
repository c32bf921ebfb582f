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
        for each in _scatter(panel, chart):
            handles.setdefault(str(each.get_label()), each)
        drawing.title(panel, chart.title, width_in - 0.6)
    drawing.legend(figure, list(handles.values()), width_in)


def _scatter(panel: Axes, chart: ScatterChart) -> list[Line2D]:
    every = [*chart.dots, *chart.mixes, *([chart.chosen] if chart.chosen is not None else [])]
    panel.set_xlim(*axis_ends([1.0, *(finite(end, 1.0) for each in every for end in _reach(each))]))
    top = max([chart.bound or 0.0, *(finite(each.error) for each in every)])
    panel.set_ylim(0, top * 1.12 or 1.0)
    handles = []
    if chart.bound is not None:
        panel.axhline(chart.bound, color=SOFT, linewidth=0.9, linestyle="--", zorder=1)
        label: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": SMALL, "color": SOFT}
        panel.annotate(
            "bound", (1, chart.bound), (-3, 2), xycoords=("axes fraction", "data"), textcoords="offset points", **label
        )
    if chart.mixes:
        x, y = [each.speedup.value for each in chart.mixes], [each.error for each in chart.mixes]
        look: dict[str, Any] = {"color": style("mark-total").light, "linewidth": 0.8, "marker": ".", "markersize": 3.5}
        panel.plot(x, y, **look, zorder=2)
        handles.append(Line2D([], [], **look, label="Pareto front of mixes"))
    for each in chart.dots:
        look = {**dot(chart.color(each.name), 6.5), "linestyle": "none"}
        below, above = drawing.reach(each.speedup)
        if each.speedup.known:
            panel.errorbar(
                each.speedup.value, each.error, xerr=[[below], [above]], **{**WHISKER, "ecolor": look["color"]}, zorder=3
            )
        panel.plot(each.speedup.value, each.error, **look, zorder=4)
        handles.append(Line2D([], [], **look, label=each.name))
    if chart.chosen is not None:
        look = {**CHOSEN, "color": style("mark-break-even").light}
        panel.plot(chart.chosen.speedup.value, chart.chosen.error, **look, zorder=5)
        handles.append(Line2D([], [], **look, label=drawing.short(chart.chosen.name, 70)))
    drawing.speedup_axis(panel.xaxis)
    drawing.share_axis(panel.yaxis)
    drawing.grid(panel)
    panel.xaxis.grid(visible=True, color=drawing.GRID, linewidth=0.6)
    panel.set_xlabel("speedup over BF16", fontsize=NORMAL)
    panel.set_ylabel("error", fontsize=NORMAL)
    return handles


def _reach(each: Dot) -> tuple[float, float]:
    below, above = drawing.reach(each.speedup)
    return each.speedup.value - below, each.speedup.value + above
