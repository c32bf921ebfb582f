"""The Document of a `CompareResult`."""

from collections.abc import Sequence

from gemmscope import units
from gemmscope.document.common import command_facts, phrase, sections
from gemmscope.document.model import Document, Message, Subject
from gemmscope.document.table import Cell, Column, Table, across, ends_text, table
from gemmscope.results.compare import ComparedRow, CompareResult, EnvironmentDifference

MOST_ROWS, MOST_DIFFERENCES = 14, 4  # of the short view
CLOSE, NOISY, MISSING = "too close to call", "too noisy", "missing"
DECISIONS = ("compare-too-slow", "compare-too-noisy", "compare-within-limit")
CHANGES = ("compare-changed", "compare-equal")


def compare_document(result: CompareResult, name: str = "") -> Document:
    """Build the Document of the result."""
    runs, fleets = len(result.runs), result.has("fleets-compared")
    # letters for files: their paths are too long for columns
    letters = [chr(ord("A") + index) if index < 26 else f"run {index + 1}" for index in range(runs)]
    title = f"Comparison of {runs} {'fleets' if fleets else 'runs'}"
    # a requested check comes first
    answer, *findings = sorted(result.findings, key=lambda finding: finding.code not in DECISIONS)
    because = [finding for finding in findings if answer.code in DECISIONS and finding.code in CHANGES]
    method = phrase("compare-fleets" if fleets else "compare-runs")
    changes = [_changes(result, letters, run, [0, run], method) for run in range(1, runs - 1)]
    return Document(
        kind="compare",
        title=title,
        subject=Subject(title),
        where=" and ".join(result.runs) if runs == 2 else f"{result.runs[0]} to {result.runs[-1]}",
        answer=answer.text,
        because=tuple(finding.text for finding in because),
        summary=_changes(result, letters, runs - 1, [0, runs - 1], method, most=MOST_ROWS),
        context=(*(f"{letter}: {run}" for letter, run in zip(letters, result.runs, strict=True)), *_also_different(result)),
        sections=sections(
            {
                "Environment": [differences_table("Other differences between the runs", result.differences, letters)],
                "Rows": [_changes(result, letters, runs - 1, range(runs), method), *changes],
            }
        ),
        messages=tuple(Message.of(finding) for finding in findings if finding not in because),
        facts={"Method": (("comparison", method), *command_facts(result))},
        name=name,
    )


def _also_different(result: CompareResult) -> list[str]:
    """The differences in the environment in one line: a time that changed with the driver is not due to the code."""
    listed = [f"{row.name} ({', '.join(value or '-' for value in row.values)})" for row in result.differences]
    more = len(listed) - MOST_DIFFERENCES
    named = [*listed[:MOST_DIFFERENCES], *([f"{more} more"] if more > 0 else [])]
    return [phrase("compare-also-different", named=", ".join(named))] if named else []


def differences_table(title: str, differences: Sequence[EnvironmentDifference], heads: Sequence[str] = ()) -> Table:
    """What differs in the environment, a row for each name. Without `heads`, values are in the order of their frequency."""
    heads = heads or [
        "Most common",
        *(f"Value {place}" for place in range(2, max((len(row.values) for row in differences), default=1) + 1)),
    ]
    return table(
        "differences",
        title,
        differences,
        Column("What", lambda row: row.name),
        *across(range(len(heads)), lambda row, at: dict(enumerate(row.values)).get(at) or None, head=heads.__getitem__),
    )


def _changes(
    result: CompareResult, letters: list[str], run: int, shown: Sequence[int], note: str, most: int | None = None
) -> Table:
    """The change from the first run to another, with the times of the runs `shown`. `most`: only so many rows, the largest change
    first, then those that are too noisy, then the rest."""
    noisy = [row.name for row in result.unresolved()] if run == len(result.runs) - 1 else []

    def verdict(row: ComparedRow) -> str:
        return NOISY if row.name in noisy else row.changes[run - 1].verdict

    def order(row: ComparedRow) -> tuple[int, float]:
        ratio, last = row.changes[run - 1].ratio, (NOISY, CLOSE, MISSING)
        return (last.index(verdict(row)) + 1 if verdict(row) in last else 0), -abs(ratio.value - 1) if ratio is not None else 0.0

    rows = result.rows
    if most is not None:
        left_out = len(rows) - most
        hidden = phrase("compare-not-shown", rows=units.counted(left_out, "more row")) if left_out > 0 else ""
        rows, note = tuple(sorted(rows, key=order)[:most]), phrase("compare-plus", hidden=hidden)
    return table(
        f"changes_{letters[run]}".lower() if most is None else "changes",
        f"{letters[run]} compared with {letters[0]}",
        rows,
        Column("Row", lambda row: row.name),
        *across(shown, lambda row, index: row.times_ms[index], ".4g", 2, head=lambda index: f"{letters[index]} ms"),
        Column("Change", lambda row: row.changes[run - 1].ratio, "of 1"),
        Column("Interval", lambda row: ends_text(row.changes[run - 1].ratio, "unknown"), "d", drop=1),
        Column("Verdict", lambda row: Cell(verdict(row), level="warning" if verdict(row) in (NOISY, "slower") else "")),
        note=note,
    )
