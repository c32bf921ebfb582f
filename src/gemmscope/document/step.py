"""The Document of a `StepResult`."""

from collections.abc import Sequence

from gemmscope import units
from gemmscope.document.charts import Point
from gemmscope.document.common import batch_lines, command_facts, machine_facts, model_facts, quoted_of_fleet, subject
from gemmscope.document.measured import clock_facts, sample_text
from gemmscope.document.model import Advice, Block, CurveChart, Document, Message, Section
from gemmscope.document.step_parts import (
    cost_table,
    step_answer,
    step_chart,
    step_figures,
    step_speedups,
    step_summary,
    step_table,
    step_times,
    waterfalls,
)
from gemmscope.document.table import Cell, Facts, Table, columns
from gemmscope.interval import Interval
from gemmscope.parts import STEP_PARTS
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.step import Recommendation, StepResult, StepTime, Variant, VariantResult
from gemmscope.step.answer import PartialRecipe
from gemmscope.step.waterfall import place

MOST_KERNELS = 4  # of one part in a tooltip
LEVELS = ("error", "warning", "note")
COST_NOTE = "Assumes that every GPU computes all the time. Communication and restarts are not included."
NEXT = "print the code that records a trace of your own run, to compare it with this prediction"
AGREES = {True: "yes", False: "no", None: "?"}
REQUESTED = (
    "observed-as-expected", "observed-more", "observed-unknown",
    "break-even-from", "break-even-at-smallest", "break-even-never", "break-even-not-at-largest",
)  # fmt: skip
GRAPHS = ("step-captured", "step-captured-alone", "graphs-not-measured")
ENDED = ("precision-reached", "all-measured")  # a run that ended otherwise has a warning


def step_document(result: StepResult, name: str = "") -> Document:
    """Build the Document of the result."""
    answer, because = step_answer(result.step, result.where, result.name)
    shown = sorted(result.findings, key=lambda finding: LEVELS.index(finding.level))
    ended = [finding.text for finding in result.findings if finding.code in ENDED]
    return Document(
        kind="step",
        title=f"Training step of {result.name} on {result.where}",
        subject=subject(result.model, result.run),
        where=result.where,
        answer=answer,
        because=(*because, *_mixed(result.recommendation), *_requested(result), *_captured(result), *quoted_of_fleet(result)),
        key_figures=step_figures(result.step),
        summary=step_summary({result.where: result.step}),
        context=(*batch_lines(result.run, result.stage), *_how_it_ran(result), *ended),
        sections=tuple(_sections(result)),
        messages=tuple(map(Message.of, shown)),
        advice=_advice(result.recommendation) if result.recommendation is not None else None,
        facts={"Method": _method(result), "Environment": machine_facts(result.environment, result.device, result.versions)},
        speedups=step_speedups(result.step, result.where),
        times=step_times(result.step, result.where),
        next_purpose=NEXT if result.step.recipes else "",
        next_command="gemmscope trace-me" if result.step.recipes else "",
        name=name,
    )


RAN = {
    "stack": "layers built from the model's sizes",
    "module": "the module itself",
    "huggingface": "the Hugging Face model itself",
}
COMPILED = {"whole": "compiled as a whole", "layers": "compiled layer by layer", "none": "not compiled"}


def _how_it_ran(result: StepResult) -> list[str]:
    """How the step was compiled, in one line: the attention kernels depend on it."""
    compiled = COMPILED.get(result.settings.compile or "")
    if compiled is None:
        return []
    kernels = dict.fromkeys(name for time in result.step.recipes for name in time.attention_kernels)
    attention = f"; attention: {units.names(kernels)}" if kernels else ""
    return [f"Ran {RAN[result.ran]}, {compiled}{attention}."]


def _sections(result: StepResult) -> list[Section]:
    """The sections that have content: the step, the waterfalls, the verification, the cost, the break-even."""
    times = result.step
    chart = step_chart(times, layers_run=result.depth if result.depth < result.layers else None, hover=_hover(result))
    blocks: dict[str, Sequence[Block | None]] = {
        "The training step": (step_table(times) if times.recipes else None, chart),
        "From the GEMMs to the step": waterfalls(times),
        "Verification": (_verified(times.recipes),),
        "Cost": (cost_table(times, COST_NOTE),),
        "Break-even": (_break_even(result),),
    }
    sections = [Section(title, tuple(block for block in group if block is not None)) for title, group in blocks.items()]
    return [section for section in sections if section.blocks]


def _mixed(recommended: Recommendation | None) -> list[str]:
    """The speedup with some blocks left in BF16, if that is faster."""
    if recommended is None or not recommended.left_out or recommended.speedup is None:
        return []
    left = " and ".join(recommended.left_out)
    return [f"Faster still: {recommended.recipe} with {left} in {BASELINE}, {units.speedup(recommended.speedup)}."]


def _requested(result: StepResult) -> list[str]:
    """Notes that were requested with an option, on the recipe that the answer names."""
    best = max(result.step.recipes, key=lambda time: time.speedup.value if time.speedup is not None else 0.0, default=None)
    notes = [finding for finding in result.findings if finding.code in REQUESTED]
    return [finding.text for finding in notes if best is not None and finding.facts["recipe"] == best.recipe]


