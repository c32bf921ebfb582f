"""The picture of a sweep: the gain of the best precision over a plane of two sizes, or along one, and the break-even line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemmscope.forecast.sweep import Point
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.plot import COLOURS, STYLE, write_figure

MOST_LABELS = 24  # that can be read along a side
CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
MOST_LETTERS = 40  # of all labels below a panel: more stand upright
MOST_WORDS = 8  # columns that have room for a recipe's name


def save_sweep(sweeps: Sequence[tuple[str, Sequence[Point]]], names: Sequence[str], recipes: Sequence[str], path: str) -> None:
    """One panel for each GPU."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.2 * len(sweeps), 4.8), layout="constrained")
        panels = figure.subplots(1, len(sweeps), squeeze=False)[0]
        for panel, (gpu, points) in zip(panels, sweeps, strict=True):
            (_line if len(names) == 1 else _plane)(figure, panel, points, names, recipes)
            panel.set_title(f"{gpu}: FORECAST, gain of the training step over {BASELINE}", fontsize=9.5)
        write_figure(figure, path)


def _line(_: Any, panel: Any, points: Sequence[Point], names: Sequence[str], recipes: Sequence[str]) -> None:
    """Every recipe along one size, its error bar as a band."""
    low = [name for name in recipes if name != BASELINE]  # none where the chip runs nothing else
    for number, name in enumerate(low):
        found = [(point.values[0], gain) for point in points if (gain := point.of(name)) is not None]
        colour = COLOURS[number % len(COLOURS)]
        sizes = [size for size, _ in found]
        panel.plot(sizes, [gain.value for _, gain in found], color=colour, label=name, marker="o", markersize=2.5)
        bound = [(point.values[0], gain.value) for point in points if name in point.host_bound and (gain := point.of(name))]
        panel.plot([size for size, _ in bound], [gain for _, gain in bound], "x", color=colour, markersize=8)
        panel.fill_between(sizes, [gain.low for _, gain in found], [gain.high for _, gain in found], color=colour, alpha=0.15)
    panel.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    panel.set_xlabel(names[0])
    panel.set_ylabel(
        "times faster (band: 90% error bar)" + ("; x: HOST-BOUND" if any(each.host_bound for each in points) else "")
    )
    if low:
        panel.legend(frameon=False, fontsize=8)


def _plane(figure: Any, panel: Any, points: Sequence[Point], names: Sequence[str], recipes: Sequence[str]) -> None:
    """The best gain as colour, the best recipe in each field, the break-even line where gains become certain."""
    import numpy as np
    from matplotlib.lines import Line2D

    firsts, seconds = (list(dict.fromkeys(point.values[side] for point in points)) for side in (0, 1))
    gain, sure = np.full((len(firsts), len(seconds)), np.nan), np.full((len(firsts), len(seconds)), np.nan)
    possible = [point for point in points if not point.why_not]
    for point in possible:
        place = firsts.index(point.values[0]), seconds.index(point.values[1])
        name, found = point.best
        gain[place], sure[place] = found.value, found.low if name not in (BASELINE, *point.host_bound) else 0.0
    most = max(1.05, float(np.nanmax(gain, initial=1.0)))
    image = panel.imshow(gain, origin="lower", aspect="auto", cmap="cividis_r", vmin=1.0, vmax=most)
    figure.colorbar(image, ax=panel, label="times faster, best precision")
    in_words, crowded = len(seconds) <= MOST_WORDS, max(len(firsts), len(seconds)) > MOST_LABELS
    for point in [] if crowded else possible:
        name, found = point.best
        label = f"{name if in_words else _short(name, recipes)}\n{found.value:.2f}{'' if point.certain else ' ?'}"
        label += "\nhost" if name in point.host_bound else ""
        colour = "white" if found.value > (1 + most) / 2 else "black"
        panel.text(seconds.index(point.values[1]), firsts.index(point.values[0]), label, color=colour, **CENTRED)
    known = sure[~np.isnan(sure)]
    legend = []
    if min(sure.shape) > 1 and known.size and known.min() < 1.0 < known.max():
        panel.contour(np.nan_to_num(sure, nan=0.0), levels=[1.0], colors="#D55E00", linewidths=2)
        legend.append(Line2D([], [], color="#D55E00", linewidth=2, label="break-even (gain certain beyond)"))
    marks = (
        ("?", "too close to call", any(not each.certain for each in possible)),
        ("host", "HOST-BOUND", any(each.host_bound for each in possible)),
    )
    legend += [Line2D([], [], linestyle="", label=f"{mark} = {means}") for mark, means, there in marks if there and not crowded]
    if not in_words and not crowded:
        used = dict.fromkeys(point.best[0] for point in possible)
        legend += [Line2D([], [], linestyle="", label=f"{_short(name, recipes)} = {name}") for name in used]
    upright = sum(map(len, _ticks(seconds)[1])) > MOST_LETTERS
    if legend:
        below = (0.5, -0.2 if upright else -0.14)
        panel.legend(handles=legend, loc="upper center", bbox_to_anchor=below, ncol=3, frameon=False, fontsize=7)
    panel.set_xticks(*_ticks(seconds))
    panel.tick_params(axis="x", rotation=90 if upright else 0)
    panel.set_yticks(*_ticks(firsts))
    panel.set_xlabel(names[1])
    panel.set_ylabel(names[0])


def _short(name: str, recipes: Sequence[str]) -> str:
    """A letter for each recipe, in their order."""
    return "ABCDEFGHIJKL"[list(recipes).index(name) % 12]


def _ticks(values: Sequence[int]) -> tuple[list[int], list[str]]:
    """Every value, or every n-th where there are many.

    >>> _ticks([1, 2, 4])
    ([0, 1, 2], ['1', '2', '4'])
    """
    every = max(1, -(-len(values) // MOST_LABELS))
    places = list(range(0, len(values), every))
    return places, [str(values[place]) for place in places]
