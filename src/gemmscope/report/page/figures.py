"""The report's charts as PNG and SVG files, for papers and slides, in the looks of `report/plot.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError
from gemmscope.report.page.charts import axis_ends, gain_rows, head
from gemmscope.report.page.markup import slug
from gemmscope.report.page.parts import REST, Bar, Bars, Curve, Report, Segment, Waterfall, legend
from gemmscope.report.plot import ALARM, CLEAR, COLOURS, DARK, QUANTIZING, STYLE, UNDATED, WIDTH, lighter
from gemmscope.report.plot import REST as GREY

FORMATS = ("png", "svg")
DOWN, UP = "#D55E00", "#009E73"
MARKERS = "os^DvPX*"
Drawing = tuple[str, Callable[[Any], None]]


def save_figures(report: Report, folder: Path) -> list[Path]:
    """Every chart of every run, as PNG and SVG; returns what was written."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            for name, draw in _drawings(report):
                figure = Figure(layout="constrained")
                draw(figure)
                for ending in FORMATS:
                    path = folder / f"{name}.{ending}"
                    figure.savefig(path, dpi=200, metadata=UNDATED if ending == "svg" else None)
                    written.append(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"figures cannot be written to {folder}: {reason}", "name a folder that can be written") from error
    return written


def _drawings(report: Report) -> Iterator[Drawing]:
    for run in report.runs:
        start = f"{report.letter(run).lower()}-" if len(report.runs) > 1 else ""
        title = f"{report.title} on {run.where}"
        if run.bars:
            for unit in dict.fromkeys(each.unit for each in run.bars):
                panels = [each for each in run.bars if each.unit == unit]
                yield f"{start}time-{slug(unit.split()[-1])}", _with_title(title, _bars, panels)
        if run.waterfalls:
            yield f"{start}waterfall", _with_title(title, _waterfalls, run.waterfalls)
        for curve in run.curves:
            yield f"{start}speedup-{slug(curve.title.split(':')[0])}", _with_title(title, _curve, curve)
    if len(report.runs) > 1 and any(run.gains for run in report.runs):
        yield "side-by-side", _with_title(report.title, _gains, report)


def _with_title(title: str, draw: Callable[[Any, Any], None], what: Any) -> Callable[[Any], None]:
    def drawn(figure: Any) -> None:
        draw(figure, what)
        figure.suptitle(textwrap.fill(title, int(figure.get_size_inches()[0] * 10)), fontsize=11, fontweight="bold")

    return drawn


# --- bars ------------------------------------------------------------------------------------------------------------------


def _bars(figure: Any, panels: Sequence[Bars]) -> None:
    from matplotlib.patches import Patch

    widths = [len(panel.bars) for panel in panels]
    figure.set_size_inches(3.2 + 1.15 * sum(widths), 4.6)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for place, bar in enumerate(panel.bars):
            _bar(axis, place, bar)
        axis.set_xticks(range(len(panel.bars)), [bar.label for bar in panel.bars])
        axis.set_xlim(-0.6, len(panel.bars) - 0.4)
        axis.set_title(panel.title, fontsize=9.5)
        axis.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axis.tick_params(axis="x", length=0)
    axes[0].set_ylabel(panels[0].unit)
    axes[0].set_ylim(0, max(bar.total_ms for panel in panels for bar in panel.bars) * 1.2)
    shades = {segment.shade for panel in panels for bar in panel.bars for segment in bar.segments}
    handles = [Patch(facecolor=_colour(colour), label=name) for name, colour in reversed(legend(panels).items())]
    if "hatched" in shades:
        handles.insert(0, Patch(**QUANTIZING, label="quantizing"))
    if "light" in shades:
        handles += [Patch(facecolor=DARK, label="fprop + dgrad"), Patch(facecolor=lighter(DARK), label="wgrad (lighter)")]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8.5)


def _bar(axis: Any, place: int, bar: Bar) -> None:
    height = 0.0
    for segment in bar.segments:
        axis.bar(place, segment.time_ms, bottom=height, width=WIDTH, **_look(segment))
        height += segment.time_ms
    if not bar.segments:
        axis.text(place, 0, bar.note.replace(" as ", "\nas "), ha="center", va="bottom", fontsize=8, color="#777777")
        return
    ends = (
        f"[{bar.gain.low:.2f}, {bar.gain.high:.2f}]\n"
        if bar.gain and bar.gain.low is not None and bar.gain.high is not None
        else ""
    )
    time = f"{height:.0f} ms" if height >= 100 else f"{height:.3g} ms"
    small = axis.annotate(f"{ends}{time}", (place, height), (0, 2), textcoords="offset points", ha="center", va="bottom",
                          fontsize=7.5, color="#333333", bbox=CLEAR)  # fmt: skip
    axis.annotate(head(bar), (0.5, 1.0), (0, 0.5), xycoords=small, textcoords="offset points", ha="center", va="bottom",
                  fontsize=10, fontweight="bold", color=ALARM if bar.alarm else "black", bbox=CLEAR)  # fmt: skip


