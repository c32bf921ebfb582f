"""The colors of everything that is drawn, from `palette.toml`: one for each class, the same in figures and on pages.

A chart holds the key of a style (`part-gemms`), never a color. Figures look the style up; a page has a CSS variable of that name.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from gemmscope.recipe.recipes import recipes
from gemmscope.roles import key_of
from gemmscope.toml import load_data
from gemmscope.units import slug

CLASSES = ("recipe", "part", "series", "mark")
REST = "series-rest"  # what has no color of its own


@dataclass(frozen=True)
class Style:
    """How a class is drawn. Bars use `hatch` beside the color, curves use `marker` and `line`."""

    key: str
    light: str
    dark: str
    hatch: str = ""
    marker: str = "o"
    line: str = "solid"


@cache
def _data() -> dict[str, Any]:
    return load_data("gemmscope.document", "palette.toml")


@cache
def styles() -> dict[str, Style]:
    """Every style by its key.

    >>> styles()["recipe-bf16"].light
    '#686868'
    """
    return {style.key: style for style in [_style(kind, name) for kind in CLASSES for name in _data()[kind]]}


def _style(kind: str, name: str) -> Style:
    return Style(f"{kind}-{slug(name)}", **_data()[kind][name])


def recipe_key(name: str, place: int = 0) -> str:
    """The style of a recipe; a recipe that the palette lacks is a missing fact. What is no recipe has the style of its place.

    >>> recipe_key("MXFP8"), recipe_key("MXFP8 (in BF16: first 1)", 2)
    ('recipe-mxfp8', 'series-3')
    """
    return _style("recipe", name).key if name in recipes() else series_key(place)


def part_key(name: str) -> str:
    """The style of a part of a training step.

    >>> part_key("head and loss"), part_key("unheard of")
    ('part-head-and-loss', 'series-rest')
    """
    return _style("part", name).key if name in _data()["part"] else REST


def series_key(place: int) -> str:
    """The style of the first, second, ... of several similar series, such as runs."""
    return f"series-{place % most_series() + 1}"


def most_series() -> int:
    """How many series have a color of their own."""
    return len(_data()["series"]) - 1


def op_keys(ops: Sequence[str]) -> dict[str, str]:
    """The styles of the ops of one model, the largest first. An op keeps its color unless a larger one has it.

    >>> op_keys(["MLP Up", "QKV Proj", "my.linear"])
    {'MLP Up': 'series-3', 'QKV Proj': 'series-1', 'my.linear': 'series-2'}
    """
    places = {op: place - 1 for op in ops if (place := _data()["ops"].get(key_of(op))) is not None}
    most = most_series() if len(ops) <= most_series() else most_series() - 1
    keys: dict[str, str] = {}
    for op in ops[:most]:  # those with a color of their own first, or others would take it
        if op in places and series_key(places[op]) not in keys.values():
            keys[op] = series_key(places[op])
    free = [key for place in range(most_series()) if (key := series_key(place)) not in keys.values()]
    for op in ops[:most]:
        keys.setdefault(op, free[0] if free else REST)
        free = free[1:] if free[:1] == [keys[op]] else free
    return {op: keys.get(op, REST) for op in ops}


def heat_stops() -> tuple[str, ...]:
    """The colors of a heat map, from no speedup to the largest."""
    return tuple(_data()["heat"]["stops"])


def css() -> str:
    """The colors as CSS variables, `--recipe-bf16` and so on, for light and dark screens and for paper."""
    light = "".join(f"--{key}:{style.light};" for key, style in styles().items())
    dark = "".join(f"--{key}:{style.dark};" for key, style in styles().items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def shapes(keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Hatch, marker and line of these styles, for a chart that has its colors from CSS."""
    return {
        key: {name: value for name, value in asdict(styles()[key]).items() if name in ("hatch", "marker", "line")}
        for key in dict.fromkeys(keys)
    }
