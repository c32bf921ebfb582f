"""The Document of a `BenchResult`."""

from gemmscope import units
from gemmscope.document.common import (
    batch_lines,
    command_facts,
    machine_facts,
    model_facts,
    quoted_of_fleet,
    same_model,
    subject,
)
from gemmscope.document.linears import linears_answer, linears_sections, linears_speedups, linears_times
from gemmscope.document.linears_summary import linears_summary
from gemmscope.document.model import Advice, Document, Message
from gemmscope.document.table import Facts
from gemmscope.paste.emit import ready_to_paste
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import BenchResult


def bench_document(result: BenchResult, name: str = "") -> Document:
    """Build the Document of the result."""
    linears = result.linears
    answer, because = linears_answer(linears, result.where)
    model = result.model
    return Document(
        kind="bench",
        title=f"{result.name} on {result.where}",
        subject=subject(model, result.run, linears.cases),
        where=result.where,
        answer=answer,
        because=(*because, *quoted_of_fleet(result)),
        summary=linears_summary(linears),
        context=tuple(_context(result)),
        sections=linears_sections(linears, tasks=result.tasks),
        messages=tuple(map(Message.of, result.findings)),
        advice=_advice(result),
        facts={"Method": _method(result), "Environment": machine_facts(result.environment, result.device, result.versions)},
        speedups=linears_speedups(linears, result.where),
        times=linears_times(linears, result.where),
        next_purpose="" if model is None or not linears.ops else "predict the speedup of the whole training step",
        next_command="" if model is None or not linears.ops else same_model("step", result),
        name=name,
    )


def _context(result: BenchResult) -> list[str]:
    sizes = [result.model.description] if result.model is not None and result.model.description else []
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    backend = f"{result.settings.backend} backend" + (f" ({versions})" if versions else "")
    profiler = ", timed by kernel timestamps" if result.settings.timing == "profiler" else ""
    return [*sizes, *batch_lines(result.run, result.stage), f"{backend}{profiler}, {units.counted(result.rounds, 'round')}"]


def _advice(result: BenchResult) -> Advice | None:
    """The recipe whose linears are fastest, if it beats BF16."""
    winner = result.linears.winners.get("autocast")
    if winner is None:
        return None
    if winner.best == BASELINE or BASELINE in winner.rivals or winner.speedup is None:
        return Advice(f"stay with {BASELINE}: no recipe that was measured is faster beyond its interval")
    rivals = f"; too close to call against {units.names(winner.rivals)}" if winner.rivals else ""
    text = f"for the linears alone, {winner.best} ({units.speedup(winner.speedup)}){rivals}"
    return Advice(text, ready_to_paste(winner.best))


def _method(result: BenchResult) -> Facts:
    settings = result.settings
    until = ""
    if settings.counts is not None:
        until = f"{settings.counts.num_iters} runs after {settings.counts.num_warmup} warm-up runs"
    elif result.precision is not None:
        until = f"every speedup is known to ±{result.precision:.1%}"
        until += f", or {result.time_limit_s:g} s have passed" if result.time_limit_s is not None else ""
    count = sum(len(burst) for task in result.tasks for burst in task.rounds_ms)
    events = "the CPU clock" if settings.backend == "cpu" else "CUDA events around each replay of a graph"
    lines = [
        *model_facts(result.model, result.run, result.stage),
        ("backend", settings.backend),
        ("clock", "kernel timestamps of the profiler" if settings.timing == "profiler" else events),
        (
            "bursts",
            f"{settings.keep_ms:g} ms of steady state each, after discarding {settings.drop_ms:g} ms; recipes take turns",
        ),
        ("measured until", until),
        ("samples", f"{count:,} of {units.counted(len(result.tasks), 'task')} in {units.counted(result.rounds, 'round')}"),
        ("intervals", "95%, bootstrap over 100 ms blocks of both sides of each ratio"),
        ("weights", "weight quantization is excluded, because it happens once per step" if settings.cache_weights else ""),
        *command_facts(result),
    ]
    return tuple((name, value) for name, value in lines if value)
