"""The Document of a `StepResult`."""

from gemmscope import units
from gemmscope.document.charts import Point
from gemmscope.document.common import (
    batch_lines,
    clock_facts,
    command_facts,
    facts,
    machine_facts,
    model_facts,
    phrase,
    quoted_of_fleet,
    sample_text,
    sections,
    subject,
)
from gemmscope.document.model import Advice, CurveChart, Document, Message, Section
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
from gemmscope.document.table import Cell, Column, Facts, Table, estimated, grouped, table
from gemmscope.interval import Interval
from gemmscope.parts import STEP_PARTS
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.step import Recommendation, StepResult, StepTime, VariantResult
from gemmscope.step.answer import PartialRecipe
from gemmscope.step.waterfall import place

MOST_KERNELS = 4  # of one part in a tooltip
LEVELS = ("error", "warning", "note")
AGREES = {True: "yes", False: "no", None: "?"}
REQUESTED = (
    "observed-as-expected", "observed-more", "observed-unknown",
    "break-even-from", "break-even-at-smallest", "break-even-never", "break-even-not-at-largest",
)  # fmt: skip
GRAPHS = ("step-captured", "step-captured-alone")
ENDED = ("precision-reached", "all-measured")  # a run that ended otherwise has a warning


def step_document(result: StepResult, name: str = "") -> Document:
    """Build the Document of the result."""
    answer, because = step_answer(result.step, result.where, result.name)
    shown = sorted(result.findings, key=lambda finding: LEVELS.index(finding.level))
    captured, ended = ([finding.text for finding in result.findings if finding.code in codes] for codes in (GRAPHS, ENDED))
    return Document(
        kind="step",
        title=f"Training step of {result.name} on {result.where}",
        subject=subject(result.model, result.run),
        where=result.where,
        answer=answer,
        because=(*because, *_mixed(result.recommendation), *_requested(result), *captured, *quoted_of_fleet(result)),
        key_figures=step_figures(result.step),
        summary=step_summary({result.where: result.step}),
        context=(*batch_lines(result.run, result.stage), *_how_it_ran(result), *ended),
        sections=_sections(result),
        messages=tuple(map(Message.of, shown)),
        advice=_advice(result.recommendation) if result.recommendation is not None else None,
        facts={"Method": _method(result), "Environment": machine_facts(result.environment, result.device, result.versions)},
        speedups=step_speedups(result.step, result.where),
        times=step_times(result.step, result.where),
        next_purpose=phrase("step-next") if result.step.recipes else "",
        next_command="gemmscope trace-me" if result.step.recipes else "",
        name=name,
    )


def _how_it_ran(result: StepResult) -> list[str]:
    """How the step was compiled, in one line: the attention kernels depend on it."""
    if result.settings.compile is None:
        return []
    kernels = list(dict.fromkeys(name for time in result.step.recipes for name in time.attention_kernels))
    attention = phrase("step-attention", kernels=kernels) if kernels else ""
    ran, compiled = phrase(f"step-ran-{result.ran}"), phrase(f"step-compiled-{result.settings.compile}")
    return [phrase("step-ran", ran=ran, compiled=compiled, attention=attention)]


def _sections(result: StepResult) -> tuple[Section, ...]:
    """The step, the waterfalls, the verification, the cost, the break-even."""
    times = result.step
    chart = step_chart(times, layers_run=result.depth if result.depth < result.layers else None, hover=_hover(result))
    return sections(
        {
            "The training step": [step_table(times), chart],
            "From the GEMMs to the step": waterfalls(times),
            "Verification": [_verified(times.recipes)],
            "Cost": [cost_table({"": times}, phrase("step-cost"))],
            "Break-even": [_break_even(result)],
        }
    )


def _mixed(recommended: Recommendation | None) -> list[str]:
    """The speedup with some blocks left in BF16, if that is faster."""
    if recommended is None or not recommended.left_out or recommended.speedup is None:
        return []
    return [
        phrase(
            "step-mixed",
            recipe=recommended.recipe,
            left=" and ".join(recommended.left_out),
            baseline=BASELINE,
            speedup=recommended.speedup,
        )
    ]


def _requested(result: StepResult) -> list[str]:
    """Notes that were requested with an option, on the recipe that the answer names."""
    best = max(result.step.recipes, key=lambda time: time.speedup.value if time.speedup is not None else 0.0, default=None)
    notes = [finding for finding in result.findings if finding.code in REQUESTED]
    return [finding.text for finding in notes if best is not None and finding.facts["recipe"] == best.recipe]


