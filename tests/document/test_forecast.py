"""The Document of a forecast: every number is marked FORECAST, and one rule decides what is too close to call."""

from __future__ import annotations

import pytest

from gemmscope.document import document
from gemmscope.document.charts import CurveChart, HeatMap
from gemmscope.document.model import Document, Table
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import ForecastResult
from support.forecast_files import forecast_result, plane, several_gpus, sweep

ALL = [forecast_result, several_gpus, sweep, plane]


def codes(shown: Document) -> list[str]:
    return [message.code for message in shown.messages]


def table(shown: Document, start: str) -> Table:
    return next(table for table in shown.tables() if table.title.startswith(start))


def column(shown_table: Table, name: str) -> list[str]:
    index = [column.name for column in shown_table.columns].index(name)
    return [row[index].text for row in shown_table.rows]


@pytest.mark.parametrize("make", ALL)
def test_every_number_says_that_it_is_a_forecast(make: object) -> None:
    shown = document(make())  # type: ignore[operator]
    assert shown.forecast
    assert shown.title.startswith("FORECAST")
    assert shown.answer.startswith("FORECAST")
    assert "FORECAST" in shown.where
    assert all("FORECAST" in table.title for table in shown.tables())
    assert all("FORECAST" in chart.title for chart in shown.charts())
    assert "forecast-not-measured" in codes(shown)
    assert not any("95%" in table.title for table in shown.tables())


def test_all_gpus_stand_side_by_side() -> None:
    result = several_gpus()
    main = table(document(result), "FORECAST: linears of one micro-batch on one rank, and the training step")
    assert len(main.rows) == sum(len(gpu.linears.recipes) for gpu in result.gpus)
    assert list(dict.fromkeys(column(main, "GPU"))) == ["b300", "h200", "l40s", "a100"]
    assert column(main, "Over b300 BF16")[0] == "1x"
    assert all("[" in text for text in column(main, "Over b300 BF16")[1:10])
    first = result.gpus[0].step
    assert first is not None
    mfu = first.recipes[0].mfu
    assert mfu is not None
    assert column(main, "MFU (BF16)")[0] == f"{mfu:.1%}"


def test_the_short_view_is_one_table() -> None:
    summary = document(several_gpus()).summary
    assert summary is not None
    assert {"GPU", "Over b300 BF16", "Cost"} <= {column.name for column in summary.columns}


def test_what_is_too_close_to_call_is_the_winners_rivals() -> None:
    """A regression test: the terminal, the page and the file contradicted each other."""
    for result in (forecast_result(), several_gpus()):
        shown = document(result)
        text = " ".join([shown.answer, *shown.because])
        for gpu in result.gpus:
            assert gpu.step is not None
            winner = gpu.step.winner
            if winner is None:
                assert gpu.step.unfit
                continue
            others = [name for name in winner.rivals if name != BASELINE]
            close = [
                finding for finding in gpu.findings if finding.code == "too-close-to-call" and finding.facts["over"] == others
            ]
            assert bool(close) == bool(others and winner.best != BASELINE)
            for name in others:
                ratio = gpu.step.speedup(winner.best, name)
                assert ratio is None or ratio.includes_one
            if others and winner.best != BASELINE:
                assert f"too close to call against {', '.join(winner.rivals)}" in text


@pytest.mark.parametrize(
    ("reach", "said"),
    [
        ({"b300": 0.01, "h200": 0.01}, "FORECAST: fastest is b300. Tokens/s"),
        ({"b300": 0.01, "h200": 3.0}, "FORECAST: fastest are b300 and h200, too close to call. Tokens/s"),
        ({"b300": 30.0, "h200": 0.01}, "FORECAST: b300, h200 and a100 are too close to call. Tokens/s"),
    ],
)
def test_gpus_whose_error_bars_overlap_are_too_close_to_call(reach: dict[str, float], said: str) -> None:
    result = several_gpus()
    gpus = []
    for gpu in result.gpus:
        assert gpu.step is not None
        times = [
            time.model_copy(update={"step_ms": Interval(ms := time.step_ms.value, ms / (1 + width), ms * (1 + width))})
            for time in gpu.step.recipes
            for width in [reach.get(gpu.gpu, 0.01)]
        ]
        gpus.append(gpu.model_copy(update={"step": gpu.step.model_copy(update={"recipes": tuple(times), "may_not_fit": ()})}))
    shown = document(result.model_copy(update={"gpus": tuple(gpus)}))
    assert shown.answer.startswith(said)


def test_findings_of_one_gpu_carry_its_name() -> None:
    shown = document(several_gpus())
    fits = [message for message in shown.messages if message.code == "does-not-fit"]
    assert [message.text.split(":")[0] for message in fits] == ["l40s"]
    assert codes(shown).count("mfu-definition") == 1  # all GPUs share it
    assert "only-baseline-runs" in codes(shown)


