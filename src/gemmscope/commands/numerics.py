"""`gemmscope numerics`: what every recipe loses in accuracy, linear by linear, beside what it gains in speed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from math import isfinite
from pathlib import Path

from gemmscope.choices import SWITCHES, SYNTHETIC_KINDS, Switch
from gemmscope.commands.forecast import forecast
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.forecast.gpus_and_recipes import forecastable
from gemmscope.gpu.specs import gpu as gpu_named
from gemmscope.grouping import grouped
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import linear_cases, rank_workload
from gemmscope.numerics.evaluation.error_findings import error_findings
from gemmscope.numerics.evaluation.error_table import completed, error_table, recipe_errors
from gemmscope.numerics.evaluation.mixes import with_mix
from gemmscope.numerics.evaluation.requests import (
    ComputedErrors,
    DepthModel,
    ErrorsRequest,
    TensorSource,
    compute_errors,
    model_linears,
)
from gemmscope.numerics.evaluation.speeds import SpeedResult
from gemmscope.numerics.recording import read_recording
from gemmscope.options.estimating import ForecastOptions, NumericsOptions
from gemmscope.progress import QUIET, Reporter
from gemmscope.recipe.frameworks import frameworks
from gemmscope.recipe.recipes import BASELINE, recipe, recipes
from gemmscope.results.base import Result, command_of, damage_reported
from gemmscope.results.bench import BenchResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.numerics import Moment, NumericsResult
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.signals import defer_signals
from gemmscope.workload.derive import HEAD

LARGEST_SEED = 2**63 - 1  # that PyTorch takes


def run_numerics(options: NumericsOptions, context: RunContext = PLAIN, *, job: ModelRun | None = None) -> NumericsResult:
    """The errors of every linear in every recipe, and what to keep in a higher precision.

    `job`: the model of `synthetic` tensors, of `depth`, and of the forecast for `gpu`. With `depth`, a Hugging Face config runs
    with random weights; a module is run without being asked. Ctrl-C ends it early, with the linears computed until then.
    """
    backend, speed, device = options.backend or "", options.speed, options.device or "cpu"
    depth = _depth(job, options.depth)
    request = ErrorsRequest(
        source=_source(options, job, context.reporter),
        recipes=tuple(chosen_recipes(options.recipes, backend)),
        backend=backend,
        without=_without(options, depth),
        device=device,
        seed=options.seed,
        depth=depth,
    )
    _check(options.bound, device, options.seed)
    for path in options.later or ():
        read_recording(path)
    speeds, speed_gpu = speed_result(speed, options.gpu, job, options.recipes, context.reporter)
    with defer_signals():  # after Ctrl-C, what was computed is delivered before the command ends
        computed = _computed(request, context.reporter)
        result = computed.tensors.result.model_copy(
            update={
                "command": context.command,
                "findings": tuple(error_findings(computed, backend)),
                "linears": tuple(completed(computed.linears)),
                "stale": tuple(computed.stale),
                "depth": computed.depth.depth,
                "interrupted": not computed.complete,
                "speed_file": str(speed) if isinstance(speed, (str, Path)) else "",
            }
        )
        with damage_reported(*([speeds] if speeds is not None else [])):
            result = with_mix(result, speeds, options.bound, speed_gpu)
        if options.later:
            later = (_later(path, request, context.reporter) for path in options.later)
            result = result.model_copy(update={"moments": tuple(map(_moment, (result, *later)))})
        if context.deliver is not None:
            context.deliver(result)
    return result


def _later(path: str, request: ErrorsRequest, reporter: Reporter) -> NumericsResult:
    """Another recording of the same training."""
    source = TensorSource("recording", str(path))
    computed = _computed(replace(request, source=source, depth=None), reporter)
    linears = completed(computed.linears)
    table = error_table(linears)
    recipes = tuple(recipe_errors(linears, table)) if table is not None else ()
    return computed.tensors.result.model_copy(update={"linears": tuple(linears), "recipes": recipes})


def _moment(result: NumericsResult) -> Moment:
    """A recording as one of several."""
    spans = grouped(
        (operand.tensor, operand.octaves)
        for linear in result.counted
        for one in linear.passes
        for operand in one.operands
        if operand.octaves is not None
    )
    octaves = {tensor: sum(values) / len(values) for tensor, values in spans.items()}
    recipes = tuple(row.model_copy(update={"speedup": None, "rivals": ()}) for row in result.recipes)
    return Moment(origin=result.origin, steps=result.steps, recipes=recipes, octaves=octaves)


def chosen_recipes(names: Sequence[str] | None, backend: str) -> list[str]:
    """The recipes to compute, in the order of recipes.toml if none is named.

    >>> chosen_recipes(None, "")[:3], chosen_recipes(["mxfp8", "MXFP8"], "")
    (['BF16', 'FP8Current', 'FP8Delayed'], ['MXFP8'])
    """
    quantizing = [name for name, known in frameworks().items() if known.quantizes]
    if backend and backend not in quantizing:
        raise UserError(f"{option('backend')} {shown(backend)} does not quantize", f"it can be {' or '.join(quantizing)}")
    if names is None:
        library = backend or quantizing[0]
        return [BASELINE, *(name for name, one in recipes().items() if one.quantizes and library in one.backends)]
    if not names:
        raise UserError(f"{option('recipes')} is empty", f"one of: {', '.join(recipes())}")
    chosen = [recipe(name) for name in names]
    for one in chosen:
        if backend and one.quantizes and backend not in one.backends:
            raise UserError(f"{one.name} does not run with the backend {backend}", f"one of: {', '.join(one.backends)}")
    return list(dict.fromkeys(one.name for one in chosen))


def _source(options: NumericsOptions, job: ModelRun | None, reporter: Reporter) -> TensorSource:
    """The source of tensors, as the worker is told."""
    recording, checkpoint, synthetic = options.recording, options.checkpoint, options.synthetic
    named = [
        name
        for name, value in {"recording": recording, "checkpoint": checkpoint, "synthetic": synthetic}.items()
        if value is not None
    ]
    if len(named) != 1:
        listed = " and ".join("a recording" if name == "recording" else option(name) for name in named)
        problem = f"{listed} are given" if named else "no tensors are given"
        raise UserError(
            f"{problem}; give exactly one source of tensors",
            f"a recording of gemmscope.record_tensors, {option('checkpoint', 'FILE')} or {option('synthetic', 'normal')}",
        )
    if checkpoint == "":  # a Path would be the current folder
        raise UserError(f"{option('checkpoint')} is empty", "give a safetensors file, or a folder of them")
    if recording is not None:
        read_recording(recording)  # an invalid file is rejected before a process is started
        return TensorSource("recording", str(recording))
    if checkpoint is not None:
        model = job.source.model if job is not None else None
        return TensorSource("checkpoint", str(checkpoint), model_linears(model) if model is not None else None)
    if synthetic is None or synthetic not in SYNTHETIC_KINDS:
        raise UserError(f"{option('synthetic')} {shown(synthetic)} is not known", f"it can be {', '.join(SYNTHETIC_KINDS)}")
    if job is None:
        raise UserError(
            f"{option('synthetic', synthetic)} needs a model, for the shapes of its linears",
            f"for example {option('preset', 'llama-3.1-8b')}",
        )
    subject = rank_workload(job, reporter.say)
    heads = {op.name for op in subject.workload.ops if op.section == HEAD}  # they stay in BF16
    cases = [case for case in linear_cases(subject.workload).cases if case.quantized and case.op not in heads]
    if not cases:
        raise UserError("the model has no linears that recipes quantize", "give a model with linears of at least 128 features")
    return TensorSource(
        "synthetic", synthetic, sizes={case.op: (case.inputs, case.outputs) for case in cases}, model=subject.name
    )


def _without(options: NumericsOptions, depth: DepthModel | None) -> tuple[Switch, ...]:
    """What is switched off."""
    names: list[str] = options.without or []
    for name in names:
        if name not in SWITCHES:
            raise UserError(f"{option('without')} {shown(name)} is not known", f"it can be {' or '.join(SWITCHES)}")
        if options.checkpoint is not None or depth is not None or options.backend == "torchao":
            raise UserError(
                f"{option('without', name)} needs a recording or SYNTHETIC tensors, quantized by Transformer Engine",
                "leave it out, or the checkpoint, the module, depth or torchao",
            )
    return tuple(one for one in SWITCHES if one in names)


def _depth(job: ModelRun | None, wanted: bool) -> DepthModel | None:
    """The model to run for errors along depth; None if none was requested."""
    source = job.source if job is not None else None
    if job is None or source is None or (source.module is None and source.config is None):
        if wanted:
            raise UserError(
                f"{option('depth')} runs a model, but there is none that can be run",
                f"add {option('module', 'file.py:build')}, or {option('config', 'config.json')}",
            )
        return None
    if not wanted and source.module is None:
        return None
    return DepthModel(source.module, (dict(source.config) if source.config is not None else None), job.micro_batch, job.sequence)


def _check(bound: float | None, device: str, seed: int) -> None:
    wide = bound is not None and not (isinstance(bound, (int, float)) and isfinite(bound) and 0 < bound < 1)
    limits, valid = f"a whole number between 0 and {LARGEST_SEED}", isinstance(seed, int) and 0 <= seed <= LARGEST_SEED
    unknown, without = device != "cpu" and device.split(":")[0] != "cuda", importlib.util.find_spec("torch") is None
    need = "torch is needed to compute errors, but it is not installed"
    reject(
        (wide, f"{option('bound')} must be between 0 and 1, not {shown(bound)}", f"for example {option('bound', 0.05)}"),
        (not valid, f"{option('seed')} must be {limits}, not {shown(seed)}", f"for example {option('seed', 0)}"),
        (unknown, f"{option('device')} {shown(device)} is not known", "it can be cpu or cuda"),
        (without, need, "pip install torch, in gemmscope's environment"),
    )


def _computed(request: ErrorsRequest, reporter: Reporter) -> ComputedErrors:
    """Let the worker compute the errors. Progress begins once it has opened the file and knows how many linears there are."""
    with ExitStack() as stack:

        @cache
        def counting(count: int) -> Callable[[int], None]:
            return stack.enter_context(reporter.counting("linears", count))

        return compute_errors(request, lambda done, count: counting(count)(done))


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
    return forecast(job, ForecastOptions(gpu=[gpu], recipes=able), RunContext(reporter=reporter))
