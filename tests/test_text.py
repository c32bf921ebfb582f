"""Text from files reaches people without anything invisible in it."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.say import complain, say
from gemmscope.text import csv_cell, printable, visible_json
from support.poison import invisible

ANY = st.text(st.characters())  # including lone surrogates


@given(ANY)
def test_nothing_invisible_is_left(text: str) -> None:
    assert not invisible(printable(text))
    assert not invisible(printable(text, keep=""), allowed="")
    assert printable(printable(text)) == printable(text)
    printable(text).encode("utf-8")


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_what_is_visible_stays(text: str) -> None:
    assert printable(text) == text


@given(ANY)
def test_errors_quote_nothing_invisible(text: str) -> None:
    assert not invisible(str(UserError(text, text)), allowed="\n")
    assert "\n" not in UserError(text, text).message


@given(ANY)
def test_json_stays_the_same_data(text: str) -> None:
    data = {"name": text.encode("utf-8", "replace").decode(), text.encode("utf-8", "replace").decode(): 1.5}
    written = visible_json(json.dumps(data, ensure_ascii=False, indent=1))
    assert json.loads(written) == data
    assert not invisible(written, allowed="\n")


FORMULAS = ("=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1", "＝1", "-1+cmd|' /C calc'!A0", "--1", "-1 to A1", "+", "-,", "+٣")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_text(text: str) -> None:
    assert csv_cell(text)[0] in "'\\"


@pytest.mark.parametrize("text", ["-1.5", "+3.2%", "1e-5", "-2.5e+10", "-1.6% to +1.8%", "-", "", "1.654x [1.642, 1.667]", "a=b"])
def test_a_number_is_a_number(text: str) -> None:
    assert csv_cell(text) == text


@given(st.lists(ANY, min_size=1))
def test_a_row_is_read_back_as_one_row(cells: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([csv_cell(cell) for cell in cells])
    assert list(csv.reader(io.StringIO(out.getvalue()))) == [[csv_cell(cell) for cell in cells]]


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class _Gone(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", [None, _Full(), _Gone()])
def test_saying_something_never_fails(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for broken in (stream, closed):
        monkeypatch.setattr(sys, "stderr", broken)
        say("a line")
        complain("a complaint", "a hint")


def test_lines_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say("\x1b]0;title\x07 \u202ename")
    complain("\x1b[31m", "\x9b2J")
    assert capsys.readouterr().err == "\\x1b]0;title\\x07 \\u202ename\ngemmscope: \\x1b[31m\n  \\x9b2J\n"
