"""The Document of a `ForecastResult`: all GPUs side by side, then each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from gemmscope import units
from gemmscope.document.common import batch_lines, command_facts, model_facts, same_model, subject
from gemmscope.document.exchanges import exchange_table
from gemmscope.document.linears import linears_answer, linears_sections, linears_speedups, linears_times
from gemmscope.document.linears_summary import linears_summary
from gemmscope.document.memory import memory_table
from gemmscope.document.model import Block, Document, NamedSpeedup, NamedTime, Section
from gemmscope.document.step_parts import (
    common_baseline,
    cost_basis,
    cost_table,
    memory_cell,
    on_all_gpus,
    over_common,
    over_other_gpu,
    per_gpu,
    step_answer,
    step_chart,
    step_figures,
    step_speedups,
    step_summary,
    step_times,
    waterfalls,
)
from gemmscope.document.sweep import STATES, gpu_messages, sweep_document
from gemmscope.document.table import (
    BASELINE_CELL,
    NOTHING,
    Cell,
    Table,
    called_cell,
    columns,
    number,
    range_cell,
    share_cell,
)
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import ForecastResult, GpuForecast
from gemmscope.results.step import StepTime, StepTimes

NO_RESTARTS = "Assumes that every GPU computes or waits for others all the time. Restarts are not included."


def forecast_document(result: ForecastResult, name: str = "") -> Document:
    """Build the Document of the result."""
    if result.sweeps:
        return sweep_document(result, name)
    first = result.gpus[0]
    answer, because = _answer(result)
    sections = [section for gpu in result.gpus for section in _gpu_sections(gpu, several=len(result.gpus) > 1)]
    if not first.linears.bare:
        sections = [_side_by_side(result), *sections]
    return Document(
        kind="forecast",
        title=f"FORECAST, not measured: {result.name} on {_gpus(result)}",
        subject=subject(result.model, result.run, first.linears.cases),
        where=f"{first.title if len(result.gpus) == 1 else ', '.join(gpu.gpu for gpu in result.gpus)}, FORECAST",
        answer=answer,
        because=because,
        key_figures=step_figures(first.step) if first.step is not None and len(result.gpus) == 1 else (),
        summary=_summary(result),
        context=tuple(_context(result)),
        sections=tuple(sections),
        messages=gpu_messages(result.findings, {gpu.gpu: gpu.findings for gpu in result.gpus}),
        facts={"Method": _method(result)},
        speedups=tuple(speedup for gpu in result.gpus for speedup in _speedups(gpu)),
        times=tuple(time for gpu in result.gpus for time in _times(gpu)),
        forecast=True,
        next_purpose="measure it on a real GPU",
        next_command=same_model(*_measures(result)),
        name=name,
    )


def _gpus(result: ForecastResult) -> str:
    return ", ".join(gpu.title if len(result.gpus) <= 2 else gpu.gpu for gpu in result.gpus)


def _context(result: ForecastResult) -> Iterator[str]:
    if result.model is not None and result.model.description:
        yield result.model.description
    yield from batch_lines(result.run, result.stage)
    step = next((gpu.step for gpu in result.gpus if gpu.step is not None), None)
    if step is not None and step.gpus and step.global_batch and result.run is not None:
        batch = units.counted(step.global_batch, step.batch_unit)
        tokens = f" = {step.global_batch * result.run.sequence_length:,} tokens" if step.unit == "tokens" else ""
        yield f"{units.counted(step.gpus, 'GPU')}, global batch {batch}{tokens}; {_sharing(result.run)}"
    yield f"{result.state} clocks: {STATES[result.state]}; intervals are 90% error bars"


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
    alone = linears.bare or linears.as_te_benchmark or any(finding.code == "layers-not-run" for finding in result.findings)
    traced = any(finding.code in ("traced", "traced-with-values") for finding in result.findings) and "--config" in result.command
    return "bench" if alone else "step", result, "--hugging-face" if traced and not alone else ""


def _answer(result: ForecastResult) -> tuple[str, tuple[str, ...]]:
    """The answer about the step if there is one, else about the linears; for several GPUs, the fastest, then a line for each."""
    answers = [_answer_of(gpu) for gpu in result.gpus]
    if len(answers) == 1:
        return answers[0]
    lines = tuple(_line(gpu, answer) for gpu, (answer, _) in zip(result.gpus, answers, strict=True))
    best = {gpu.gpu: time for gpu in result.gpus if (time := _best(gpu)) is not None}
    unfit = [gpu.gpu for gpu in result.gpus if gpu.step is not None and gpu.step.unfit and gpu.gpu not in best]
    unit = next((gpu.step.unit for gpu in result.gpus if gpu.step is not None), "tokens")
    if unfit and not best:
        return f"FORECAST: {result.name} fits on none of these GPUs in this layout.", lines
    if unfit and len(best) == 1:
        [(name, time)] = best.items()
        rest = f"{units.names(unfit)} {'has' if len(unfit) == 1 else 'have'} too little memory"
        return f"FORECAST: this layout fits only on {name}: {_rate(time)} {unit}/s per GPU in {time.recipe}; {rest}.", lines
    if len(best) < 2:
        cases = result.gpus[0].linears.cases
        what = units.counted(len(cases), "shape") if result.gpus[0].linears.bare else "The linears"
        return f"FORECAST: {what} on {len(result.gpus)} GPUs.", lines
    ranked = sorted(best.items(), key=lambda pair: -pair[1].tokens_per_s)
    costs = {gpu: time.cost.money for gpu, time in best.items() if time.cost is not None and time.cost.money is not None}
    if len(costs) > 1:
        prices = [
            f"{gpu} in {best[gpu].recipe} {units.amount(costs[gpu])}" for gpu in sorted(costs, key=lambda gpu: costs[gpu].value)
        ]
        lines = (*lines, f"Cost of the full run, the cheapest first: {', '.join(prices)}.")
    rates = [f"{gpu} in {time.recipe} {_rate(time)}" for gpu, time in ranked]
    too_small = f" It does not fit on {units.names(unfit)}." if unfit else ""
    return f"FORECAST: {_fastest(ranked)} {unit.capitalize()}/s per GPU: {', '.join(rates)}.{too_small}", lines


def _fastest(ranked: Sequence[tuple[str, StepTime]]) -> str:
    """The GPU with the highest rate, and those that may be as fast."""
    (name, best), *others = ranked
    rivals = [other for other, time in others if not over_other_gpu(best, time).above_one]
    if not rivals:
        return f"fastest is {name}."
    names = f"{', '.join([name, *rivals[:-1]])} and {rivals[-1]}"
    return f"{names} are too close to call." if len(rivals) == len(others) else f"fastest are {names}, too close to call."


def _line(gpu: GpuForecast, answer: str) -> str:
    """One GPU in one line."""
    winner = gpu.step.winner if gpu.step is not None else None
    if winner is None or winner.speedup is None or BASELINE in winner.rivals:
        return f"{gpu.gpu}: {answer.removeprefix('FORECAST: ')}"
    rivals = f"; too close to call against {units.names(winner.rivals)}" if winner.rivals else ""
    unsure = "; it may not fit in memory" if gpu.step is not None and winner.best in gpu.step.may_not_fit else ""
    return f"{gpu.gpu}: use {winner.best}, {units.speedup(winner.speedup)} over {BASELINE} on the same GPU{rivals}{unsure}."


def _best(gpu: GpuForecast) -> StepTime | None:
    return gpu.step.of(gpu.step.winner.best) if gpu.step is not None and gpu.step.winner is not None else None


def _rate(time: StepTime) -> str:
    return units.rounded(time.tokens_per_s, time.step_ms.half_width)


def _answer_of(gpu: GpuForecast) -> tuple[str, tuple[str, ...]]:
    if gpu.step is not None:
        return step_answer(gpu.step, gpu.title)
    sentence, because = linears_answer(gpu.linears, gpu.title)
    return f"FORECAST: {sentence}", because


def _summary(result: ForecastResult) -> Table | None:
    """The summary of the steps if there are any, else of the linears."""
    steps = {gpu.gpu: gpu.step for gpu in result.gpus if gpu.step is not None}
    if steps:
        return step_summary(steps)
    return linears_summary(result.gpus[0].linears) if len(result.gpus) == 1 else _main_table(result.gpus)


def _side_by_side(result: ForecastResult) -> Section:
    costs = [(gpu.gpu, table) for gpu in result.gpus if gpu.step is not None and (table := cost_table(gpu.step)) is not None]
    if not costs:
        return Section("Summary", (_main_table(result.gpus),))
    first = costs[0][1]
    rows = tuple((Cell(gpu), *row) for gpu, table in costs for row in table.rows)
    basis = cost_basis([gpu.step for gpu in result.gpus if gpu.step is not None])
    cost = replace(first, columns=(*columns(("GPU",), ()), *first.columns), rows=rows, note=f"{basis} {NO_RESTARTS}")
    return Section("Summary", (_main_table(result.gpus), cost))


def _main_table(gpus: Sequence[GpuForecast]) -> Table:
    """A row for each GPU and recipe: the linears in both modes, the step and its speedup."""
    modes, first = gpus[0].linears.modes, gpus[0].step
    steps = {gpu.gpu: gpu.step for gpu in gpus if gpu.step is not None}
    common = common_baseline(steps) if len(gpus) > 1 else None
    rows = []
    for gpu in gpus:
        for name in gpu.linears.recipes:
            totals = [gpu.linears.total(name, mode) for mode in modes]
            cells = [range_cell(total.total_ms if total else None) for total in totals]
            rows.append((Cell(gpu.gpu), Cell(name), *cells, *_step_cells(gpu, name, common)))
    heads = [*(f"Linears ms, {mode}" for mode in modes)]
    heads += [*_step_heads(first), f"Speedup over {BASELINE}"] if first is not None else []
    heads += [f"Over {common[0]} {BASELINE}"] if common is not None else []
    if first is None:
        title = "FORECAST: linears of one micro-batch on one rank [90% error bar]"
        return Table(title, columns(("GPU", "Recipe"), heads), tuple(rows))
    title = "FORECAST: linears of one micro-batch on one rank, and the training step [90% error bar]"
    return Table(title, columns(("GPU", "Recipe"), heads), tuple(rows), PER_GPU.format(unit=first.unit.capitalize()))


def _step_heads(step: StepTimes) -> tuple[str, ...]:
    return ("Step ms", per_gpu(step), on_all_gpus(step), "Model TFLOP/s/GPU", "MFU", "Memory of one GPU")


PER_GPU = (
    "{unit}/s/GPU, model TFLOP/s and MFU are means over all GPUs of the layout: the FLOPs of the model, without recomputation, "
    "over the time of the step. Memory is that of the GPU that needs the most. Linears are those of one rank. With a pipeline, "
    "this is a rank of the stage with the most FLOPs, or of the stage that you chose."
)


def _step_cells(gpu: GpuForecast, name: str, common: tuple[str, StepTime] | None) -> list[Cell]:
    if gpu.step is None:
        return []
    time = gpu.step.of(name)
    if time is None:  # it cannot run this model
        return [NOTHING] * (len(_step_heads(gpu.step)) + (2 if common else 1))
    every = time.total_tokens_per_s
    return [
        range_cell(time.step_ms),
        number(time.tokens_per_s, f"{time.tokens_per_s:,.0f}"),
        number(every, f"{every:,.0f}" if every is not None else None),
        number(time.model_tflops, units.tflops(time.model_tflops)),
        share_cell(time.mfu),
        memory_cell(gpu.step, time),
        BASELINE_CELL if name == BASELINE else called_cell(time.speedup),
        *([over_common(gpu.gpu, gpu.step, time, common)] if common else []),
    ]


def _gpu_sections(gpu: GpuForecast, *, several: bool) -> Iterator[Section]:
    prefix = f"{gpu.gpu}: " if several else ""
    if gpu.step is not None and gpu.step.recipes:
        chart = step_chart(gpu.step, prefix=prefix)
        charts = [replace(chart, figure=True)] if chart is not None else []
        blocks: tuple[Block, ...] = (*charts, *waterfalls(gpu.step, prefix=prefix), *_pairs(gpu.step, prefix))
        if (exchanged := exchange_table(gpu.step, prefix)) is not None:
            blocks = (*blocks, exchanged)
        yield Section(f"{prefix}Training step", blocks, gpu=gpu.gpu if several else "")
    if gpu.memory:
        yield Section(f"{prefix}Memory of one GPU", (memory_table(gpu, prefix),), gpu=gpu.gpu if several else "")
    for section in linears_sections(gpu.linears, prefix=prefix):
        yield replace(section, gpu=gpu.gpu if several else "")


def _pairs(step: StepTimes, prefix: str) -> Iterator[Table]:
    """Every low precision over every other: which of them are too close to call."""
    pairs = combinations([time.recipe for time in step.recipes if time.recipe not in (BASELINE, *step.unfit)], 2)
    rows = tuple((Cell(later), Cell(earlier), called_cell(step.speedup(later, earlier))) for earlier, later in pairs)
    if rows:
        title = f"{prefix}FORECAST: recipes compared with each other: speedup of the training step"
        yield Table(title, columns(("Recipe", "Over"), ("Speedup [90% error bar]",)), rows)


def _speedups(gpu: GpuForecast) -> tuple[NamedSpeedup, ...]:
    where = f"{gpu.title}, FORECAST"
    steps = step_speedups(gpu.step, where) if gpu.step is not None else ()
    return (*steps, *linears_speedups(gpu.linears, where))


def _times(gpu: GpuForecast) -> tuple[NamedTime, ...]:
    where = f"{gpu.title}, FORECAST"
    return (*(step_times(gpu.step, where) if gpu.step is not None else ()), *linears_times(gpu.linears, where))


def _layout(run: RunSpec) -> tuple[tuple[str, str], ...]:
    return (
        ("GPUs", f"{run.gpus:,} = tp {run.tp} x cp {run.cp} x pp {run.pp} x dp {run.data_parallel}"),
        ("global batch", f"{run.global_batch:,} {'sequences' if run.inputs is None else 'samples'}"),
        ("optimizer", _sharing(run)),
    )


def _method(result: ForecastResult) -> tuple[tuple[str, str], ...]:
    several = len(result.gpus) > 1
    return (
        *model_facts(result.model, result.run, result.stage),
        *((f"{gpu.gpu} is based on" if several else "based on", "; ".join(gpu.basis)) for gpu in result.gpus),
        *((f"compute capability of {gpu.gpu}", gpu.capability) for gpu in result.gpus),
        ("state", result.state),
        *(_layout(result.run) if result.run is not None else ()),
        ("fitted on", result.coefficients),
        *command_facts(result),
    )
