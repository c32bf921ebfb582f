"""The Document of `compare`."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.document import document
from gemmscope.findings import finding
from gemmscope.interval import Interval
from gemmscope.results.compare import Change, ComparedRow, CompareResult, EnvironmentDifference
from gemmscope.writers.html import page
from gemmscope.writers.markdown import markdown
from gemmscope.writers.tables import csv_text
from gemmscope.writers.terminal import text

SLOWER = Change(ratio=Interval(1.05, 1.03, 1.07), verdict="slower")
CLOSE = Change(ratio=Interval(1.001), verdict="too close to call")
MISSING = Change(ratio=None, verdict="missing")


def compared(*, runs: int = 2) -> CompareResult:
    changes = ((SLOWER, CLOSE, MISSING)[index % 3] for index in range(3))
    rows = tuple(
        ComparedRow(
            what=what,
            recipe="FP8Current",
            mode="autocast",
            times_ms=(1.0, *(None if change.ratio is None else change.ratio.value for _ in range(runs - 1))),
            changes=(change,) * (runs - 1),
        )
        for what, change in zip(("MLP Up", "MLP Down", "Attn Out"), changes, strict=True)
    )
    return CompareResult(
        command="gemmscope compare a.json b.json",
        runs=tuple(f"{letter}.json" for letter in "abcd"[:runs]),
        rows=rows,
        differences=(EnvironmentDifference(name="driver", values=("580", "", "590", "590")[:runs]),),
        limit=0.03,
        findings=(finding("compare-changed", slower=1, faster=0, close=1), finding("compare-missing", rows=1)),
    )


@pytest.mark.parametrize("runs", [2, 3])
def test_every_writer_shows_every_row(runs: int) -> None:
    doc = document(compared(runs=runs))
    tables = doc.tables()
    assert tables[0].title == "Other differences between the runs"
    assert len(tables) == runs
    for written in (text(doc), markdown([doc]), page([doc]), csv_text(doc)):
        for word in ("MLP Up · FP8Current · autocast", "slower", "too noisy", "missing", "580"):
            assert word in written


def test_changes_are_marked_and_unknown_intervals_named() -> None:
    rows = document(compared()).tables()[1].rows
    assert [cell.text for cell in rows[0][-3:]] == ["+5.0%", "+3.0% to +7.0%", "slower"]
    assert rows[0][-1].level == "warning"
    assert [cell.text for cell in rows[1][-3:]] == ["+0.1%", "unknown", "too noisy"]
    assert [cell.text for cell in rows[2][-3:]] == ["-", "-", "missing"]
    assert (rows[0][-3].low, rows[0][-3].high) == (1.03, 1.07)


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        ("compare-too-slow", {"limit": "3%", "rows": 1, "worst": "MLP Up", "change": 0.05}),
        ("compare-too-noisy", {"limit": "3%", "rows": 1, "of": 3, "noisiest": "MLP Down", "spread": "±9%"}),
        ("compare-within-limit", {"limit": "3%"}),
    ],
)
def test_a_requested_check_is_the_answer(code: str, facts: dict[str, Any]) -> None:
    checked = finding(code, **facts)
    doc = document(compared().model_copy(update={"findings": (*compared().findings, checked)}))
    assert doc.answer == checked.text
    assert doc.because == (compared().findings[0].text,)
    assert [message.code for message in doc.messages] == ["compare-missing"]


def test_differences_in_the_environment_are_in_the_short_view() -> None:
    assert document(compared()).context[-1] == "Also different: driver (580, -)"
    many = tuple(EnvironmentDifference(name=f"package {number}", values=("1", "2")) for number in range(9))
    context = document(compared().model_copy(update={"differences": many})).context
    assert context[-1].endswith("package 3 (1, 2), 5 more")
    assert not any("different" in line for line in document(compared().model_copy(update={"differences": ()})).context)


def test_rows_that_are_too_noisy_say_so() -> None:
    wide = Change(ratio=Interval(1.0, 0.9, 1.1), verdict="too close to call")
    row = ComparedRow(what="MLP Up", recipe="BF16", times_ms=(1.0, 1.0), changes=(wide,))
    result = compared().model_copy(update={"rows": (*compared().rows, row)})
    doc = document(result)
    assert doc.tables()[1].rows[-1][-1].text == "too noisy"
    assert doc.summary is not None
    assert [row[-1].text for row in doc.summary.rows] == ["slower", "too noisy", "too noisy", "missing"]
    unlimited = document(result.model_copy(update={"limit": None}))
    assert unlimited.tables()[1].rows[-1][-1].text == "too close to call"


def test_the_answer_is_the_first_finding() -> None:
    doc = document(compared())
    assert doc.answer == compared().findings[0].text
    assert [message.code for message in doc.messages] == ["compare-missing"]
    assert [row.what for row in compared().failing()] == ["MLP Up"]
