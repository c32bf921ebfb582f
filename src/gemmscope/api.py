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
from dataclasses import dataclass, field, fields
from inspect import signature
from pathlib import Path
from typing import Any

from gemmscope import app, writers
from gemmscope.app.bench import BenchTiming, Shape
from gemmscope.app.calibrate import Calibrated
from gemmscope.app.choose import Choices
from gemmscope.app.doctor import Diagnosis
from gemmscope.app.model import ModelRun, load_model, model_run, with_prediction_layers
from gemmscope.errors import UserError, in_a_line, shown
from gemmscope.files import write_text
from gemmscope.model import presets
from gemmscope.model.read import read_text
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import RUN_SETTINGS, ModelSpec
from gemmscope.results.base import Result
from gemmscope.results.bench import BenchResult
from gemmscope.results.compare import CompareResult
from gemmscope.results.explain import ExplainResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.plan import PlanResult
from gemmscope.results.shapes import ShapesResult
from gemmscope.results.step import StepResult
from gemmscope.sizes import size, token_count

PathOrResult = str | Path | Result


def load(model: str | Path | Mapping[str, Any] | None = None, *, mtp_layers: int | None = None, **sizes: Any) -> Model:
    """A model: the name of a preset, a config (file, folder, hub id or dictionary), `file.py:factory`, or sizes by name.

    `mtp_layers`: with so many layers of multi-token prediction.

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
            raise UserError(f"the dictionary is not what a config.json can hold: {in_a_line(error)}") from error
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
    """A model that was read. `on` says how it is run."""

    source: ModelSource
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""

    def __repr__(self) -> str:
        return f"<Model {self.call}>"

    @property
    def spec(self) -> ModelSpec | None:
        """Its layers; None where only tracing can tell."""
        return self.source.model

    def on(self, micro_batch_size: int | str | None = None, sequence_length: int | str | None = None, **run: Any) -> Job:
        """The batch, and any field of `RunSpec` (tp, cp, pp, ep, dp, recompute, ...), or gpus, global_batch (sequences) and fsdp,
        which decide some of them; the rest as the model's file says. Sizes can be texts such as "8k"."""
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
        """The fastest layouts on so many GPUs of one type, with a global batch of so many sequences.

        Parts of a layout can be fixed, each to a value or a list: tp, pp, vp, cp, ep, etp, micro_batch_size, recompute, zero.
        `vary={"hidden": [5120, 6144]}` compares models. Options: state, network, nvlink_domain, left_out, imbalance,
        optimizer_state, tp_overlap, dp_overlap, ep_overlap, cuda_graphs, and tokens, price for the cost of a run. Ctrl-C returns
        the layouts computed until then.

        >>> result = load("llama-3.2-1b").plan("h100", 2, 8, 4096, recipes="fp8current", recompute="none", pp=1)
        >>> result.best.recipe
        'FP8Current'
        """
        sizes = {"gpus": gpus, "global_batch": global_batch, "sequence_length": sequence_length}
        command = f"{self.call}.{_call('plan', repr(gpu), **sizes, recipes=recipes, vary=vary, **options)}"
        restrict = {name: options.pop(name) for name in app.plan.PARTS if name in options}
        settings = {name: options.pop(name) for name in app.plan.SETTINGS if name in options}
        choices, rest = _split({"recipes": recipes, **options}, app.plan.plan, Choices)
        return app.plan.plan(
            self.source, gpu, **_numbers(sizes), restrict=restrict, vary=vary or {}, settings=settings,
            choices=Choices(**choices), command=command, reporter=_console(), **rest,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Job(ModelRun):
    """A model and how it is run: what can be asked about it."""

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
        return app.shapes.shapes(self, check=check, command=self._command("shapes", check=check), reporter=_console())

    def forecast(self, *gpus: str | Iterable[str], recipes: Sequence[str] | None = None, **options: Any) -> ForecastResult:
        """Linears and the training step on GPUs that need not be here, with 90% error bars.

        GPUs are named one by one, in a list, or separated by commas: `job.forecast("b300", "h200")`, `job.forecast("b300,h200")`.
        Options: modes, left_out, state, cache_weights, network, nvlink_domain, gpu_count (all GPUs, which gives the data-parallel
        size), and tokens, price for the cost of a run.
        """
        if misplaced := [name for name in options if name in (*RUN_SETTINGS, "global_batch", "fsdp")]:
            raise UserError(
                f"{misplaced[0]} is a run setting, not an option of forecast", f"on(..., {misplaced[0]}=...).forecast(...)"
            )
        if "gpus" in options:
            raise UserError(
                "forecast takes the names of GPUs without a keyword", 'forecast("h200"); gpu_count=8 for how many there are'
            )
        choices, rest = _split({"recipes": recipes, **options}, app.forecast.forecast, Choices)
        command = self._command("forecast", *map(repr, gpus), recipes=recipes, **options)
        job: ModelRun = self
        if rest.get("gpu_count") is not None and not {"gpus", "dp"} & self.arguments.keys():
            job = model_run(self.source, **self.arguments, gpus=rest["gpu_count"])
        return app.forecast.forecast(job, _names(gpus), choices=Choices(**choices), command=command, reporter=_console(), **rest)

    def sweep(self, *gpus: str | Iterable[str], recipes: Sequence[str] | None = None, **axes_and_options: Any) -> ForecastResult:
        """The training step over one size or two: `job.sweep("b200", micro_batch_size=[1, 2, 4])`. Sizes of the model can vary if
        it was loaded by its sizes. Ctrl-C returns the points computed until then. Options: state, network, nvlink_domain,
        left_out."""
        known = ("state", "network", "nvlink_domain", "left_out")
        axes = {name: value for name, value in axes_and_options.items() if name not in known}
        options = {name: value for name, value in axes_and_options.items() if name not in axes}
        choices, rest = _split({"recipes": recipes, **options}, app.forecast.sweep, Choices)
        command = self._command("sweep", *map(repr, gpus), recipes=recipes, **axes_and_options)
        arguments = self.model_arguments, self.arguments
        return app.forecast.sweep(
            *arguments, axes, _names(gpus), choices=Choices(**choices), command=command, reporter=_console(), **rest
        )

    def bench(self, *, recipes: Sequence[str] | None = None, **options: Any) -> BenchResult:
        """Time the linears on this GPU. Options: modes, left_out, backend, device, share_gpu, precision, time_limit, counts, ...,
        resume, as `gemmscope bench --help` lists them."""
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
        left_out. `tokens`, `gpu_count` and `price` (per GPU-hour): the cost."""
        command = self._command("step", recipes=recipes, tokens=tokens, gpu_count=gpu_count, price=price, **options)
        choices, rest = _split({"recipes": recipes, **options}, app.step.run_step, Choices)
        budget = app.step.Budget.asked(token_count(tokens) if isinstance(tokens, str) else tokens, gpu_count, price)
        return app.step.run_step(self, choices=Choices(**choices), budget=budget, command=command, reporter=_console(), **rest)

    def _command(self, name: str, *arguments: str, **options: Any) -> str:
        return f"{self.call}.{_call(name, *arguments, **options)}"


def bench_gemms(shapes: Sequence[Shape] | None = None, *, recipes: Sequence[str] | None = None, **options: Any) -> BenchResult:
    """Time bare GEMMs of these (M, K, N) on this GPU, with the options of `Job.bench`."""
    return _bench(None, shapes, recipes, options, _call("gemmscope.bench_gemms", shapes=shapes, recipes=recipes, **options))


def _bench(
    job: Job | None, shapes: Sequence[Shape] | None, recipes: Sequence[str] | None, options: Mapping[str, Any], command: str
) -> BenchResult:
    choices, timing, rest = _split({"recipes": recipes, **options}, app.bench.run_bench, Choices, BenchTiming)
    return app.bench.run_bench(
        job, shapes=shapes, choices=Choices(**choices), timing=BenchTiming(**timing), command=command, reporter=_console(), **rest
    )


def forecast_gemms(*gpus: str | Iterable[str], shapes: Sequence[Shape], **options: Any) -> ForecastResult:
    """Forecast bare GEMMs of these (M, K, N), with the options of `Job.forecast`."""
    choices, rest = _split(options, app.forecast.forecast, Choices)
    command = _call("gemmscope.forecast_gemms", *map(repr, gpus), shapes=shapes, **options)
    return app.forecast.forecast(None, _names(gpus), shapes=shapes, choices=Choices(**choices), command=command, **rest)


def explain_trace(*traces: str | Path, **options: Any) -> ExplainResult:
    """Where the time of a recorded step went, and why. Options: baseline, against, recipe, steps, job, perfetto."""
    command = _call("gemmscope.explain_trace", *(repr(str(trace)) for trace in traces), **options)
    return app.explain.explain(traces, command=command, reporter=_console(), **options)


def compare_runs(runs: Sequence[str | Path | BenchResult | StepResult], *, fail_if_slower: float | None = None) -> CompareResult:
    """Compare results of bench or step, or their run files, the oldest first."""
    names = [str(run) if isinstance(run, (str, Path)) else run for run in runs]
    command = _call("gemmscope.compare_runs", repr(names), fail_if_slower=fail_if_slower)
    return app.compare.compare(runs, fail_if_slower=fail_if_slower, command=command)


def write_report(runs: Sequence[PathOrResult] | PathOrResult, path: str | Path) -> None:
    """One page from results or run files: .html, or .md for Markdown."""
    listed = [runs] if isinstance(runs, (str, Path, Result)) else list(runs)
    documents, messages = app.report.report(listed)
    if Path(path).suffix.lower() not in (".html", ".md"):
        raise UserError(f"{path} does not tell what to write", "use a path that ends in .html or .md")
    write = writers.html.page if Path(path).suffix.lower() == ".html" else writers.markdown.markdown
    write_text(path, write(documents, messages))


def read(path: str | Path) -> Result:
    """The result in a run file."""
    return app.result.read_result(path)


def calibrate(*, recipes: Sequence[str] | None = None, **options: Any) -> Calibrated | None:
    """Measure this GPU to make its forecasts more accurate."""
    choices, timing, rest = _split({"recipes": recipes, **options}, app.calibrate.calibrate, Choices, BenchTiming)
    return app.calibrate.calibrate(choices=Choices(**choices), timing=BenchTiming(**timing), reporter=_console(), **rest)


def doctor() -> Diagnosis:
    """What this machine can measure, and why not the rest."""
    return app.doctor.diagnose()


def _names(given: Iterable[str | Iterable[str]]) -> list[str]:
    """Names one by one, in lists, or separated by commas.

    >>> _names(["b300, h200", ["a100"]])
    ['b300', 'h200', 'a100']
    """
    names = [name for each in given for name in ([each] if isinstance(each, str) or not isinstance(each, Iterable) else each)]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UserError(f"{shown(wrong[0])} is not a name", "for example job.forecast('b300', 'h200', recipes=['mxfp8'])")
    return [part.strip() for name in names for part in name.split(",") if part.strip()]


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with sizes as people type them: `sequence_length="8k"`, `tokens="2T"`. Other texts stay as they are.

    >>> _numbers({"sequence_length": "8k", "tokens": "2T", "recompute": "full", "tp": 2})
    {'sequence_length': 8192, 'tokens': 2000000000000.0, 'recompute': 'full', 'tp': 2}
    """
    result = dict(given)
    for name, value in given.items():
        if isinstance(value, str):
            with suppress(ValueError):
                result[name] = token_count(value) if name == "tokens" else size(value)
    return result


def _split(options: Mapping[str, Any], function: Callable[..., Any], *groups: type) -> list[dict[str, Any]]:
    """The options that are fields of each group, then those of the function itself; a `UserError` for any other."""
    names = [{each.name for each in fields(group)} for group in groups]
    names.append(
        {name for name in signature(function).parameters if name not in ("job", "command", "reporter", "choices", "timing")}
    )
    options = _numbers({**options, **({"recipes": _names([given])} if (given := options.get("recipes")) is not None else {})})
    known = set().union(*names)
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"there is no option {', '.join(unknown)}", f"options: {', '.join(sorted(known))}")
    return [{name: value for name, value in options.items() if name in group} for group in names]


def _call(name: str, *arguments: str, **options: Any) -> str:
    """A Python call as text, for the `command` of a result: options that were not given are left out."""
    given = [f"{key}={value!r}" for key, value in options.items() if value not in (None, False)]
    return f"{name}({', '.join([*arguments, *given])})"


def _console() -> Any:
    return app.progress.Console()
