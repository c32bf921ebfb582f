"""The Python API: every command as a function that takes Python values and returns the command's result.

>>> import gemmscope as gs
>>> job = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=8192)
>>> forecast = job.forecast("b300", "h200")
>>> [gpu.gpu for gpu in forecast.gpus]
['b300', 'h200']

A result shows itself in a notebook, `print(result)` prints what the command prints, `result.to_frame()` gives its main table to
pandas, and `result.save(path)` writes it. Invalid arguments raise `UserError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from gemmscope import commands, writers
from gemmscope.bench.choose import Choices
from gemmscope.bench.timing import BenchTiming, Shape
from gemmscope.commands.calibrate import Calibrated
from gemmscope.commands.doctor import Diagnosis
from gemmscope.errors import UserError, in_a_line, shown
from gemmscope.job.load import ModelRun, load_model, model_run, with_prediction_layers
from gemmscope.model import presets
from gemmscope.model.readers import read_text
from gemmscope.model.spec import RUN_SETTINGS, ModelSource, ModelSpec
from gemmscope.options.values import percentage, size, token_count
from gemmscope.results.base import Result
from gemmscope.results.bench import BenchResult
from gemmscope.results.compare import CompareResult
from gemmscope.results.explain import ExplainResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.numerics import NumericsResult
from gemmscope.results.plan import PlanResult
from gemmscope.results.shapes import ShapesResult
from gemmscope.results.step import StepResult
from gemmscope.results.sweep import SweepResult

PathOrResult = str | Path | Result
NOT_OPTIONS = ("job", "command", "reporter", "choices", "timing", "model", "run", "shape", "axes", "places", "step")
"""Arguments of the application's functions that are filled in here."""


def load(model: str | Path | Mapping[str, Any] | None = None, *, mtp_layers: int | None = None, **sizes: Any) -> Model:
    """A model: the name of a preset, a config (file, folder, hub ID or dictionary), `file.py:function`, or sizes by name.

    `mtp_layers`: the number of multi-token prediction layers to add.

    >>> load("qwen3-8b").spec.hidden_size
    4096
    >>> load(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=3).spec.pattern()
    '3 dense'
    """
    predicting = {} if mtp_layers is None else {"mtp_layers": mtp_layers}
    if isinstance(model, Mapping):
        try:
            text = json.dumps(model)
        except (TypeError, ValueError, RecursionError) as error:  # an object, a cycle, thousands of levels
            raise UserError(f"the dictionary cannot be written as a config.json: {in_a_line(error)}") from error
        source = read_text(text, "the dictionary")
        source = source if mtp_layers is None else with_prediction_layers(source, mtp_layers)
        return Model(source, {}, _call("gemmscope.load", "{...}", **predicting))
    name = str(model) if model is not None else None
    if name is not None and sizes:
        raise UserError(f"the model is named twice: {name} and {', '.join(sizes)}", "use only one of them")
    named = {} if name is None else {"preset" if name in presets.names() else "module" if ".py:" in name else "config": name}
    arguments = {**named, **_numbers(sizes), **predicting}
    call = _call("gemmscope.load", *([repr(name)] if name else []), **sizes, **predicting)
    return Model(load_model(**arguments), arguments, call)


