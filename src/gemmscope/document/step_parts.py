"""Tables, charts and sentences of a training step, measured or forecast."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, Fall, Segment, WaterfallChart
from gemmscope.document.common import phrase
from gemmscope.document.model import KeyFigure, NamedSpeedup, NamedTime
from gemmscope.document.palette import part_key, recipe_key
from gemmscope.document.table import (
    BASELINE_CELL,
    FALLBACK_CELL,
    Cell,
    Column,
    Facts,
    Table,
    Value,
    rate_cell,
    share_cell,
    table,
    write,
)
from gemmscope.interval import Interval
from gemmscope.recipe.kept import split_name
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Winner, independent_ratio
from gemmscope.results.step import StepTime, StepTimes
from gemmscope.step.waterfall import named_verdict

MOST_ROWS = 12  # of the short view
PartName = TypeVar("PartName", bound=str)
Common = tuple[str, StepTime]
"""The first GPU on which BF16 fits, and its time: what all GPUs are compared with."""


def _title(times: StepTimes, text: str, prefix: str = "") -> str:
    return f"{prefix}{'FORECAST: ' if times.origin == 'forecast' else ''}{text}"


def speedup_value(time: StepTime) -> Value:
    """The speedup over BF16 on the same GPU."""
    return BASELINE_CELL if time.recipe == BASELINE else FALLBACK_CELL if time.fell_back else time.speedup


def recommended(times: StepTimes, recipe: str) -> bool:
    """Whether the answer says to use this recipe: none is where it is too close to call, or may not fit."""
    winner = times.winner
    if winner is None or len(times.recipes) < 2 or winner.best in times.may_not_fit:
        return False
    return recipe == winner.best and BASELINE not in winner.rivals and not (recipe == BASELINE and winner.rivals)


def step_table(times: StepTimes) -> Table:
    """A row per recipe of a measured step. A column that no recipe has a number for is left out."""
    return table(
        "step",
        "Training step per GPU",
        times.recipes,
        Column("Recipe", lambda time: time.recipe),
        Column("Step ms", lambda time: time.step_ms, "ms"),
        Column("Speedup [95%]", speedup_value, "x"),
        Column(per_gpu(times), lambda time: time.tokens_per_s, ",.0f"),
        Column("Model TFLOP/s", lambda time: time.model_tflops, "TFLOP/s"),
        Column("MFU (BF16)", lambda time: time.mfu, "%"),
        Column("GPU ms", lambda time: time.gpu_ms, "ms"),
        Column("Launch ms", lambda time: time.launch_ms, "ms"),
        Column("Peak memory", lambda time: time.peak_bytes, "GB"),
        sparse=True,
        recommended=lambda time: recommended(times, time.recipe),
    )


def step_summary(steps: Mapping[str, StepTimes]) -> Table | None:
    """The compact table: a row per GPU and recipe. With several GPUs, also the speedup over one common baseline.

    With more than `MOST_ROWS` rows, each GPU shows only its baseline, its winner and the winner's rivals.
    """
    full = sum(len(times.recipes) for times in steps.values()) <= MOST_ROWS
    rows = [
        (gpu, times, time)
        for gpu, times in steps.items()
        for time in times.recipes
        if full or time.recipe in (BASELINE, *((times.winner.best, *times.winner.rivals) if times.winner is not None else ()))
    ]
    if not rows:
        return None
    several, first, common = len(steps) > 1, next(iter(steps.values())), common_baseline(steps)
    forecast = first.origin == "forecast"
    unfit = any(times.unfit or times.may_not_fit for times in steps.values())

    basis = cost_basis(tuple(steps.values()))
    note = "" if full else phrase("step-some-recipes", baseline=BASELINE)
    note += phrase("cost-basis-without-restarts", basis=basis) if basis else ""
    return table(
        "summary",
        f"Training step per GPU [{'90% error bar' if forecast else '95% interval'}]",
        rows,
        Column("GPU", lambda row: row[0], when=several),
        Column("Recipe", lambda row: row[2].recipe),
        Column("Step ms", lambda row: row[2].step_ms, "ms, range", drop=4),
        Column(f"Speedup over {BASELINE}", lambda row: speedup_value(row[2]), "x"),
        *over_common(common if several else None),
        Column(per_gpu(first), lambda row: rate_cell(row[2].tokens_per_s, row[2].step_ms.half_width), ",.0f", drop=3),
        Column(on_all_gpus(first), lambda row: _total_rate(row[1], row[2]), ",.0f", drop=8),
        Column("MFU (BF16)", lambda row: share_cell(row[2].mfu, row[2].step_ms.half_width), "%", drop=6),
        Column(
            "Memory" if forecast else "Peak memory",
            lambda row: memory_cell(row[1], row[2]),
            "GB",
            drop=0 if forecast and unfit else 5,
        ),
        Column("Days", lambda row: row[2].cost.days if row[2].cost else None, "amount", drop=1),
        Column("GPU-hours", lambda row: row[2].cost.gpu_hours if row[2].cost else None, "amount", drop=7),
        Column("Cost", lambda row: row[2].cost.money if row[2].cost else None, "amount", drop=2),
        note=note,
        sparse=True,
        recommended=lambda row: recommended(row[1], row[2].recipe),
    )


def _total_rate(times: StepTimes, time: StepTime) -> Cell | None:
    if time.total_tokens_per_s is None or (times.gpus or 1) == 1:
        return None
    return rate_cell(time.total_tokens_per_s, time.step_ms.half_width)


def common_baseline(steps: Mapping[str, StepTimes]) -> Common | None:
    """The first GPU on which BF16 fits, and its time."""
    known = (
        (gpu, time) for gpu, times in steps.items() if (time := times.of(BASELINE)) is not None and BASELINE not in times.unfit
    )
    return next(known, None)


def over_common(common: Common | None) -> list[Column[tuple[str, StepTimes, StepTime]]]:
    """The column of tokens/s relative to the common baseline, a dash if the recipe does not fit; none without a baseline."""
    if common is None:
        return []

    def over(row: tuple[str, StepTimes, StepTime]) -> Value:
        gpu, times, time = row
        if time.recipe in times.unfit:
            return None
        if time is common[1]:
            return BASELINE_CELL
        return time.speedup if gpu == common[0] and time.speedup is not None else over_other_gpu(time, common[1])

    return [Column(f"Over {common[0]} {BASELINE}", over, "x")]


def over_other_gpu(time: StepTime, other: StepTime) -> Interval:
    """Tokens/s of a step over those of a step on another GPU. Times of two GPUs are independent."""
    return independent_ratio(time.tokens_per_s / other.tokens_per_s, other.step_ms, time.step_ms)


def memory_cell(times: StepTimes, time: StepTime) -> Cell:
    """The memory that one GPU needs, marked if it does not fit."""
    cell = write(time.peak_bytes, "GB")
    verb = "does" if time.recipe in times.unfit else "may" if time.recipe in times.may_not_fit else ""
    return replace(cell, text=f"{cell.text}, {verb} not fit", level="warning") if verb else cell


def per_gpu(times: StepTimes) -> str:
    """The column of the rate of one GPU."""
    return f"{times.unit.capitalize()}/s/GPU"


def on_all_gpus(times: StepTimes) -> str:
    """The column of the rate of all GPUs."""
    return f"{times.unit.capitalize()}/s, all GPUs"


def cost_basis(steps: Sequence[StepTimes]) -> str:
    """What the cost is based on: tokens, GPUs, global batch and price."""
    costs = [time.cost for times in steps for time in times.recipes if time.cost is not None and time.cost.tokens is not None]
    if not costs:
        return ""
    first = costs[0]
    prices = list(dict.fromkeys(f"{cost.price:g}" for cost in costs if cost.price is not None))
    batch = phrase("cost-batch", batch=first.global_batch) if first.global_batch else ""
    price = phrase("cost-price", prices=prices) if prices else ""
    return phrase("cost-basis", tokens=units.tokens(first.tokens or 0), gpus=first.gpus or 0, batch=batch, price=price)


def cost_table(steps: Mapping[str, StepTimes], note: str) -> Table:
    """Days, GPU-hours and money of the full run on each GPU (named "" where there is one), if they were requested."""
    interval = "95%" if any(times.origin == "measured" for times in steps.values()) else "90%"

    rows = [(gpu, time.recipe, time.cost) for gpu, times in steps.items() for time in times.recipes if time.cost is not None]
    title = "Cost of the full run" if interval == "95%" else "FORECAST: Cost of the full run"
    return table(
        "cost",
        title,
        rows,
        Column("GPU", lambda row: row[0], when="" not in steps),
        Column("Recipe", lambda row: row[1]),
        Column(f"Days [{interval}]", lambda row: row[2].days, "amount"),
        Column("GPU-hours", lambda row: row[2].gpu_hours, "amount"),
        Column("Cost", lambda row: row[2].money, "amount"),
        note=f"{cost_basis(tuple(steps.values()))} {note}".strip(),
    )


def step_chart(
    times: StepTimes, *, prefix: str = "", layers_run: int | None = None, hover: Mapping[tuple[str, str], Facts] = {}
) -> BarChart | None:
    """The step of every recipe, part by part. `layers_run`: how many layers the parts are of, if not all."""
    if not times.recipes:
        return None
    split, forecast = any(time.parts_ms for time in times.recipes), times.origin == "forecast"
    title = "Where the time of a step goes" if split else "Time of a step"
    note = phrase("step-layers-run", layers=layers_run) if layers_run is not None and split else ""
    bars = tuple(_bar(time, hover, unfit=time.recipe in times.unfit, split=split) for time in times.recipes)
    return BarChart("parts", _title(times, title, prefix), "ms per step", bars, note=note, figure=forecast)


def bar_label(name: str) -> str:
    """The label below the bar of a recipe; mixes are shortened, because their names are long.

    >>> bar_label("FP8Current (in BF16: first 1, last 2, MLP Down)"), bar_label("BF16")
    ('FP8Current + BF16', 'BF16')
    """
    mixed = split_name(name)
    return f"{mixed[0]} + {mixed[1].recipe}" if mixed is not None else name


def _bar(time: StepTime, hover: Mapping[tuple[str, str], Facts], *, unfit: bool, split: bool) -> Bar:
    """One recipe. Without `split`, kernels were not profiled, as on the CPU: the bar is the whole step."""
    label, baseline = bar_label(time.recipe), time.recipe == BASELINE
    if not split:
        return Bar(
            label,
            (Segment("whole step", time.step_ms.value, recipe_key(time.recipe)),),
            time.speedup,
            baseline,
            total=time.step_ms,
        )
    segments = part_segments(time.parts_ms, {part: hover.get((time.recipe, part), ()) for part in time.parts_ms})
    alarm = "FALLBACK" if time.fell_back else "NO FIT" if unfit else ""
    return Bar(label, segments, time.speedup, baseline, alarm, note="" if segments else "not split", total=time.step_ms)


def part_segments(
    parts_ms: Mapping[PartName, float], hover: Mapping[PartName, Facts] = {}, time_text: str = ""
) -> tuple[Segment, ...]:
    """The parts of a step as segments of a bar, quantization on top. `time_text`: the format of times in tooltips."""
    total_ms = sum(parts_ms.values())
    order = sorted((part for part, part_ms in parts_ms.items() if part_ms > 0), key=lambda part: part == "quantization")
    return tuple(
        Segment(
            part,
            parts_ms[part],
            part_key(part),
            "hatched" if part == "quantization" else "plain",
            (
                (part, f"{format(parts_ms[part], time_text) if time_text else units.milliseconds(parts_ms[part])} ms"),
                ("share", units.percent(parts_ms[part] / total_ms)),
                *hover.get(part, ()),
            ),
        )
        for part in order
    )


def waterfalls(times: StepTimes, *, prefix: str = "") -> tuple[WaterfallChart, ...]:
    """How the speedup changes from the GEMMs alone to the whole step, for every recipe."""
    return tuple(
        WaterfallChart(
            f"waterfall {time.recipe}",
            _title(times, f"From GEMMs to step: {time.recipe}", prefix),
            time.recipe,
            BASELINE,
            tuple(Fall(level.part, level.baseline_ms, level.recipe_ms, level.speedup) for level in time.waterfall),
            note=_why(time),
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
    valid = [time for time in others if time.speedup is not None and time.recipe not in times.unranked]
    if times.winner is None and times.unfit:
        sizes = {time.recipe: time.peak_bytes or 0.0 for time in times.recipes}
        least = min(times.unfit, key=lambda name: sizes.get(name, 0.0))
        smallest = phrase("step-smallest", recipe=least) if len(times.unfit) > 1 else least
        return phrase("step-nothing-fits", where=where, smallest=smallest, needs=units.memory(sizes.get(least, 0.0))), ()
    if not others or times.winner is None:
        names = [time.recipe for time in times.recipes]
        done = "measured" if times.origin == "measured" else "forecast"
        return phrase("step-alone" if names else "step-nothing", recipes=names, done=done, where=where), ()
    if not valid and times.unranked:
        return phrase("step-fits-alone", recipe=times.winner.best, where=where), ()
    if not valid:
        return phrase("step-without-speedup", recipes=[time.recipe for time in others], where=where), ()
    fastest = max(valid, key=lambda time: time.speedup.value if time.speedup is not None else 0.0)
    best = next((time for time in valid if time.recipe == times.winner.best), fastest)
    training = phrase("step-of-model", model=model_name, where=where) if model_name else phrase("step-on", where=where)
    parts = [phrase("forecast") if times.origin == "forecast" else "", _verdict(times, times.winner, best, training)]
    parts += [phrase("step-unfit", recipes=times.unfit)] if times.unfit else []
    parts += [phrase("step-may-not-fit", recipes=times.may_not_fit)] if {*times.may_not_fit} & {*times.unranked} else []
    return "".join(parts), tuple(_because(best))


def _verdict(times: StepTimes, winner: Winner, best: StepTime, training: str) -> str:
    assert best.speedup is not None
    graphs = times.decided_by == "graphs" and best.gpu_speedup is not None
    speedup = best.gpu_speedup if graphs else best.speedup
    training += phrase("step-in-graphs") if graphs else ""
    about: dict[str, Any] = {"recipe": best.recipe, "speedup": speedup, "baseline": BASELINE, "training": training}
    if not best.speedup.known:
        return phrase("step-without-interval", **about)
    if winner.best in times.may_not_fit:
        return phrase("step-if-it-fits", **about)
    if BASELINE in winner.rivals or best.recipe in winner.rivals:
        return phrase("step-close", **about)
    if winner.best == BASELINE:
        return phrase("step-stay", **about)
    gains = {time.recipe: time.speedup for time in times.recipes if time.speedup is not None}
    perhaps = [name for name in winner.rivals if name in gains and gains[name].value > best.speedup.value]
    others = [name for name in winner.rivals if name not in perhaps]
    rivals = "".join(phrase("step-perhaps", recipe=name, speedup=gains[name]) for name in perhaps)
    rivals += phrase("step-rivals", rivals=others) if others else ""
    return phrase("step-use", rivals=rivals, **about)


def _because(best: StepTime) -> list[str]:
    lines = []
    if best.waterfall:
        lines.append(phrase("step-gemms", speedup=best.waterfall[0].speedup, why=_why(best)).rstrip())
    of_gpu, launched = best.gpu_speedup, best.speedup
    if of_gpu is not None and launched is not None and units.speedup(of_gpu) != units.speedup(launched):
        lines.append(_limits(best, of_gpu, launched))
    if best.verified is not None:
        verified = best.verified
        lines.append(phrase("step-verified", layers=verified.depth, speedup=verified.actual, error=verified.error))
    return lines


def _limits(best: StepTime, of_gpu: Interval, launched: Interval) -> str:
    """Where the GPU is the limit, and as launched."""
    facts = {"recipe": best.recipe, "of_gpu": of_gpu, "launched": launched}
    if best.rounds is None:
        return phrase("step-limits", **facts)
    return phrase(
        "step-limits-here",
        late=(phrase("step-late", late=best.late_rounds, rounds=best.rounds) if best.late_rounds else ""),
        **facts,
    )


def step_speedups(times: StepTimes, where: str) -> tuple[NamedSpeedup, ...]:
    """The speedups of the step, to show beside those of other runs."""
    known = [(time.recipe, time.speedup) for time in times.recipes if time.speedup is not None and time.recipe not in times.unfit]
    return tuple(NamedSpeedup(where, "training step", name, speedup) for name, speedup in known)


def step_times(times: StepTimes, where: str) -> tuple[NamedTime, ...]:
    """Times to compare with those of other GPUs and runs, without recipes that fell back or do not fit in memory."""
    valid = [time for time in times.recipes if not time.fell_back and time.recipe not in times.unfit]
    return tuple(NamedTime(where, "training step", time.recipe, time.step_ms, time.tokens_per_s, times.unit) for time in valid)


def best_time(times: StepTimes | None) -> StepTime | None:
    """The time of the best recipe, if there is one."""
    return times.of(times.winner.best) if times is not None and times.winner is not None else None


def step_figures(times: StepTimes) -> tuple[KeyFigure, ...]:
    """The recipe to use, its speedup, tokens/s, MFU and memory."""
    best = best_time(times)
    if best is None:
        return ()
    half_width, speedup = best.step_ms.half_width, best.speedup if best.recipe != BASELINE else None
    mfu, memory = share_cell(best.mfu, half_width).text, "Memory" if times.origin == "forecast" else "Peak memory"
    total = _total_rate(times, best) if best.total_tokens_per_s else None
    note = f"{total.text} on all {times.gpus:,} GPUs" if total is not None else ""
    return (
        KeyFigure("Recipe", best.recipe),
        *([KeyFigure(f"Speedup over {BASELINE}", *units.speedup(speedup).split(" ", 1))] if speedup is not None else []),
        KeyFigure(f"{times.unit.capitalize()}/s per GPU", units.rounded(best.tokens_per_s, half_width), note),
        *([KeyFigure("MFU", mfu, f"of the dense {BASELINE} rate")] if best.mfu is not None else []),
        *([KeyFigure(memory, units.memory(best.peak_bytes), "of one GPU")] if best.peak_bytes is not None else []),
    )
