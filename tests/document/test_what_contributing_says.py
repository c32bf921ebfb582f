"""What CONTRIBUTING says about columns, charts, writers, kinds of results and findings is all that there is to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pytest

import gemmscope as gs
from gemmscope import findings, writers
from gemmscope.document import document
from gemmscope.document.charts import Chart, Drawing
from gemmscope.document.common import subject
from gemmscope.document.model import Document, Message, Section
from gemmscope.document.table import Column, Table, table
from gemmscope.findings import finding
from gemmscope.results import read as reading
from gemmscope.results.base import Result
from gemmscope.writers import chart_data, figure, html, markdown, tables, terminal
from support.command import Run, run
from support.results import RESULTS

__all__ = ["run"]


def edited(name: str, old: str, new: str) -> ModuleType:
    """A module of the package with one change in its source."""
    source = Path(str(import_module(name).__file__)).read_text()
    assert source.count(old) == 1
    module = ModuleType(name)
    exec(compile(source.replace(old, new), name, "exec"), module.__dict__)
    return module


def test_a_column_is_one_line() -> None:
    old = '        Column("FLOPs each", lambda gemm: gemm.flops, "FLOP"),\n'
    shapes = edited("gemmscope.document.shapes", old, f'{old}        Column("Weights", lambda gemm: gemm.k * gemm.n, ",d"),\n')
    doc = shapes.shapes_document(RESULTS["shapes"]())
    own = next(one for one in doc.tables() if any(head.name == "Weights" for head in one.columns))
    place = [head.name for head in own.columns].index("Weights")
    cell = own.rows[0][place]
    for text in (terminal.text(doc), markdown.markdown([doc]), html.page([doc])):
        assert "Weights" in text
        assert cell.text in text
    assert cell.value in tables.columns(own)["Weights"]


@dataclass(frozen=True)
class Dial(Drawing):
    """A chart that is not there yet: one value."""

    value: float

    def table(self) -> Table:
        return table(self.name, self.title, [self.value], Column("Value", lambda value: value, ".1f"))


def with_blocks(*blocks: Any) -> Document:
    return Document("shapes", "A title", subject(None, None), "here", "The answer.", sections=(Section("Section", blocks),))


def test_a_chart_is_a_class_and_a_line_for_each_writer_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    doc = with_blocks(Dial("pressure", "Pressure", 3.5))
    assert "3.5" in terminal.text(doc)
    assert "3.5" in markdown.markdown([doc])
    monkeypatch.setitem(chart_data.DATA, Dial, ("dial", lambda chart, _: {"half": chart.value / 2}))
    drawn: list[float] = []
    kind = figure.PanelKind(
        lambda _: "dial", lambda *_: 1.0, lambda part, charts, _: drawn.append(charts[0].value) or part.subplots()
    )
    monkeypatch.setitem(figure.PANELS, Dial, kind)
    assert '"type":"dial"' in html.page([doc])
    assert figure.image(doc, ".png").startswith(b"\x89PNG")
    assert drawn == [3.5]


def test_every_chart_is_known_to_every_writer_that_draws() -> None:
    charts = set(get_args(Chart))
    assert set(figure.PANELS) == charts
    assert set(chart_data.DATA) == charts
    scripts = html.asset("charts.js") + html.asset("ranks.js")
    assert [name for name, _ in chart_data.DATA.values() if name not in scripts] == []


def test_a_writer_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = RESULTS["shapes"]()
    with pytest.raises(gs.UserError):
        result.save(tmp_path / "out.txt")
    monkeypatch.setitem(writers.WRITERS, ".txt", lambda docs, _: terminal.text(docs[0]))
    result.save(tmp_path / "out.txt")
    assert document(result).answer in (tmp_path / "out.txt").read_text()
    with pytest.raises(gs.UserError, match=r"\.txt"):
        result.save(tmp_path / "out.unknown")


class WeatherResult(Result):
    """A kind of result that is not there yet."""

    kind: Literal["weather"] = "weather"
    degrees: float


def weather_document(result: WeatherResult, name: str = "") -> Document:
    columns = [Column[WeatherResult]("Degrees", lambda one: one.degrees, ".1f")]
    now = table("now", "Now", [result], *columns)
    doc = replace(with_blocks(now), kind="weather", messages=tuple(map(Message.of, result.findings)))
    return replace(doc, answer=f"{result.degrees:.1f} degrees.", name=name)


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeatherResult]:
    reading.KINDS.append("weather")
    for folder in ("results", "document"):
        monkeypatch.setitem(sys.modules, f"gemmscope.{folder}.weather", sys.modules[__name__])
    monkeypatch.setitem(findings.catalog(), "weather-cold", {"level": "warning", "text": "It is cold: {degrees:.1f} degrees."})
    yield WeatherResult(command="weather", degrees=-3.5, findings=(finding("weather-cold", degrees=-3.5),))
    reading.KINDS.remove("weather")


def test_a_kind_of_result_is_a_type_a_document_and_a_name(weather: WeatherResult, tmp_path: Path, run: Run) -> None:
    weather.save(tmp_path / "weather.json")
    assert json.loads((tmp_path / "weather.json").read_text())["degrees"] == -3.5
    assert gs.read(tmp_path / "weather.json").model_dump() == weather.model_dump()
    for ending in (".md", ".csv", ".html"):
        weather.save(tmp_path / f"weather{ending}")
        assert "-3.5" in (tmp_path / f"weather{ending}").read_text()
    assert "-3.5 degrees." in str(weather)
    outcome = run(f"report {tmp_path}/weather.json -o {tmp_path}/page.html --markdown {tmp_path}/page.md")
    assert outcome.code == 0
    assert "-3.5 degrees." in (tmp_path / "page.html").read_text()


def test_a_finding_is_one_table_and_one_call(weather: WeatherResult) -> None:
    [message] = document(weather).messages
    assert (message.code, message.level) == ("weather-cold", "warning")
    for text in (terminal.text(document(weather)), markdown.markdown([document(weather)]), html.page([document(weather)])):
        assert finding("weather-cold", degrees=-3.5).text in text.replace("\\", "")