@dataclass(frozen=True, repr=False)
class Model:
    """A model. `on` sets how it is run."""

    source: ModelSource
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""

    def __repr__(self) -> str:
        return f"<Model {self.call}>"

    @property
    def spec(self) -> ModelSpec | None:
        """The model's layers; None if the model must be traced to find them."""
        return self.source.model

    def on(self, micro_batch_size: int | str | None = None, sequence_length: int | str | None = None, **run: Any) -> Job:
        """Set the batch and any field of `RunSpec` (tp, cp, pp, ep, dp, recompute, ...), or gpus, global_batch (sequences) and
        fsdp, which determine some of them. The rest comes from the model file. Sizes can be strings such as "8k"."""
        given = {"micro_batch_size": micro_batch_size, "sequence_length": sequence_length, **run}
        given = _numbers({name: value for name, value in given.items() if value is not None})
        job = model_run(self.source, **given)
        return Job(job.source, job.run, job.findings, job.settled, self.arguments, given, f"{self.call}.{_call('on', **given)}")

    def plan(
        self,
        gpu: str,
        gpus: int | str,
        global_batch: int | str | None = None,
        sequence_length: int | str | None = None,
        *,
        recipes: Sequence[str] | str | None = None,
        vary: Mapping[str, Sequence[int]] | None = None,
        **options: Any,
    ) -> PlanResult:
        """Find the fastest layouts on `gpus` GPUs of one type, with a global batch of `global_batch` sequences.

        Parts of a layout can be fixed to a value or restricted to a list: tp, pp, vp, cp, ep, etp, micro_batch_size, recompute,
        zero. `vary={"hidden": [5120, 6144]}` compares variants of the model. Options: state, network, nvlink_domain, left_out
        (recipes to skip), imbalance, optimizer_state, tp_overlap, dp_overlap, ep_overlap, cuda_graphs; tokens and price for the
        cost of a run. Ctrl-C returns the layouts computed so far.

        >>> result = load("llama-3.2-1b").plan("h100", 2, 8, 4096, recipes="fp8current", recompute="none", pp=1)
        >>> result.best.recipe
        'FP8Current'
        """
        sizes = {"gpus": gpus, "global_batch": global_batch, "sequence_length": sequence_length}
        command = f"{self.call}.{_call('plan', repr(gpu), **sizes, recipes=recipes, vary=vary, **options)}"
        restrict = {name: options.pop(name) for name in commands.plan.PARTS if name in options}
        settings = {name: options.pop(name) for name in commands.plan.SETTINGS if name in options}
        arguments = _arguments(commands.plan.plan, {"recipes": recipes, **options}, choices=Choices())
        return commands.plan.plan(
            self.source, gpu, **_numbers(sizes), restrict=restrict, vary=vary or {}, settings=settings, command=command,
            reporter=_console(), **arguments,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Job(ModelRun):
    """A model and how it is run. Its methods correspond to the commands."""

    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""

    def __repr__(self) -> str:
        return f"<Job {self.call}>"

    def shapes(self, *, check: bool = False) -> ShapesResult:
        """Every GEMM of a training step. `check` compares them with the live model (needs torch and transformers).

        >>> load("llama-3.2-1b").on(1, 512).shapes().kind
        'shapes'
        """
        return commands.shapes.shapes(self, check=check, command=self._command("shapes", check=check), reporter=_console())

    def forecast(self, *gpus: str | Iterable[str], recipes: Sequence[str] | None = None, **options: Any) -> ForecastResult:
        """Forecast the linears and the training step on GPUs that you do not need to have, with 90% error bars.

        GPUs are named one by one, in a list, or separated by commas: `job.forecast("b300", "h200")`, `job.forecast("b300,h200")`.
        Options: modes, left_out, state, cache_weights, network, nvlink_domain, gpu_count (all GPUs, which sets the data-parallel
        size); tokens and price for the cost of a run; and mix (a result of `quantization_errors`, or its run file) or keep_higher
        ("first=1,last=2,mlp.down_proj") for a recipe that keeps layers and linears in a higher precision.
        """
        if misplaced := [name for name in options if name in (*RUN_SETTINGS, "global_batch", "fsdp")]:
            raise UserError(
                f"{misplaced[0]} is a run setting, not an option of forecast", f"on(..., {misplaced[0]}=...).forecast(...)"
            )
        if "gpus" in options:
            raise UserError(
                "forecast takes the names of GPUs without a keyword", 'forecast("h200"); gpu_count=8 for their number'
            )
        arguments = _arguments(commands.forecast.forecast, {"recipes": recipes, **options}, choices=Choices())
        command = self._command("forecast", *map(repr, gpus), recipes=recipes, **options)
        job: ModelRun = self
        if arguments.get("gpu_count") is not None and not {"gpus", "dp"} & self.arguments.keys():
            job = model_run(self.source, **self.arguments, gpus=arguments["gpu_count"])
        return commands.forecast.forecast(job, _names(gpus), command=command, reporter=_console(), **arguments)

    def sweep(self, *gpus: str | Iterable[str], recipes: Sequence[str] | None = None, **axes_and_options: Any) -> ForecastResult:
        """Forecast the training step at several values of one or two sizes: `job.sweep("b200", micro_batch_size=[1, 2, 4])`.
        Sizes of the model can vary if it was loaded by its sizes. Ctrl-C returns the points computed so far. Options: state,
        network, nvlink_domain, left_out."""
        known = ("state", "network", "nvlink_domain", "left_out")
        axes = {name: value for name, value in axes_and_options.items() if name not in known}
        options = {name: value for name, value in axes_and_options.items() if name not in axes}
        arguments = _arguments(commands.forecast.sweep, {"recipes": recipes, **options}, choices=Choices())
        command = self._command("sweep", *map(repr, gpus), recipes=recipes, **axes_and_options)
        model = self.model_arguments, self.arguments
        return commands.forecast.sweep(*model, axes, _names(gpus), command=command, reporter=_console(), **arguments)

    def bench(self, *, recipes: Sequence[str] | None = None, **options: Any) -> BenchResult:
        """Time the linears on this GPU. Options: modes, left_out, backend, device, share_gpu, precision, time_limit, counts, ...,
        resume, as listed by `gemmscope bench --help`; `fleet`: a result of `Job.fleet`, or its run file, to include the range of
        other GPUs of that fleet."""
        return _bench(self, None, recipes, options, self._command("bench", recipes=recipes, **options))

    def step(
        self,
        *,
        recipes: Sequence[str] | None = None,
        tokens: float | str | None = None,
        gpu_count: int | None = None,
        price: float | None = None,
        **options: Any,
    ) -> StepResult:
        """Predict the training step on this GPU. Options: verify, break_even, hugging_face, compile ("whole", "layers", "none"),
        optimizer ("adamw", "adam", "sgd", "none"), precision, time_limit, observed_speedup, backend, device, share_gpu,
        left_out, mix, keep_higher, fleet (as in `bench`). `tokens`, `gpu_count` and `price` (per GPU-hour): the cost."""
        command = self._command("step", recipes=recipes, tokens=tokens, gpu_count=gpu_count, price=price, **options)
        arguments = _arguments(commands.step.run_step, {"recipes": recipes, **options}, choices=Choices())
        budget = commands.step.Budget.asked(token_count(tokens) if isinstance(tokens, str) else tokens, gpu_count, price)
        return commands.step.run_step(self, budget=budget, command=command, reporter=_console(), **arguments)

    def fleet(self, *, step: bool = False, recipes: Sequence[str] | None = None, **options: Any) -> FleetResult:
        """Run the same measurement on every GPU, and find outliers. Measures the linears, or with `step` the training step.

        Options: gpus ("all", or a list of numbers), ray (the address of a cluster), repeat, tolerance (0.02 for 2%), at_once,
        folder (also write the run file of each GPU there), resume; those of `bench`; and with `step` hugging_face, compile,
        optimizer. `gemmscope.gather_fleet` does the same from run files.
        """
        command = self._command("fleet", step=step, recipes=recipes, **options)
        return _fleet(self, recipes, options, command, step=step)

    def bench_sweep(self, *, recipes: Sequence[str] | None = None, **axes_and_options: Any) -> SweepResult:
        """Time the linears at several values of one or two sizes: `job.bench_sweep(micro_batch_size=[1, 2, 4], gpus="all")`.

        Sizes of the model can vary if it was loaded by its sizes. Each point is measured to `precision` (2%), for at most
        `time_limit` (20) seconds. `gpus` ("all", "0,1") or `ray` (an address) spread the points; all other options are those of
        `bench`. Ctrl-C returns the points measured so far, and `resume=True` continues; `stream` is a function that receives the
        points so far every few seconds.
        """
        axes, options = _axes(axes_and_options)
        groups = {"choices": Choices(), "timing": commands.sweep.DEFAULT_TIMING, "places": commands.HERE}
        arguments = _arguments(commands.sweep.bench_sweep, {"recipes": recipes, **options}, **groups)
        command = self._command("bench_sweep", recipes=recipes, **axes_and_options)
        model = self.model_arguments, self.arguments
        return commands.sweep.bench_sweep(*model, axes, command=command, reporter=_console(), **arguments)

    def step_sweep(self, *, recipes: Sequence[str] | None = None, **axes_and_options: Any) -> SweepResult:
        """Measure the training step at several values of one or two sizes: `job.step_sweep(sequence_length=["2k", "8k"])`.
        Options as in `bench_sweep`, and hugging_face, compile, optimizer as in `step`."""
        axes, options = _axes(axes_and_options)
        groups = {"choices": Choices(), "places": commands.HERE, "step": commands.sweep.PLAIN_STEP}
        arguments = _arguments(commands.sweep.step_sweep, {"recipes": recipes, **options}, **groups)
        command = self._command("step_sweep", recipes=recipes, **axes_and_options)
        model = self.model_arguments, self.arguments
        return commands.sweep.step_sweep(*model, axes, command=command, reporter=_console(), **arguments)

    def numerics(self, recording: str | Path | None = None, **options: Any) -> NumericsResult:
        """Compute quantization errors for this model, as `quantization_errors` does. The model gives the sizes of SYNTHETIC
        tensors (`synthetic="outliers"`), and `gpu="b200"` forecasts the speeds."""
        arguments = [repr(str(recording))] if recording is not None else []
        return _numerics(self, recording, options, self._command("numerics", *arguments, **options))

    def _command(self, name: str, *arguments: str, **options: Any) -> str:
        return f"{self.call}.{_call(name, *arguments, **options)}"


def bench_gemms(shapes: Sequence[Shape] | None = None, *, recipes: Sequence[str] | None = None, **options: Any) -> BenchResult:
    """Time bare GEMMs of these (M, K, N) on this GPU, with the options of `Job.bench`."""
    return _bench(None, shapes, recipes, options, _call("gemmscope.bench_gemms", shapes=shapes, recipes=recipes, **options))


def bench_gemm_sweep(shape: Shape, *, recipes: Sequence[str] | None = None, **axes_and_options: Any) -> SweepResult:
    """Time one bare GEMM of (M, K, N) with one or two of its sizes varied: `bench_gemm_sweep((8192, 4096, 14336), m=[1024])`.
    Options as in `Job.bench_sweep`."""
    axes, options = _axes(axes_and_options)
    groups = {"choices": Choices(), "timing": commands.sweep.DEFAULT_TIMING, "places": commands.HERE}
    arguments = _arguments(commands.sweep.gemm_sweep, {"recipes": recipes, **options}, **groups)
    command = _call("gemmscope.bench_gemm_sweep", repr(shape), recipes=recipes, **axes_and_options)
    return commands.sweep.gemm_sweep(shape, axes, command=command, reporter=_console(), **arguments)


def _bench(
    job: Job | None, shapes: Sequence[Shape] | None, recipes: Sequence[str] | None, options: Mapping[str, Any], command: str
) -> BenchResult:
    arguments = _arguments(commands.bench.run_bench, {"recipes": recipes, **options}, choices=Choices(), timing=BenchTiming())
    return commands.bench.run_bench(job, shapes=shapes, command=command, reporter=_console(), **arguments)


def fleet_gemms(shapes: Sequence[Shape] | None = None, *, recipes: Sequence[str] | None = None, **options: Any) -> FleetResult:
    """Time bare GEMMs of these (M, K, N) on every GPU, with the options of `Job.fleet`."""
    command = _call("gemmscope.fleet_gemms", shapes=shapes, recipes=recipes, **options)
    return _fleet(None, recipes, options, command, shapes=shapes)


def gather_fleet(*runs: str | Path, tolerance: float = 0.02) -> FleetResult:
    """Gather the run files of single GPUs into one fleet: give a folder of run files, or the files."""
    usual = {} if tolerance == commands.fleet.TOLERANCE else {"tolerance": tolerance}
    command = _call("gemmscope.gather_fleet", *(repr(str(run)) for run in runs), **usual)
    return commands.fleet.gather_fleet(runs, tolerance=tolerance, command=command)


def _fleet(
    job: Job | None, recipes: Sequence[str] | None, options: Mapping[str, Any], command: str, *, step: bool = False, **what: Any
) -> FleetResult:
    steps = {name: options[name] for name in commands.fleet.STEP_OPTIONS if options.get(name)}
    rest = {name: value for name, value in options.items() if name not in commands.fleet.STEP_OPTIONS}
    gpus = {"gpus": rest.pop("gpus")} if "gpus" in rest else {}
    arguments = _arguments(commands.fleet.run_fleet, {"recipes": recipes, **rest}, choices=Choices(), timing=BenchTiming())
    arguments["timing"] = commands.fleet.with_step_limit(arguments["timing"], step=step, given="time_limit" in options)
    return commands.fleet.run_fleet(
        job, step=step, **what, step_options=steps, command=command, reporter=_console(), **gpus, **arguments
    )


def forecast_gemms(*gpus: str | Iterable[str], shapes: Sequence[Shape], **options: Any) -> ForecastResult:
    """Forecast bare GEMMs of these (M, K, N), with the options of `Job.forecast`."""
    arguments = _arguments(commands.forecast.forecast, options, choices=Choices())
    command = _call("gemmscope.forecast_gemms", *map(repr, gpus), shapes=shapes, **options)
    return commands.forecast.forecast(None, _names(gpus), shapes=shapes, command=command, **arguments)


def quantization_errors(recording: str | Path | None = None, **options: Any) -> NumericsResult:
    """Compute the quantization error of each recipe, for every linear, layer and pass, from a file that `record_tensors` wrote.

    Options: checkpoint (weights only, instead of a recording), recipes, speed (a result of bench, step or forecast, or its run
    file), gpu (the GPU to take from a forecast of several), bound (finds the fastest mix with at most this error, 0.05 for 5%),
    backend, device, seed.
    """
    arguments = [repr(str(recording))] if recording is not None else []
    return _numerics(None, recording, options, _call("gemmscope.quantization_errors", *arguments, **options))


def _numerics(job: Job | None, recording: str | Path | None, options: Mapping[str, Any], command: str) -> NumericsResult:
    arguments = _arguments(commands.numerics.run_numerics, options)
    return commands.numerics.run_numerics(recording, job=job, command=command, reporter=_console(), **arguments)


def explain_trace(*traces: str | Path, **options: Any) -> ExplainResult:
    """Explain where the time of a recorded step went, and why. Options: baseline, against, recipe, steps, job, perfetto."""
    command = _call("gemmscope.explain_trace", *(repr(str(trace)) for trace in traces), **options)
    return commands.explain.explain(traces, command=command, reporter=_console(), **options)


def compare_runs(
    runs: Sequence[str | Path | BenchResult | StepResult | SweepResult | FleetResult], *, fail_if_slower: float | None = None
) -> CompareResult:
    """Compare results of bench, step, their sweeps or fleet, or run files, oldest first."""
    names = [str(run) if isinstance(run, (str, Path)) else run for run in runs]
    command = _call("gemmscope.compare_runs", repr(names), fail_if_slower=fail_if_slower)
    return commands.compare.compare(runs, fail_if_slower=fail_if_slower, command=command)


def write_report(runs: Sequence[PathOrResult] | PathOrResult, path: str | Path) -> None:
    """Write one page from results or run files: .html, or .md for Markdown."""
    listed = [runs] if isinstance(runs, (str, Path, Result)) else list(runs)
    documents, messages = commands.report.report(listed)
    ending = Path(path).suffix.lower()
    if ending not in writers.SEVERAL:
        raise UserError(
            f"{path} has no extension that selects a format", f"use a path that ends in {' or '.join(writers.SEVERAL)}"
        )
    writers.save(path, writers.content(ending, documents, messages))


def read(path: str | Path) -> Result:
    """Read the result from a run file."""
    return commands.read.read_result(path)


def calibrate(*, recipes: Sequence[str] | None = None, **options: Any) -> Calibrated | None:
    """Measure this GPU to make its forecasts more accurate."""
    arguments = _arguments(commands.calibrate.calibrate, {"recipes": recipes, **options}, choices=Choices(), timing=BenchTiming())
    return commands.calibrate.calibrate(reporter=_console(), **arguments)


def doctor() -> Diagnosis:
    """Check what this machine can measure, and what is missing."""
    return commands.doctor.diagnose()


def _axes(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a measured sweep varies, with its values, and its other options.

    >>> _axes({"micro_batch_size": [1, 2], "sequence_length": ["2k", "4k"], "gpus": "all"})
    ({'micro_batch_size': [1, 2], 'sequence_length': [2048, 4096]}, {'gpus': 'all'})
    """
    axes = {name: value for name, value in given.items() if name in commands.sweep.ALL_SIZES}
    options = {name: value for name, value in given.items() if name not in axes}
    typed = {
        name: [_numbers({name: value})[name] for value in values] if isinstance(values, (list, tuple)) else values
        for name, values in axes.items()
    }
    return typed, options


def _names(given: Iterable[str | Iterable[str]]) -> list[str]:
    """Names one by one, in lists, or separated by commas.

    >>> _names(["b300, h200", ["a100"]])
    ['b300', 'h200', 'a100']
    """
    names = [name for item in given for name in ([item] if isinstance(item, str) or not isinstance(item, Iterable) else item)]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UserError(f"{shown(wrong[0])} is not a name", "for example job.forecast('b300', 'h200', recipes=['mxfp8'])")
    return [part.strip() for name in names for part in name.split(",") if part.strip()]


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with numbers as people type them: `sequence_length="8k"`, `tokens="2T"`, `bound="5%"`. Other texts stay as
    they are.

    >>> _numbers({"sequence_length": "8k", "tokens": "2T", "recompute": "full", "tp": 2, "bound": "5%"})
    {'sequence_length': 8192, 'tokens': 2000000000000.0, 'recompute': 'full', 'tp': 2, 'bound': 0.05}
    """
    result = dict(given)
    readers: dict[str, Callable[[str], float]] = {"tokens": token_count, "bound": percentage}
    for name, value in given.items():
        if isinstance(value, str):
            with suppress(ValueError):
                result[name] = readers.get(name, size)(value)
    return result


def _arguments(function: Callable[..., Any], options: Mapping[str, Any], **groups: Any) -> dict[str, Any]:
    """The arguments of an application function from options: its own, and `groups`, each a dataclass with its defaults, in which
    options that are its fields are set. A `UserError` for any other option."""
    options = _numbers({**options, **({"recipes": _names([given])} if (given := options.get("recipes")) is not None else {})})
    own = {name for name in signature(function).parameters if name not in NOT_OPTIONS}
    inside = {group: {field.name for field in fields(default)} for group, default in groups.items()}
    known = own.union(*inside.values())
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"there is no option {', '.join(unknown)}", f"options: {', '.join(sorted(known))}")
    arguments = {name: value for name, value in options.items() if name in own}
    for group, default in groups.items():
        arguments[group] = replace(default, **{name: value for name, value in options.items() if name in inside[group]})
    return arguments


def _call(name: str, *arguments: str, **options: Any) -> str:
    """A Python call as text, for the `command` of a result: options that were not given are left out."""
    given = [f"{key}={value!r}" for key, value in options.items() if value not in (None, False)]
    return f"{name}({', '.join([*arguments, *given])})"


def _console() -> commands.Console:
    return commands.Console()
