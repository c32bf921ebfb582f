"""How results show themselves in Python: one short line, DataFrames, a notebook's HTML."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import gemmscope as gs
from gemmscope.document import document
from gemmscope.results.base import LONGEST_REPR, Result, Samples
from gemmscope.results.forecast import ForecastResult
from gemmscope.writers import tables
from support.run_files import recorded_bench
from support.step_files import recorded_step

TRACE = Path(__file__).parent / "data" / "traces" / "recompute.json.gz"
SIZES = {"hidden_size": "1k", "intermediate_size": "4k", "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 1000}
KINDS = ("bench", "step", "forecast", "sweep", "shapes", "compare", "explain")
every_result = pytest.mark.parametrize("kind", KINDS)


@cache
def results() -> dict[str, Result]:
    job = gs.load(**SIZES).on(1, "1k")
    bench = recorded_bench("first")
    return {
        "bench": bench,
        "step": recorded_step(),
        "forecast": job.forecast(["b300", "h200"]),
        "sweep": job.sweep("b300", micro_batch_size=[1, 2]),
        "shapes": job.shapes(),
        "compare": gs.compare_runs([bench, recorded_bench("again")]),
        "explain": gs.explain_trace(TRACE),
    }


def parts(value: Any) -> list[Any]:
    """The value and everything inside it that is a part of a result."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in parts(item)]
    if isinstance(value, dict):
        return parts(list(value.values()))
    if isinstance(value, BaseModel):
        return [value, *parts([getattr(value, name) for name in type(value).model_fields])]
    if is_dataclass(value):
        return [value, *parts([getattr(value, field.name) for field in fields(value)])]
    return []


@every_result
def test_one_short_line(kind: str) -> None:
    result = results()[kind]
    assert repr(result).startswith(f"<{type(result).__name__}: {document(result).answer[:40]}")
    for part in parts(result):
        assert "\n" not in repr(part)
        if isinstance(part, (BaseModel, Samples)):
            assert len(repr(part)) <= LONGEST_REPR


def test_parts_show_their_numbers() -> None:
    forecast = results()["forecast"]
    assert isinstance(forecast, ForecastResult)
    assert repr(forecast.gpus[0]).startswith("GpuForecast(gpu='b300', title=")
    step = forecast.gpus[0].step
    assert step is not None
    assert re.match(r"StepTime\(recipe='FP8Current', step_ms=[\d.]+ \[[\d.]+, [\d.]+\], speedup=", repr(step.recipes[1]))


def test_models_and_jobs_are_short_too() -> None:
    model = gs.load("llama-3.1-8b")
    assert repr(model) == "<Model gemmscope.load('llama-3.1-8b')>"
    assert repr(model.on(1, "8k")) == "<Job gemmscope.load('llama-3.1-8b').on(micro_batch_size=1, sequence_length=8192)>"


def test_gpus_and_recipes_in_every_form() -> None:
    job = gs.load(**SIZES).on(1, 1024)
    forms: list[tuple[Any, ...]] = [("h100", "b200"), (["h100", "b200"],), (("h100", "b200"),), ("h100, b200",)]
    for form in forms:
        assert [gpu.gpu for gpu in job.forecast(*form, recipes="fp8current").gpus] == ["h100", "b200"]
    result = gs.forecast_gemms(["h100", "b200"], shapes=[(1024, 1024, 1024)], recipes=["fp8current"])
    assert [gpu.gpu for gpu in result.gpus] == ["h100", "b200"]
    assert [gpu.gpu for gpu in job.sweep(["h100", "b200"], micro_batch_size=[1, 2]).sweeps] == ["h100", "b200"]
    with pytest.raises(gs.UserError, match="3 is not a name"):
        job.forecast(3)  # type: ignore[arg-type]


def test_sizes_as_text() -> None:
    job = gs.load(**SIZES).on("1", "8k")
    assert (job.run.sequence_length, job.run.micro_batch_size) == (8192, 1)
    cost = [job.forecast("h200", tokens=tokens, gpu_count=8, price=2.0).gpus[0].step.recipes[0].cost for tokens in ("2T", 2e12)]
    assert cost[0] == cost[1] is not None
    with pytest.raises(gs.UserError, match="sequence_length must be a whole number"):
        gs.load(**SIZES).on(1, "eight")


