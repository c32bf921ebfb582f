"""The Document of a step: what the result says is in it, and in every writer's output."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.document import document
from gemmscope.document.charts import BarChart, CurveChart, WaterfallChart
from gemmscope.document.model import Document
from gemmscope.document.step_parts import step_answer, step_chart, step_speedups, step_table, waterfalls
from gemmscope.findings import finding
from gemmscope.interval import Interval
from gemmscope.results.linears import Winner
from gemmscope.results.step import Recommendation, StepResult, StepTime, StepTimes
from gemmscope.step.waterfall import levels_of
from support.step_files import recorded_step


@pytest.fixture(scope="module")
def result() -> StepResult:
    return recorded_step("gpt1b", verified=True, batches=True)


@pytest.fixture(scope="module")
def doc(result: StepResult) -> Document:
    return document(result, "step.json")


def time(recipe: str, speedup: Interval | None = None, **values: Any) -> StepTime:
    return StepTime(
        recipe=recipe, step_ms=Interval(100.0, 99.0, 101.0), speedup=speedup, tokens_per_s=1.0, model_tflops=1.0, **values
    )


def times(*others: StepTime, winner: Winner | None = None, origin: Any = "measured") -> StepTimes:
    return StepTimes(origin=origin, recipes=(time("BF16"), *others), winner=winner)


def test_a_result_survives_its_run_file(result: StepResult) -> None:
    assert StepResult.model_validate_json(result.to_json()) == result


def test_every_recipe_has_a_row_with_mfu(doc: Document, result: StepResult) -> None:
    (table,) = [table for table in doc.tables() if table.title == "Training step per GPU"]
    names = [column.name for column in table.columns]
    assert [row[0].text for row in table.rows] == [time.recipe for time in result.step.recipes]
    for row, recipe in zip(table.rows, result.step.recipes, strict=True):
        assert row[names.index("MFU (BF16)")].value == recipe.mfu
        assert row[names.index("Step ms")].value == recipe.step_ms.value
        assert row[names.index("Launch ms")].value == (recipe.launch_ms and recipe.launch_ms.value)


def test_every_finding_is_a_message(doc: Document, result: StepResult) -> None:
    assert sorted(message.code for message in doc.messages) == sorted(finding.code for finding in result.findings)
    assert [message.level for message in doc.messages] == sorted(
        (finding.level for finding in result.findings), key=("error", "warning", "note").index
    )


def test_charts(doc: Document, result: StepResult) -> None:
    bars, *falls = [chart for chart in doc.charts() if not isinstance(chart, CurveChart)]
    (curve,) = [chart for chart in doc.charts() if isinstance(chart, CurveChart)]
    assert isinstance(bars, BarChart)
    assert [bar.label for bar in bars.bars] == [time.recipe for time in result.step.recipes]
    assert [chart.recipe for chart in falls if isinstance(chart, WaterfallChart)] == ["FP8Current", "FP8Delayed", "FP8Block"]
    assert curve.places == ["1 x 1024", "2 x 1024", "8 x 1024"]
    segment = bars.bars[1].segments[0]
    facts = dict(segment.facts)
    assert segment.name == "GEMMs"
    assert "steps timed" in facts
    assert any("nvjet" in value for value in facts.values())  # its kernels
    assert sum(part.time_ms for part in bars.bars[1].segments) == pytest.approx(sum(result.step.recipes[1].parts_ms.values()))


def test_the_short_view_has_what_was_requested(doc: Document) -> None:
    """The short view has the step, and the verification and cost if they were requested."""
    assert doc.summary is not None
    assert {"Days", "GPU-hours"} <= {column.name for column in doc.summary.columns}
    assert {"Prediction compared with the real model", "Cost of the full run"} <= {table.title for table in doc.tables()}
    assert any("smallest batch" in line for line in doc.because)


def test_the_answer_names_the_winner(doc: Document, result: StepResult) -> None:
    assert result.step.winner is not None
    assert result.step.winner.best in doc.answer
    assert "1.318x [1.308, 1.327]" in doc.answer
    assert doc.advice is not None
    assert "Transformer Engine" in doc.advice.ready_to_paste
    assert {named.recipe for named in doc.speedups} == {"FP8Current", "FP8Delayed", "FP8Block"}


SURE, CLOSE, SLOW = Interval(1.3, 1.29, 1.31), Interval(1.01, 0.99, 1.03), Interval(0.9, 0.89, 0.91)


def fp8(speedup: Interval, origin: str = "measured", best: str = "FP8Block", rivals: tuple[str, ...] = ()) -> StepTimes:
    winner = Winner(best=best, speedup=speedup if best == "FP8Block" else None, rivals=rivals)
    return times(time("FP8Block", speedup), winner=winner, origin=origin)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (StepTimes(origin="measured", recipes=()), "Nothing was measured on X."),
        (times(), "Only BF16 was measured on X."),
        (fp8(SURE), "Use FP8Block: 1.300x [1.290, 1.310] over BF16 for the training step of M on X."),
        (
            fp8(CLOSE, rivals=("BF16",)),
            "Too close to call: FP8Block and BF16 for the training step of M on X (1.010x [0.990, 1.030]).",
        ),
        (
            fp8(SLOW, best="BF16"),
            "Stay with BF16 for the training step of M on X: the best other recipe, FP8Block, reaches 0.900x [0.890, 0.910].",
        ),
        (
            fp8(Interval(1.3), rivals=("BF16",)),
            "FP8Block reaches 1.30x [?] over BF16 for the training step of M on X; too little was measured for an interval.",
        ),
        (fp8(SURE, "forecast"), "FORECAST: Use FP8Block: 1.300x [1.290, 1.310] over BF16 for the training step of M on X."),
    ],
)
def test_answers(given: StepTimes, sentence: str) -> None:
    assert step_answer(given, "X", "M")[0] == sentence


def test_a_fallback_is_no_speedup_anywhere() -> None:
    fell_back = finding("step-fallback", recipe="FP8Block", where=["qkv forward"], ran="bf16 x bf16", requested=["e4m3 x e4m3"])
    fallen = times(time("FP8Block", verdict=fell_back, parts_ms={"GEMMs": 90.0}), winner=Winner(best="BF16", speedup=None))
    cells = [row[2] for row in step_table(fallen).rows]
    assert [(cell.text, cell.level) for cell in cells] == [("1x", ""), ("FALLBACK", "error")]
    chart = step_chart(fallen)
    assert chart is not None
    assert [bar.head for bar in chart.bars] == ["", "FALLBACK"]
    assert step_speedups(fallen, "X") == ()
    assert step_answer(fallen, "X")[0] == "No speedup on X: FP8Block did not run in low precision."


def test_shares_are_those_of_the_layers_that_were_run() -> None:
    """Only a quarter of the layers ran: shares refer to these layers, not to the whole step."""
    chart = step_chart(times(time("FP8Block", SURE, parts_ms={"GEMMs": 10.0, "attention": 10.0})), layers_run=8)
    assert chart is not None
    assert "8 layers" in chart.note
    assert [("share", "50.0%") in segment.facts for segment in chart.bars[1].segments] == [True, True]


def test_a_forecast_says_so_in_every_title() -> None:
    given = times(
        time("FP8Block", SURE, waterfall=levels_of({"GEMMs": 9.0}, {"GEMMs": 5.0}), parts_ms={"GEMMs": 5.0}), origin="forecast"
    )
    charts = [step_chart(given, prefix="b300: "), *waterfalls(given, prefix="b300: ")]
    assert [chart.title.startswith("b300: FORECAST: ") for chart in charts if chart is not None] == [True, True]


def test_a_mixed_plan_is_told(result: StepResult) -> None:
    mixed = Recommendation(recipe="FP8Delayed", left_out=("qkv",), speedup=Interval(1.4, 1.39, 1.41), rivals=("FP8Delayed",))
    doc = document(result.model_copy(update={"recommendation": mixed}))
    assert doc.advice is not None
    assert doc.advice.text == "use FP8Delayed with qkv in BF16 (1.400x [1.390, 1.410]); too close to call against FP8Delayed"
    assert any("FP8Delayed with qkv in BF16" in line for line in doc.because)


def test_unknown_agreement_is_a_question_mark(result: StepResult) -> None:
    verified = {"depth": 8, "predicted": Interval(1.2), "actual": Interval(0.2, -0.1, 0.5)}
    step = times(time("FP8Block", SURE, verified=verified), winner=Winner(best="FP8Block", speedup=SURE))
    (table,) = [table for table in document(result.model_copy(update={"step": step})).tables() if "real model" in table.title]
    assert [cell.text for cell in table.rows[0]] == ["FP8Block", "8", "1.20x [?]", "0.20x [0.00, 0.50]", "+500.00%", "?"]
