"""A run file of `gemmscope step` as a part of a report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench_notes import state_words
from gemmscope.report.page.facts import batch_facts, command_facts, machine_facts, subject
from gemmscope.report.page.parts import (
    REST,
    Bar,
    Bars,
    Cell,
    Curve,
    Estimate,
    Facts,
    Fall,
    Finding,
    Gain,
    Point,
    Recommendation,
    RunPart,
    Segment,
    Shade,
    Table,
    Waterfall,
    noted,
)
from gemmscope.report.page.rows import clocks, samples, short
from gemmscope.report.units import percent, si
from gemmscope.step.breakeven import AtBatch
from gemmscope.step.breakeven import words as break_even_words
from gemmscope.step.waterfall import NOT_RUNNING, ROWS, place
from gemmscope.store.benchfile import IntervalRecord
from gemmscope.store.stepfile import CostRecord, LevelRecord, RecipeRecord, StepFile, VariantRecord

MOST_KERNELS = 4  # of one row in a hover
COLUMNS = ("Step ms", "Tokens/s", "Model TFLOP/s", "Speedup [95%]", "GPU busy ms", "Launching ms", "Peak memory")


def from_step(file: StepFile, name: str) -> RunPart:
    """Everything that the file says."""
    where = str(file.device.get("name", "this machine"))
    recommended = file.recommendation
    answer, because = _answer(file, where)
    kernels = {
        variant.recipe: _kernels(variant) for variant in reversed(file.variants) if not variant.real and not variant.left_out
    }
    return RunPart(
        kind="step",
        name=name,
        subject=subject(file.model, file.run),
        where=where,
        answer=answer,
        because=tuple(because),
        bars=step_bars(
            [(each.recipe, each.waterfall, each.step_ms, each.speedup) for each in file.recipes],
            _hover(file, kernels),
            fallen=[each.recipe for each in file.recipes if _fallen(each)],
        ),
        waterfalls=tuple(waterfall(each.recipe, each.waterfall, each.verdict) for each in file.recipes if each.waterfall),
        curves=_break_even(file),
        ops=(_table(file.recipes),),
        tables=(*_verified(file.recipes), *costs_table({each.recipe: each.cost for each in file.recipes}, WITHOUT)),
        gains=tuple(
            Gain("training step", each.recipe, Estimate.of(each.speedup))
            for each in file.recipes
            if each.speedup and not _fallen(each)
        ),
        findings=tuple(_findings(file)),
        method=_method(file),
        environment=machine_facts(file.environment, file.device, file.versions),
        recommendation=Recommendation(recommended.words, recommended.ready_to_paste) if recommended is not None else None,
    )


def _fallen(each: RecipeRecord) -> bool:
    """Whether products ran in BF16 that were asked for in less: that is no speedup."""
    return each.verdict.startswith(NOT_RUNNING)


def _answer(file: StepFile, where: str) -> tuple[str, list[str]]:
    """The answer in one sentence, and what stands behind it."""
    gains = {each.recipe: each for each in file.recipes if each.speedup is not None}
    if not gains:
        measured = ", ".join(each.recipe for each in file.recipes)
        return f"{f'Only {measured}' if measured else 'Nothing'} could be measured on {where}.", []
    chosen = file.recommendation.recipe if file.recommendation is not None else ""
    running = {name: each for name, each in gains.items() if not _fallen(each)}
    best = gains.get(chosen) or max((running or gains).values(), key=lambda each: each.speedup.value if each.speedup else 0.0)
    assert best.speedup is not None
    gain = Estimate.of(best.speedup)
    if _fallen(best):
        return f"No speedup on {where}: {best.recipe} is {best.verdict}.", []
    if gain.too_close:
        sentence = (
            f"On {where} it is too close to call whether training in {best.recipe} is faster than in {BASELINE}: {gain.times}."
        )
    elif gain.value < 1 or chosen == BASELINE:
        sentence = f"On {where} stay with {BASELINE}: the best other precision, {best.recipe}, trains {gain.times} as fast."
    else:
        left = file.recommendation.left_out if file.recommendation is not None else []
        spared = f" (with {' and '.join(left)} left in {BASELINE} it is a little more)" if left else ""
        sentence = f"On {where} a training step in {best.recipe} is {gain.times} as fast as in {BASELINE}{spared}."
    return sentence, list(_because(best, running))


def _because(best: RecipeRecord, gains: Mapping[str, RecipeRecord]) -> list[str]:
    lines = []
    if best.waterfall:
        why = f": {best.verdict}" if best.verdict else ""
        lines.append(f"Its products alone gain {best.waterfall[0].speedup:.2f}x{why}.")
    others = [f"{name} {Estimate.of(each.speedup).times}" for name, each in gains.items() if each is not best and each.speedup]
    if others:
        lines.append(f"Others: {', '.join(others)}.")
    if best.verified is not None:
        real = Estimate.of(best.verified.actual).times
        off = f"the prediction is off by {best.verified.error:+.1%}"
        lines.append(f"The real model, {best.verified.depth} layers, was run too: {real}; {off}.")
    return lines


# --- bars and waterfalls: forecasts have them too ------------------------------------------------------------------------


def step_bars(
    recipes: Sequence[tuple[str, Sequence[LevelRecord], IntervalRecord, IntervalRecord | None]],
    hover: Mapping[tuple[str, str], Facts],
    fallen: Collection[str] = (),
) -> tuple[Bars, ...]:
    """The step of every recipe, row by row. The baseline's rows are those that any waterfall holds it against."""
    falls = {name: levels for name, levels, _, _ in recipes}
    first = next((levels for levels in falls.values() if levels), ())
    if not first:
        return ()
    made = []
    for name, levels, step_ms, gain in recipes:
        times = {level.row: level.recipe_ms for level in levels} or (
            {level.row: level.baseline_ms for level in first} if name == BASELINE else {}
        )
        order = sorted((row for row, time in times.items() if time > 0), key=lambda row: row == "quantization")  # on top
        whole = sum(times.values()) or step_ms.value  # of as many layers as the rows are of
        segments = tuple(_segment(row, times[row], whole, hover.get((name, row), ())) for row in order)
        made.append(
            Bar(
                name,
                segments,
                Estimate.of(gain) if gain and name not in fallen else None,
                baseline=name == BASELINE,
                alarm="FALLBACK" if name in fallen else "",
                note="" if segments else "not split",
            )
        )
    return (Bars("One training step of one rank", "What a step's time goes into, ms", "ms per step", tuple(made)),)


