"""Every writer says the same of every result: terminal with --detail, Markdown, HTML, CSV, figures.

A result of every kind, recorded on an H200 or computed, goes through its Document to every writer; what each one shows is read
back and compared with the Document.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gemmscope.document import document
from gemmscope.document.model import Document, Table, decisive
from gemmscope.results.read import KINDS, read_result
from gemmscope.writers import figure, markdown, tables, terminal
from gemmscope.writers import html as html_writer
from support.results import RESULTS

NAMES = tuple(RESULTS)


@cache
def told(name: str) -> Document:
    return document(RESULTS[name](), f"{name}.json")


@cache
def shown(name: str) -> dict[str, str]:
    """What each writer shows, as plain text on one line."""
    doc = told(name)
    return {
        "terminal": _plain(terminal.text(doc, detail=True)),
        "markdown": _plain(_unescaped(markdown.markdown([doc]))),
        "html": _plain(_Page.of(html_writer.page([doc])).text),
    }


def _unescaped(text: str) -> str:
    """Markdown without its escapes; blocks of code have none."""
    parts = text.split("```")
    return "".join(part if place % 2 else re.sub(r"\\(.)", r"\1", part) for place, part in enumerate(parts))


def _plain(text: str) -> str:
    return " ".join(text.split())


class _Page(HTMLParser):
    """The text of a page, and the rows of its tables; scripts and styles are not text."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.rows: list[tuple[str, ...]] = []
        self._row: list[str] = []
        self._hidden = False
        self._cell = False

    @classmethod
    def of(cls, page: str) -> _Page:
        parser = cls()
        parser.feed(page)
        return parser

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = self._hidden or tag in ("script", "style")
        if tag == "tr":
            self._row = []
        if tag in ("td", "th"):
            self._cell = True
            self._row.append("")
        if tag not in ("strong", "span", "b", "code"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = self._hidden and tag not in ("script", "style")
        if tag == "tr":
            self.rows.append(tuple(_plain(cell) for cell in self._row))
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        self.parts.append(data)
        if self._cell:
            self._row[-1] += data


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return [tuple(_plain(cell.text) for cell in row) for row in table.rows]


def test_every_kind_is_here() -> None:
    assert {RESULTS[name]().kind for name in NAMES} == set(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_file_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]()
    path = tmp_path / "run.json"
    path.write_text(result.to_json(), encoding="utf-8")
    again = read_result(path)
    assert type(again) is type(result)
    assert again.to_json() == result.to_json()
    assert document(again, "x") == document(result, "x")


@pytest.mark.parametrize("name", NAMES)
def test_every_writer_shows_the_same_words(name: str) -> None:
    doc = told(name)
    texts = [doc.answer, *doc.because, *doc.context, *(message.text for message in doc.messages)]
    texts += [doc.advice.text] if doc.advice else []
    texts += doc.advice.ready_to_paste.values() if doc.advice else ()
    texts += [f"{value}" for facts in doc.facts.values() for _, value in facts]
    causes = [message.text for message in doc.messages if message.code.startswith("cause-")]  # of which a page has cards
    cards = [text for card in doc.cards for text in (card.title, card.cost, card.speedup, *card.remedy, card.evidence)]
    for writer, text in shown(name).items():
        for sentence in [*(text for text in texts if text not in causes), *cards] if writer == "html" else texts:
            assert _plain(sentence) in text, f"{writer} lacks {sentence!r}"


@pytest.mark.parametrize("name", NAMES)
def test_every_writer_shows_the_same_rows(name: str) -> None:
    doc = told(name)
    lines = [_plain(line.removesuffix(terminal.MARK)) for line in terminal.text(doc, detail=True).splitlines()]
    pipes = [
        tuple(
            _plain(re.sub(r"\\(.)", r"\1", cell)).removeprefix("**").removesuffix("**")
            for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])
        )
        for line in markdown.markdown([doc]).splitlines()
        if line.startswith("|")
    ]
    page = _Page.of(html_writer.page([doc])).rows
    for table in doc.tables():
        assert table.rows, f"{table.title} is empty"
        for row in rows_of(table):
            assert " ".join(cell for cell in row if cell) in lines, f"terminal lacks {row} of {table.title}"
            assert row in pipes, f"markdown lacks {row} of {table.title}"
            assert row in page, f"html lacks {row} of {table.title}"


@pytest.mark.parametrize("name", NAMES)
def test_csv_holds_every_table_unrounded(name: str) -> None:
    doc = told(name)
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(doc))))
    for table in doc.tables():
        own = [row for row in rows if row["table"] == table.name]
        assert len(own) >= len(table.rows)
        for cells in table.rows:
            wanted = {
                column.plain: cell.value if cell.value is not None and column.numeric else cell.text
                for column, cell in zip(table.columns, cells, strict=True)
            }
            assert any(all(_same(row[column], value) for column, value in wanted.items()) for row in own), wanted


def _same(text: str, value: float | str) -> bool:
    if isinstance(value, str):
        return text == ("" if value == "-" else value)
    return text not in ("", "nowhere") and float(text) == value


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith(("explain ", "bench, "))]
)  # drawn in the same way
def test_every_chart_is_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "FORMATS", (".svg",))
    doc = told(name)
    charts = doc.charts()
    page = html_writer.page([doc])
    data = json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    drawn = [chart for chart in data if chart["type"] != "rates"]  # the common baseline is not a chart of its own
    assert len(drawn) == len(charts)
    figure.save_figures([doc], tmp_path)
    text = " ".join(path.read_text() for path in tmp_path.glob("*.svg"))
    drawn = _plain(html.unescape(re.sub("<!--.*?-->|<[^>]*>", " ", text, flags=re.DOTALL)))  # a long title has several lines
    for chart in charts:
        assert chart.title in drawn


@pytest.mark.parametrize("name", NAMES)
def test_the_short_view_is_a_part_of_the_document(name: str) -> None:
    doc = told(name)
    assert set(decisive(doc)) <= set(doc.messages)
    assert all(
        message.level == "note" or message.code.startswith("cause-") for message in doc.messages if message not in decisive(doc)
    )
    text = terminal.text(doc, detail=False)
    assert _plain(doc.answer) in _plain(text)


def test_several_runs_stand_side_by_side() -> None:
    pair = [told("bench"), told("bench again")]
    text = markdown.markdown(pair)
    page = _Page.of(html_writer.page(pair)).text
    for doc in pair:
        for speedup in doc.speedups:
            assert f"{speedup.speedup.value:.3f}x" in text
            assert f"{speedup.speedup.value:.3f}x" in page
