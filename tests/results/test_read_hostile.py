"""Run files with invalid values: every use of them gives a value or one message."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmscope import reading
from gemmscope.commands.report import report
from gemmscope.document.table import Cell, Head, Table
from gemmscope.errors import UserError
from gemmscope.results import read
from gemmscope.results.base import damage_reported
from gemmscope.results.read import read_result
from gemmscope.show import text
from support.commands import compare, explain
from support.predictions import bench_run, step_run
from support.report_files import RunData, put, run_data
from support.results import RESULTS
from support.traces import recorded


def change(data: Any, *path: Any, to: Any) -> RunData:
    """The data with another value at a place."""
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    changed: RunData = data
    return changed


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "-1e308", "1" * 400])
def test_numbers_that_no_result_has(number: str, tmp_path: Path) -> None:
    data = change(run_data("bench"), "linears", "totals", 0, "total_ms", "value", to="NUMBER")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data).replace('"NUMBER"', number))
    with pytest.raises(UserError, match="is not a valid number"):
        read_result(path)


def test_halves_of_characters(tmp_path: Path) -> None:
    data = change(run_data("bench"), "device", "name", to="GPU \ud800")
    data["command"] = "\udcff"
    result = read_result(put(tmp_path, "run.json", data))
    assert "GPU ?" in text(result)
    result.to_json().encode()


def test_nesting(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    path = put(tmp_path, "run.json", change(run_data("bench"), "device", "name", to=deep))
    with pytest.raises(UserError, match="nested too deeply"):
        read_result(path)


def test_very_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value can cause an error, and all errors together would need far more memory than the file."""
    monkeypatch.setattr(read, "MOST_VALUES", 20_000)
    path = put(tmp_path, "run.json", change(run_data("bench"), "linears", "cases", to=[1] * 21_000))
    with pytest.raises(UserError, match="more than 20,000 values"):
        read_result(path)
    put(tmp_path, "run.json", change(run_data("bench"), "linears", "cases", to=[{}] * 5000))
    with pytest.raises(UserError, match="more than 4,000 lists and objects"):
        read_result(path)


@pytest.mark.parametrize("command", [read_result, lambda path: report([path]), lambda path: compare([path, path])])
def test_what_is_no_file(command: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NO_WRITER_SECONDS", 0.05)
    os.mkfifo(tmp_path / "fifo")
    for name in ("/dev/zero", str(tmp_path), str(tmp_path / "fifo"), "zero\0byte", "x" * 5000):
        with pytest.raises(UserError, match=r"is a (device|folder|pipe)|cannot be read"):
            command(name)


ROWS = {
    "an unknown recipe": ("bench", ("linears", "recipes"), ["BF16", "FP7"]),
    "ops of no case": ("bench", ("linears", "cases"), []),
    "a row of another length": ("compare", ("rows", 0, "times_ms"), [1.0, 2.0, 3.0, 4.0]),
    "a zero time": ("bench", ("linears", "ops", 0, "total_ms"), {"value": 0.0, "low": 0.0, "high": 0.0}),
    "a step without recipes": ("step", ("step", "recipes"), []),
    "an unknown finding": ("step", ("findings",), [{"code": "\x1b[31m", "level": "note"}]),
    "a finding without its facts": ("explain", ("verdict", "facts"), {}),
    "a time as text": ("bench", ("device",), {"memory_bytes": "much"}),
    "no steps": ("explain", ("account", "step_ms"), 0.0),
    "no micro-batches": ("explain", ("account", "micro_batches"), 0),
    "huge intervals": ("step", ("step", "recipes", 0, "step_ms"), {"value": 1e-29, "low": -1e29, "high": 1e29}),
}


@pytest.mark.parametrize("name", ROWS)
def test_values_that_do_not_belong_together(name: str, tmp_path: Path) -> None:
    """Every use gives a value or one message."""
    result, place, value = ROWS[name]
    path = put(tmp_path, "run.json", change(run_data(result), *place, to=value))
    uses: list[Callable[[], object]] = [lambda: text(read_result(path), detail=True), lambda: report([path])]
    if result in ("bench", "step"):
        other = put(tmp_path, "other.json", result)
        uses += [lambda: compare([path, other]), lambda: compare([other, path])]
    for use in uses:
        try:
            use()
        except UserError as error:
            assert str(path) in error.message
            assert error.message.isprintable()


def test_own_results_are_not_called_damaged() -> None:
    """Only what was read from a file can be damaged: elsewhere an exception is a defect of this package."""
    with pytest.raises(KeyError), damage_reported(RESULTS["shapes"]()):
        raise KeyError("x")


def test_rows_have_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="cells"):
        Table("t", "t", (Head("a"), Head("b")), ((Cell("1"),),))


AGAINST: dict[str, tuple[Callable[[Path], Path], tuple[Any, ...], Any, str]] = {
    "step without recipes": (step_run, ("step", "recipes"), [], "nothing was measured"),
    "step of no time": (step_run, ("step", "recipes", 1, "step_ms", "value"), 0.0, "its time of FP8Current is 0.0"),
    "step of a negative time": (step_run, ("step", "recipes", 1, "step_ms", "value"), -1.0, "its time of FP8Current is -1.0"),
    "bench without totals": (bench_run, ("linears", "totals"), [], "no linears with quantization"),
    "bench of no time": (bench_run, ("linears", "totals", 1, "total_ms", "value"), 0.0, "its time of FP8Current is 0.0"),
}


@pytest.mark.parametrize("name", AGAINST)
def test_predictions_without_times(name: str, tmp_path: Path) -> None:
    make, place, value, message = AGAINST[name]
    path = make(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()), *place, to=value)))
    with pytest.raises(UserError, match=message):
        explain([recorded("healthy_te_current")], against=path)


def test_a_baseline_of_no_time(tmp_path: Path) -> None:
    for make, place in (
        (step_run, ("step", "recipes", 0, "step_ms", "value")),
        (bench_run, ("linears", "totals", 0, "total_ms", "value")),
    ):
        path = make(tmp_path)
        path.write_text(json.dumps(change(json.loads(path.read_text()), *place, to=0.0)))
        assert explain([recorded("healthy_te_current")], against=path).comparisons


def test_names_with_brackets(tmp_path: Path) -> None:
    path = step_run(tmp_path).rename(tmp_path / "run[bold][red].json")
    data = json.loads(path.read_text())
    for recipe in data["step"]["recipes"]:
        recipe["recipe"] = f"[/{recipe['recipe']}]"
    path.write_text(json.dumps(data))
    result = explain([recorded("healthy_te_current")], against=path, recipe="[/FP8Current]")
    assert result.comparisons[0].expected == "predicted, [/FP8Current]"
