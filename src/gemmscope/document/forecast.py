"""The Document of a `ForecastResult`: all GPUs side by side, then each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from gemmscope import units
from gemmscope.document.common import batch_lines, command_facts, model_facts, same_model, subject
from gemmscope.document.linears import linears_answer, linears_sections, linears_speedups, linears_times
from gemmscope.document.linears_summary import linears_summary
from gemmscope.document.model import Block, Document, NamedSpeedup, NamedTime, Section
from gemmscope.document.step_parts import (
    cost_table,
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
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import ForecastResult, GpuForecast
from gemmscope.results.step import StepTime, StepTimes

NO_RESTARTS = "Every GPU computes all the time, or waits for the others. Restarts are not included."


def forecast_document(result: ForecastResult, name: str = "") -> Document:
    """Everything that the result says."""
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
        next_purpose="measure it on the GPU itself",
        next_command=same_model("bench" if first.linears.bare or first.linears.as_te_benchmark else "step", result),
        name=name,
    )


def _gpus(result: ForecastResult) -> str:
    return ", ".join(gpu.title if len(result.gpus) <= 2 else gpu.gpu for gpu in result.gpus)


def _context(result: ForecastResult) -> Iterator[str]:
    if result.model is not None and result.model.description:
        yield result.model.description
    yield from batch_lines(result.run, result.stage)
    if result.dp > 1 and result.run is not None:
        sequences = result.run.micro_batch_size * result.run.gradient_accumulation * result.dp
        tokens = sequences * result.run.sequence_length
        yield f"{result.dp} data-parallel replicas, global batch {sequences:,} sequences = {tokens:,} tokens"
    yield f"{result.state}: {STATES[result.state]}; every interval is a 90% error bar"


def _answer(result: ForecastResult) -> tuple[str, tuple[str, ...]]:
    """Of the step where there is one, else of the linears; of several GPUs, the fastest, then a line for each."""
    answers = [_answer_of(gpu) for gpu in result.gpus]
    if len(answers) == 1:
        return answers[0]
    lines = tuple(_line(gpu, answer) for gpu, (answer, _) in zip(result.gpus, answers, strict=True))
    best = {gpu.gpu: time for gpu in result.gpus if (time := _best(gpu)) is not None}
    if len(best) < 2:
        cases = result.gpus[0].linears.cases
        what = units.counted(len(cases), "shape") if result.gpus[0].linears.bare else "The linears"
        return f"FORECAST: {what} on {len(result.gpus)} GPUs.", lines
    ranked = sorted(best.items(), key=lambda pair: -pair[1].tokens_per_s)
    rates = [f"{gpu} in {time.recipe} {_rate(time)}" for gpu, time in ranked]
    return f"FORECAST: fastest is {ranked[0][0]}. Tokens/s per GPU: {', '.join(rates)}.", lines


def _line(gpu: GpuForecast, answer: str) -> str:
    """One GPU in one line."""
    winner = gpu.step.winner if gpu.step is not None else None
    if winner is None or winner.speedup is None or BASELINE in winner.rivals:
        return f"{gpu.gpu}: {answer.removeprefix('FORECAST: ')}"
    rivals = f"; too close to call against {units.names(winner.rivals)}" if winner.rivals else ""
    return f"{gpu.gpu}: use {winner.best}, {units.speedup(winner.speedup)} over {BASELINE} on the same GPU{rivals}."


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
    """Of the steps where there are any; else of the linears."""
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
    cost = replace(first, columns=(*columns(("GPU",), ()), *first.columns), rows=rows, note=f"{first.note} {NO_RESTARTS}")
    return Section("Summary", (_main_table(result.gpus), cost))


def _main_table(gpus: Sequence[GpuForecast]) -> Table:
    """A row for each GPU and recipe: the linears in both modes, the step and its speedup."""
    modes, first = gpus[0].linears.modes, gpus[0].step
    baseline = first.of(BASELINE) if first is not None and len(gpus) > 1 else None
    rows = []
    for gpu in gpus:
        for name in gpu.linears.recipes:
            totals = [gpu.linears.total(name, mode) for mode in modes]
            cells = [range_cell(total.total_ms if total else None) for total in totals]
            rows.append((Cell(gpu.gpu), Cell(name), *cells, *_step_cells(gpu, name, baseline.step_ms if baseline else None)))
    heads = [*(f"Linears ms, {mode}" for mode in modes)]
    heads += ["Step ms", "Tokens/s/GPU", "Model TFLOP/s", "MFU", f"Speedup over {BASELINE}"] if first is not None else []
    heads += [f"Over {gpus[0].gpu} {BASELINE}"] if baseline is not None else []
    title = "FORECAST: linears of one micro-batch and training step of one rank [90% error bar]"
    return Table(title, columns(("GPU", "Recipe"), heads), tuple(rows))


def _step_cells(gpu: GpuForecast, name: str, baseline: Interval | None) -> list[Cell]:
    if gpu.step is None:
        return []
    time = gpu.step.of(name)
    if time is None:  # it cannot run this model
        return [NOTHING] * (6 if baseline else 5)
    over = baseline.value / time.step_ms.value if baseline else None
    return [
        range_cell(time.step_ms),
        number(time.tokens_per_s, f"{time.tokens_per_s:,.0f}"),
        number(time.model_tflops, units.tflops(time.model_tflops)),
        share_cell(time.mfu),
        BASELINE_CELL if name == BASELINE else called_cell(time.speedup),
        *([number(over, f"{over:.2f}x")] if over else []),
    ]


def _gpu_sections(gpu: GpuForecast, *, several: bool) -> Iterator[Section]:
    prefix = f"{gpu.gpu}: " if several else ""
    if gpu.step is not None and gpu.step.recipes:
        chart = step_chart(gpu.step, prefix=prefix)
        charts = [replace(chart, figure=True)] if chart is not None else []
        blocks: tuple[Block, ...] = (*charts, *waterfalls(gpu.step, prefix=prefix), *_pairs(gpu.step, prefix))
        yield Section(f"{prefix}Training step", blocks, gpu=gpu.gpu if several else "")
    for section in linears_sections(gpu.linears, prefix=prefix):
        yield replace(section, gpu=gpu.gpu if several else "")


def _pairs(step: StepTimes, prefix: str) -> Iterator[Table]:
    """Every low precision over every other: which of them are too close to call."""
    pairs = combinations([time.recipe for time in step.recipes if time.recipe != BASELINE], 2)
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


def _method(result: ForecastResult) -> tuple[tuple[str, str], ...]:
    several = len(result.gpus) > 1
    return (
        *model_facts(result.model, result.run, result.stage),
        *((f"{gpu.gpu} is based on" if several else "based on", "; ".join(gpu.basis)) for gpu in result.gpus),
        *((f"compute capability of {gpu.gpu}", gpu.capability) for gpu in result.gpus),
        ("state", result.state),
        *((("data-parallel replicas", str(result.dp)),) if result.dp > 1 else ()),
        ("fitted on", result.coefficients),
        *command_facts(result),
    )
