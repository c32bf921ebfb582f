"""Findings about a forecast step: what more micro-batches, CUDA graphs, a compiler or another layout would change."""

from dataclasses import replace
from math import ceil, exp

from gemmscope.findings import Fact, Finding, finding
from gemmscope.forecast.communication import cluster
from gemmscope.forecast.gemm import slowed
from gemmscope.forecast.stacks import Software, stacks_on
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import IDLE
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import StepTimes

MORE = 16  # times as many micro-batches
NOTICEABLE = 0.1  # share of the step: of work done once per step, of waiting for launches
WORTH_SAYING, GOAL = 0.10, 0.05  # shares of the step: the pipeline's bubble
SLOWER = 1.10  # compiled layer by layer, over the step of a module that is compiled as a whole


def accumulation_finding(forecast: StepForecast, step: StepTimes) -> Finding | None:
    """A finding if work done once per step takes a large part of it: what more micro-batches would change."""
    run, names = forecast.run, [time.recipe for time in step.recipes if time.recipe not in step.unfit]
    if step.winner is None or BASELINE not in [time.recipe for time in step.recipes]:
        return None
    now, many = run.gradient_accumulation, MORE * run.gradient_accumulation
    longer = forecast.again(replace(run, gradient_accumulation=many))
    times = {name: (forecast.step(name).time_ms, longer.step(name).time_ms) for name in {*names, BASELINE}}
    best = step.winner.best
    short_ms, long_ms = times[best]
    once_ms = max(short_ms - now * (long_ms - short_ms) / (many - now), 0.0)  # does not grow with the number of micro-batches
    if once_ms / short_ms < NOTICEABLE:
        return None
    later = min(names, key=lambda name: times[name][1])
    about: dict[str, Fact] = {
        "recipe": best,
        "share": once_ms / short_ms,
        "later_share": once_ms / long_ms,
        "speedup": times[BASELINE][0] / short_ms,
        "later_speedup": times[BASELINE][1] / long_ms,
        "now": now,
        "many": many,
        "saved": 1 - long_ms / many * now / short_ms,
    }
    return finding("once-per-step", **about) if later == best else finding("once-per-step-decides", **about, other=later)


def graphs_finding(forecast: StepForecast, step: StepTimes) -> Finding | None:
    """The fastest recipe with CUDA graphs, its speedup over BF16 with them, and over the best step without."""
    waits = [time.parts_ms.get(IDLE, 0.0) / time.step_ms.value for time in step.recipes]
    names = [time.recipe for time in step.recipes if time.recipe not in step.unfit]
    if forecast.run.cuda_graphs or not names or max(waits, default=0.0) < NOTICEABLE:
        return None
    captured = forecast.again(replace(forecast.run, cuda_graphs=True))
    steps = {name: captured.step(name) for name in {*names, BASELINE}}
    best = min(names, key=lambda name: steps[name].time_ms)
    now = min(time.step_ms.value for time in step.recipes if time.recipe in names)
    facts: dict[str, Fact] = {"recipe": best, "gain": now / steps[best].time_ms}
    if best == BASELINE:
        return finding("graphs-baseline", **facts)
    return finding("graphs-would-help", speedup=captured.speedup(steps, best, BASELINE), **facts)


def power_findings(chip: GpuSpec, software: Software) -> list[Finding]:
    """A finding about a lower power limit, or about published runs that were on a variant of the GPU."""
    (slower, unsure), watts = slowed(chip), chip.power_limit_w
    if software.variant:
        return [finding("published-on-variant", gpu=chip.name, variant=software.variant, watts=chip.power_w)]
    if watts is None or watts == chip.power_w:
        return []
    return [finding("power-limit", watts=watts, usual=chip.power_w, slower=slower, spread=exp(unsure))]


def bubble_findings(step: StepTimes, run: RunSpec) -> list[Finding]:
    """A finding if there are too few micro-batches for the stages, with how many are enough."""
    shares = [time.parts_ms.get("pipeline bubble", 0.0) / time.step_ms.value for time in step.recipes]
    if not shares or max(shares) < WORTH_SAYING:
        return []
    facts = {"stages": run.pp, "micro_batches": run.gradient_accumulation, "enough": enough_micro_batches(run.pp, run.vp)}
    return [finding("pipeline-bubble", share=max(shares), **facts, goal=GOAL)]


def enough_micro_batches(stages: int, virtual: int) -> int:
    """Micro-batches per step that keep the bubble at a twentieth of the step: a multiple of the stages.

    >>> enough_micro_batches(16, virtual=1), enough_micro_batches(8, virtual=4)
    (304, 40)
    """
    return ceil((stages - 1) / virtual / GOAL / stages) * stages


def eager_finding(forecast: StepForecast) -> Finding | None:
    """The BF16 step with the ops between GEMMs fused, and with them launched one by one; None for a model with a closed form."""
    if forecast.model is not None:
        return None
    eager = StepForecast(forecast.forecaster, None, forecast.run, forecast.workload, forecast.network, fused=not forecast.fused)
    times = {one.fused: one.step(BASELINE).time_ms for one in (forecast, eager)}
    return finding("traced-step-compiled", compiled_ms=times[True], eager_ms=times[False], recipe=BASELINE)


def software_finding(forecast: StepForecast) -> Finding:
    """Which software the forecast assumes, and the other one that would change the step most."""
    forecaster, time_ms = forecast.forecaster, forecast.step(BASELINE).time_ms
    changes = {}
    for stack in stacks_on(forecaster.chip):
        there = forecaster.running(stack.on(forecaster.chip))
        step = StepForecast(there, forecast.model, forecast.run, forecast.workload, forecast.network).step(BASELINE)
        changes[stack.name, stack.title] = step.time_ms / time_ms - 1
    name, other = max(changes, key=lambda known: abs(changes[known]))
    software = forecaster.software
    title = software.title + (f", attention by {software.attention}" if software.attention else "")
    facts: dict[str, Fact] = {"title": title, "other": other, "name": name, "changed": changes[name, other]}
    return finding("step-software", **facts, recipe=BASELINE)


def layers_finding(forecast: StepForecast, step: StepTimes, layers: int) -> Finding | None:
    """The step of a traced module whose layers are compiled one by one; None where launching them does not slow it down."""
    one_by_one = StepForecast(
        forecast.forecaster, forecast.model, forecast.run, forecast.workload, forecast.network, layers=layers
    )
    times = {time.recipe: one_by_one.step(time.recipe).time_ms for time in step.recipes}
    if not any(times[time.recipe] > SLOWER * time.step_ms.value for time in step.recipes):
        return None
    known = cluster()["host"]["layer_ms"]
    layer_ms = {BASELINE: known[BASELINE], "low precision": known["other"]}
    return finding("traced-step-layers", times=times, layers=layers, layer_ms=layer_ms)
