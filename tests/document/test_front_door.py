"""What a reader sees first: answers that agree with themselves, figures that show what they say, no repeated words."""

from __future__ import annotations

import re

import pytest

import gemmscope as gs
from gemmscope.commands.report import answers, report
from gemmscope.document import document
from gemmscope.document.charts import BarChart, CurveChart, HeatMap
from gemmscope.document.combine import own_baseline
from gemmscope.document.model import Document
from gemmscope.interval import Interval
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.plan import PlanPoint
from gemmscope.writers import figure, html
from gemmscope.writers.plots import _break_even
from support.plan_files import plan_result

MODEL = "llama-3.1-8b"


@pytest.fixture(scope="module")
def several() -> ForecastResult:
    return gs.load(MODEL).on(1, 8192).forecast("h100", "h200", "b200", recipes="fp8current")


def of_shell(result: ForecastResult, command: str) -> Document:
    """Its document, as if it came from the command line."""
    return document(result.model_copy(update={"command": command}))


def test_a_plan_recommends_what_fits_in_any_case() -> None:
    """The fastest layout is recommended unless its memory is tight and another one is as fast as far as is known."""
    point = plan_result().points[0]
    first, *others = point.layouts
    close = next(layout for layout in others if layout.close)

    def best(*layouts: object) -> object:
        return PlanPoint.model_copy(point, update={"layouts": tuple(layouts)}).best

    tight, safe = (first.model_copy(update={"tight": True}), close.model_copy(update={"tight": False}))
    slower = Interval(1.3, 1.2, 1.4)
    assert best(first.model_copy(update={"tight": False}), safe).recipe == first.recipe
    assert best(tight, safe) is safe
    assert best(tight, safe.model_copy(update={"slowdown": slower})) is tight
    assert best(tight, safe.model_copy(update={"tight": True})) is tight


def test_what_does_not_fit_is_named_and_not_measured(several: ForecastResult) -> None:
    shown = of_shell(several, f"gemmscope forecast --preset {MODEL} --gpu h100,h200,b200")
    assert shown.title.endswith("on h200, b200; does not fit on h100")
    assert shown.next_command.startswith("gemmscope step")
    alone = of_shell(several.model_copy(update={"gpus": several.gpus[:1]}), f"gemmscope forecast --preset {MODEL} --gpu h100")
    assert alone.next_command == f"gemmscope plan --preset {MODEL} --gpu h100 --gpus 8"
    assert "find a layout that fits" in alone.next_purpose


def test_a_forecast_has_no_run(several: ForecastResult) -> None:
    assert own_baseline([document(several)]) == "Speedup over BF16 on the same GPU"


def test_forecast_is_said_once(several: ForecastResult) -> None:
    one = several.model_copy(update={"gpus": several.gpus[1:2]})
    lines = answers(report([one, one.model_copy()])[0])
    assert len(lines) == 2
    assert all(line.count("FORECAST") == 1 for line in lines)


def test_sizes_without_a_point_are_noted() -> None:
    swept = gs.load(MODEL).on(1, 8192).sweep("h200", micro_batch_size=[1, 2, 8], recipes="fp8current")
    [chart] = [chart for chart in document(swept).charts() if isinstance(chart, CurveChart)]
    assert chart.note.startswith("Not drawn: micro_batch_size 8 (")
    assert "sequence_length 8192" in document(swept).context


def test_the_break_even_line_is_between_speedups() -> None:
    """Not around points that do not fit."""
    import matplotlib.pyplot as plt

    swept = gs.load(MODEL).on(1).sweep("h200", micro_batch_size=[1, 8], sequence_length=[4096, 8192], recipes="fp8current")
    [chart] = [chart for chart in document(swept).charts() if isinstance(chart, HeatMap)]
    assert any(cell.value is None for row in chart.cells for cell in row)
    _, panel = plt.subplots()
    assert _break_even(panel, chart) == []
    plt.close("all")


def test_labels_have_the_digits_of_their_intervals() -> None:
    charts = [chart for chart in document(plan_result()).charts() if isinstance(chart, BarChart)]
    bars = [bar for chart in charts for bar in chart.bars if bar.total is not None and bar.total.half_width > 0.05]
    assert bars
    for bar in bars:
        digits = bar.time.removesuffix(" ms").replace(",", "")
        assert len(digits.strip("0.")) <= 3, bar.time


