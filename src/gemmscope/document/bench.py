"""The Document of a `BenchResult`."""

from gemmscope.document.common import (
    batch_lines,
    command_facts,
    described,
    facts,
    machine_facts,
    model_facts,
    phrase,
    quoted_of_fleet,
    same_model,
    subject,
    versions_text,
)
from gemmscope.document.linears import linears_answer, linears_sections, linears_speedups, linears_summary, linears_times
from gemmscope.document.model import Advice, Document, Message
from gemmscope.document.table import Facts
from gemmscope.paste.emit import ready_to_paste
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import BenchResult


def bench_document(result: BenchResult, name: str = "") -> Document:
    """Build the Document of the result."""
    linears, model = result.linears, result.model
    answer, because = linears_answer(linears, result.where)
    has_step = model is not None and bool(linears.ops)
    return Document(
        kind="bench",
        title=f"{result.name} on {result.where}",
        subject=subject(model, result.run, linears.cases),
        where=result.where,
        answer=answer,
        because=(*because, *quoted_of_fleet(result)),
        summary=linears_summary(linears),
        context=(*described(model), *batch_lines(result.run, result.stage), _backend(result)),
        sections=linears_sections(linears, tasks=result.tasks),
        messages=tuple(map(Message.of, result.findings)),
        advice=_advice(result),
        facts={"Method": _method(result), "Environment": machine_facts(result.environment, result.device, result.versions)},
        speedups=linears_speedups(linears, result.where),
        times=linears_times(linears, result.where),
        next_purpose=phrase("bench-next") if has_step else "",
        next_command=same_model("step", result) if has_step else "",
        name=name,
    )


def _backend(result: BenchResult) -> str:
    versions = f" ({versions_text(result.versions)})" if result.versions else ""
    profiler = phrase("bench-profiler") if result.settings.timing == "profiler" else ""
    return phrase("bench-backend", backend=result.settings.backend, versions=versions, profiler=profiler, rounds=result.rounds)


def _advice(result: BenchResult) -> Advice | None:
    """The recipe whose linears are fastest, if it beats BF16."""
    winner = result.linears.winners.get("autocast")
    if winner is None:
        return None
    if winner.best == BASELINE or BASELINE in winner.rivals or winner.speedup is None:
        return Advice(phrase("bench-stay", baseline=BASELINE))
    rivals = phrase("against-rivals", rivals=winner.rivals) if winner.rivals else ""
    return Advice(phrase("bench-use", recipe=winner.best, speedup=winner.speedup, rivals=rivals), ready_to_paste(winner.best))


def _until(result: BenchResult) -> str:
    counts = result.settings.counts
    if counts is not None:
        return phrase("bench-until-counts", runs=counts.num_iters, warmup=counts.num_warmup)
    if result.precision is None:
        return ""
    limit = phrase("bench-until-limit", seconds=result.time_limit_s) if result.time_limit_s is not None else ""
    return phrase("bench-until-precision", precision=result.precision, limit=limit)


def _method(result: BenchResult) -> Facts:
    settings = result.settings
    count = sum(len(burst) for task in result.tasks for burst in task.rounds_ms)
    clock = "profiler" if settings.timing == "profiler" else "cpu" if settings.backend == "cpu" else "events"
    return facts(
        *model_facts(result.model, result.run, result.stage),
        ("backend", settings.backend),
        ("clock", phrase(f"bench-clock-of-{clock}")),
        ("bursts", phrase("bench-bursts", keep=settings.keep_ms, drop=settings.drop_ms)),
        ("measured until", _until(result)),
        ("samples", phrase("bench-samples", count=count, tasks=len(result.tasks), rounds=result.rounds)),
        ("intervals", phrase("bench-intervals")),
        ("weights", phrase("bench-weights") if settings.cache_weights else ""),
        *command_facts(result),
    )
