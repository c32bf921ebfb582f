"""The step of a traced module that is not compiled as a whole: run operator by operator, or compiled layer by layer."""

from gemmscope.findings import Finding, finding
from gemmscope.forecast.overlap import cluster
from gemmscope.forecast.step import StepForecast
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import StepTimes

NOTICEABLE = 1.10  # times the step of a module that is compiled as a whole


def eager_finding(forecast: StepForecast) -> Finding | None:
    """The BF16 step with the ops between GEMMs fused, and with them launched one by one; None for a model with a closed form."""
    if forecast.model is not None:
        return None
    eager = StepForecast(forecast.forecaster, None, forecast.run, forecast.workload, forecast.network, fused=not forecast.fused)
    times = {one.fused: one.step(BASELINE).total.value for one in (forecast, eager)}
    return finding("traced-step-compiled", compiled_ms=times[True], eager_ms=times[False], recipe=BASELINE)


def layers_finding(forecast: StepForecast, step: StepTimes, layers: int) -> Finding | None:
    """The step of a traced module whose layers are compiled one by one; None where launching them does not slow it down."""
    one_by_one = StepForecast(
        forecast.forecaster, forecast.model, forecast.run, forecast.workload, forecast.network, layers=layers
    )
    times = {time.recipe: one_by_one.step(time.recipe).total.value for time in step.recipes}
    if not any(times[time.recipe] > NOTICEABLE * time.step_ms.value for time in step.recipes):
        return None
    known = cluster()["host"]["layer_ms"]
    layer_ms = {BASELINE: known[BASELINE], "low precision": known["other"]}
    return finding("traced-step-layers", times=times, layers=layers, layer_ms=layer_ms)
