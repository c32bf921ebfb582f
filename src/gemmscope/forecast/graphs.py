"""What CUDA graphs would change where launching limits a step."""

from dataclasses import replace

from gemmscope.findings import Fact, Finding, finding
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import IDLE
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import StepTimes

NOTICEABLE = 0.10  # of a step spent waiting for launches


def graphs_finding(forecast: StepForecast, step: StepTimes) -> Finding | None:
    """The fastest recipe with CUDA graphs, its speedup over BF16 with them, and over the best step without."""
    waits = [time.parts_ms.get(IDLE, 0.0) / time.step_ms.value for time in step.recipes]
    names = [time.recipe for time in step.recipes if time.recipe not in step.unfit]
    if forecast.run.cuda_graphs or not names or max(waits, default=0.0) < NOTICEABLE:
        return None
    captured = forecast.again(replace(forecast.run, cuda_graphs=True))
    steps = {name: captured.step(name) for name in {*names, BASELINE}}
    best = min(names, key=lambda name: steps[name].total.value)
    now = min(time.step_ms.value for time in step.recipes if time.recipe in names)
    facts: dict[str, Fact] = {"recipe": best, "gain": now / steps[best].total.value}
    if best == BASELINE:
        return finding("graphs-baseline", **facts)
    return finding("graphs-would-help", speedup=captured.speedup(steps, best, BASELINE).interval(), **facts)
