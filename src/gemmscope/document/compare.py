"""The Document of a `CompareResult`."""

from dataclasses import replace

from gemmscope import units
from gemmscope.document.common import command_facts
from gemmscope.document.model import Document, Message, Section, Subject
from gemmscope.document.table import NOTHING, Cell, Table, columns, number
from gemmscope.results.compare import Change, CompareResult

MOST_ROWS, MOST_DIFFERENCES = 14, 4  # of the short view
CLOSE, NOISY, MISSING = "too close to call", "too noisy", "missing"
DECISIONS = ("compare-too-slow", "compare-too-noisy", "compare-within-limit")
CHANGES = ("compare-changed", "compare-equal")
METHOD = (
    "Change compares the new time with the first: plus is slower. The intervals hold for all rows together with 95% confidence, "
    "and include the variation between runs."
)
FLEETS = (
    "Change compares the new time with the first: plus is slower. The change of all GPUs is the median over the GPUs, so that "
    "chip-to-chip differences cancel. A GPU has its own row if its change differs from the others by more than chance allows, "
    "or if there are too few GPUs to tell. The intervals hold for all GPUs and recipes together with 95% confidence."
)


def compare_document(result: CompareResult, name: str = "") -> Document:
    """Build the Document of the result."""
    letters = _letters(result)
    title = f"Comparison of {len(result.runs)} {'fleets' if _are_fleets(result) else 'runs'}"
    # a requested check comes first
    answer, *findings = sorted(result.findings, key=lambda finding: finding.code not in DECISIONS)
    because = [finding for finding in findings if answer.code in DECISIONS and finding.code in CHANGES]
    sections = [Section("Rows", tuple(_rows(result, letters)))]
    if result.differences:
        sections.insert(0, Section("Environment", (_environment(result, letters),)))
    return Document(
        kind="compare",
        title=title,
        subject=Subject(title),
        where=" and ".join(result.runs) if len(result.runs) == 2 else f"{result.runs[0]} to {result.runs[-1]}",
        answer=answer.text,
        because=tuple(finding.text for finding in because),
        summary=_summary(result, letters),
        context=(*(f"{letter}: {run}" for letter, run in zip(letters, result.runs, strict=True)), *_also_different(result)),
        sections=tuple(sections),
        messages=tuple(Message.of(finding) for finding in findings if finding not in because),
        facts={"Method": (("comparison", _method(result)), *command_facts(result))},
        name=name,
    )


def _are_fleets(result: CompareResult) -> bool:
    return result.has("fleets-compared")


def _method(result: CompareResult) -> str:
    return FLEETS if _are_fleets(result) else METHOD


def _letters(result: CompareResult) -> list[str]:
    """Letters for files: their paths are too long for columns."""
    return [chr(ord("A") + index) if index < 26 else f"run {index + 1}" for index in range(len(result.runs))]


def _also_different(result: CompareResult) -> list[str]:
    """The differences in the environment in one line: a time that changed with the driver is not due to the code."""
    listed = [f"{row.name} ({', '.join(value or '-' for value in row.values)})" for row in result.differences]
    more = len(listed) - MOST_DIFFERENCES
    named = [*listed[:MOST_DIFFERENCES], *([f"{more} more"] if more > 0 else [])]
    return [f"Also different: {', '.join(named)}"] if named else []


def _environment(result: CompareResult, letters: list[str]) -> Table:
    """What differs besides the times."""
    rows = tuple((Cell(row.name), *(Cell(value or "-") for value in row.values)) for row in result.differences)
    return Table("Other differences between the runs", columns(("What", *letters), ()), rows)


def _summary(result: CompareResult, letters: list[str]) -> Table:
    """The rows that changed, the largest change first; then those that are too noisy; the rest as far as there is room."""
    table = _changes(result, letters, len(result.runs) - 1, [0, len(result.runs) - 1])

    def order(row: tuple[Cell, ...]) -> tuple[int, float]:
        change, verdict = row[-3].value, row[-1].text
        rank = (NOISY, CLOSE, MISSING).index(verdict) + 1 if verdict in (NOISY, CLOSE, MISSING) else 0
        return rank, -abs(change - 1) if change is not None else 0.0

    rows = sorted(table.rows, key=order)
    left_out = len(rows) - MOST_ROWS
    note = f"{units.counted(left_out, 'more row')} not shown here. " if left_out > 0 else ""
    return replace(table, rows=tuple(rows[:MOST_ROWS]), note=f"{note}Plus is slower.")


def _rows(result: CompareResult, letters: list[str]) -> list[Table]:
    """A table for each run after the first. The last run comes first, with the times of all runs."""
    last = len(result.runs) - 1
    tables = [_changes(result, letters, run, [0, run]) for run in range(1, last)]
    return [_changes(result, letters, last, list(range(last + 1))), *tables]


def _changes(result: CompareResult, letters: list[str], run: int, shown: list[int]) -> Table:
    times_of = [f"{letters[index]} ms" for index in shown]
    heads = columns(("Row",), (*times_of, "Change", "Interval"), {"Interval": 1, **dict.fromkeys(times_of, 2)})
    rows, noisy = [], [row.name for row in result.unresolved()] if run == len(result.runs) - 1 else []
    for row in result.rows:
        times = [row.times_ms[index] for index in shown]
        cells = [number(time, f"{time:.4g}" if time is not None else None) for time in times]
        rows.append((Cell(row.name), *cells, *_change(row.changes[run - 1], noisy=row.name in noisy)))
    title = f"{letters[run]} compared with {letters[0]}"
    return Table(title, (*heads, *columns(("Verdict",), ())), tuple(rows), _method(result))


def _change(change: Change, *, noisy: bool) -> tuple[Cell, Cell, Cell]:
    """The change, its interval and the verdict. `noisy`: too noisy to check the slowdown that is allowed."""
    ratio = change.ratio
    verdict = Cell(NOISY if noisy else change.verdict, level="warning" if noisy or change.verdict == "slower" else "")
    if ratio is None:
        return NOTHING, NOTHING, verdict
    known = ratio.low is not None and ratio.high is not None
    interval = f"{units.difference(ratio.low or 0.0)} to {units.difference(ratio.high or 0.0)}" if known else "unknown"
    return Cell(units.difference(ratio.value), ratio.value, ratio.low, ratio.high), Cell(interval), verdict
