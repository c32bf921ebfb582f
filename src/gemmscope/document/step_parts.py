"""Tables, charts and sentences of a training step, measured or forecast."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import hypot, isfinite

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
    range_cell,
    rate_cell,
    share_cell,
    speedup_cell,
    time_cell,
)
from gemmscope.interval import Interval
from gemmscope.parts import StepPart
from gemmscope.recipe.kept import split_name
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Winner
from gemmscope.results.step import StepTime, StepTimes
from gemmscope.step.waterfall import named_verdict


def _title(times: StepTimes, text: str, prefix: str = "") -> str:
    return f"{prefix}{'FORECAST: ' if times.origin == 'forecast' else ''}{text}"


def step_table(times: StepTimes) -> Table:
    """A row per recipe of a measured step. A column that no recipe has a number for is left out."""
    names = ("Step ms", "Speedup [95%]", per_gpu(times), "Model TFLOP/s", "MFU", "GPU busy ms", "Launch ms", "Peak memory")
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
    return Table("Training step per GPU", heads, tuple(shown))


def step_summary(steps: Mapping[str, StepTimes], most_rows: int = 12) -> Table | None:
    """The compact table: a row per GPU and recipe. With several GPUs, also the speedup over one common baseline.

    With more than `most_rows` rows, each GPU shows only its baseline, its winner and the winner's rivals.
    """
    several = len(steps) > 1
    common = common_baseline(steps) if several else None
    full = sum(len(times.recipes) for times in steps.values()) <= most_rows
    rows = [
        _summary_row(gpu if several else "", times, time, common)
        for gpu, times in steps.items()
        for time in times.recipes
        if full or time.recipe in _contenders(times)
    ]
    if not rows:
        return None
    names = list(
        dict.fromkeys(name for row in rows for name in row if any(other.get(name, NOTHING) != NOTHING for other in rows))
    )
    interval = "90% error bar" if next(iter(steps.values())).origin == "forecast" else "95% interval"
    texts = [name for name in names if name in ("GPU", "Recipe")]
    dropped = DROPPED if not any(times.unfit or times.may_not_fit for times in steps.values()) else {**DROPPED, "Memory": 0}
    heads = columns(texts, [name for name in names if name not in texts], dropped)
    cells = tuple(tuple(row.get(name, NOTHING) for name in names) for row in rows)
    basis = cost_basis(tuple(steps.values()))
    note = f"{basis} Restarts are not included." if basis else ""
    return Table(f"Training step per GPU [{interval}]", heads, cells, note)


def common_baseline(steps: Mapping[str, StepTimes]) -> tuple[str, StepTime] | None:
    """The first GPU on which BF16 fits, and its time: what all GPUs are compared with."""
    known = (
        (gpu, time) for gpu, times in steps.items() if (time := times.of(BASELINE)) is not None and BASELINE not in times.unfit
    )
    return next(known, None)


def over_common(gpu: str, times: StepTimes, time: StepTime, common: tuple[str, StepTime]) -> Cell:
    """Tokens/s relative to the common baseline; a dash if the recipe does not fit."""
    if time.recipe in times.unfit:
        return NOTHING
    if time is common[1]:
        return BASELINE_CELL
    if gpu == common[0] and time.speedup is not None:
        return speedup_cell(time.speedup)
    return speedup_cell(over_other_gpu(time, common[1]))


def over_other_gpu(time: StepTime, other: StepTime) -> Interval:
    """Tokens/s of a step over those of a step on another GPU. Times of two GPUs are independent."""
    value = time.tokens_per_s / other.tokens_per_s
    reach = hypot(other.step_ms.half_width, time.step_ms.half_width)
    return Interval(value, value / (1 + reach), value * (1 + reach)) if isfinite(reach) else Interval(value)


def memory_cell(times: StepTimes, time: StepTime) -> Cell:
    """The memory that one GPU needs, marked if it does not fit."""
    cell = bytes_cell(time.peak_bytes)
    if times.origin == "forecast" and time.peak_bytes is not None:
        cell = replace(cell, text=f"{time.peak_bytes / 1e9:.0f} GB" if time.peak_bytes > 1e10 else cell.text)
    verb = "does" if time.recipe in times.unfit else "may" if time.recipe in times.may_not_fit else ""
    return replace(cell, text=f"{cell.text}, {verb} not fit", level="warning") if verb else cell


def per_gpu(times: StepTimes) -> str:
    """The column of the rate of one GPU."""
    return f"{times.unit.capitalize()}/s/GPU"


def on_all_gpus(times: StepTimes) -> str:
    """The column of the rate of all GPUs."""
    return f"{times.unit.capitalize()}/s, all GPUs"


def _contenders(times: StepTimes) -> tuple[str, ...]:
    return (BASELINE, *((times.winner.best, *times.winner.rivals) if times.winner is not None else ()))


DROPPED = {
    "Days": 1,
    "Cost": 2,
    "Tokens/s/GPU": 3,
    "Samples/s/GPU": 3,
    "Step ms": 4,
    "Peak memory": 5,
    "Memory": 5,
    "MFU": 6,
    "GPU-hours": 7,
    "Tokens/s, all GPUs": 8,
    "Samples/s, all GPUs": 8,
}
"""Which columns of the compact table are dropped if it is too wide, the highest number first."""


def _summary_row(gpu: str, times: StepTimes, time: StepTime, common: tuple[str, StepTime] | None) -> dict[str, Cell]:
    row = {"GPU": Cell(gpu)} if gpu else {}
    speedup = BASELINE_CELL if time.recipe == BASELINE else FALLBACK_CELL if time.fell_back else speedup_cell(time.speedup)
    row |= {"Recipe": Cell(time.recipe), "Step ms": range_cell(time.step_ms), f"Speedup over {BASELINE}": speedup}
    if common is not None:
        row[f"Over {common[0]} {BASELINE}"] = over_common(gpu, times, time, common)
    row[per_gpu(times)] = rate_cell(time.tokens_per_s, time.step_ms.half_width)
    if time.total_tokens_per_s is not None and (times.gpus or 1) > 1:
        row[on_all_gpus(times)] = rate_cell(time.total_tokens_per_s, time.step_ms.half_width)
    row["MFU"] = share_cell(time.mfu, time.step_ms.half_width)
    row["Memory" if times.origin == "forecast" else "Peak memory"] = memory_cell(times, time)
    if time.cost is not None:
        row |= {"Days": amount_cell(time.cost.days), "GPU-hours": amount_cell(time.cost.gpu_hours)}
        row["Cost"] = amount_cell(time.cost.money)
    return row


def cost_basis(steps: Sequence[StepTimes]) -> str:
    """What the cost is based on: tokens, GPUs, global batch and price."""
    costs = [time.cost for times in steps for time in times.recipes if time.cost is not None and time.cost.tokens is not None]
    if not costs:
        return ""
    first = costs[0]
    prices = list(dict.fromkeys(cost.price for cost in costs if cost.price is not None))
    price = f", at {units.names(f'{price:g}' for price in prices)} per GPU-hour (cost in the same currency)" if prices else ""
    batch = f", global batch {first.global_batch:,} sequences" if first.global_batch else ""
    return f"Full run: {units.tokens(first.tokens or 0)} on {units.counted(first.gpus or 0, 'GPU')}{batch}{price}."


def cost_table(times: StepTimes, note: str = "") -> Table | None:
    """Days, GPU-hours and money of the full run, if that was requested."""
    costs = [(time.recipe, time.cost) for time in times.recipes if time.cost is not None]
    rows = tuple((Cell(name), *map(amount_cell, (cost.days, cost.gpu_hours, cost.money))) for name, cost in costs)
    interval = "95%" if times.origin == "measured" else "90%"
    heads = columns(("Recipe",), (f"Days [{interval}]", "GPU-hours", "Cost"))
    notes = " ".join(part for part in (cost_basis((times,)), note) if part)
    return Table(_title(times, "Cost of the full run"), heads, rows, notes) if rows else None


def step_chart(
    times: StepTimes, *, prefix: str = "", layers_run: int | None = None, hover: Mapping[tuple[str, str], Facts] = {}
) -> BarChart | None:
    """The step of every recipe, part by part. `layers_run`: how many layers the parts are of, if not all."""
    if not times.recipes:
        return None
    if not any(time.parts_ms for time in times.recipes):  # kernels were not profiled, as on the CPU
        whole = [(time, Segment("whole step", time.step_ms.value, recipe_key(time.recipe))) for time in times.recipes]
        bars = tuple(
            Bar(bar_label(time.recipe), (part,), time.speedup, time.recipe == BASELINE, total=time.step_ms)
            for time, part in whole
        )
        return BarChart(_title(times, "Time of a step", prefix), "ms per step", bars)
    note = f"For the {units.counted(layers_run, 'layer')} that were run." if layers_run is not None else ""
    bars = tuple(_bar(time, hover, unfit=time.recipe in times.unfit) for time in times.recipes)
    return BarChart(_title(times, "Where the time of a step goes", prefix), "ms per step", bars, note)


def bar_label(name: str) -> str:
    """The label below the bar of a recipe; mixes are shortened, because their names are long.

    >>> bar_label("FP8Current (in BF16: first 1, last 2, MLP Down)"), bar_label("BF16")
    ('FP8Current + BF16', 'BF16')
    """
    mixed = split_name(name)
    return f"{mixed[0]} + {mixed[1].recipe}" if mixed is not None else name


def _bar(time: StepTime, hover: Mapping[tuple[str, str], Facts], *, unfit: bool) -> Bar:
    total_ms = sum(time.parts_ms.values())
    order = sorted((part for part, part_ms in time.parts_ms.items() if part_ms > 0), key=lambda part: part == "quantization")
    return Bar(
        label=bar_label(time.recipe),
        segments=tuple(_segment(part, time.parts_ms[part], total_ms, hover.get((time.recipe, part), ())) for part in order),
        speedup=time.speedup,
        baseline=time.recipe == BASELINE,
        alarm="FALLBACK" if time.fell_back else "NO FIT" if unfit else "",
        note="" if order else "not split",
        total=time.step_ms,
    )


def _segment(part: StepPart, time_ms: float, total_ms: float, facts: Facts) -> Segment:
    shade: Shade = "hatched" if part == "quantization" else "plain"
    own = ((part, f"{units.milliseconds(time_ms)} ms"), ("share", units.percent(time_ms / total_ms)))
    return Segment(part, time_ms, part_key(part), shade, (*own, *facts))


def waterfalls(times: StepTimes, *, prefix: str = "") -> tuple[WaterfallChart, ...]:
    """How the speedup changes from the GEMMs alone to the whole step, for every recipe."""
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
    valid = [time for time in others if time.speedup is not None and time.recipe not in times.unfit]
    verb = "measured" if times.origin == "measured" else "forecast"
    if times.winner is None and times.unfit:
        least = f"the smallest, {min(times.unfit, key=_needs(times))}," if len(times.unfit) > 1 else times.unfit[0]
        needs = units.si(min(map(_needs(times), times.unfit)), "B")
        return f"FORECAST: nothing fits in memory on {where} in this layout: {least} needs about {needs} on one GPU.", ()
    if not others or times.winner is None:
        names = units.names(time.recipe for time in times.recipes)
        return f"{f'Only {names}' if names else 'Nothing'} was {verb} on {where}.", ()
    if not valid and times.unfit:
        return f"FORECAST: only {times.winner.best} fits in memory on {where}.", ()
    if not valid:
        return f"No speedup on {where}: {units.names(time.recipe for time in others)} did not run in low precision.", ()
    best = max(valid, key=lambda time: time.speedup.value if time.speedup is not None else 0.0)
    training = f"the training step of {model_name}" if model_name else "the training step"
    forecast = "FORECAST: " if times.origin == "forecast" else ""
    unfit = f" {units.names(times.unfit)} {'does' if len(times.unfit) == 1 else 'do'} not fit in memory." if times.unfit else ""
    unfit += f" {times.winner.best} may not fit in memory." if times.winner.best in times.may_not_fit else ""
    return f"{forecast}{_verdict(times.winner, best, f'{training} on {where}')}{unfit}", tuple(_because(best))


def _needs(times: StepTimes) -> Callable[[str], float]:
    """Bytes of a recipe on one GPU."""
    sizes = {time.recipe: time.peak_bytes or 0.0 for time in times.recipes}
    return lambda name: sizes.get(name, 0.0)


def _verdict(winner: Winner, best: StepTime, training: str) -> str:
    assert best.speedup is not None
    name, gain = best.recipe, units.speedup(best.speedup)
    if not best.speedup.known:
        return f"{name} reaches {gain} over {BASELINE} for {training}; too little was measured for an interval."
    if BASELINE in winner.rivals or name in winner.rivals:
        return f"Too close to call: {name} and {BASELINE} for {training} ({gain})."
    if winner.best == BASELINE:
        return f"Stay with {BASELINE} for {training}: the best other recipe, {name}, reaches {gain}."
    rivals = f" Too close to call against {units.names(winner.rivals)}." if winner.rivals else ""
    return f"Use {name}: {gain} over {BASELINE} for {training}.{rivals}"


def _because(best: StepTime) -> list[str]:
    lines = []
    if best.waterfall:
        lines.append(f"The GEMMs alone reach {best.waterfall[0].speedup:.2f}x. {_why(best)}".rstrip())
    if best.verified is not None:
        real, error = units.speedup(best.verified.actual), best.verified.error
        layers = units.counted(best.verified.depth, "layer")
        lines.append(f"The real model with {layers} has a speedup of {real}; the prediction is off by {error:+.1%}.")
    return lines


def step_speedups(times: StepTimes, where: str) -> tuple[NamedSpeedup, ...]:
    """The speedups of the step, to show beside those of other runs."""
    known = [(time.recipe, time.speedup) for time in times.recipes if time.speedup is not None and time.recipe not in times.unfit]
    return tuple(NamedSpeedup(where, "training step", name, speedup) for name, speedup in known)


def step_times(times: StepTimes, where: str) -> tuple[NamedTime, ...]:
    """Times to compare with those of other GPUs and runs, without recipes that fell back or do not fit in memory."""
    valid = [time for time in times.recipes if not time.fell_back and time.recipe not in times.unfit]
    return tuple(NamedTime(where, "training step", time.recipe, time.step_ms, time.tokens_per_s, times.unit) for time in valid)


def step_figures(times: StepTimes) -> tuple[KeyFigure, ...]:
    """The recipe to use, its speedup, tokens/s, MFU and memory."""
    best = times.of(times.winner.best) if times.winner is not None else None
    if best is None:
        return ()
    figures = [KeyFigure("Recipe", best.recipe)]
    if best.speedup is not None and best.recipe != BASELINE:
        figures.append(KeyFigure(f"Speedup over {BASELINE}", *units.speedup(best.speedup).split(" ", 1)))
    gpus = times.gpus or 1
    total_rate = units.rounded(best.total_tokens_per_s, best.step_ms.half_width) if gpus > 1 and best.total_tokens_per_s else ""
    rate = units.rounded(best.tokens_per_s, best.step_ms.half_width)
    name = f"{times.unit.capitalize()}/s per GPU"
    figures.append(KeyFigure(name, rate, f"{total_rate} on all {gpus:,} GPUs" if total_rate else ""))
    if best.mfu is not None:
        figures.append(KeyFigure("MFU", share_cell(best.mfu, best.step_ms.half_width).text, f"of the dense {BASELINE} rate"))
    if best.peak_bytes is not None:
        memory = "Memory" if times.origin == "forecast" else "Peak memory"
        figures.append(KeyFigure(memory, units.si(best.peak_bytes, "B"), "of one GPU"))
    return tuple(figures)
