"""The Document of an `ExplainResult`."""

from __future__ import annotations

from pathlib import Path

from gemmscope import units
from gemmscope.document.charts import GREY, Bar, BarChart, Segment
from gemmscope.document.common import command_facts
from gemmscope.document.model import Block, Document, Message, Section, Subject
from gemmscope.document.table import NOTHING, Cell, Table, columns, number, share_cell
from gemmscope.parts import STEP_PARTS
from gemmscope.results.explain import Cause, ExplainResult, StepComparison

COLORED = [part for part in STEP_PARTS if part != "quantization"][:8]  # quantization is hatched, the rest is grey
MOST_UNKNOWN = 10  # kernels that are listed one by one


def explain_document(result: ExplainResult, name: str = "") -> Document:
    """Everything that the result says."""
    account = result.account
    file = Path(result.trace).name
    rank = f", rank {result.rank} of {result.world_size}" if result.rank is not None and result.world_size > 1 else ""
    steps = f"{units.counted(result.steps, 'step')} of {account.step_ms:.2f} ms, found by {result.steps_found_by}"
    compared = [finding for comparison in result.comparisons for finding in comparison.findings]
    sections: dict[str, tuple[Block, ...]] = {
        "Where the time goes": (_chart(result), _classes(result), *_idle(result), _counts(result), *_unknown(result)),
        "GEMMs": _gemms(result),
        "Why the step is not faster": _causes(result),
        "Comparisons": tuple(map(_comparison, result.comparisons)),
        "Ranks": _ranks(result),
    }
    return Document(
        kind="explain",
        title=f"Profiler trace {file}",
        subject=Subject(f"Profiler trace {file}"),
        where=result.gpu or "unknown GPU",
        answer=result.verdict.text,
        because=(
            f"A step takes {account.step_ms:.2f} ms. The GPU is busy for {account.busy_ms:.2f} ms "
            f"({units.percent(1 - account.idle_share)}).",
            *(finding.text for finding in compared if finding.level == "note"),
        ),
        context=(f"{result.gpu or 'unknown GPU'}{rank}; {steps}",),
        sections=tuple(Section(title, blocks) for title, blocks in sections.items() if blocks),
        messages=(
            *(_cause_message(place, cause) for place, cause in enumerate(result.causes, start=1)),
            *(Message.of(finding) for finding in compared if finding.level != "note"),
            *map(Message.of, result.findings),
        ),
        facts={"Method": (("trace", result.trace), ("steps", steps), *_framework(result), *command_facts(result))},
        next_command=_next(result),
        name=name,
    )


def _next(result: ExplainResult) -> str:
    if result.comparisons:
        return "gemmscope step with the model predicts the step in every precision on this GPU"
    return "gemmscope explain TRACE --baseline BF16-TRACE compares with the same training in BF16"


def _framework(result: ExplainResult) -> tuple[tuple[str, str], ...]:
    return (("framework", result.framework),) if result.framework else ()


def _cause_message(place: int, cause: Cause) -> Message:
    """One cause with its evidence, and what to do about it."""
    evidence = " ".join(finding.text for finding in cause.evidence)
    where = f" ({cause.where})" if cause.where else ""
    text = f"{place}. {cause.title}{where}. {evidence} What to do: {'; '.join(cause.advice)}."
    return Message(f"cause-{cause.code}", "warning", text)


# --- where the time goes -------------------------------------------------------------------------------------------------


def _chart(result: ExplainResult) -> BarChart:
    """One bar with the parts of the step, quantization on top."""
    account = result.account
    order = sorted((part for part, time in account.parts_ms.items() if time > 0), key=lambda part: part == "quantization")
    segments = tuple(
        Segment(
            part,
            account.parts_ms[part],
            COLORED.index(part) if part in COLORED else GREY,
            "hatched" if part == "quantization" else "plain",
            ((part, f"{account.parts_ms[part]:.2f} ms"), ("share", units.percent(account.share(part)))),
        )
        for part in order
    )
    return BarChart("Where the time of a step goes", "ms per step", (Bar("trace", segments),), main=True)


def _classes(result: ExplainResult) -> Table:
    account = result.account
    rows = [(Cell(name), _ms(time), share_cell(time / account.step_ms)) for name, time in account.classes_ms.items()]
    total = sum(account.classes_ms.values())
    rows.append((Cell("total"), _ms(total), share_cell(total / account.step_ms)))
    note = "A cast that is fused with a norm or an activation counts as quantization here; the parts above divide its time."
    return Table("By class of kernel", columns(("Class",), ("ms per step", "Share")), tuple(rows), note)


def _idle(result: ExplainResult) -> tuple[Table, ...]:
    """The reasons for idle time, where there is any."""
    account = result.account
    rows = tuple((Cell(why), _ms(time), share_cell(time / account.step_ms)) for why, time in account.idle_ms.items() if time > 0)
    return (Table("Idle time by reason", columns(("Reason",), ("ms per step", "Share of step")), rows),) if rows else ()


