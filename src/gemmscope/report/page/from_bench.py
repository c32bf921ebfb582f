"""A run file of `gemmscope bench` as a part of a report."""

from __future__ import annotations

from collections.abc import Sequence

from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.report.page.doubts import findings
from gemmscope.report.page.facts import batch_facts, command_facts, machine_facts, subject
from gemmscope.report.page.parts import Cell, Estimate, Facts, Finding, Recommendation, RunPart, Table, noted
from gemmscope.report.page.rows import Rows, bars, curves, gains, modes_table, ops_table
from gemmscope.report.units import percent, si
from gemmscope.step.emit import ready_to_paste
from gemmscope.step.recommend import Plan
from gemmscope.store.benchfile import BenchFile, MemoryRecord, SettingsRecord


def from_bench(file: BenchFile, name: str) -> RunPart:
    """Everything that the file says."""
    found = Rows(file.rows, file.speedups, file.totals, file.tasks)
    where = str(file.device.get("name", "this machine"))
    answer, because = answer_of(found, where)
    return RunPart(
        kind="bench",
        name=name,
        subject=subject(file.model, file.run, file.rows),
        where=where,
        answer=answer,
        because=tuple(because),
        bars=() if found.bare else bars(found),
        curves=curves(found),
        modes=modes_table(found),
        ops=(ops_table(found),) if file.rows else (),
        tables=memory_table(file.memory),
        gains=gains(found),
        findings=(
            *(Finding("warning", words) for words in file.warnings),
            *findings(found),
            *map(noted, file.notes),
        ),
        method=_method(file, file.settings),
        environment=machine_facts(file.environment, file.device, file.versions),
        recommendation=_recommendation(found),
    )


def answer_of(found: Rows, where: str, *, forecast: bool = False) -> tuple[str, list[str]]:
    """The answer in one sentence, and what stands behind it."""
    if not found.rows:
        return "Nothing could be measured.", []
    if found.bare:
        return _answer_of_shapes(found, where)
    verb = "would run" if forecast else "run"
    mode = "autocast" if "autocast" in found.modes else found.modes[0]
    what = "the linears" if mode == "autocast" else "the products"
    best = found.best(mode)
    if best is None:
        fallen = [name for name in found.recipes if found.fell_back(name, mode)]
        if fallen:
            return f"No speedup on {where}: {', '.join(fallen)} did not run in the precision asked for (FALLBACK).", []
        could = "was forecast" if forecast else "could be measured"
        return f"Only {', '.join(found.recipes)} {could} on {where}: there is nothing to compare.", []
    name, gain = best
    if gain.too_close:
        return f"On {where} it is too close to call whether {name} is faster than {BASELINE} for {what}: {gain.times}.", []
    if gain.value < 1:
        return f"On {where} no precision is faster than {BASELINE} for {what}: {name} comes closest, {gain.times}.", []
    included = ", quantization included" if mode == "autocast" else ", quantization left out"
    sentence = f"On {where} {what} {verb} {gain.times} as fast in {name} as in {BASELINE}{included}."
    return sentence, _because(found, name, mode)


def _because(found: Rows, name: str, mode: str) -> list[str]:
    lines = []
    bare = found.best("pre-quantized") if mode == "autocast" else None
    share = found.quantizing_share(name)
    if bare is not None:
        spent = f"; quantizing takes {percent(share)} of the time in {name}" if share is not None else ""
        lines.append(f"The products alone would gain {bare[1].times} ({bare[0]}){spent}.")
    others = [f"{other} {found_gain.times}" for other in found.recipes
              if other != name and (found_gain := found.gain(other, mode)) is not None]  # fmt: skip
    if others:
        lines.append(f"Others: {', '.join(others)}.")
    lines.append("This is the linears' share of a training step. The step itself gains less: gemmscope step predicts it.")
    return lines


def _answer_of_shapes(found: Rows, where: str) -> tuple[str, list[str]]:
    mode = found.modes[-1]
    pairs = [
        (one.recipe, one.op, Estimate.of(one.speedup)) for one in found.speedups if one.mode == mode and one.over == BASELINE
    ]
    if not pairs:
        return f"{len(found.ops)} shapes were measured on {where}; there is no speedup to form.", []
    name, op, gain = max(pairs, key=lambda each: each[2].value)
    lost = [f"{recipe_name} {shape}" for recipe_name, shape, one in pairs if one.high is not None and one.high <= 1]
    because = [f"Slower than {BASELINE}: {', '.join(lost[:8])}{' …' if len(lost) > 8 else ''}."] if lost else []
    return (
        f"On {where} the best of {len(found.ops)} shapes is {op} in {name}: {gain.times} as fast as {BASELINE}, {mode}.",
        because,
    )


def _recommendation(found: Rows) -> Recommendation | None:
    """For the linears: the recipe that gains most, if it gains."""
    best = found.best("autocast")
    if found.bare or best is None:
        return None
    name, gain = best
    if gain.too_close or gain.value <= 1:
        return Recommendation(f"stay with {BASELINE}: no precision that was measured is faster beyond doubt", {})
    close = [other for other in found.recipes if other != name and _overlaps(gain, found.gain(other, "autocast"))]
    doubt = f"; too close to call against {' and '.join(close)}" if close else ""
    words = f"of the linears' time alone, {name} ({gain.times}){doubt}; gemmscope step says what training gains"
    return Recommendation(words, ready_to_paste(Plan(name)) if recipe(name).quantizes else {})


def _overlaps(best: Estimate, other: Estimate | None) -> bool:
    return other is not None and best.low is not None and other.high is not None and other.high >= best.low


def memory_table(memory: Sequence[MemoryRecord]) -> tuple[Table, ...]:
    """Bytes by recipe."""
    rows = []
    for one in memory:
        sizes = (one.weights_bytes, one.copies_bytes, one.weights_bytes + one.copies_bytes, one.kept_bytes)
        rows.append((Cell(one.recipe), *(Cell(si(size, "B"), size) for size in sizes)))
    names = ("BF16 weights", "Quantized copies", "Weights in all", "X kept for backward")
    columns = {"Recipe": False, **dict.fromkeys(names, True)}
    title = "Memory of the linears on one rank"
    return (Table(title, columns, tuple(rows), "One micro-batch; computed from sizes, not measured."),) if rows else ()


def _method(file: BenchFile, settings: SettingsRecord) -> Facts:
    """How it was measured, in a list."""
    timing = {"profiler": "the kernels' own timestamps"}.get(settings.timing, "CUDA events around each replay of a graph")
    until = (
        f"{settings.counts.num_iters} runs after {settings.counts.num_warmup} to warm up"
        if settings.counts is not None
        else f"until every speedup was known to ±{settings.precision:.1%}" if settings.precision is not None else ""
    )  # fmt: skip
    count = sum(len(burst) for task in file.tasks for burst in task.rounds_ms)
    lines = [
        *batch_facts(file.model, file.run),
        ("backend", settings.backend),
        ("clock", timing),
        (
            "bursts",
            f"{settings.keep_ms:g} ms of steady state each, after {settings.drop_ms:g} ms that are dropped; precisions in turn",
        ),
        ("measured", f"{until}; ended: {file.ended}"),
        ("samples", f"{count:,} of {len(file.tasks)} tasks in {file.rounds} rounds"),
        ("intervals", "95%, by resampling pieces of 100 ms of both sides of each ratio"),
        ("weights", "quantizing them is left out: it is done once per step" if settings.cache_weights else ""),
        *command_facts(file.command, file.gemmscope_version),
    ]
    return tuple((name, value) for name, value in lines if value)