@every_result
def test_frames_hold_the_numbers_of_the_tables(kind: str) -> None:
    pandas = pytest.importorskip("pandas", reason="DataFrames need pandas")
    result = results()[kind]
    told = document(result)
    tables = {table.name: table for table in (told.summary, *told.tables()) if table is not None}
    frames = result.to_frames()
    assert frames.keys() == tables.keys()
    for name, table in tables.items():
        frame = frames[name]
        assert isinstance(frame, pandas.DataFrame)
        assert len(frame) == len(table.rows)
        for index, column in enumerate(table.columns):
            values = [row[index].value for row in table.rows]
            if not column.numeric or not any(value is not None for value in values):
                continue
            assert pandas.api.types.is_numeric_dtype(frame[column.plain])
            assert [None if pandas.isna(value) else value for value in frame[column.plain]] == values
            for end in ("low", "high"):
                ends = [getattr(row[index], end) for row in table.rows]
                if any(value is not None for value in ends):
                    assert [None if pandas.isna(value) else value for value in frame[f"{column.plain} {end}"]] == ends
    assert len(result.to_frame()) > 0


@every_result
def test_tables_have_short_names_of_their_own(kind: str) -> None:
    told = document(results()[kind])
    names = [table.name for table in told.tables()]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z0-9_]{3,40}", name), name


def test_names_begin_with_the_gpu_where_there_are_several() -> None:
    one, several = (gs.load("gpt2").on(1, 1024).forecast(*gpus, recipes="fp8current") for gpus in (["h200"], ["h200", "b200"]))
    names = {table.name for table in document(one).tables()} - {"forecast"}
    assert {"memory", "parts", "times_autocast"} < names
    assert {table.name for table in document(several).tables()} == {
        "forecast", *(f"{gpu}_{name}" for gpu in ("h200", "b200") for name in names)
    }  # fmt: skip


def test_a_frame_by_its_name_or_title() -> None:
    pytest.importorskip("pandas", reason="DataFrames need pandas")
    result = results()["bench"]
    assert result.to_frame("speedups_autocast").equals(result.to_frame("Autocast: speedup of every op"))
    assert set(result.to_frame("speedup of every op").columns) > {"Op", "FP8Current", "FP8Current low", "FP8Current high"}
    with pytest.raises(gs.UserError, match="there is no table 'phase of the moon'"):
        result.to_frame("phase of the moon")


def test_without_pandas_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError(name)
        return import_module(name)

    monkeypatch.setattr(tables, "import_module", absent)
    for call in (results()["shapes"].to_frame, results()["shapes"].to_frames):
        with pytest.raises(gs.UserError, match="DataFrames need pandas, which is not installed\npip install pandas"):
            call()


@pytest.mark.parametrize("kind", ["bench", "forecast", "step"])
def test_a_notebook_shows_the_answer_first(kind: str) -> None:
    told = document(results()[kind])
    html = results()[kind]._repr_html_()
    assert html.strip().startswith('<div class="gemmscope-result">')
    rules = re.findall(r"^([^{}\n]+) \{", html[html.index("<style>") : html.index("</style>")], flags=re.MULTILINE)
    assert rules
    assert all(part.strip().startswith(".gemmscope-result") for rule in rules for part in rule.split(","))
    places = [html.index('class="answer"'), html.index("<table>"), html.index("<details>")]
    assert places == sorted(places)
    if told.charts():
        assert places[0] < html.index("<img") < places[1]
        assert html.count("<img") == 1
    assert html[: places[2]].count("<table>") == 1  # the main table; the others are collapsed
    shown = [table for section in told.sections[:8] for table in section.tables()]
    assert html.count("<table>") == len(shown) + (told.summary is not None)
    assert ("more sections: result.frames()" in html) == (len(told.sections) > 8)