def _counts(result: ExplainResult) -> Table:
    account = result.account
    casts = account.quantization_kernels
    cells = {
        "GPU busy, ms": _ms(account.busy_ms),
        "GPU busy, share of the step": share_cell(1 - account.idle_share),
        "GPU idle, ms": _ms(sum(account.idle_ms.values())),
        "communication hidden behind computation, ms": _ms(account.hidden_ms),
        "several kernels at once, ms": _ms(account.overlapped_ms),
        "kernels and copies": number(account.kernels, f"{account.kernels:.0f}"),
        "launches": number(account.launches, f"{account.launches:.0f}"),
        "micro-batches": number(account.micro_batches),
        "kernels per GEMM, casts included": number(account.kernels_per_gemm, f"{account.kernels_per_gemm:.1f}"),
        "quantization kernels": number(casts, f"{casts:.0f}"),
        "quantization kernels per low-precision GEMM": _ratio(casts, max(account.low_gemms, 1), 1),
        "quantization kernels per micro-batch": _ratio(casts, account.micro_batches, 0),
        f"linears in low precision, share of {result.low_share_of} (without the output head)": share_cell(result.low_share),
        "GPU time in kernels of a known class": share_cell(account.named_share),
    }
    rows = tuple((Cell(what), cell) for what, cell in cells.items())
    return Table("Per step", columns(("What",), ("Value",)), rows)


def _ms(time_ms: float | None) -> Cell:
    return number(time_ms, f"{time_ms:.2f}" if time_ms is not None else None)


def _ratio(value: float, over: float, digits: int) -> Cell:
    return number(value / over, f"{value / over:.{digits}f}")


def _unknown(result: ExplainResult) -> tuple[Table, ...]:
    """Kernels of no known class: the longest, and the others together."""
    kernels = result.account.unknown
    if not kernels:
        return ()
    rows = [
        (Cell(kernel.name), Cell(f"{kernel.time_ms:.3f}", kernel.time_ms), number(kernel.count, f"{kernel.count:.3g}"))
        for kernel in kernels[:MOST_UNKNOWN]
    ]
    if rest := kernels[MOST_UNKNOWN:]:
        time, count = sum(kernel.time_ms for kernel in rest), sum(kernel.count for kernel in rest)
        rows.append((Cell(f"{len(rest)} more"), Cell(f"{time:.3f}", time), number(count, f"{count:.3g}")))
    return (Table("Kernels of unknown class", columns(("Kernel",), ("ms per step", "Runs per step")), tuple(rows)),)


def _gemms(result: ExplainResult) -> tuple[Block, ...]:
    rows = []
    total = sum(row.flops for row in result.account.gemms)
    for row in result.account.gemms:
        flops = (NOTHING, NOTHING, NOTHING)
        if row.flops > 0:
            tflop, rate = row.flops / 1e12, row.flops / row.time_ms / 1e9 if row.time_ms else None
            flops = (number(tflop, f"{tflop:.2f}"), share_cell(row.flops / total), number(rate, f"{rate:.0f}" if rate else None))
        rows.append((Cell(row.precision), number(row.count, f"{row.count:.0f}"), _ms(row.time_ms), *flops))
    heads = columns(("Precision",), ("GEMMs", "ms", "TFLOP", "Share of FLOPs", "TFLOP/s"))
    return (Table("GEMMs by precision, per step", heads, tuple(rows), main=True),) if rows else ()


# --- causes, comparisons, ranks ------------------------------------------------------------------------------------------


def _causes(result: ExplainResult) -> tuple[Block, ...]:
    """What each cause costs, and the kernels it is in; evidence and advice are messages."""
    if not result.causes:
        return ()
    rows = tuple(
        (
            Cell(f"{place}. {cause.title}"),
            Cell(cause.where),
            _ms(cause.cost_ms),
            share_cell(cause.cost_ms / result.account.step_ms),
            Cell(f"{cause.speedup_without:.2f}x", cause.speedup_without),
        )
        for place, cause in enumerate(result.causes, start=1)
    )
    heads = columns(("Cause", "Where"), ("Cost, ms per step", "Share of step", "Speedup without it"))
    kernels = tuple((Cell(cause.title), Cell(kernel)) for cause in result.causes for kernel in cause.kernels)
    table = Table("Causes by cost", heads, rows, main=True)
    return (table, *([Table("Kernels of the causes", columns(("Cause", "Kernel"), ()), kernels)] if kernels else []))


def _comparison(comparison: StepComparison) -> Table:
    """Part by part, and the sum of the parts that both sides have."""
    known = [part for part in comparison.parts if part.expected_ms is not None]
    expected, actual = sum(part.expected_ms or 0.0 for part in known), sum(part.trace_ms for part in known)
    rows = [
        (
            Cell(part.part),
            _ms(part.expected_ms),
            _ms(part.trace_ms),
            _signed(part.difference_ms),
            number(part.speedup, f"{part.speedup:.2f}x" if part.speedup is not None else None),
        )
        for part in comparison.parts
    ]
    total = number(expected / actual, f"{expected / actual:.2f}x") if actual else NOTHING
    rows.append((Cell("total"), _ms(expected), _ms(actual), _signed(actual - expected), total))
    heads = columns(("Part",), (f"{comparison.expected}, ms", "this trace, ms", "Difference, ms", "Speedup so far"))
    return Table(comparison.title, heads, tuple(rows), main=True)


def _signed(time_ms: float | None) -> Cell:
    return NOTHING if time_ms is None else Cell(f"{time_ms:+.2f}", time_ms)


def _ranks(result: ExplainResult) -> tuple[Block, ...]:
    rows = tuple(
        (
            Cell(str(rank.rank), rank.rank),
            *map(_ms, (rank.step_ms, rank.computing_ms, rank.exposed_ms, rank.idle_ms)),
        )
        for rank in result.ranks
    )
    heads = columns(("Rank",), ("Step ms", "Computing ms", "Exposed communication ms", "Idle ms"))
    return (Table("Ranks", heads, rows, main=True),) if rows else ()
