"""Results of `gemmscope step`, made of the messages that were recorded on an H200."""

from __future__ import annotations

from gemmscope.bench.findings import state_findings
from gemmscope.findings import finding
from gemmscope.results.base import ModelSummary
from gemmscope.results.step import AtBatch, StepResult, StepSettings
from gemmscope.step.answer import PartialRecipe, recommend
from gemmscope.step.cost import Budget, cost
from gemmscope.step.waterfall import break_even_finding, observed_findings, step_findings
from support.machines import machine
from support.recorded_steps import MODELS, answered, replayed


def recorded_step(name: str = "llama8b", *, verified: bool = False, batches: bool = False) -> StepResult:
    """A recorded step with its cost; `batches` pretends that smaller ones were run too."""
    model, run = MODELS[name]
    real = replayed(name, real=True) if verified else None
    measurements, times = answered(name, real)
    costed = [time.model_copy(update={"cost": cost(time.step_ms, run, Budget(1e12, 256, 2.5))}) for time in times.recipes]
    times = times.model_copy(update={"recipes": tuple(costed)})
    speedups = {time.recipe: time.speedup for time in times.recipes if time.speedup is not None}
    sizes = (1, 2, run.micro_batch_size) if batches else ()
    at = [AtBatch(micro_batch_size=size, sequence_length=run.sequence_length, speedups=speedups) for size in sizes]
    variants = [result for part in (measurements, *([real] if real else [])) for result in part.tasks.values()]
    return StepResult(
        command="gemmscope step --json step.json",
        origin="command line",
        model=ModelSummary.of(model, model.name, "command line"),
        run=run,
        findings=(
            finding("precision-reached", precision=0.01),
            *step_findings(times),
            *observed_findings(times, 1.2),
            *(break_even_finding(at, recipe) for recipe in (speedups if at else ())),
            *state_findings([state for result in variants for state in result.states if state]),
        ),
        environment=machine(),
        device=dict(measurements.hello.device),
        versions=dict(measurements.hello.versions),
        settings=StepSettings("transformer_engine", seed=1),
        depth=len(model.layers),
        layers=len(model.layers),
        seconds={"predicting": 41.0},
        step=times,
        recommendation=recommend(measurements, [PartialRecipe(time.recipe) for time in times.recipes]),
        break_even=tuple(at),
        observed_speedup=1.2,
        variants=tuple(variants),
    )