def test_memory_of_a_plan_ends_at_that_of_the_gpu() -> None:
    result = plan_result()
    [chart] = [chart for chart in document(result).charts() if isinstance(chart, CurveChart)]
    assert chart.limit == result.memory_gb
    assert max(float(place) for place in chart.places) <= chart.limit
    assert "GB" in chart.axis


def test_in_python_a_result_says_its_answer(several: ForecastResult) -> None:
    assert repr(several).startswith("<ForecastResult: FORECAST: fastest is b200.")
    assert len(several._repr_html_()) < 150_000
    assert len(plan_result()._repr_html_()) < 150_000


def test_a_plan_shows_what_it_recommends() -> None:
    """Its row is in the table of the first screen, with the most memory that it can need; so is that of a faster, tight one."""
    point = plan_result().points[0]
    tight = point.layouts[0].model_copy(update={"tight": True, "most_memory_gb": 999.0, "on_front": True})
    safe = next(layout for layout in point.layouts if layout.close).model_copy(update={"on_front": False, "most_memory_gb": 70.0})
    told = document(plan_result().model_copy(update={"points": (point.model_copy(update={"layouts": (tight, safe)}),)}))
    assert told.summary is not None
    assert told.summary.marked == (1,)
    most = [head.name for head in told.summary.columns].index("At most")
    assert [row[most].text for row in told.summary.rows] == ["999", "70"]
    assert "recommended, not on the front" in told.summary.note
    assert f"{safe.memory_gb:.0f} (at most 70)" in told.answer
    assert "its memory is tight" in told.because[0]


def test_what_may_not_fit_is_not_the_answer_of_a_sweep() -> None:
    swept = gs.load(MODEL).on(1, 8192).sweep("h200", micro_batch_size=[1, 2], recipes="fp8current")
    told = document(swept.model_copy(update={"command": f"gemmscope forecast --preset {MODEL} --gpu h200 --sweep mbs=1,2"}))
    assert "at micro_batch_size 1" in told.answer
    assert "Not counted: micro_batch_size 2" in " ".join(told.because)
    assert told.summary is not None
    assert [row[-1].text.partition(",")[2] for row in told.summary.rows] == ["", " may not fit"]
    assert told.next_command == f"gemmscope forecast --preset {MODEL} --gpu h200 --micro-batch-size 1"


def test_the_best_point_of_a_map_is_that_of_the_answer() -> None:
    swept = gs.load(MODEL).on(1, 4096).sweep("h200", micro_batch_size=[4, 8], sequence_length=[1024, 2048], recipes="fp8current")
    told = document(swept)
    (chart,) = (chart for chart in told.charts() if isinstance(chart, HeatMap))
    assert any(cell.may_not_fit for row in chart.cells for cell in row)
    assert chart.best is not None
    column, row = chart.best
    assert f"micro_batch_size {chart.rows[row]}, sequence_length {chart.columns[column]}." in told.answer


def test_where_only_bf16_fits_no_recipe_is_called_slow() -> None:
    swept = gs.load(MODEL).on(1, 2048).sweep("h100", micro_batch_size=[1, 8], recipes="fp8current")
    assert document(swept).answer == "FORECAST: on h100, only BF16 fits in memory, at 1 of 2 points."


def test_several_gpus_say_what_does_not_fit_and_what_is_left_out() -> None:
    result = gs.load(MODEL).on(1, 8192).forecast("h100", "h200", "b200", "b300")
    told = document(result)
    assert told.answer.endswith("It does not fit on h100.")
    assert told.summary is not None
    assert "Only BF16, the best recipe and its close rivals are shown." in told.summary.note
    unsure = document(gs.load(MODEL).on(2, 8192).forecast("h200", "h100", recipes="fp8current")).answer
    assert unsure.startswith("FORECAST: only h200 may have enough memory for this layout: ")


def test_a_figure_says_what_is_not_drawn_and_that_its_axis_is_logarithmic() -> None:
    swept = gs.load(MODEL).on(1, 1024).sweep("h200", micro_batch_size=[1, 2, 4, 64], recipes="fp8current")
    drawn = figure.image(document(swept), ".svg").decode()
    assert "micro_batch_size (log scale)" in drawn
    assert "Not drawn: micro_batch_size 64" in drawn


def test_rates_on_a_page_have_the_digits_of_their_intervals(several: ForecastResult) -> None:
    texts = re.findall(r'"text":"([0-9,]+) .u00b7 [0-9.]+x"', html.page([document(several)]))
    assert len(texts) == 4
    assert all(len(text.replace(",", "").rstrip("0")) <= 3 for text in texts), texts
