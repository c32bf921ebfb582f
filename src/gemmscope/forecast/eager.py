"""What a traced module takes without torch.compile."""

from gemmscope.findings import Finding, finding
from gemmscope.forecast.step import StepForecast
from gemmscope.recipe.recipes import BASELINE


def eager_finding(forecast: StepForecast) -> Finding | None:
    """The step in BF16 with what runs between GEMMs fused, and launched one by one; None for a model with a closed form."""
    if forecast.model is not None:
        return None
    eager = StepForecast(forecast.forecaster, None, forecast.run, forecast.workload, forecast.network, fused=not forecast.fused)
    times = {one.fused: one.step(BASELINE).total.value for one in (forecast, eager)}
    return finding("traced-step-compiled", compiled_ms=times[True], eager_ms=times[False], recipe=BASELINE)