def _advice(recommended: Recommendation) -> Advice:
    rivals = phrase("against-rivals", rivals=recommended.rivals) if recommended.rivals else ""
    if recommended.recipe == BASELINE:
        return Advice(phrase("step-advice-stay", baseline=BASELINE, rivals=rivals))
    gain = f" ({units.speedup(recommended.speedup)})" if recommended.speedup is not None else ""
    plan = PartialRecipe(recommended.recipe, recommended.left_out)
    return Advice(phrase("step-advice-use", plan=plan.name, gain=gain, rivals=rivals), recommended.ready_to_paste)


def _hover(result: StepResult) -> dict[tuple[str, str], Facts]:
    """(recipe, part) → kernels, samples, clocks."""
    hover: dict[tuple[str, str], Facts] = {}
    predicting = [one for one in result.variants if not (one.variant.real or one.variant.captured or one.variant.left_out)]
    for name in (time.recipe for time in result.step.recipes):
        variants = [variant for variant in predicting if variant.variant.recipe == name]
        states = clock_facts([state for variant in variants for state in variant.states])
        samples = sample_text([variant.rounds_ms for variant in variants])
        kernels = _kernels(variants[0]) if variants else {}
        for part in STEP_PARTS:
            hover[name, part] = (*kernels.get(part, ()), *((("steps timed", samples),) if samples else ()), *states)
    return hover


def _kernels(result: VariantResult) -> dict[str, Facts]:
    """The longest kernels of every part, from the one step that was profiled."""
    times_ms = grouped(
        ((part, kernel.name), time_us / 1000)
        for kernel in place(result.parts, quantizes=recipe(result.variant.recipe).quantizes)
        for part, time_us in kernel.parts.items()
    )
    longest = sorted(times_ms.items(), key=lambda pair: -sum(pair[1]))
    kernels = grouped((part, (f"{len(runs)} x, {sum(runs):.2f} ms", units.kernel_name(name))) for (part, name), runs in longest)
    return {part: named[:MOST_KERNELS] for part, named in kernels.items()}


def _verified(recipes: tuple[StepTime, ...]) -> Table:
    def estimate(name: str, value: Interval) -> Cell:
        return estimated(units.time_range(value) if name == BASELINE else units.speedup(value), value)

    rows = [(time.recipe, time.verified) for time in recipes if time.verified is not None]
    return table(
        "verification",
        "Prediction compared with the real model",
        rows,
        Column("Recipe", lambda row: row[0]),
        Column("Layers", lambda row: row[1].depth, "d"),
        Column("Predicted [95%]", lambda row: estimate(row[0], row[1].predicted), "x"),
        Column("Real [95%]", lambda row: estimate(row[0], row[1].actual), "x"),
        Column("Error", lambda row: row[1].error, "+.2%"),
        Column("Within intervals", lambda row: Cell(AGREES[row[1].agrees]), "d"),
        note=phrase("step-verification", baseline=BASELINE),
    )


def _break_even(result: StepResult) -> CurveChart | None:
    points = grouped(
        (name, Point(batch.name, speedup, (("speedup", units.speedup(speedup)),)))
        for batch in result.break_even
        for name, speedup in batch.speedups.items()
    )
    return (
        CurveChart("break_even", "Speedup of the step on smaller batches", "micro-batch x sequence", points) if points else None
    )


def _what_was_run(result: StepResult) -> str:
    """The stack of layers, how it was extrapolated, or the model itself."""
    if 0 < result.depth < result.layers:
        depths = sorted({variant.variant.depth for variant in result.variants if not variant.variant.real}, reverse=True)
        return phrase("step-extrapolated", layers=result.layers, depths=[*map(str, depths)])
    if result.ran == "stack":
        return phrase("step-stack", layers=result.layers) if result.depth else ""
    if not result.depth and result.ran != "module":
        return ""
    return phrase(
        "step-model",
        ran=phrase(f"step-ran-{result.ran}"),
        layers=(phrase("step-all-layers", layers=result.layers) if result.layers else ""),
    )


def _method(result: StepResult) -> Facts:
    settings = result.settings
    count = sum(len(burst) for variant in result.variants for burst in variant.rounds_ms)
    return facts(
        *model_facts(result.model, result.run, result.stage),
        ("what was run", _what_was_run(result)),
        ("backend", settings.backend),
        ("torch.compile", settings.compile),
        ("optimizer", settings.optimizer if result.ran != "stack" else ""),
        ("bursts", phrase("step-bursts", keep=settings.keep_ms, drop=settings.drop_ms)),
        ("samples", phrase("step-samples", count=count, variants=len(result.variants)) if count else ""),
        ("duration", ", ".join(f"{purpose} {seconds:g} s" for purpose, seconds in result.seconds.items())),
        ("intervals", phrase("step-intervals")),
        *command_facts(result),
    )
