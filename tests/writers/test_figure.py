"""Figures: what is drawn, with which scales and labels, and that nothing overlaps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from gemmscope.document import document
from gemmscope.document.charts import Bar, BarChart, CurveChart, HeatCell, HeatMap, Point, Segment, WaterfallChart
from gemmscope.document.model import Chart, Document, Section, Subject
from gemmscope.document.palette import op_keys
from gemmscope.interval import Interval
from gemmscope.writers import figure, plots
from support.commands import explain
from support.results import RESULTS
from support.traces import recorded

RECIPES = ("BF16", "FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4")


@pytest.fixture(autouse=True)
def small_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(figure, "DPI", 100)
    with figure._drawing():
        yield


def of(*charts: Chart, title: str = "a model on a GPU") -> Document:
    """A document with these charts."""
    batch = {"micro-batch": 1, "sequence": 4096, "tp": 8, "cp": 1, "recompute": "none"}
    subject = Subject("model: 8 layers", model={"layers": 8}, batch=batch)
    main = tuple(replace(chart, main=True) for chart in charts)
    return Document("bench", title, subject, "a GPU", "the answer", sections=(Section("charts", main),))


def drawn(doc: Document) -> tuple[Any, list[Any]]:
    """The figure and its panels."""
    drawing = figure._main_charts(doc)
    return drawing, [axes for axes in drawing.get_axes() if axes.axison]


def texts(drawing: Any) -> list[str]:
    return [
        text.get_text() for text in drawing.findobj(match=lambda artist: hasattr(artist, "get_text")) if text.get_text().strip()
    ]


def stacked(title: str, times: dict[str, float], width: float = 0.05) -> BarChart:
    """Bars of two ops; every time with an interval."""
    bars = tuple(
        Bar(
            name,
            (Segment("QKV Proj", time * 0.6, "series-1"), Segment("MLP Up", time * 0.4, "series-3", "light")),
            None if name == "BF16" else Interval(1.5, 1.4, 1.6),
            baseline=name == "BF16",
            total=Interval(time, time * (1 - width), time * (1 + width)),
        )
        for name, time in times.items()
    )
    return BarChart("bars", title, "ms per step", bars)


def plane(rows: int, columns: int) -> HeatMap:
    """Speedups that grow with both sizes; the small ones are not certain, the first is not possible."""
    cells = tuple(
        tuple(
            HeatCell("C\n1.10", 1 + 0.1 * x + 0.05 * y, certain=x + y > 2, text="FP8Current 1.10x")
            if x + y
            else HeatCell(certain=False)
            for x in range(columns)
        )
        for y in range(rows)
    )
    sizes = [str(1024 * (place + 1)) for place in range(max(rows, columns))]
    return HeatMap("map", "heat", "hidden_size", "micro_batch_size", tuple(sizes[:rows]), tuple(sizes[:columns]), cells)


def curve(places: list[str], recipes: tuple[str, ...] = RECIPES[1:3]) -> CurveChart:
    series = {
        name: tuple(
            Point(place, Interval(1.1 + at / 9, 1 + at / 9, 1.2 + at / 9), mark="HOST-BOUND" * (at < 2))
            for at, place in enumerate(places)
        )
        for name in recipes
    }  # fmt: skip
    return CurveChart("curve", "curve", "sequence_length", series)


HARD = {
    "one recipe": lambda: of(stacked("one", {"BF16": 3.0})),
    "all recipes": lambda: of(stacked("all", dict.fromkeys(RECIPES, 3.0)), stacked("again", dict.fromkeys(RECIPES, 2.0))),
    "eight GPUs": lambda: of(*(stacked(f"gpu-{place}", {"BF16": 9.0 - place, "MXFP8": 5.0}) for place in range(8))),
    "long names": lambda: of(stacked("a long title " * 12, {"BF16": 3.0, "a recipe, a name " * 4: 2.0}), title="a model " * 30),
    "no baseline": lambda: of(BarChart("", "gap", "ms", (Bar("FP8Current", note="not run"), *stacked("", {"MXFP8": 2.0}).bars))),
    "a fallback": lambda: of(BarChart("bars", "fell", "ms", (replace(stacked("", {"MXFP8": 2.0}).bars[0], alarm="FALLBACK"),))),
    "a plane of 12 x 12": lambda: of(plane(12, 12)),
    "two planes": lambda: of(plane(4, 4), plane(4, 4)),
    "40 points": lambda: of(curve([str(256 * place) for place in range(1, 41)])),
    "names along a curve": lambda: of(curve([f"{1024 * place}x4096x{512 * place}" for place in range(1, 13)])),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_no_label_covers_another(name: str) -> None:
    """Neither in a panel nor along its sides; and nothing is cut off at the edge of the figure."""
    drawing, panels = drawn(HARD[name]())
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    renderer = canvas.get_renderer()
    edge = drawing.bbox
    for panel in panels:
        inside = [text for text in panel.texts if text.get_text()]
        for labels in (inside, panel.get_xticklabels(), panel.get_yticklabels()):
            shown = [label for label in labels if label.get_text() and label.get_visible()]
            if any(label.get_rotation() % 90 for label in shown):
                continue  # their boxes overlap, their letters do not
            boxes = [label.get_window_extent(renderer) for label in shown]
            for one, other in combinations(boxes, 2):
                both = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
                assert min(both) < 1.5, f"{name}: labels overlap"  # pixels
        for label in (*inside, panel.title, panel._left_title, panel.xaxis.label, panel.yaxis.label):
            box = label.get_window_extent(renderer)
            assert not label.get_text() or (box.x0 > edge.x0 - 1 and box.x1 < edge.x1 + 1 and box.y0 > -1), label.get_text()


def test_panels_share_their_scale() -> None:
    _, panels = drawn(of(stacked("slow", {"BF16": 4.0}), stacked("fast", {"BF16": 2.0, "MXFP8": 1.0})))
    assert len({panel.get_ylim() for panel in panels}) == 1
    _, panels = drawn(of(stacked("fast", {"BF16": 4.0}), stacked("far slower", {"BF16": 400.0})))
    assert panels[0].get_ylim() != panels[1].get_ylim()
    assert "other scale" in panels[1].get_ylabel()


def test_error_bars_are_as_long_as_the_intervals() -> None:
    _, [panel] = drawn(of(stacked("one", {"BF16": 4.0, "MXFP8": 2.0}, width=0.1)))
    [container] = [container for container in panel.containers if type(container).__name__ == "ErrorbarContainer"]
    ends = [tuple(path[:, 1]) for path in container.lines[2][0].get_segments()]
    assert ends == [pytest.approx((3.6, 4.4)), pytest.approx((1.8, 2.2))]


def test_a_waterfall_has_the_interval_of_the_step() -> None:
    result = document(RESULTS["step"]())
    falls = [chart for chart in result.charts() if isinstance(chart, WaterfallChart)]
    _, panels = drawn(replace(result, sections=(Section("x", (falls[0],)),)))
    [container] = [container for container in panels[0].containers if type(container).__name__ == "ErrorbarContainer"]
    [ends] = [tuple(path[:, 0]) for path in container.lines[2][0].get_segments()]
    assert falls[0].total is not None
    assert ends == pytest.approx((falls[0].total.low, falls[0].total.high), rel=0.002)


def test_the_legend_has_what_is_drawn() -> None:
    drawing, _ = drawn(of(stacked("one", {"BF16": 4.0, "MXFP8": 2.0})))
    [part] = [part for part in drawing.subfigs if part.legends]
    assert [text.get_text() for text in part.legends[0].get_texts()] == ["QKV Proj", "MLP Up", "fprop + dgrad", "wgrad (lighter)"]


def test_the_title_names_model_batch_layout_and_gpu() -> None:
    lines = texts(drawn(of(stacked("one", {"BF16": 4.0})))[0])
    assert {"a model on a GPU", "model: 8 layers, micro-batch 1, sequence 4096, tp 8"} <= set(lines)
    forecast = " ".join(texts(drawn(document(RESULTS["forecast"]()))[0]))
    assert "FORECAST" in forecast
    assert "B300" in forecast


def test_sizes_that_double_stand_on_a_log_axis() -> None:
    assert plots.positions(["128", "256", "512", "1024"])[0] == [7, 8, 9, 10]
    assert plots.positions(["128", "256", "384", "512", "640"])[0] == [128, 256, 384, 512, 640]
    _, [panel] = drawn(of(curve(["1024", "2048", "4096"])))
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1024", "2048", "4096"]


def test_the_break_even_line_runs_between_fields() -> None:
    """The line never crosses a field, and the best point has a frame."""
    _, panels = drawn(of(plane(4, 4)))
    segments = [path for lines in panels[0].collections for path in lines.get_segments()]
    assert segments
    for (x0, y0), (x1, y1) in segments:
        assert (x0 == x1 and x0 % 1 == 0.5) or (y0 == y1 and y0 % 1 == 0.5)
    assert {(patch.get_x(), patch.get_y()) for patch in panels[0].patches} >= {(3 - 0.46, 3 - 0.46)}


def test_several_gpus_are_compared_with_one_baseline_first() -> None:
    drawing, panels = drawn(document(RESULTS["forecast of several GPUs"]()))
    assert panels[0].get_ylabel() == "tokens/s per GPU"
    assert panels[1].get_ylabel() == "speedup over BF16"
    assert {"1.00x", "B300 SXM6 288\u00a0GB"} <= set(texts(drawing))
    assert [label.get_text() for label in panels[0].get_xticklabels()] == [
        label.get_text() for label in panels[1].get_xticklabels()
    ]


def test_a_trace_stands_beside_its_baseline() -> None:
    result = explain([recorded("healthy_te_current")], baseline=recorded("healthy_te_bf16"))
    doc = document(result)
    bars, fall = doc.charts()
    assert isinstance(bars, BarChart)
    assert isinstance(fall, WaterfallChart)
    assert [bar.label for bar in bars.bars] == ["baseline", "this trace"]
    assert fall.falls[-1].speedup == pytest.approx(bars.bars[0].total_ms / bars.bars[1].total_ms)
    assert len(drawn(doc)[1]) == 2


def test_no_number_has_an_exponent() -> None:
    """Whether it is large or small."""
    charts = [stacked("one", {"BF16": 12400.0, "MXFP8": 0.00003}), replace(curve(["1", "2"]), unit="TFLOP/s")]
    values = [text for chart in charts for text in texts(drawn(of(chart))[0])]
    assert not [text for text in values if re.search(r"\de[+-]?\d", text)]
    assert "12,400 ms" in " ".join(values)


@pytest.mark.parametrize("ending", ["svg", "pdf", "png"])
def test_the_same_numbers_give_the_same_file(ending: str, tmp_path: Path) -> None:
    doc = of(stacked("one", {"BF16": 4.0, "MXFP8": 2.0}))
    for name in ("first", "again"):
        (tmp_path / f"{name}.{ending}").write_bytes(figure.image(doc, f".{ending}"))
    first = (tmp_path / f"first.{ending}").read_bytes()
    assert first == (tmp_path / f"again.{ending}").read_bytes()
    if ending == "svg":  # text stays text
        assert b"micro-batch 1, sequence 4096, tp 8" in first
    if ending == "pdf":  # real fonts
        assert b"/FontFile2" in first
        assert b"/Type3" not in first


def test_many_ops_share_one_color() -> None:
    ops = [f"layers.{place}.linear" for place in range(40)]
    keys = op_keys(ops)
    bar = Bar("BF16", tuple(Segment(op if keys[op] != "series-rest" else "smaller ops", 1.0, keys[op]) for op in ops))
    _, [panel] = drawn(of(BarChart("bars", "many", "ms", (bar, replace(bar, label="MXFP8")))))
    heights = [patch.get_height() for patch in panel.patches]
    assert sum(heights) == pytest.approx(80)
    assert max(heights) == pytest.approx(33)
