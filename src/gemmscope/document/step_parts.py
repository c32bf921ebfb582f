"""Tables, charts and sentences of a training step, measured or forecast."""

from collections.abc import Mapping

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, Fall, Segment, Shade, WaterfallChart
from gemmscope.document.model import KeyFigure, NamedSpeedup, NamedTime
from gemmscope.document.palette import part_key, recipe_key
from gemmscope.document.table import (
    BASELINE_CELL,
    FALLBACK_CELL,
    NOTHING,
    Cell,
    Facts,
    Table,
    amount_cell,
    bytes_cell,
    columns,
    number,
    share_cell,
    speedup_cell,
    time_cell,
)
from gemmscope.parts import StepPart
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Winner
from gemmscope.results.step import StepTime, StepTimes
from gemmscope.step.findings import named_verdict


def _title(times: StepTimes, text: str, prefix: str = "") -> str:
    return f"{prefix}{'FORECAST: ' if times.origin == 'forecast' else ''}{text}"


def step_table(times: StepTimes) -> Table:
    """A row per recipe of a measured step. A column that no recipe has a number for is left out."""
    names = ("Step ms", "Speedup [95%]", "Tokens/s", "Model TFLOP/s", "MFU", "GPU busy ms", "Launch ms", "Peak memory")
    rows = [
        (
            time_cell(time.step_ms),
            BASELINE_CELL if time.recipe == BASELINE else FALLBACK_CELL if time.fell_back else speedup_cell(time.speedup),
            number(time.tokens_per_s, f"{time.tokens_per_s:,.0f}"),
            number(time.model_tflops, units.tflops(time.model_tflops)),
            share_cell(time.mfu),
            time_cell(time.gpu_busy_ms),
            time_cell(time.host_ms),
            bytes_cell(time.peak_bytes),
        )
        for time in times.recipes
    ]
    kept = [index for index in range(len(names)) if any(row[index] != NOTHING for row in rows)]
    heads = columns(("Recipe",), [names[index] for index in kept])
    shown = [(Cell(time.recipe), *(row[index] for index in kept)) for time, row in zip(times.recipes, rows, strict=True)]
    return Table("Training step of one rank", heads, tuple(shown), main=True)


def cost_table(times: StepTimes, note: str = "") -> Table | None:
    """Days, GPU-hours and money of the full run, if that was requested."""
    costs = [(time.recipe, time.cost) for time in times.recipes if time.cost is not None]
    rows = tuple((Cell(name), *map(amount_cell, (cost.days, cost.gpu_hours, cost.money))) for name, cost in costs)
    interval = "95%" if times.origin == "measured" else "90%"
    heads = columns(("Recipe",), (f"Days [{interval}]", "GPU-hours", "Money"))
    return Table(_title(times, "Cost of the full run"), heads, rows, note, main=True) if rows else None


def step_chart(
    times: StepTimes, *, prefix: str = "", layers_run: int | None = None, hover: Mapping[tuple[str, str], Facts] = {}
) -> BarChart | None:
    """The step of every recipe, part by part. `layers_run`: how many layers the parts are of, if not all."""
    if not times.recipes:
        return None
    if not any(time.parts_ms for time in times.recipes):  # kernels were not profiled, as on the CPU
        whole = [(time, Segment("whole step", time.step_ms.value, recipe_key(time.recipe))) for time in times.recipes]
        bars = tuple(Bar(time.recipe, (part,), time.speedup, time.recipe == BASELINE, total=time.step_ms) for time, part in whole)
        return BarChart(_title(times, "Time of a step", prefix), "ms per step", bars)
    note = f"Of {units.counted(layers_run, 'layer')}, as many as were run." if layers_run is not None else ""
    bars = tuple(_bar(time, hover) for time in times.recipes)
    return BarChart(_title(times, "Where the time of a step goes", prefix), "ms per step", bars, note)


def _bar(time: StepTime, hover: Mapping[tuple[str, str], Facts]) -> Bar:
    total_ms = sum(time.parts_ms.values())
    order = sorted((part for part, part_ms in time.parts_ms.items() if part_ms > 0), key=lambda part: part == "quantization")
    return Bar(
        label=time.recipe,
        segments=tuple(_segment(part, time.parts_ms[part], total_ms, hover.get((time.recipe, part), ())) for part in order),
        speedup=time.speedup,
        baseline=time.recipe == BASELINE,
        alarm="FALLBACK" if time.fell_back else "",
        note="" if order else "not split",
        total=time.step_ms,
    )


def _segment(part: StepPart, time_ms: float, total_ms: float, facts: Facts) -> Segment:
    shade: Shade = "hatched" if part == "quantization" else "plain"
    own = ((part, f"{units.milliseconds(time_ms)} ms"), ("share", units.percent(time_ms / total_ms)))
    return Segment(part, time_ms, part_key(part), shade, (*own, *facts))


