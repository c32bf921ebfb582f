"""The Document of an `ExplainResult`."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, Fall, Segment, WaterfallChart
from gemmscope.document.common import command_facts
from gemmscope.document.explain_steps import step_summary, steps_table
from gemmscope.document.explain_tables import gemm_shape_table, table_sections
from gemmscope.document.model import Block, Card, Document, KeyFigure, Message, Section, Subject
from gemmscope.document.palette import part_key
from gemmscope.document.table import NOTHING, Cell, Table, columns, number, share_cell, without_empty
from gemmscope.interval import Interval
from gemmscope.results.explain import Cause, ExplainResult, PartComparison, StepComparison

MOST_UNKNOWN = 10  # kernels that are listed one by one


def explain_document(result: ExplainResult, name: str = "") -> Document:
    """Build the Document of the result."""
    account = result.account
    file = Path(result.trace).name
    rank = f", rank {result.rank} of {result.world_size}" if result.rank is not None and result.world_size > 1 else ""
    times = f"{account.step_ms:.2f} ms{step_summary(result)}"
    steps = f"{units.counted(result.steps, 'step')} of {times}, found by {result.steps_found_by}"
    compared = [finding for comparison in result.comparisons for finding in comparison.findings]
    straggler = [finding for finding in result.findings if finding.code in ("ranks-straggler", "straggler-explained")]
    answer, *more = [*(finding.text for finding in straggler), _verdict(result)]
    sections: dict[str, tuple[Block, ...]] = {
        "Where the time goes": (
            *(_chart(result), _classes(result), _idle(result)),
            *(steps_table(result), _counts(result), _unknown(result)),
        ),
        "GEMMs": (_gemms(result), gemm_shape_table(result)),
        "Why the step is not faster": (_causes(result), _kernels(result)),
        "Comparisons": (*_waterfalls(result), *map(_comparison, result.comparisons)),
        **table_sections(result),
        "Ranks": (_ranks(result),),
    }
    filled = {title: tuple(block for block in blocks if not _is_empty(block)) for title, blocks in sections.items()}
    framework = [("framework", result.framework)] if result.framework else []
    return Document(
        kind="explain",
        title=f"Profiler trace {file}",
        subject=Subject(f"Profiler trace {file}"),
        where=result.gpu or "unknown GPU",
        answer=answer,
        because=(
            *more,
            f"A step takes {account.step_ms:.2f} ms. The GPU is busy for {account.busy_ms:.2f} ms "
            f"({units.percent(account.busy_share)}).",
            *(finding.text for finding in compared if finding.level == "note"),
        ),
        key_figures=_key_figures(result),
        summary=_summary(result),
        cards=tuple(map(_card, result.causes)),
        context=(f"{result.gpu or 'unknown GPU'}{rank}; {'inference: ' if result.inference else ''}{steps}",),
        sections=tuple(Section(title, blocks) for title, blocks in filled.items() if blocks),
        messages=(
            *(_cause_message(place, cause) for place, cause in enumerate(result.causes, start=1)),
            *(Message.of(finding) for finding in compared if finding.level != "note"),
            *(Message.of(finding) for finding in result.findings if finding not in straggler),
        ),
        facts={"Method": (("trace", result.trace), ("steps", steps), *framework, *command_facts(result))},
        next_purpose=_next(result)[0],
        next_command=_next(result)[1],
        name=name,
    )


def _next(result: ExplainResult) -> tuple[str, str]:
    """The next useful command, and its purpose."""
    if result.comparisons:
        return "predict the step in every precision", "gemmscope step --preset NAME …"
    file = Path(result.trace).name
    low = result.low_share > 0 and not result.inference
    purpose = f"compare with {'the same training in BF16' if low else 'another recording of the same model'}"
    trace = shlex.quote(file) if Path(file).suffix else "TRACE"
    return purpose, f"gemmscope explain {trace} --baseline {'BF16' if low else 'OTHER'}-TRACE"


def _verdict(result: ExplainResult) -> str:
    """The main cause with its cost, and what to do about it, unless a straggler is the answer."""
    first = result.causes[0].advice[:1] if result.causes and result.verdict.code == "step-cause" else ()
    advice = first if result.straggler is None else ()
    return " ".join([result.verdict.text, *(f"What to do: {line.rstrip('.')}." for line in advice)])


def _is_empty(block: Block) -> bool:
    return isinstance(block, Table) and not block.rows


def _key_figures(result: ExplainResult) -> tuple[KeyFigure, ...]:
    """The step, how busy the GPU is, and how much of the linears is in low precision."""
    account = result.account
    return (
        KeyFigure("Step", f"{account.step_ms:.2f} ms"),
        KeyFigure("GPU busy", units.percent(account.busy_share), f"{account.busy_ms:.2f} ms"),
        KeyFigure("Linears in low precision", units.percent(result.low_share), f"of their {result.low_share_of}"),
    )


def _summary(result: ExplainResult) -> Table | None:
    """The comparison that was asked for; else the causes; without any, where the time goes."""
    if result.comparisons:
        return _comparison(result.comparisons[0])
    if not result.causes:
        parts = sorted(result.account.parts_ms.items(), key=lambda part: -part[1])
        rows = _shares(result, {part: time for part, time in parts if time > 0})
        return Table("Where the time of a step goes", columns(("Part",), ("ms per step", "Share of step")), rows)
    heads = columns(("Cause", "Where"), ("Cost, ms", "Share", "Speedup if fixed"), {"Where": 2, "Share": 1})
    rows = tuple(
        (
            *(Cell(f"{place}. {cause.title}"), Cell(cause.where), _fixed(cause.cost_ms)),
            *(share_cell(cause.cost_ms / result.account.step_ms), _fixed(cause.speedup_without, unit="x")),
        )
        for place, cause in enumerate(result.causes, start=1)
    )
    return without_empty(Table("Why the step is not faster, per step", heads, rows))


def _card(cause: Cause) -> Card:
    return Card(
        title=cause.title,
        cost=f"{cause.cost_ms:.2f} ms per step",
        speedup=f"{cause.speedup_without:.2f}x",
        remedy=cause.advice,
        evidence=" ".join(finding.text for finding in cause.evidence),
        where=cause.where,
    )


def _cause_message(place: int, cause: Cause) -> Message:
    """One cause with its evidence, and what to do about it."""
    evidence = " ".join(finding.text for finding in cause.evidence)
    where = f" ({cause.where})" if cause.where else ""
    text = f"{place}. {cause.title}{where}. {evidence} What to do: {'; '.join(cause.advice)}."
    return Message(f"cause-{cause.code}", "warning", text)


def _chart(result: ExplainResult) -> BarChart:
    """A bar with the parts of the step, beside what it is compared with."""
    others = []
    speedup = None
    for comparison in result.comparisons:
        expected = {part.part: part.expected_ms for part in comparison.parts if part.expected_ms is not None}
        if len(expected) == len(comparison.parts) > 1:
            twin = _is_twin(comparison)
            others.append(Bar("baseline" if twin else "predicted", _segments(expected.items()), baseline=twin))
            speedup = _total_speedup(comparison) if twin else speedup
    trace = Bar("this trace" if others else "trace", _segments(result.account.parts_ms.items()), speedup)
    return BarChart("Where the time of a step goes", "ms per step", (*others, trace), main=True)


def _segments(times_ms: Iterable[tuple[str, float]]) -> tuple[Segment, ...]:
    """The parts of a step, quantization on top."""
    parts_ms = dict(times_ms)
    step_ms = sum(parts_ms.values())
    order = sorted((part for part, time in parts_ms.items() if time > 0), key=lambda part: part == "quantization")
    return tuple(
        Segment(
            part,
            parts_ms[part],
            part_key(part),
            "hatched" if part == "quantization" else "plain",
            ((part, f"{parts_ms[part]:.2f} ms"), ("share", units.percent(parts_ms[part] / step_ms))),
        )
        for part in order
    )


def _is_twin(comparison: StepComparison) -> bool:
    """Whether it is a comparison with another trace: every part has a speedup. A prediction has none."""
    return bool(comparison.parts) and all(part.speedup is not None for part in comparison.parts)


def _total_speedup(comparison: StepComparison) -> Interval:
    return Interval(comparison.parts[-1].speedup or 1.0)


def _waterfalls(result: ExplainResult) -> tuple[WaterfallChart, ...]:
    """How the speedup over another trace changes from the GEMMs to the whole step."""
    return tuple(
        WaterfallChart(
            "From GEMMs to step",
            "this trace",
            comparison.expected,
            tuple(Fall(part.part, part.expected_ms or 0.0, part.trace_ms, part.speedup or 1.0) for part in comparison.parts),
            main=True,
            total=_total_speedup(comparison),
        )
        for comparison in result.comparisons
        if _is_twin(comparison)
    )


def _classes(result: ExplainResult) -> Table:
    times = result.account.classes_ms
    rows = _shares(result, {**times, "total": sum(times.values())})
    note = "A cast that is fused with a norm or an activation counts as quantization here; the table of parts splits its time."
    return Table("By class of kernel", columns(("Class",), ("ms per step", "Share")), rows, note)


def _idle(result: ExplainResult) -> Table:
    rows = _shares(result, {why: time for why, time in result.account.idle_ms.items() if time > 0})
    return Table("Idle time by reason", columns(("Reason",), ("ms per step", "Share of step")), rows)


def _shares(result: ExplainResult, times_ms: dict[str, float]) -> tuple[tuple[Cell, ...], ...]:
    step_ms = result.account.step_ms
    return tuple((Cell(name), _fixed(time), share_cell(time / step_ms)) for name, time in times_ms.items())


def _counts(result: ExplainResult) -> Table:
    account = result.account
    casts = account.quantization_kernels
    cells = {
        "GPU busy, ms": _fixed(account.busy_ms),
        "GPU busy, share of the step": share_cell(account.busy_share),
        "GPU idle, ms": _fixed(sum(account.idle_ms.values())),
        "GPU busy with kernels that were not recorded, ms": _fixed(account.unrecorded_ms),
        "communication, ms": _fixed(account.communication_ms),
        "communication hidden behind computation, ms": _fixed(account.hidden_ms),
        "communication hidden behind computation, share of it": share_cell(account.hidden_share),
        "several kernels at once, ms": _fixed(account.overlapped_ms),
        "kernels and copies": _fixed(account.kernels, 0),
        "launches": _fixed(account.launches, 0),
        "micro-batches": number(account.micro_batches),
        "kernels per GEMM, casts included": _fixed(account.kernels_per_gemm, 1),
        "quantization kernels": _fixed(casts, 0),
        "quantization kernels per low-precision GEMM": _fixed(casts / max(account.low_gemms, 1), 1),
        "quantization kernels per micro-batch": _fixed(casts / account.micro_batches, 0),
        f"linears in low precision, share of {result.low_share_of} (without the output head)": share_cell(result.low_share),
        "GPU time in kernels of a known class": share_cell(account.named_share),
    }
    return Table("Per step", columns(("What",), ("Value",)), tuple((Cell(what), cell) for what, cell in cells.items()))


def _fixed(value: float | None, digits: int = 2, unit: str = "") -> Cell:
    return number(value, f"{value:.{digits}f}{unit}" if value is not None else None)


def _unknown(result: ExplainResult) -> Table:
    """Kernels of no known class: the longest, and the others together."""
    kernels, rest = result.account.unknown[:MOST_UNKNOWN], result.account.unknown[MOST_UNKNOWN:]
    rows = [(kernel.name, kernel.time_ms, kernel.count) for kernel in kernels]
    if rest:
        rows.append((f"{len(rest)} more", sum(kernel.time_ms for kernel in rest), sum(kernel.count for kernel in rest)))
    cells = tuple(
        (Cell(name), _fixed(time, 3), number(count, f"{count:,.0f}" if count >= 10 else f"{count:.1f}"))
        for name, time, count in rows
    )
    return Table("Kernels of unknown class", columns(("Kernel",), ("ms per step", "Runs per step")), cells)


def _gemms(result: ExplainResult) -> Table:
    rows = []
    total = sum(row.flops for row in result.account.gemms)
    for row in result.account.gemms:
        flops = (NOTHING, NOTHING, NOTHING)
        if row.flops > 0:
            flops = (_fixed(row.flops / 1e12), share_cell(row.flops / total), _fixed(row.tflops, 0))
        rows.append((Cell(row.precision), _fixed(row.count, 0), _fixed(row.time_ms), *flops))
    heads = columns(("Precision",), ("GEMMs", "ms", "TFLOP", "Share of FLOPs", "TFLOP/s"))
    return Table("GEMMs by precision, per step", heads, tuple(rows))


def _causes(result: ExplainResult) -> Table:
    """What each cause costs; evidence and advice are messages."""
    heads = columns(("Cause", "Where"), ("Cost, ms per step", "Share of step", "Speedup if fixed"))
    rows = []
    for place, cause in enumerate(result.causes, start=1):
        cost = _fixed(cause.cost_ms), share_cell(cause.cost_ms / result.account.step_ms)
        rows.append((Cell(f"{place}. {cause.title}"), Cell(cause.where), *cost, _fixed(cause.speedup_without, unit="x")))
    return Table("Causes, by the speedup from fixing them", heads, tuple(rows))


def _kernels(result: ExplainResult) -> Table:
    rows = tuple((Cell(cause.title), Cell(kernel)) for cause in result.causes for kernel in cause.kernels)
    return Table("Kernels of the causes", columns(("Cause", "Kernel"), ()), rows)


def _comparison(comparison: StepComparison) -> Table:
    """Part by part, and the sum of the parts that both sides have."""
    known = [part for part in comparison.parts if part.expected_ms is not None]
    expected, actual = sum(part.expected_ms or 0.0 for part in known), sum(part.trace_ms for part in known)
    speedup = expected / actual if actual else None
    total = PartComparison(part="total", expected_ms=expected, trace_ms=actual, speedup=speedup)
    rows = []
    for part in (*comparison.parts, total):
        change = part.difference_ms
        difference = number(change, f"{change:+.2f}" if change is not None else None)
        speedup_cell = _fixed(part.speedup, unit="x")
        rows.append((Cell(part.part), _fixed(part.expected_ms), _fixed(part.trace_ms), difference, speedup_cell))
    heads = columns(("Part",), (f"{comparison.expected}, ms", "this trace, ms", "Difference, ms", "Speedup so far"))
    return Table(comparison.title, heads, tuple(rows))


def _ranks(result: ExplainResult) -> Table:
    """A row for each rank. Columns about waiting are left out if the ranks have no collectives in common."""
    rows = tuple(
        (
            Cell(f"{rank.rank}, straggler" if rank.rank == result.straggler else str(rank.rank), rank.rank),
            *map(_fixed, (rank.step_ms, rank.computing_ms, rank.exposed_ms, rank.idle_ms, rank.waiting_ms)),
            _fixed(rank.last_to_arrive, 1),
            _fixed(rank.delay_ms),
        )
        for rank in result.ranks
    )
    heads = columns(
        ("Rank",),
        ("Step ms", "Computing ms", "Exposed communication ms", "Idle ms", "Waits ms", "Last to arrive", "Others wait for it ms"),
    )
    note = "Waits: in collectives, for ranks that enter them later." if result.straggler is not None else ""
    return without_empty(Table("Ranks, per step", heads, rows, note))
