"""The Document of a `ForecastResult`: all GPUs side by side, then each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil, log2

from gemmscope import units
from gemmscope.document.common import (
    batch_lines,
    command_facts,
    described,
    facts,
    gpu_messages,
    model_facts,
    phrase,
    same_model,
    sections,
    subject,
)
from gemmscope.document.linears import (
    linears_answer,
    linears_sections,
    linears_speedups,
    linears_summary,
    linears_times,
    total_ms,
)
from gemmscope.document.model import Block, Document, Section
from gemmscope.document.step_parts import (
    best_time,
    common_baseline,
    cost_table,
    memory_cell,
    on_all_gpus,
    over_common,
    over_other_gpu,
    per_gpu,
    recommended,
    speedup_value,
    step_answer,
    step_chart,
    step_figures,
    step_speedups,
    step_summary,
    step_times,
    waterfalls,
)
from gemmscope.document.sweep import forecast_sweep_document
from gemmscope.document.table import Cell, Column, Facts, Table, across, called_cell, table
from gemmscope.model.spec import RunSpec
from gemmscope.options.declare import options_of
from gemmscope.options.job import ModelOptions
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import ForecastResult, GpuForecast
from gemmscope.results.step import Exchanged, StepTime, StepTimes

LORA = "gemmscope step --module FILE.py:FUNCTION"  # a measured step trains all weights, but those that the module freezes
MEMORY_USES = {
    "weights_bytes": "Weights",
    "gradients_bytes": "Gradients",
    "master_weights_bytes": "Master weights",
    "moments_bytes": "Optimizer moments",
    "activations_bytes": "Activations",
    "quantized_copies_bytes": "Quantized copies of weights",
    "communication_bytes": "Communication buffers",
    "workspace_bytes": "Logits and loss, or gradients of one layer",
    "reserve_bytes": "CUDA, libraries, allocator",
    "total_bytes": "Total, usual",
    "least_bytes": "At least",
    "most_bytes": "At most",
}


def forecast_document(result: ForecastResult, name: str = "") -> Document:
    """Build the Document of the result."""
    if result.sweeps:
        return forecast_sweep_document(result, name)
    first, several = result.gpus[0], len(result.gpus) > 1
    answer, because = _answer(result)
    software = [entry.text for entry in first.findings if entry.code == "step-software"]
    own = [section for gpu in result.gpus for section in _gpu_sections(gpu, several=several)]
    both = [] if first.linears.bare else [_main_table(result.gpus), cost_table(_steps(result.gpus), phrase("no-restarts"))]
    unfit = [gpu.gpu for gpu in result.gpus if gpu.step is not None and best_time(gpu.step) is None and gpu.step.unfit]
    titles = ", ".join(
        gpu.title if len(result.gpus) <= 2 else gpu.gpu
        for gpu in ([gpu for gpu in result.gpus if gpu.gpu not in unfit] or result.gpus)
    )
    titles += f"; does not fit on {units.listed(unfit)}" if 0 < len(unfit) < len(result.gpus) else ""
    lora = result.run is not None and result.run.lora is not None
    nothing_fits, several_gpus = len(unfit) == len(result.gpus), result.run is not None and result.run.gpus > 1
    where = [(gpu, f"{gpu.title}, FORECAST") for gpu in result.gpus]
    return Document(
        kind="forecast",
        title=f"FORECAST, not measured: {result.name} on {titles}",
        subject=subject(result.model, result.run, first.linears.cases),
        where=f"{', '.join(gpu.gpu for gpu in result.gpus) if several else first.title}, FORECAST",
        answer=answer,
        because=(*because, *(software if several else [])),
        key_figures=step_figures(first.step) if first.step is not None and not several else (),
        summary=_summary(result),
        context=(*_context(result), *(software if not several else [])),
        sections=(*sections({"Summary": both}), *own),
        messages=gpu_messages(result.findings, {gpu.gpu: gpu.findings for gpu in result.gpus}),
        facts={"Method": _method(result)},
        speedups=tuple(
            speedup
            for gpu, place in where
            for speedup in (*(step_speedups(gpu.step, place) if gpu.step else ()), *linears_speedups(gpu.linears, place))
        ),
        times=tuple(
            time
            for gpu, place in where
            for time in (*(step_times(gpu.step, place) if gpu.step else ()), *linears_times(gpu.linears, place))
        ),
        forecast=True,
        next_purpose=phrase("forecast-next-plan" if nothing_fits else "forecast-next-rank" if several_gpus else "forecast-next"),
        next_command=_plans(result) if nothing_fits else LORA if lora else same_model(*_measures(result)),
        name=name,
    )


def _context(result: ForecastResult) -> Iterator[str]:
    yield from described(result.model)
    yield from batch_lines(result.run, result.stage)
    step = next((gpu.step for gpu in result.gpus if gpu.step is not None), None)
    if step is not None and step.gpus and step.global_batch and result.run is not None:
        batch = units.counted(step.global_batch, step.batch_unit)
        batch += f" = {step.global_batch * result.run.sequence_length:,} tokens" if step.unit == "tokens" else ""
        yield phrase("forecast-layout", gpus=step.gpus, batch=batch, sharing=_sharing(result.run))
    yield phrase(f"clocks-{result.state}")


def _sharing(run: RunSpec) -> str:
    """Which precision the optimizer has, and what data-parallel ranks share."""
    shared = ("nothing sharded", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)")[run.zero_stage]
    states = "BF16" if run.state_precision == "bf16" else "FP32 master weights and"
    ranks = f" across {run.zero_ranks} ranks" if run.zero_stage and run.zero_ranks else ""
    return f"{states} optimizer states, {shared}{ranks}"


def _measures(result: ForecastResult) -> tuple[str, ForecastResult, str]:
    """The command that measures this: linears alone, where the step cannot be run. A config without a closed form is run by its
    Hugging Face class."""
    linears = result.gpus[0].linears
    alone = linears.bare or linears.as_te_benchmark or result.has("layers-not-run")
    traced = (result.has("traced") or result.has("traced-with-values")) and "--config" in result.command
    return "bench" if alone else "step", result, "--hugging-face" if traced and not alone else ""


def _plans(result: ForecastResult) -> str:
    """The command that looks for a layout that fits, on as many GPUs as the smallest recipe needs, and some more."""
    gpu = result.gpus[0]
    least = min(memory.least_bytes / memory.available_bytes for memory in gpu.memory)
    gpus = 8 * 2 ** max(ceil(log2(least * (result.run.gpus if result.run is not None else 1) / 4)), 0)
    return same_model("plan", result, f"--gpu {gpu.gpu} --gpus {gpus}", (*options_of(ModelOptions), "sequence_length"))


def _answer(result: ForecastResult) -> tuple[str, tuple[str, ...]]:
    """The answer about the step if there is one, else about the linears; for several GPUs, the fastest, then a line for each."""
    answers = [_answer_of(gpu) for gpu in result.gpus]
    if len(answers) == 1:
        return answers[0]
    lines = tuple(_line(gpu, answer) for gpu, (answer, _) in zip(result.gpus, answers, strict=True))
    best = {gpu.gpu: time for gpu in result.gpus if (time := best_time(gpu.step)) is not None}
    best = {gpu.gpu: best[gpu.gpu] for gpu in result.gpus if gpu.gpu in best and not _unsure(gpu)} or best
    steps = _steps(result.gpus)
    unfit = [name for name, step in steps.items() if name not in best and (step.unfit or step.may_not_fit)]
    certain = [name for name in unfit if best_time(steps[name]) is None]
    unsure = [gpu.gpu for gpu in result.gpus if gpu.gpu not in certain and (gpu.gpu in unfit or (_unsure(gpu) and len(best) > 1))]
    too_small = phrase("forecast-too-small", gpus=certain) if certain else ""
    too_small += phrase("forecast-may-be-too-small", gpus=unsure) if unsure else ""
    unit = next((gpu.step.unit for gpu in result.gpus if gpu.step is not None), "tokens")
    if unfit and not best:
        return phrase("forecast-fits-nowhere", model=result.name), lines
    if unfit and len(best) == 1:
        [(name, time)] = best.items()
        about = {"gpu": name, "rate": _rate(time), "unit": unit, "recipe": time.recipe, "too_small": too_small}
        return phrase(
            "forecast-may-fit-on-one" if time.recipe in steps[name].may_not_fit else "forecast-fits-on-one", **about
        ), lines
    if len(best) < 2:
        if result.gpus[0].linears.bare:
            return answers[0][0], tuple(because.removeprefix(phrase("forecast")) for because, _ in answers[1:])
        return phrase("forecast-without-best", gpus=len(result.gpus)), lines
    ranked = sorted(best.items(), key=lambda pair: -pair[1].tokens_per_s)
    costs = {gpu: time.cost.money for gpu, time in best.items() if time.cost is not None and time.cost.money is not None}
    if len(costs) > 1:
        cheapest = sorted(costs, key=lambda gpu: costs[gpu].value)
        lines = (
            *lines,
            phrase(
                "forecast-costs", prices=", ".join(f"{gpu} in {best[gpu].recipe} {units.amount(costs[gpu])}" for gpu in cheapest)
            ),
        )
    rates = ", ".join(f"{gpu} in {time.recipe} {_rate(time)}" for gpu, time in ranked)
    return phrase("forecast-ranked", fastest=_fastest(ranked), unit=unit.capitalize(), rates=rates, too_small=too_small), lines


def _fastest(ranked: Sequence[tuple[str, StepTime]]) -> str:
    """The GPU with the highest rate, and those that may be as fast."""
    (name, best), *others = ranked
    rivals = [other for other, time in others if not over_other_gpu(best, time).above_one]
    if not rivals:
        return phrase("forecast-fastest", gpu=name)
    return phrase(
        ("forecast-all-close" if len(rivals) == len(others) else "forecast-fastest-close"), gpus=units.listed([name, *rivals])
    )


def _line(gpu: GpuForecast, answer: str) -> str:
    """One GPU in one line."""
    winner = gpu.step.winner if gpu.step is not None else None
    if winner is None or winner.speedup is None or BASELINE in winner.rivals:
        return f"{gpu.gpu}: {answer.removeprefix(phrase('forecast'))}"
    notes = phrase("against-rivals", rivals=winner.rivals) if winner.rivals else ""
    notes += phrase("forecast-may-not-fit") if _unsure(gpu) else ""
    return phrase("forecast-line", gpu=gpu.gpu, recipe=winner.best, speedup=winner.speedup, baseline=BASELINE, notes=notes)


def _unsure(gpu: GpuForecast) -> bool:
    """Whether its best recipe may not fit in memory."""
    return gpu.step is not None and gpu.step.winner is not None and gpu.step.winner.best in gpu.step.may_not_fit


def _rate(time: StepTime) -> str:
    return units.rounded(time.tokens_per_s, time.step_ms.half_width)


def _answer_of(gpu: GpuForecast) -> tuple[str, tuple[str, ...]]:
    if gpu.step is not None:
        return step_answer(gpu.step, gpu.title)
    sentence, because = linears_answer(gpu.linears, gpu.title)
    return phrase("forecast") + sentence, because


def _steps(gpus: Sequence[GpuForecast]) -> dict[str, StepTimes]:
    return {gpu.gpu: gpu.step for gpu in gpus if gpu.step is not None}


def _summary(result: ForecastResult) -> Table | None:
    """The summary of the steps if there are any, else of the linears."""
    if steps := _steps(result.gpus):
        return step_summary(steps)
    named, first = {gpu.gpu: gpu.linears for gpu in result.gpus}, result.gpus[0].linears
    return linears_summary(first, named) if first.bare or len(named) == 1 else _main_table(result.gpus)


def _main_table(gpus: Sequence[GpuForecast]) -> Table:
    """A row for each GPU and recipe: the linears in both modes, the step and its speedup."""
    steps = _steps(gpus)
    first = gpus[0].step
    common = common_baseline(steps) if len(gpus) > 1 and first is not None else None
    columns: list[Column[tuple[GpuForecast, str]]] = [
        Column("GPU", lambda row: row[0].gpu),
        Column("Recipe", lambda row: row[1]),
        *across(
            gpus[0].linears.modes,
            lambda row, mode: total_ms(row[0].linears, mode, row[1]),
            "ms, range",
            head=lambda mode: f"Linears ms, {mode}",
        ),
    ]
    if first is not None:
        of_step = [
            Column[StepRow]("Step ms", lambda row: row[2].step_ms, "ms, range"),
            Column[StepRow](per_gpu(first), lambda row: row[2].tokens_per_s, ",.0f"),
            Column[StepRow](on_all_gpus(first), lambda row: row[2].total_tokens_per_s, ",.0f"),
            Column[StepRow]("Model TFLOP/s/GPU", lambda row: row[2].model_tflops, "TFLOP/s"),
            Column[StepRow]("MFU (BF16)", lambda row: row[2].mfu, "%"),
            Column[StepRow]("Memory of one GPU", lambda row: memory_cell(row[1], row[2]), "GB"),
            Column[StepRow](f"Speedup over {BASELINE}", lambda row: speedup_value(row[2]), "x, called"),
            *over_common(common),
        ]
        columns += [column.of(_of_step) for column in of_step]
    rows = [(gpu, name) for gpu in gpus for name in gpu.linears.recipes]
    what = "linears of one micro-batch on one rank" + (", and the training step" if first is not None else "")
    note = phrase("forecast-means", unit=first.unit.capitalize()) if first is not None else ""
    return table("forecast", f"FORECAST: {what} [90% error bar]", rows, *columns, note=note, recommended=_recommended)


def _recommended(row: tuple[GpuForecast, str]) -> bool:
    return row[0].step is not None and recommended(row[0].step, row[1])


StepRow = tuple[str, StepTimes, StepTime]


def _of_step(row: tuple[GpuForecast, str]) -> StepRow | None:
    """The step of a recipe; None if it cannot run this model."""
    gpu, name = row
    time = gpu.step.of(name) if gpu.step is not None else None
    return (gpu.gpu, gpu.step, time) if gpu.step is not None and time is not None else None


def _gpu_sections(gpu: GpuForecast, *, several: bool) -> Iterator[Section]:
    prefix, step = f"{gpu.gpu}: " if several else "", gpu.step
    blocks: list[Block | None] = []
    if step is not None and step.recipes:
        blocks = [step_chart(step, prefix=prefix), *waterfalls(step, prefix=prefix)]
        blocks += [_pairs(step, prefix), _exchanged(step, prefix)]
    memory: list[Block | None] = [_memory(gpu, prefix)] if gpu.memory else []
    named = {f"{prefix}Training step": blocks, f"{prefix}Memory of one GPU": memory}
    for section in (*sections(named), *linears_sections(gpu.linears, prefix=prefix)):
        yield replace(section, gpu=gpu.gpu if several else "")


def _pairs(step: StepTimes, prefix: str) -> Table:
    """Every low precision over every other: which of them are too close to call."""

    return table(
        "recipes_compared",
        f"{prefix}FORECAST: recipes compared with each other: speedup of the training step",
        combinations([time.recipe for time in step.recipes if time.recipe not in (BASELINE, *step.unfit)], 2),
        Column("Recipe", lambda pair: pair[1]),
        Column("Over", lambda pair: pair[0]),
        Column("Speedup [90% error bar]", lambda pair: called_cell(step.speedup(pair[1], pair[0])), "x"),
    )


def _memory(gpu: GpuForecast, prefix: str) -> Table:
    """Every use of the memory in every recipe, and whether it fits."""
    fits = {memory.recipe: Cell(memory.fit, level="" if memory.fit in ("fits", "tight") else "warning") for memory in gpu.memory}
    first = gpu.memory[0]
    where = (
        phrase("memory-of-stage", stage=first.stage, micro_batches=first.in_flight)
        if (first.stage or first.in_flight > 1)
        else ""
    )
    return table(
        "memory",
        f"{prefix}FORECAST: memory of one GPU, out of {units.si(first.available_bytes, 'B')}",
        MEMORY_USES,
        Column("Use", MEMORY_USES.get),
        *across(gpu.memory, lambda use, memory: getattr(memory, use), "GB", head=lambda memory: memory.recipe),
        note=where + phrase("memory-computed"),
        more=[{"Use": "Fits", **fits}],
    )


def _exchanged(step: StepTimes, prefix: str) -> Table | None:
    """What one GPU exchanges with others in a step in the best recipe; None if there is nothing."""
    time = best_time(step) or step.recipes[0]
    if not time.exchanged:
        return None

    return table(
        "communication",
        f"{prefix}FORECAST: communication of one GPU in a step ({time.recipe})",
        time.exchanged,
        Column("Exchange", lambda one: phrase(f"exchange-{one.kind}")),
        Column("Over", lambda one: "CPU link" if one.kind == "offload" else "network" if one.crosses else "NVLink"),
        Column("Exposed share", lambda one: one.basis),
        Column("Total ms", lambda one: one.time_ms, ".1f"),
        Column("Hidden ms", lambda one: one.time_ms - one.exposed_ms, ".1f"),
        Column("Exposed ms [90% error bar]", _exposed, ".1f"),
        note=phrase("exchange-hidden"),
    )


def _exposed(one: Exchanged) -> Cell:
    low, high = max(one.exposed_ms - one.unsure_ms, 0.0), one.exposed_ms + one.unsure_ms
    high = high if one.crosses else min(high, one.time_ms)
    return Cell(f"{one.exposed_ms:.1f} [{low:.1f}, {max(high, one.exposed_ms):.1f}]", one.exposed_ms)


def _method(result: ForecastResult) -> Facts:
    several, run = len(result.gpus) > 1, result.run
    layout = (
        (
            ("GPUs", f"{run.gpus:,} = tp {run.tp} x cp {run.cp} x pp {run.pp} x dp {run.data_parallel}"),
            ("global batch", f"{run.global_batch:,} {'sequences' if run.inputs is None else 'samples'}"),
            ("optimizer", _sharing(run)),
        )
        if run is not None
        else ()
    )
    return facts(
        *model_facts(result.model, run, result.stage),
        *((f"{gpu.gpu} is based on" if several else "based on", "; ".join(gpu.basis)) for gpu in result.gpus),
        *((f"compute capability of {gpu.gpu}", gpu.capability) for gpu in result.gpus),
        ("state", result.state),
        *layout,
        ("fitted on", result.coefficients),
        *command_facts(result),
    )
