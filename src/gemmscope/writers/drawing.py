"""What all panels of a figure share: matplotlib styles from the palette, sizes of text, numbers along axes."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gemmscope.document.palette import Style, styles
from gemmscope.interval import Interval

INK, SOFT, GRID, PAPER = "#222222", "#5a5a5a", "#DDDDDD", "white"
CLEAR: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}  # behind text, or lines would cross it
WHISKER: dict[str, Any] = {"ecolor": INK, "elinewidth": 0.9, "capsize": 2.2, "capthick": 0.9, "fmt": "none"}
SMALL, NORMAL, LARGE = 6.5, 7.5, 8.5  # sizes of text, in points
HATCHES = {"": "", "/": "/////", "\\": "\\\\\\\\", ".": "+++", "-": "-----", "|": "|||||"}  # dots would take a megabyte in SVG
WGRAD = "\\\\\\\\\\"
Drawn = TypeVar("Drawn")
LETTER_IN = 0.062  # width of a letter of a label
LONGEST_LABEL = 26  # characters along an axis


def style(key: str) -> Style:
    """A style of the palette; its color on paper is `light`."""
    return styles()[key]


def lighter(color: str) -> tuple[float, float, float]:
    """The color mixed with as much white."""
    red, green, blue = to_rgb(color)
    return (1 + red) / 2, (1 + green) / 2, (1 + blue) / 2


def is_dark(color: Any) -> bool:
    """Whether text and lines on this color must be white."""
    red, green, blue = to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.52


def face(key: str, shade: str = "plain") -> dict[str, Any]:
    """How a bar of this style is filled. The light shade is hatched in its own color, so that grey prints show the same class."""
    own = style(key)
    if shade == "light":
        return {"facecolor": lighter(own.light), "edgecolor": own.light, "hatch": WGRAD, "linewidth": 0}
    line = PAPER if is_dark(own.light) else "#444444"
    outline = 0.6 if own.light.lower() == "#ffffff" else 0
    return {"facecolor": own.light, "edgecolor": line, "hatch": HATCHES[own.hatch], "linewidth": outline}


def dot(key: str, size: float = 4.5) -> dict[str, Any]:
    """How a curve of this style is drawn."""
    own = style(key)
    edge = {"markeredgecolor": "#333333", "markeredgewidth": 0.4}
    return {"color": own.light, "marker": own.marker, "linestyle": own.line, "markersize": size, "linewidth": 1.3, **edge}


def reach(estimate: Interval) -> tuple[float, float]:
    """How far the interval reaches below and above the value. Nothing that is drawn can be negative."""
    low = max(estimate.low, 0.0) if estimate.low is not None else estimate.value
    return max(estimate.value - low, 0.0), max(
        (estimate.high if estimate.high is not None else estimate.value) - estimate.value, 0.0
    )


def top_of(estimate: Interval) -> float:
    """The upper end of the interval, or the value."""
    return finite(max(estimate.value, estimate.high if estimate.high is not None else estimate.value))


def finite(value: float, otherwise: float = 0.0) -> float:
    """The value, or `otherwise` if it cannot be drawn."""
    return value if math.isfinite(value) else otherwise


def plain(value: float) -> str:
    """A number along an axis, never with an exponent.

    >>> plain(1240.0), plain(0.30000000000000004), plain(-0.0)
    ('1,240', '0.3', '0')
    """
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def numbers(axis: Axis, most: int = 6, text: Callable[[float], str] = plain) -> None:
    """Label an axis with round numbers, without exponents."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def speedup_axis(axis: Axis, most: int = 6) -> None:
    """Label an axis with speedups: 1.5x."""
    numbers(axis, most, lambda value: f"{plain(value)}x")


def share_axis(axis: Axis) -> None:
    """Label an axis with shares: 5%."""
    numbers(axis, text=lambda value: f"{plain(round(100 * value, 6))}%")


def grid(axes: Axes, along: str = "y") -> None:
    """Draw thin grid lines behind everything, and no ticks at the labels."""
    getattr(axes, f"{along}axis").grid(visible=True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x" if along == "y" else "y", length=0)
    axes.tick_params(labelsize=NORMAL)


def short(text: str, longest: int = LONGEST_LABEL) -> str:
    """A label, shortened in the middle, because names differ at both ends.

    >>> short("a-very-long-name-of-a-layer", 11)
    'a-ver…layer'
    """
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def rows_of(count: int, most: int) -> tuple[int, int]:
    """Rows and columns for so many panels, with at most `most` in a row, and rows of equal length.

    >>> rows_of(4, 3), rows_of(2, 3)
    ((2, 2), (1, 2))
    """
    rows = -(-count // min(most, count))
    return rows, -(-count // rows)


def panels(axes: Any, charts: Sequence[Drawn]) -> Iterator[tuple[int, Axes, Drawn]]:
    """Each chart with its place and its panel; the panels after the last chart stay empty."""
    for place, panel in enumerate(axes.flat):
        if place < len(charts):
            yield place, panel, charts[place]
        else:
            panel.set_axis_off()


def whiskers(panel: Axes, x: Sequence[float], y: Sequence[float], reach: tuple[Sequence[float], Sequence[float]]) -> None:
    """Draw intervals on bars, with a light outline: dark lines would be lost on dark bars."""
    for line in panel.errorbar(x, y, yerr=reach, **WHISKER).get_children():
        line.set_path_effects([withStroke(linewidth=2.0, foreground=PAPER)])


def title(axes: Axes, text: str, width_in: float) -> None:
    """Set the title of a panel, in as many lines as it needs."""
    axes.set_title(textwrap.fill(text, max(12, int(width_in * 14.8))), fontsize=LARGE, loc="left")


def legend(figure: FigureBase, handles: Sequence[Any], width_in: float) -> None:
    """Draw the legend below the panels, in as many columns as fit."""
    if handles:
        settings: dict[str, Any] = {"frameon": False, "fontsize": NORMAL, "handlelength": 1.6}
        columns = -(-len(handles) // _legend_rows(handles, width_in))  # rows of equal length
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, **settings)


def legend_size(handles: Sequence[Any], width_in: float) -> float:
    """The height of a legend."""
    return 0.17 * _legend_rows(handles, width_in) + 0.05 if handles else 0.0


def _legend_rows(handles: Sequence[Any], width_in: float) -> int:
    widest = max(len(str(handle.get_label())) for handle in handles)
    return -(-len(handles) // max(1, min(len(handles), int(width_in / (0.45 + 0.052 * widest)))))


def room_above(values: Iterable[float], label_in: float, height_in: float) -> float:
    """The end of an axis that leaves room for labels of this height above the highest value."""
    highest = max((finite(value) for value in values), default=0.0)
    return highest / (1 - min(label_in / height_in, 0.6)) if 0 < highest < 1e300 else 1.0