def test_the_cost_of_the_run_is_one_table() -> None:
    costs = table(document(several_gpus()), "FORECAST: Cost of the full run")
    assert set(column(costs, "GPU")) == {"b300", "h200", "a100"}  # it does not fit on an L40S
    assert "4, 2.5 per GPU-hour" in costs.note
    assert "Restarts are not included" in costs.note


def test_the_memory_of_every_gpu_is_a_table() -> None:
    result = several_gpus()
    shown = document(result)
    for gpu in result.gpus:
        memory = table(shown, f"{gpu.gpu}: FORECAST: memory of one GPU")
        assert [column.name for column in memory.columns[1:]] == list(gpu.linears.recipes)
        for place, needed in enumerate(gpu.memory, start=1):
            sizes = [row[place].value or 0.0 for row in memory.rows[:9]]
            assert sum(sizes) == pytest.approx(memory.rows[9][place].value)
            assert memory.rows[-1][place].text == needed.fit
    summary = shown.summary
    assert summary is not None
    assert any("does not fit" in text for text in column(summary, "Memory"))
    l40s = [index for index, gpu in enumerate(column(summary, "GPU")) if gpu == "l40s"]
    assert {column(summary, "Over b300 BF16")[index] for index in l40s} == {"-"}


def test_every_gpu_has_its_speedups_for_other_runs() -> None:
    shown = document(several_gpus())
    assert {speedup.where for speedup in shown.speedups} == {f"{gpu.title}, FORECAST" for gpu in several_gpus().gpus[:3]}
    [alone] = {speedup.where for speedup in document(forecast_result()).speedups}
    assert alone == document(forecast_result()).where


# --- sweeps -----------------------------------------------------------------------------------------------------------


def points(result: ForecastResult) -> list[tuple[Table, int]]:
    shown = document(result)
    return [(table(shown, f"{swept.gpu}: FORECAST, every point"), index) for index, swept in enumerate(result.sweeps)]


@pytest.mark.parametrize("make", [sweep, plane])
def test_a_sweep_does_not_contradict_itself(make: object) -> None:
    """ "0 of 4 points are faster" stood above a table of 2.1x [1.9, 2.3]: two questions had one answer."""
    result = make()  # type: ignore[operator]
    for point_table, index in points(result):
        swept = result.sweeps[index]
        assert len(point_table.rows) == len(swept.points)
        for point, faster, close in zip(
            swept.points, column(point_table, "Faster than BF16"), column(point_table, "Too close to call against"), strict=True
        ):
            if point.winner is None:
                continue
            gain = point.winner.speedup
            by_hand = gain is not None and gain.above_one
            assert (faster == "yes") == by_hand == point.gains
            assert close == (", ".join(point.winner.rivals) or "-")
        count = sum(point.gains for point in swept.points)
        if len(result.sweeps) == 1:
            assert any(f"at {count:,} of" in line for line in document(result).because)


def test_one_size_is_a_curve_with_marks() -> None:
    [first, second] = document(sweep()).charts()
    assert isinstance(first, CurveChart)
    assert isinstance(second, CurveChart)
    assert {point.mark for point in first.series["FP8Delayed"]} == {"", "HOST-BOUND"}
    assert [point.at for point in first.series["MXFP8"]] == ["128", "256", "512", "1024", "2048"]


def test_two_sizes_are_a_heat_map() -> None:
    [chart] = document(plane()).charts()
    assert isinstance(chart, HeatMap)
    assert (len(chart.rows), len(chart.columns)) == (9, 4)
    assert dict(chart.legend) == {"?": "too close to call", "host": "host-bound"}
    [swept] = plane().sweeps
    cells = [cell for row in chart.cells for cell in row]
    assert [cell.certain for cell in cells] == [point.gains for point in swept.points]
    assert [cell.value is None for cell in cells] == [point.winner is None for point in swept.points]


def test_reasons_stand_in_the_findings() -> None:
    one, two = document(sweep()), document(plane())
    assert {"sweep-host-bound", "sweep-recipe-not-possible"} <= set(codes(one))
    assert "sweep-point-not-possible" in codes(two)
    assert column(points(plane())[0][0], "Not possible")[0].startswith("hidden_size must be at least 1")


def test_break_even_is_told() -> None:
    break_even = table(document(sweep()), "h200: FORECAST break-even")
    assert column(break_even, "Recipe") == ["FP8Current", "FP8Delayed", "FP8Block"]
    two = table(document(plane()), "b300: FORECAST break-even")
    assert [column.name for column in two.columns][::2] == ["Recipe", "At micro_batch_size"]