def _segment(row: str, time_ms: float, step_ms: float, facts: Facts) -> Segment:
    names = [name for name in ROWS if name != "quantization"]
    shade: Shade = "hatched" if row == "quantization" else "plain"
    colour = names.index(row) if row in names and shade == "plain" else REST
    return Segment(row, time_ms, colour, shade, ((row, f"{time_ms:.2f} ms"), ("share", percent(time_ms / step_ms)), *facts))


def waterfall(name: str, levels: Sequence[LevelRecord], words: str) -> Waterfall:
    """Every row with what it does to the speedup."""
    falls = []
    for level in levels:
        times = ((BASELINE, f"{level.baseline_ms:.2f} ms"), (name, f"{level.recipe_ms:.2f} ms"))
        facts = (*times, ("speedup so far", f"{level.speedup:.3f}x"))
        falls.append(Fall(level.row, level.baseline_ms, level.recipe_ms, level.speedup, facts))
    return Waterfall(name, BASELINE, tuple(falls), words)


def _kernels(variant: VariantRecord) -> dict[str, Facts]:
    """The longest kernels of every row, from the one step that was profiled."""
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for each in place(
        [(part, direction, kernels) for part, direction, kernels in variant.parts], quantizes=variant.recipe != BASELINE
    ):
        for row, time_us in each.rows.items():
            time, count = sums.setdefault(row, {}).get(each.name, (0.0, 0))
            sums[row][each.name] = (time + time_us / 1000, count + 1)
    found = {}
    for name, by_name in sums.items():
        longest = sorted(by_name.items(), key=lambda pair: -pair[1][0])[:MOST_KERNELS]
        found[name] = tuple((f"{count} x, {time:.2f} ms", short(kernel)) for kernel, (time, count) in longest)
    return found


def _hover(file: StepFile, kernels: Mapping[str, Mapping[str, Facts]]) -> dict[tuple[str, str], Facts]:
    """(recipe, row) → kernels, samples, clocks."""
    made: dict[tuple[str, str], Facts] = {}
    for name, rows in kernels.items():
        variants = [variant for variant in file.variants if (variant.recipe, variant.real, variant.left_out) == (name, False, [])]
        state = clocks([state for variant in variants for state in variant.states])
        taken = samples([variant.rounds_ms for variant in variants])
        for row in ROWS:
            made[name, row] = (*rows.get(row, ()), *((("steps timed", taken),) if taken else ()), *state)
    return made


# --- tables --------------------------------------------------------------------------------------------------------------


def _table(recipes: Sequence[RecipeRecord]) -> Table:
    rows = []
    for each in recipes:
        gain = Estimate.of(each.speedup) if each.speedup else None
        fallen = _fallen(each)
        rows.append(
            (
                Cell(each.recipe),
                Cell(f"{each.step_ms.value:.2f}", each.step_ms.value),
                Cell(f"{each.tokens_per_s:,.0f}", each.tokens_per_s),
                Cell(f"{each.model_tflops:.3g}", each.model_tflops),
                Cell("FALLBACK", 0.0, "alarm") if fallen else Cell(gain.times, gain.value) if gain else Cell("1", 1.0),
                _number(each.gpu_busy_ms),
                _number(each.host_ms),
                Cell(si(each.peak_bytes, "B"), each.peak_bytes) if each.peak_bytes is not None else Cell("-"),
            )
        )
    return Table("The training step of one rank", {"Recipe": False, **dict.fromkeys(COLUMNS, True)}, tuple(rows))


def _number(value: float | None) -> Cell:
    return Cell(f"{value:.2f}", value) if value is not None else Cell("-")


