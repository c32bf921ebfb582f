"""Classes that appear in one chart can be told apart: with every kind of color vision, and in grey print."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from gemmscope.document import palette
from gemmscope.document.palette import Style
from gemmscope.parts import STEP_PARTS
from gemmscope.recipe.recipes import recipes

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "luminance": [[0.2126729, 0.7151522, 0.0721750]] * 3,  # in grey print, by the light that is reflected
    "luma": [[0.299, 0.587, 0.114]] * 3,  # in grey print as most drivers do it: Rec. 601, on the values as they are stored
}
GREY = ("luminance", "luma")
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
# The least CIEDE2000 between two classes of one chart, by vision. Just noticeable is about 1, side by side.
LEAST = {"recipe": {"normal": 18.0, "grey": 7.5}, "part": {"normal": 18.0, "grey": 7.5}, "series": {"normal": 15.0, "grey": 5.0}}
COLOR_BLIND = {"recipe": 11.0, "part": 11.0, "series": 9.0}


def lab(color: str, vision: str) -> tuple[float, float, float]:
    """CIELAB of a color as somebody with this vision sees it."""
    srgb = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    srgb = VISIONS["luma"] @ srgb if vision == "luma" else srgb
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    relative = XYZ @ np.clip(linear if vision == "luma" else np.asarray(VISIONS[vision]) @ linear, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(relative > 216 / 24389, np.cbrt(relative), (24389 / 27 * relative + 16) / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first: tuple[float, float, float], second: tuple[float, float, float]) -> float:
    """CIEDE2000 (Sharma, Wu and Dalal, 2005)."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25**7))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = h1 + turn / 2 if c1 * c2 else h1 + h2
    chroma, lightness = (c1 + c2) / 2, (l1 + l2) / 2
    weights = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(weight * np.cos(np.radians(times * hue + shift)) for weight, times, shift in weights)
    dl = (l2 - l1) / (1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    around = np.radians(60 * np.exp(-((((hue % 360) - 275) / 25) ** 2)))
    return float(np.sqrt(dl**2 + dc**2 + dh**2 - np.sin(around) * 2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * dc * dh))


def named(kind: str, names: list[str]) -> list[Style]:
    return [palette.styles()[f"{kind}-{palette.slug(name)}"] for name in names]


def charts() -> dict[str, list[Style]]:
    """What can appear together: the recipes of one backend, the parts of a step, the ops of a layer or several runs."""
    backends = {backend for recipe in recipes().values() for backend in recipe.backends}
    of_backend = {
        f"recipe {name}": [recipe.name for recipe in recipes().values() if name in recipe.backends] for name in backends
    }
    series = [style for key, style in palette.styles().items() if key.startswith("series-")]
    return {
        **{title: named("recipe", names) for title, names in of_backend.items()},
        "part": named("part", list(STEP_PARTS)),
        "series": series,
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_classes_of_one_chart_differ(vision: str, theme: str) -> None:
    for title, styles in charts().items():
        kind = title.split()[0]
        for one, other in combinations(styles, 2):
            apart = distance(lab(getattr(one, theme), vision), lab(getattr(other, theme), vision))
            least = LEAST[kind].get("grey" if vision in GREY else vision, COLOR_BLIND[kind])
            if one.hatch != other.hatch:  # also distinguished by hatching: in grey print only by that
                least = 0.0 if vision in GREY else least / 2
            assert apart >= least, f"{one.key} and {other.key} are {apart:.1f} apart with {vision} ({theme})"


def test_the_distance_is_ciede2000() -> None:
    """Pairs of the test data that Sharma, Wu and Dalal published."""
    pairs = {
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)): 2.0425,
        ((50.0, 2.5, 0.0), (61.0, -5.0, 29.0)): 22.8977,
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514)): 0.9082,
    }
    for (first, second), published in pairs.items():
        assert distance(first, second) == pytest.approx(published, abs=1e-4)


def test_curves_differ_by_marker() -> None:
    for title, styles in charts().items():
        if title != "part":
            assert len({style.marker for style in styles}) == len(styles), title


def test_the_palette_is_complete() -> None:
    """Every recipe and every part has a style, and every style belongs to something."""
    keys = {f"recipe-{palette.slug(name)}" for name in recipes()} | {f"part-{palette.slug(part)}" for part in STEP_PARTS}
    assert {key for key in palette.styles() if key.startswith(("recipe-", "part-"))} == keys
    assert all(f"--{key}:" in palette.css() for key in palette.styles())


def test_ops_keep_their_colors() -> None:
    """In every model, unless it has more ops than there are colors."""
    dense = palette.op_keys(["MLP Gate+Up", "MLP Down", "QKV Proj", "Attn Out", "LM Head"])
    assert dense == {**dense, **palette.op_keys(["Attn Out", "QKV Proj"])}
    many = palette.op_keys([f"linear {place}" for place in range(40)])
    assert list(many.values()).count(palette.REST) == 40 - (palette.most_series() - 1)
    assert len(set(many.values())) == palette.most_series()
    shared = palette.op_keys(["Shared Expert Down", "Q Down Proj", "K Proj"])
    assert len(set(shared.values())) == 3
