"""The Document of an `ExplainResult`."""

import shlex
from pathlib import Path

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, Fall, WaterfallChart
from gemmscope.document.common import command_facts, facts, phrase, sections
from gemmscope.document.explain_tables import (
    attention_table,
    causes_table,
    classes_table,
    collectives_table,
    comparison_table,
    gemm_shape_table,
    gemms_table,
    idle_frames_table,
    idle_table,
    kernels_table,
    numbers_table,
    parts_table,
    ranks_table,
    speedup_cell,
    steps_table,
    unknown_table,
)
from gemmscope.document.model import Card, Document, KeyFigure, Message, Subject
from gemmscope.document.step_parts import part_segments
from gemmscope.document.table import Table
from gemmscope.interval import Interval
from gemmscope.results.explain import Cause, ExplainResult, StepComparison


def explain_document(result: ExplainResult, name: str = "") -> Document:
    """Build the Document of the result."""
    account, tables, step_ms = result.account, result.tables, result.account.step_ms
    file, gpu = Path(result.trace).name, result.gpu or "unknown GPU"
    rank = f", rank {result.rank} of {result.world_size}" if result.rank is not None and result.world_size > 1 else ""
    least, median, most = result.step_range_ms or (None, None, None)
    spread = phrase("explain-spread", least=least, median=median, most=most) if least is not None else ""
    steps = phrase(
        "explain-steps", steps=result.steps, time=phrase("explain-time", time=step_ms, spread=spread), found=result.steps_found_by
    )
    compared = [finding for comparison in result.comparisons for finding in comparison.findings]
    straggler = [finding for finding in result.findings if finding.code in ("ranks-straggler", "straggler-explained")]
    answer, *more = [*(finding.text for finding in straggler), _verdict(result)]
    compared_with = "BF16" if result.low_share > 0 and result.judged else "OTHER"
    again = f"gemmscope explain {shlex.quote(file) if Path(file).suffix else 'TRACE'} --baseline {compared_with}-TRACE"
    return Document(
        kind="explain",
        title=f"Profiler trace {file}",
        subject=Subject(f"Profiler trace {file}"),
        where=gpu,
        answer=answer,
        because=(
            *more,
            phrase("explain-busy", step=step_ms, busy=account.busy_ms, share=account.busy_share),
            *(finding.text for finding in compared if finding.level == "note"),
        ),
        key_figures=(
            KeyFigure("Step", f"{step_ms:.2f} ms"),
            KeyFigure("GPU busy", units.percent(account.busy_share), f"{account.busy_ms:.2f} ms"),
            KeyFigure("Linears in low precision", units.percent(result.low_share), f"of their {result.low_share_of}"),
        ),
        summary=_summary(result),
        cards=tuple(
            Card(
                title=cause.title,
                cost=f"{cause.cost_ms:.2f} ms per step",
                speedup=speedup_cell(cause).text,
                remedy=cause.advice,
                evidence=_evidence(cause),
                where=cause.where,
            )
            for cause in result.causes
        ),
        context=(phrase("explain-context", gpu=gpu, rank=rank, kind="" if result.judged else f"{result.phase}: ", steps=steps),),
        sections=sections(
            {
                "Where the time goes": [
                    *(_chart(result), classes_table(account), idle_table(account)),
                    *(steps_table(result.each_step), numbers_table(result), unknown_table(account.unknown)),
                ],
                "GEMMs": [gemms_table(account), gemm_shape_table(result)],
                "Why the step is not faster": [causes_table(result)],
                "Comparisons": [*_waterfalls(result), *map(comparison_table, result.comparisons)],
                "Attention": [attention_table(tables.attention)],
                "Communication": [collectives_table(tables.collectives)],
                "Kernels and idle time": [kernels_table(tables.kernels, step_ms), idle_frames_table(result)],
                "Ranks": [ranks_table(result)],
            }
        ),
        messages=(
            *(_cause_message(place, cause) for place, cause in enumerate(result.causes, start=1)),
            *(Message.of(finding) for finding in compared if finding.level != "note"),
            *(Message.of(finding) for finding in result.findings if finding not in straggler),
        ),
        facts={
            "Method": facts(
                ("trace", result.trace),
                ("steps", steps),
                ("phase", result.phase),
                ("framework", result.framework),
                *command_facts(result),
            )
        },
        next_purpose=phrase("explain-next-step" if result.comparisons else f"explain-next-{compared_with.lower()}"),
        next_command="gemmscope step --preset NAME …" if result.comparisons else again,
        name=name,
    )


def _verdict(result: ExplainResult) -> str:
    """The main cause with its cost, and what to do about it, unless a straggler is the answer."""
    first = result.causes[0].advice[:1] if result.causes and result.verdict.code == "step-cause" else ()
    return " ".join(
        [
            result.verdict.text,
            *(phrase("explain-to-do", advice=line.rstrip(".")) for line in (first if result.straggler is None else ())),
        ]
    )


def _summary(result: ExplainResult) -> Table:
    """The comparison that was asked for; else the causes; without any, where the time goes."""
    if result.comparisons:
        return comparison_table(result.comparisons[0])
    return causes_table(result, short=True) if result.causes else parts_table(result.account)


def _evidence(cause: Cause) -> str:
    """What shows the cause, and its main kernels."""
    kernels = [phrase("explain-cause-kernels", kernels=", ".join(cause.kernels))] if cause.kernels else []
    return " ".join([*(finding.text for finding in cause.evidence), *kernels])


def _cause_message(place: int, cause: Cause) -> Message:
    """One cause with its evidence, and what to do about it."""
    named = f"{place}. {cause.title}{f' ({cause.where})' if cause.where else ''}"
    text = phrase("explain-cause", cause=named, evidence=_evidence(cause), advice="; ".join(cause.advice))
    return Message(f"cause-{cause.code}", "warning", text)


def _chart(result: ExplainResult) -> BarChart:
    """A bar with the parts of the step, beside what it is compared with."""
    others = []
    speedup = None
    for comparison in result.comparisons:
        expected = {part.part: part.expected_ms for part in comparison.parts if part.expected_ms is not None}
        if len(expected) == len(comparison.parts) > 1:
            twin = _is_twin(comparison)
            others.append(Bar("baseline" if twin else "predicted", part_segments(expected, time_text=".2f"), baseline=twin))
            speedup = _total_speedup(comparison) if twin else speedup
    trace = Bar("this trace" if others else "trace", part_segments(result.account.parts_ms, time_text=".2f"), speedup)
    return BarChart("step", "Where the time of a step goes", "ms per step", (*others, trace), main=True)


def _is_twin(comparison: StepComparison) -> bool:
    """Whether it is a comparison with another trace: its parts have speedups. Those of a prediction have none."""
    return any(part.speedup is not None for part in comparison.parts)


def _total_speedup(comparison: StepComparison) -> Interval:
    return Interval([part.speedup for part in comparison.parts if part.speedup is not None][-1])


def _waterfalls(result: ExplainResult) -> tuple[WaterfallChart, ...]:
    """How the speedup over another trace changes from the GEMMs to the whole step."""
    return tuple(
        WaterfallChart(
            f"waterfall {comparison.expected}",
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