def _verified(recipes: Sequence[RecipeRecord]) -> tuple[Table, ...]:
    rows = []
    for each in recipes:
        if each.verified is not None:
            unit = " ms" if each.recipe == BASELINE else "x"
            both = [
                f"{found.value:.3f}{unit} {Estimate.of(found).interval}"
                for found in (each.verified.predicted, each.verified.actual)
            ]
            error = each.verified.error
            rows.append((Cell(each.recipe), *(Cell(text) for text in both), Cell(f"{error:+.2%}", error)))
    columns = {"Recipe": False, "Predicted": True, "Real": True, "Error": True}
    return (Table("Predicted against the real model", columns, tuple(rows)),) if rows else ()


WITHOUT = "Every GPU computes all the time; communication is not in it."


def costs_table(costs: Mapping[str, CostRecord | None], words: str) -> tuple[Table, ...]:
    """What a run costs in each recipe, if that was asked."""
    rows = tuple(
        (Cell(name), *(_amount(found) for found in (cost.days, cost.gpu_hours, cost.money)))
        for name, cost in costs.items()
        if cost is not None
    )
    columns = {"Recipe": False, "Days": True, "GPU-hours": True, "Money": True}
    return (Table("The whole run", columns, rows, words),) if rows else ()


def _amount(found: IntervalRecord | None) -> Cell:
    if found is None:
        return Cell("-")
    places = 2 if found.value < 100 else 0
    ends = f" [{found.low:,.{places}f}, {found.high:,.{places}f}]" if found.low is not None and found.high is not None else ""
    return Cell(f"{found.value:,.{places}f}{ends}", found.value)


def _break_even(file: StepFile) -> tuple[Curve, ...]:
    """Speedups on smaller batches, up to this one."""
    series: dict[str, list[Point]] = {}
    for each in file.break_even:
        for name, found in each.speedups.items():
            gain = Estimate.of(found)
            series.setdefault(name, []).append(
                Point(f"{each.micro_batch_size} x {each.sequence_length}", gain, (("speedup", gain.times),))
            )
    words = f"Times faster than {BASELINE}, the whole step"
    made = {name: tuple(points) for name, points in series.items()}
    return (Curve("On smaller batches", words, "micro-batch x sequence", made),) if made else ()


# --- words ---------------------------------------------------------------------------------------------------------------


def _findings(file: StepFile) -> list[Finding]:
    made = [Finding("alarm", f"FALLBACK: {each.recipe}: {each.verdict}") for each in file.recipes if _fallen(each)]
    made += [
        Finding("warning", f"not measured: {variant.recipe}, {variant.depth} layers: {variant.failure}")
        for variant in file.variants
        if variant.failure
    ]
    for each in file.recipes:
        if each.host_bound and each.host_ms is not None and each.gpu_busy_ms is not None:
            times = f"the CPU {each.host_ms:.1f} ms to launch and the GPU {each.gpu_busy_ms:.1f} ms to run"
            made.append(Finding("warning", f"HOST-BOUND: {each.recipe} takes {times}"))
        if each.verdict and not _fallen(each):
            made.append(Finding("note", f"{each.recipe}: {each.verdict}"))
        if each.named_share is not None and each.named_share < 1:
            made.append(
                Finding("note", f"{each.recipe}: {percent(1 - each.named_share)} of GPU time is in kernels of unknown kind")
            )
    batches = [
        AtBatch(each.micro_batch_size, each.sequence_length, {name: _interval(found) for name, found in each.speedups.items()})
        for each in file.break_even
    ]
    if batches:
        made += [Finding("note", break_even_words(batches, name)) for name in batches[-1].speedups]
    states = [state for variant in file.variants for state in variant.states if state.get("sm_mhz")]
    made += [Finding("note", state_words(states))] if states else []
    return [*made, *map(noted, file.notes)]


def _interval(found: IntervalRecord) -> Interval:
    return Interval(
        found.value, found.low if found.low is not None else 0.0, found.high if found.high is not None else float("inf")
    )


def _method(file: StepFile) -> Facts:
    stack = (
        f"all {file.layers} layers, forward, backward and optimizer, with the weights of a few"
        if file.depth >= file.layers
        else f"{file.layers} layers follow from stacks of {file.depth} and {max(1, file.depth // 2)}"
    )
    settings = file.settings
    count = sum(len(burst) for variant in file.variants for burst in variant.rounds_ms)
    bursts = (
        f"{settings.get('keep_ms', 0):g} ms each, after {settings.get('drop_ms', 0):g} ms that are dropped; precisions in turn"
    )
    lines = [
        *batch_facts(file.model, file.run),
        ("what was run", stack),
        ("backend", str(settings.get("backend", ""))),
        ("bursts", bursts if settings.get("keep_ms") else ""),
        ("measured", f"ended: {file.ended}"),
        ("samples", f"{count:,} steps of {len(file.variants)} variants"),
        ("took", ", ".join(f"{purpose} {seconds:g} s" for purpose, seconds in file.seconds.items())),
        ("intervals", "95%, by resampling both sides of each ratio"),
        *command_facts(file.command, file.gemmscope_version),
    ]
    return tuple((name, value) for name, value in lines if value)