def waterfalls(times: StepTimes, *, prefix: str = "") -> tuple[WaterfallChart, ...]:
    """From the speedup of the GEMMs alone to that of the step, for every recipe."""
    return tuple(
        WaterfallChart(
            _title(times, f"From GEMMs to step: {time.recipe}", prefix),
            time.recipe,
            BASELINE,
            tuple(Fall(level.part, level.baseline_ms, level.recipe_ms, level.speedup) for level in time.waterfall),
            _why(time),
            total=time.speedup,
        )
        for time in times.recipes
        if time.waterfall
    )


def _why(time: StepTime) -> str:
    return named_verdict(time, time.verdict).text if time.verdict is not None else ""


def step_answer(times: StepTimes, where: str, model_name: str = "") -> tuple[str, tuple[str, ...]]:
    """The answer in one sentence, and the reasons for it."""
    others = [time for time in times.recipes if time.recipe != BASELINE]
    valid = [time for time in others if time.speedup is not None]
    verb = "measured" if times.origin == "measured" else "forecast"
    if not others or times.winner is None:
        names = units.names(time.recipe for time in times.recipes)
        return f"{f'Only {names}' if names else 'Nothing'} could be {verb} on {where}.", ()
    if not valid:
        return f"No speedup on {where}: {units.names(time.recipe for time in others)} did not run in low precision.", ()
    best = max(valid, key=lambda time: time.speedup.value if time.speedup is not None else 0.0)
    training = f"training {model_name}" if model_name else "training"
    forecast = "FORECAST: " if times.origin == "forecast" else ""
    return f"{forecast}On {where}, {_verdict(times.winner, best, training)}", tuple(_because(best, valid))


def _verdict(winner: Winner, best: StepTime, training: str) -> str:
    assert best.speedup is not None
    name, gain = best.recipe, f"a speedup of {units.speedup(best.speedup)}"
    if not best.speedup.known:
        return f"{training} in {name} has {gain} over {BASELINE}; too little was measured for an interval."
    if BASELINE in winner.rivals or name in winner.rivals:
        return f"{name} and {BASELINE} are too close to call for {training}: {gain}."
    if winner.best == BASELINE:
        return f"{training} is fastest in {BASELINE}: the best other recipe, {name}, has {gain}."
    rivals = f"; too close to call against {units.names(winner.rivals)}" if winner.rivals else ""
    return f"{training} in {name} has {gain} over {BASELINE}{rivals}."


def _because(best: StepTime, valid: list[StepTime]) -> list[str]:
    lines = []
    if best.waterfall:
        lines.append(f"Its GEMMs alone have a speedup of {best.waterfall[0].speedup:.2f}x. {_why(best)}".rstrip())
    others = [f"{time.recipe} {units.speedup(time.speedup)}" for time in valid if time is not best and time.speedup is not None]
    if others:
        lines.append(f"Other recipes: {', '.join(others)}.")
    if best.verified is not None:
        real, error = units.speedup(best.verified.actual), best.verified.error
        layers = units.counted(best.verified.depth, "layer")
        lines.append(f"The real model with {layers} has a speedup of {real}; the prediction is off by {error:+.1%}.")
    return lines


def step_speedups(times: StepTimes, where: str) -> tuple[NamedSpeedup, ...]:
    """To show beside those of other runs."""
    known = [(time.recipe, time.speedup) for time in times.recipes if time.speedup is not None]
    return tuple(NamedSpeedup(where, "training step", name, speedup) for name, speedup in known)


def step_times(times: StepTimes, where: str) -> tuple[NamedTime, ...]:
    """To compare with those of other GPUs and runs. What fell back is not what it claims to be, and is left out."""
    valid = [time for time in times.recipes if not time.fell_back]
    return tuple(NamedTime(where, "training step", time.recipe, time.step_ms, time.tokens_per_s) for time in valid)


def step_figures(times: StepTimes) -> tuple[KeyFigure, ...]:
    """The recipe to use, its speedup, tokens/s, MFU and memory."""
    best = times.of(times.winner.best) if times.winner is not None else None
    if best is None:
        return ()
    figures = [KeyFigure("Recipe", best.recipe)]
    if best.speedup is not None and best.recipe != BASELINE:
        figures.append(KeyFigure(f"Speedup over {BASELINE}", f"{best.speedup.value:.2f}x", units.ends(best.speedup)))
    figures.append(KeyFigure("Tokens/s per GPU", f"{best.tokens_per_s:,.0f}"))
    if best.mfu is not None:
        figures.append(KeyFigure("MFU", units.percent(best.mfu), f"of the dense {BASELINE} rate"))
    if best.peak_bytes is not None:
        figures.append(KeyFigure("Peak memory", units.si(best.peak_bytes, "B"), "of one GPU"))
    return tuple(figures)