def _captured(result: StepResult) -> list[str]:
    """The findings on CUDA graphs."""
    return [finding.text for finding in result.findings if finding.code in GRAPHS]


def _advice(recommended: Recommendation) -> Advice:
    rivals = f"; too close to call against {units.names(recommended.rivals)}" if recommended.rivals else ""
    if recommended.recipe == BASELINE:
        return Advice(f"stay with {BASELINE}: no recipe that was measured is faster{rivals}")
    gain = f" ({units.speedup(recommended.speedup)})" if recommended.speedup is not None else ""
    plan = PartialRecipe(recommended.recipe, recommended.left_out)
    return Advice(f"use {plan.name}{gain}{rivals}", recommended.ready_to_paste)


def _hover(result: StepResult) -> dict[tuple[str, str], Facts]:
    """(recipe, part) → kernels, samples, clocks."""
    facts: dict[tuple[str, str], Facts] = {}
    predicting = [variant for variant in result.variants if _predicts(variant.variant)]
    for name in (time.recipe for time in result.step.recipes):
        variants = [variant for variant in predicting if variant.variant.recipe == name]
        states = clock_facts([state for variant in variants for state in variant.states])
        samples = sample_text([variant.rounds_ms for variant in variants])
        kernels = _kernels(variants[0]) if variants else {}
        for part in STEP_PARTS:
            facts[name, part] = (*kernels.get(part, ()), *((("steps timed", samples),) if samples else ()), *states)
    return facts


def _predicts(variant: Variant) -> bool:
    return not (variant.real or variant.captured or variant.left_out)


def _kernels(result: VariantResult) -> dict[str, Facts]:
    """The longest kernels of every part, from the one step that was profiled."""
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for kernel in place(result.parts, quantizes=recipe(result.variant.recipe).quantizes):
        for part, time_us in kernel.parts.items():
            time_ms, count = sums.setdefault(part, {}).get(kernel.name, (0.0, 0))
            sums[part][kernel.name] = (time_ms + time_us / 1000, count + 1)
    longest = {part: sorted(by_name.items(), key=lambda pair: -pair[1][0])[:MOST_KERNELS] for part, by_name in sums.items()}
    return {
        part: tuple((f"{count} x, {time_ms:.2f} ms", units.kernel_name(name)) for name, (time_ms, count) in kernels)
        for part, kernels in longest.items()
    }


def _verified(recipes: Sequence[StepTime]) -> Table | None:
    rows = []
    for name, verified in ((time.recipe, time.verified) for time in recipes if time.verified is not None):
        unit = " ms" if name == BASELINE else "x"
        both = [_with_interval(value, unit) for value in (verified.predicted, verified.actual)]
        error = Cell(f"{verified.error:+.2%}", verified.error)
        rows.append((Cell(name), Cell(f"{verified.depth}"), *both, error, Cell(AGREES[verified.agrees])))
    heads = columns(("Recipe",), ("Layers", "Predicted [95%]", "Real [95%]", "Error", "Within intervals"))
    note = f"{BASELINE}: milliseconds of the step. Other recipes: speedup over {BASELINE}."
    return Table("Prediction compared with the real model", heads, tuple(rows), note) if rows else None


def _with_interval(value: Interval, unit: str) -> Cell:
    text = units.speedup(value) if unit == "x" else units.time_range(value)
    return Cell(text, value.value, value.low, value.high)


def _break_even(result: StepResult) -> CurveChart | None:
    points: dict[str, tuple[Point, ...]] = {}
    for batch in result.break_even:
        for name, speedup in batch.speedups.items():
            point = Point(batch.name, speedup, (("speedup", units.speedup(speedup)),))
            points[name] = (*points.get(name, ()), point)
    title, axis = "Speedup of the step on smaller batches", "micro-batch x sequence"
    return CurveChart(title, axis, points) if points else None


def _method(result: StepResult) -> Facts:
    settings = result.settings
    depths = sorted({variant.variant.depth for variant in result.variants if not variant.variant.real}, reverse=True)
    stack = f"all {result.layers} layers, forward, backward and optimizer, with the weights of a few layers"
    if result.ran != "stack":
        stack = f"{RAN[result.ran]}{f', all {result.layers} layers' if result.layers else ''}, forward, backward and optimizer"
    if 0 < result.depth < result.layers:
        stack = f"{result.layers} layers extrapolated from {units.names(map(str, depths))}"
    count = sum(len(burst) for variant in result.variants for burst in variant.rounds_ms)
    lines = [
        *model_facts(result.model, result.run, result.stage),
        ("what was run", stack if result.depth or result.ran == "module" else ""),
        ("backend", settings.backend),
        ("torch.compile", settings.compile or ""),
        ("optimizer", settings.optimizer if result.ran != "stack" else ""),
        ("bursts", f"{settings.keep_ms:g} ms each, after discarding {settings.drop_ms:g} ms; recipes take turns"),
        ("samples", f"{count:,} steps of {units.counted(len(result.variants), 'variant')}"),
        ("duration", ", ".join(f"{purpose} {seconds:g} s" for purpose, seconds in result.seconds.items())),
        ("intervals", "95%, bootstrap of both sides of each ratio"),
        *command_facts(result),
    ]
    return tuple((name, value) for name, value in lines if value)
