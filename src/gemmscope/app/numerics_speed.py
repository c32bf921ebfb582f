"""Where `gemmscope numerics` gets its speeds from: a run file of bench, step or forecast, or a forecast for a named GPU."""

from collections.abc import Sequence
from pathlib import Path

from gemmscope.app.choose import Choices
from gemmscope.app.forecast import forecast
from gemmscope.app.forecast_gpus import forecastable
from gemmscope.app.model import ModelRun
from gemmscope.app.progress import QUIET, Reporter
from gemmscope.errors import UserError, option, shown
from gemmscope.gpu.specs import gpu as gpu_named
from gemmscope.numerics.evaluation.speeds import SpeedResult
from gemmscope.results.base import Result, command_of
from gemmscope.results.bench import BenchResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult


def speed_result(
    speed: str | Path | Result | None,
    gpu: str | None,
    job: ModelRun | None = None,
    recipes: Sequence[str] | None = None,
    reporter: Reporter = QUIET,
) -> tuple[SpeedResult | None, str]:
    """The result with the speeds, and which GPU of it; None if no speeds were asked for.

    `speed`: a result, or its run file. Without one, `gpu` is forecast with the model of `job` in those `recipes` that it runs.
    """
    if speed is None:
        return (_forecast(gpu, job, recipes, reporter), gpu) if gpu is not None else (None, "")
    result = read_result(speed, ("bench", "step", "forecast")) if isinstance(speed, (str, Path)) else speed
    given = f"{option('speed')} {shown(str(speed))}" if isinstance(speed, (str, Path)) else option("speed")
    if not isinstance(result, Result):
        raise UserError(
            f"{given} must be a result or a run file, not {shown(result)}", "speeds come from bench, step or forecast"
        )
    if not isinstance(result, (BenchResult, StepResult, ForecastResult)):
        raise UserError(f"{given} is a result of {command_of(result.kind)}", "speeds come from bench, step or forecast")
    if isinstance(result, BenchResult) and result.linears.bare:
        raise UserError(f"{given} has times of bare GEMMs, not of a model's linears", "run gemmscope bench with the model")
    if isinstance(result, ForecastResult):
        return result, _gpu_of(result, gpu, given)
    if gpu is not None:
        raise UserError(f"{given} was measured on {result.where}, so {option('gpu', gpu)} does not apply", "use only one of them")
    return result, ""


def _gpu_of(result: ForecastResult, gpu: str | None, given: str) -> str:
    """The GPU of a forecast that was named, or its only one."""
    names = [forecast.gpu for forecast in result.gpus]
    if not names or any(forecast.linears.bare for forecast in result.gpus):
        what = "a sweep" if result.sweeps else "a forecast of bare GEMMs"
        raise UserError(f"{given} is {what}, and has no times of a model's linears", "forecast one configuration of the model")
    if gpu is None and len(names) > 1:
        raise UserError(f"{given} has several GPUs: {', '.join(names)}", f"name one: {option('gpu', names[0])}")
    name = gpu_named(gpu).name if gpu is not None else names[0]
    if name not in names:
        raise UserError(f"{given} does not have {shown(name)}", f"it has {', '.join(names)}")
    return name


def _forecast(gpu: str, job: ModelRun | None, recipes: Sequence[str] | None, reporter: Reporter) -> ForecastResult:
    if job is None:
        raise UserError(
            f"{option('gpu', gpu)} forecasts the speeds, which needs the model and its batch",
            f"add {option('preset', 'NAME')} or {option('config', 'PATH')}, {option('micro_batch_size', 1)} and "
            f"{option('sequence_length', '8k')}, or give {option('speed', 'RUNFILE')} instead",
        )
    able = forecastable(gpu, recipes) if recipes is not None else None
    return forecast(job, [gpu], choices=Choices(able), reporter=reporter)
