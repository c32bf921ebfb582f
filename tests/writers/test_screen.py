"""The short view fits one screen, and nothing is ever wider than the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gemmscope.document import document
from gemmscope.document.model import Document
from gemmscope.document.table import Cell, Head, Table
from gemmscope.writers import terminal
from gemmscope.writers.markdown import pipe_table
from gemmscope.writers.terminal import MARK, fitted, table_lines
from support.results import RESULTS

SEVERAL_GPUS = ("forecast of several GPUs", "sweep")
NAMES = tuple(name for name in RESULTS if not name.startswith("explain ") or name.endswith(("syncs", "unaligned_torchao")))


@cache
def told(name: str) -> Document:
    """Made when a test needs it: not when tests are collected."""
    return document(RESULTS[name]())


def lines(doc: Document, width: int, *, detail: bool = False) -> list[str]:
    return terminal.text(doc, detail=detail, width=width).splitlines()


def flat(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_on_one_screen(name: str) -> None:
    doc = told(name)
    shown = lines(doc, 100)
    assert len(shown) <= (40 if name in SEVERAL_GPUS else 30)
    assert flat(doc.answer) in flat(" ".join(shown[:9]))
    assert doc.summary is None or doc.summary.title in shown


@pytest.mark.parametrize("width", [100, 80, 40])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_the_terminal(name: str, width: int) -> None:
    shown = lines(told(name), width)
    assert max(map(cell_len, shown)) <= width or _only_words(shown, width)
    assert flat(told(name).answer) in flat("".join(shown))


def _only_words(shown: list[str], width: int) -> bool:
    """A single word that is too long, in a command to be pasted."""
    return all(cell_len(line) <= width or len(line.split()) <= 4 for line in shown)


@pytest.mark.parametrize("name", ["bench", "forecast of several GPUs", "explain", "compare"])
def test_details_lose_nothing_on_a_narrow_terminal(name: str) -> None:
    doc = told(name)
    code = {line for text in (doc.advice.ready_to_paste.values() if doc.advice else ()) for line in text.splitlines()}
    shown = [line for line in lines(doc, 90, detail=True) if line not in code]  # code to paste is not wrapped
    assert max(map(cell_len, shown)) <= 90 or _only_words(shown, 90)
    everything = flat("".join(shown))
    for message in doc.messages:
        assert flat(message.text) in everything


@given(
    st.lists(st.tuples(st.text("abc 123", min_size=1, max_size=30), st.booleans(), st.integers(0, 5)), min_size=1, max_size=9),
    st.integers(0, 4),
    st.integers(20, 120),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_a_table_fits_and_keeps_its_first_columns(heads: list[tuple[str, bool, int]], count: int, width: int, choice) -> None:  # type: ignore[no-untyped-def]
    columns = tuple(Head(f"{name}{place}", numeric, drop) for place, (name, numeric, drop) in enumerate(heads))
    rows = tuple(tuple(Cell("x" * choice.randint(0, 25)) for _ in columns) for _ in range(count))
    table = Table("name", "title", columns, rows)
    kept = fitted(table, width)
    assert [column for column in columns if not column.drop] == [column for column in kept.columns if not column.drop]
    shown = [line.plain for line in table_lines(kept, width)]
    assert max(map(cell_len, shown)) <= width
    whole = flat("".join(line.plain for line in table_lines(table, 10_000)))
    assert all(flat(column.name) in whole for column in columns)


def test_on_a_terminal_without_utf_8_and_without_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    terminal.show(told("bench"), console=terminal.Screen(out, 80))
    out.flush()
    shown = out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "FP8Delayed is fastest" in shown
    assert "\x1b" not in shown
    assert "\\u" not in shown


@pytest.mark.parametrize("name", NAMES)
def test_what_the_answer_recommends_is_marked(name: str) -> None:
    """With an arrow in plain text, green and bold where a terminal has colours, bold in Markdown."""
    doc = told(name)
    tables = [table for table in (doc.summary, *doc.tables()) if table is not None and table.marked]
    for marked in tables:
        place = [column.name for column in marked.columns].index("Recipe")
        recipes = {marked.rows[row][place].text for row in marked.marked}
        said = " ".join([doc.answer, *doc.because])
        assert name == "plan of several models" or all(recipe in said for recipe in recipes)
        assert len(marked.marked) < len(marked.rows)
        unmarked = replace(marked, marked=())
        plain = [line.plain for line in table_lines(marked, 2000)]
        assert [line.removesuffix(MARK) for line in plain] == [line.plain for line in table_lines(unmarked, 2000)]
        assert sum(line.endswith(MARK) for line in plain) == len(marked.marked)
        bold = sum("bold" in str(span.style) for line in table_lines(marked, 2000) for span in line.spans)
        heads = sum("bold" in str(span.style) for line in table_lines(unmarked, 2000) for span in line.spans)
        assert bold == heads + len(marked.marked) * (len(marked.columns) + 1)
        best = [line for line in pipe_table(marked).splitlines()[2:] if line.startswith("| **")]
        assert [line.replace("**", "") for line in best] == [pipe_table(unmarked).splitlines()[2 + row] for row in marked.marked]
    if re.match(r"(FORECAST: )?(Use|Stay with) ", doc.answer) and doc.kind in ("step", "forecast"):
        assert doc.summary is not None
        assert doc.summary.marked
        assert tables[0] is doc.summary
    if "oo close to call:" in doc.answer:
        assert not tables


@pytest.mark.parametrize("colours", [True, False])
def test_colours_are_the_terminals(colours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    out = io.StringIO()
    screen = terminal.Screen(out, 100) if not colours else Console(file=out, width=100, force_terminal=True, _environ={})
    terminal.show(told("forecast"), console=screen)
    assert ("\x1b[1m" in out.getvalue()) is colours
