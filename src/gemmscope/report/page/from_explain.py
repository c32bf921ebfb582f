"""A run file of `gemmscope explain` as a part of a report: where a real run's step went, and why it gained less."""

from __future__ import annotations

from gemmscope.report.page.facts import command_facts
from gemmscope.report.page.parts import REST, Bar, Bars, Cell, Finding, RunPart, Segment, Subject, Table, noted
from gemmscope.report.plot import COLOURS
from gemmscope.report.units import percent
from gemmscope.store.explainfile import CauseRecord, CensusRecord, ExplainFile, PairRecord


def from_explain(file: ExplainFile, name: str) -> RunPart:
    """Everything that the file says."""
    verdict = file.verdict[:1].upper() + file.verdict[1:]
    return RunPart(
        kind="explain",
        name=name,
        subject=Subject(f"The trace {file.trace.rsplit('/', 1)[-1]}"),
        where=file.gpu or "the traced GPU",
        answer=verdict if verdict.endswith((".", "!")) else f"{verdict}.",
        because=(f"A step takes {file.step_ms:.2f} ms, of which the GPU is busy {file.busy_ms:.2f} ms.",),
        bars=_bars(file),
        ops=_causes(file.causes),
        tables=(*_products(file.products), *(_held(pair) for pair in file.held)),
        findings=(
            *(Finding("warning", _cause_words(cause)) for cause in file.causes),
            *(Finding("note", words) for pair in file.held for words in pair.words),
            *map(noted, file.notes),
        ),
        method=(
            ("trace", file.trace),
            ("steps", f"{file.steps}, found by {file.steps_found_by}" if file.steps_found_by else str(file.steps)),
            *command_facts(file.command, file.gemmscope_version),
        ),
    )


def _cause_words(cause: CauseRecord) -> str:
    """One cause with what shows it, and what to do about it."""
    advice = f". What to do: {'; '.join(cause.advice)}" if cause.advice else ""
    return f"{cause.title}: {'; '.join(cause.evidence)}{advice}" if cause.evidence else f"{cause.title}{advice}"


def _bars(file: ExplainFile) -> tuple[Bars, ...]:
    """One bar: what the step's time goes into."""
    longest = sorted((name for name in file.classes_ms if name != "quantization"), key=lambda name: -file.classes_ms[name])
    segments = tuple(
        Segment(
            name,
            time,
            longest.index(name) if name in longest[: len(COLOURS)] else REST,
            "hatched" if name == "quantization" else "plain",
            ((name, f"{time:.2f} ms"), ("share", percent(time / file.step_ms))),
        )
        for name, time in file.classes_ms.items()
        if time > 0
    )
    return (
        (Bars("The traced step", "What the step's time goes into, ms", "ms per step", (Bar("traced", segments),)),)
        if segments
        else ()
    )


def _causes(causes: list[CauseRecord]) -> tuple[Table, ...]:
    rows = tuple(
        (
            Cell(cause.title),
            Cell(f"{cause.cost_ms:.2f}", cause.cost_ms),
            Cell(f"{cause.speedup_without:.3f}x", cause.speedup_without),
            Cell(cause.where),
        )
        for cause in causes
    )
    columns = {"Cause": False, "Costs, ms a step": True, "Step without it": True, "Where": False}
    return (Table("What the step would save", columns, rows),) if rows else ()


def _products(products: list[CensusRecord]) -> tuple[Table, ...]:
    rows = tuple(
        (Cell(one.precision), Cell(f"{one.count:g}", one.count), Cell(f"{one.time_ms:.2f}", one.time_ms)) for one in products
    )
    return (Table("Products by precision", {"Precision": False, "A step": True, "ms": True}, rows),) if rows else ()


def _held(pair: PairRecord) -> Table:
    rows = tuple(
        (
            Cell(one.row),
            Cell(f"{one.expected_ms:.2f}", one.expected_ms) if one.expected_ms is not None else Cell("-"),
            Cell(f"{one.found_ms:.2f}", one.found_ms),
            Cell(f"{one.found_ms - one.expected_ms:+.2f}", one.found_ms - one.expected_ms)
            if one.expected_ms is not None
            else Cell("-"),
        )
        for one in pair.rows
    )
    return Table(pair.title, {"Row": False, f"{pair.expected}, ms": True, "found, ms": True, "difference": True}, rows)