def _colour(index: int) -> str:
    return GREY if index == REST else COLOURS[index % len(COLOURS)]


def _look(segment: Segment) -> dict[str, Any]:
    if segment.shade == "hatched":
        return QUANTIZING
    colour = _colour(segment.colour)
    return {"facecolor": lighter(colour) if segment.shade == "light" else colour, "edgecolor": "white", "linewidth": 0.5}


# --- waterfalls, curves, side by side ----------------------------------------------------------------------------------------


def _waterfalls(figure: Any, falls: Sequence[Waterfall]) -> None:
    rows = max(len(each.falls) for each in falls) + 1
    figure.set_size_inches(1.4 + 3.1 * len(falls), 1.2 + 0.26 * rows)
    low, high = axis_ends([1.0, *(fall.speedup for each in falls for fall in each.falls)])
    for axis, each in zip(figure.subplots(1, len(falls), squeeze=False)[0], falls, strict=True):
        before = 1.0
        steps = [(fall.row, fall.speedup) for fall in each.falls]
        for place, (_, speedup) in enumerate(steps):
            colour = COLOURS[0] if place == 0 else DOWN if speedup <= before else UP
            axis.barh(place, speedup - before, left=before, height=0.62, color=colour)
            _value(axis, max(speedup, before), place, speedup)
            before = speedup
        axis.barh(len(steps), before - 1, left=1, height=0.62, color=DARK)
        _value(axis, max(before, 1.0), len(steps), before)
        axis.set_yticks(range(len(steps) + 1), [*(row for row, _ in steps), "the step"])
        axis.invert_yaxis()
        axis.set_xlim(low, high + (high - low) * 0.12)
        axis.axvline(1, color="#777777", linewidth=0.8, linestyle="--")
        axis.set_title(each.recipe, fontsize=9.5)
        axis.set_xlabel(f"times faster than {each.baseline}")


def _value(axis: Any, x: float, y: int, speedup: float) -> None:
    axis.annotate(f"{speedup:.2f}x", (x, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5, color="#333333")


def _curve(figure: Any, curve: Curve) -> None:
    places = curve.places
    figure.set_size_inches(max(4.5, 2.0 + 0.6 * len(places)), 3.4)
    axis = figure.subplots()
    for name, points in curve.series.items():
        x = [places.index(point.at) for point in points]
        y = [point.gain.value for point in points]
        low = [value - (point.gain.low if point.gain.low is not None else value) for point, value in zip(points, y, strict=True)]
        high = [
            (point.gain.high if point.gain.high is not None else value) - value for point, value in zip(points, y, strict=True)
        ]
        axis.errorbar(x, y, yerr=[low, high], label=name, **_dot(curve.colour(name)))
    turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if any(len(place) > 8 for place in places) else {}
    axis.set_xticks(range(len(places)), places, **turned)
    axis.set_xlabel(curve.axis)
    axis.set_ylabel("times faster than BF16")
    axis.axhline(1, color="#777777", linewidth=0.8, linestyle="--")
    axis.set_title(curve.title, fontsize=9.5)
    axis.legend(frameon=False, fontsize=8.5)


def _gains(figure: Any, report: Report) -> None:
    rows = gain_rows(report)
    figure.set_size_inches(6.5, 1.0 + 0.16 * len(rows) * (len(report.runs) + 1))
    axis = figure.subplots()
    for index, run in enumerate(report.runs):
        shift = (index - (len(report.runs) - 1) / 2) * 0.7 / len(report.runs)
        label: str | None = f"{report.label(run)} ({run.name})"
        for place, (_, _, by_run) in enumerate(rows):
            if (gain := by_run.get(report.letter(run))) is not None:
                known = gain.low is not None and gain.high is not None
                reach = [[gain.value - (gain.low or 0.0)], [(gain.high or 0.0) - gain.value]] if known else None
                axis.errorbar(gain.value, place + shift, xerr=reach, label=label, **_dot(index))
                label = None  # once in the legend
    axis.set_yticks(range(len(rows)), [f"{recipe}\n{what}" for what, recipe, _ in rows], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color="#777777", linewidth=0.8, linestyle="--")
    axis.set_xlabel("times faster than BF16")
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0))


def _dot(index: int) -> dict[str, Any]:
    """Series are told apart by colour and by mark."""
    colour, mark = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    return {"color": colour, "marker": mark, "markersize": 4.5, "linewidth": 1.2, "capsize": 2}
