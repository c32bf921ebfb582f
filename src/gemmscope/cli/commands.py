"""The commands: each takes its options, calls one function of `commands/`, delivers the result, and returns the exit code.

`build.py` makes the command line from their signatures; `commands.toml` has their help and describes their exit codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from gemmscope import commands, signals, writers
from gemmscope.cli.output import (
    FigureOptions,
    FleetOutputs,
    OutputOptions,
    PageOptions,
    SettingsOptions,
    StepOutputs,
    StreamedFiles,
    check_page,
    check_targets,
    deliver,
    to_stdout,
    typed_command,
    write,
)
from gemmscope.errors import UserError, in_shell, option, reject, shown
from gemmscope.options.estimating import ExploreOptions, ForecastOptions, NumericsOptions, PlanOptions, ShapesOptions
from gemmscope.options.job import ClusterOptions, ModelOptions, RunOptions
from gemmscope.options.measuring import (
    BenchOptions,
    CalibrateOptions,
    FleetOptions,
    MeasuringOptions,
    RecipeOptions,
    StepOptions,
    StepSweepOptions,
    SweepOptions,
    skip_flags,
)
from gemmscope.options.reading import (
    CompareOptions,
    DoctorOptions,
    ExplainOptions,
    Kind,
    ListOptions,
    ReportOptions,
    TraceMeOptions,
)
from gemmscope.options.values import GEMM_SIZES, Shape, shape, size
from gemmscope.say import say

# Exit codes of single commands. Every command also has 0 and 2.
NOTHING_MEASURED = 1
CHECK_FAILED = 1  # of `shapes --check` and `compare --fail-if-slower`
FALLBACK = 3  # with --strict, another precision than requested
UNWRITTEN = 2  # run files of `fleet --folder`
OUTLIERS = 3  # with --fail-if-outlier
POINTS_LOST = 4  # of a sweep: GPUs were lost before all points were measured
TOO_NOISY = 4  # to tell whether a run is slower

PROFILE_SHAPE = "4096"
ONE_OF_THEM = "use only one of them"
OF_ONE_RUN = ("mix", "measured", "keep_higher")
KINDS: tuple[Kind, ...] = get_args(Kind)
REPORT = "report.html"


def shapes(model: ModelOptions, run: RunOptions, options: ShapesOptions, outputs: OutputOptions) -> int:
    """List the GEMMs of one training step."""
    if options.list_presets:
        writers.terminal.show_table(commands.known.model_table())
        return 0
    context = outputs.context(model.files())
    result = commands.shapes.shapes(_job(model, run), options, context)
    deliver(result, outputs)
    return CHECK_FAILED if result.check is not None and not result.check.equal else 0


def bench(sweep: SweepOptions, model: ModelOptions, run: RunOptions, options: BenchOptions, outputs: PageOptions) -> int:
    """Time a model's linears in every recipe on this GPU."""
    context, named = outputs.context([*model.files(), options.fleet]), [*model.given(), *run.given()]
    if sweep.sweep:
        _check_sweep(options)
        _explain_no_fp8(options)
        return _swept(outputs, options, lambda streaming: _bench_sweep(sweep, model, run, options, streaming), context)
    _check_alone(sweep)
    if options.profile or options.profile_shape is not None:
        options = _to_profile(options, named=bool(named))
    _check_bare(options.shapes, named)
    job = _job(model, run) if named else None
    _explain_no_fp8(options)
    with commands.one_gpu(sweep.gpus, on_cpu=options.on_cpu):
        if options.profile:
            return _profile(job, options, outputs, context)
        result = commands.bench.run_bench(job, options, context)
    if not result.linears.ops:
        return NOTHING_MEASURED
    return FALLBACK if options.strict and result.has("fallback") else 0


def step(sweep: StepSweepOptions, model: ModelOptions, run: RunOptions, options: StepOptions, outputs: StepOutputs) -> int:
    """Predict the training step in every recipe."""
    context = outputs.context([*model.files(), options.mix, options.fleet])
    if sweep.sweep:
        _check_sweep(options)
        _explain_no_fp8(options)
        settings = model.given(), run.given(), options, sweep
        return _swept(outputs, options, lambda streaming: commands.sweep.step_sweep(*settings, streaming), context)
    _check_alone(sweep)
    options = options.but(gpu_count=_gpu_count(sweep.gpus))
    job = _job(model, run)
    _explain_no_fp8(options)
    return 0 if commands.step.run_step(job, options, context).step.recipes else NOTHING_MEASURED


def fleet(model: ModelOptions, run: RunOptions, options: FleetOptions, outputs: FleetOutputs) -> int:
    """Measure every GPU in the same way, and find outliers."""
    context, named = outputs.context([*options.runs, *model.files()]), [*model.given(), *run.given()]
    if options.runs:
        if given := [*options.not_for_run_files(), *named]:
            what = "applies" if len(given) == 1 else "apply"
            it = "it" if len(given) == 1 else "them"
            message = f"{_listed(given)} {what} only to measuring, but run files were given"
            raise UserError(message, f"remove {it}, or the run files")
        result = commands.fleet.gather_fleet(options.runs, options.tolerance, context)
        deliver(result, outputs)
        return _health(result, strict=options.fail_if_outlier)
    _check_bare(options.shapes, named)
    job = _job(model, run) if named else None
    rank = commands.launched() if options.gpus is None and options.ray is None else None  # else one process drives them all
    if rank is not None:
        return _own_gpu(rank, job, options, outputs, context)
    _explain_no_fp8(options)
    return _health(commands.fleet.run_fleet(job, options, context), strict=options.fail_if_outlier)


def forecast(model: ModelOptions, run: ClusterOptions, options: ForecastOptions, outputs: FigureOptions) -> int:
    """Forecast a model's linears and its training step on GPUs that are not here."""
    _one_thread()
    named = [*model.given(), *run.given()]
    if options.gemms is not None:
        _forecast_gemms(options.gemms, options, outputs, named)
        return 0
    others = [*named, *[name for name in options.about_model() if name != "cache_weights"], *(["sweep"] if options.sweep else [])]
    applies = f"{option('library')} applies only to {option('gemms')}: a model is forecast with the library that training uses"
    both = f"{option('shapes')} forecasts bare GEMMs, but {_listed(others)} applies to a model"
    reject((options.library is not None, applies, "remove it"), (options.shapes is not None and others, both, ONE_OF_THEM))
    context = outputs.context([*model.files(), options.mix, options.measured])
    _explain_no_fp8(options, options.gpu)
    given_gpus = {"gpus": options.gpus} if options.gpus is not None else {}
    if options.sweep:
        for unused in options.of_one_run():
            of_one = {**dict.fromkeys(("tokens", "price"), "the cost of one run"), **dict.fromkeys(OF_ONE_RUN, "one run")}
            what = of_one.get(unused, "the linears alone")
            message = f"{option('sweep')} forecasts the training step of many runs, but {option(unused)} applies to {what}"
            raise UserError(message, "remove it")
        with signals.defer_signals():  # also while the points that were computed are written
            deliver(commands.forecast.sweep(model.given(), run.given() | given_gpus, options, context), outputs)
        return 0
    job = _job(model, run, **given_gpus) if options.shapes is None else None
    deliver(commands.forecast.forecast(job, options, context), outputs)
    return 0


def explore(model: ModelOptions, options: ExploreOptions) -> int:
    """Make a page with controls, from forecasts that are computed in advance."""
    _one_thread()
    check_targets({"output": options.output}, model.files())
    check_page("output", options.output)
    context = commands.RunContext(typed_command(), commands.Console())
    write(options.output, writers.html.explorer(commands.explore.explore(commands.load_model(**model.given()), options, context)))
    return 0


def plan(model: ModelOptions, options: PlanOptions, outputs: SettingsOptions) -> int:
    """Find the fastest layout of a model on a number of GPUs."""
    _one_thread()
    context = outputs.context(model.files())
    with signals.defer_signals():  # also while the layouts that were computed are written
        deliver(commands.plan.plan(commands.load_model(**model.given()), options, context), outputs)
    return 0


def numerics(options: NumericsOptions, model: ModelOptions, run: RunOptions, outputs: SettingsOptions) -> int:
    """Compute the quantization error of every linear in every recipe."""
    context = outputs.context([options.recording, options.speed, *_files_of(options.checkpoint), *model.files()])
    _check_model_named(model, run)
    result = commands.numerics.run_numerics(options, context, job=_job(model, run) if model.given() else None)
    return 0 if result.recipes else NOTHING_MEASURED


def calibrate(options: CalibrateOptions) -> int:
    """Measure this GPU, for more accurate forecasts of it."""
    result = commands.calibrate.calibrate(options, commands.RunContext(typed_command(), commands.Console()))
    if result is None:
        say("nothing could be measured, so nothing was written")
        return NOTHING_MEASURED
    writers.terminal.show_table(commands.calibrate.factor_table(result.calibration))
    for finding in result.findings:
        say(f"{finding.level}: {finding.text}")
    say(f"wrote {result.path}: forecasts for {result.calibration.gpu} use it from now on")
    return 0


def explain(options: ExplainOptions, model: ModelOptions, run: RunOptions, outputs: FigureOptions) -> int:
    """Explain from a profiler trace why a training step is not faster."""
    traces = [str(path) for path in commands.explain.trace_files(options.traces)]
    perfetto = {"perfetto": options.perfetto} if options.perfetto not in (None, "-") else {}
    context = outputs.context([*traces, options.baseline, options.against, *model.files()], perfetto)
    _check_model_named(model, run)
    deliver(commands.explain.explain(traces, options, context, job=_job(model, run) if model.given() else None), outputs)
    return 0


def trace_me(options: TraceMeOptions) -> int:
    """Print the lines that record a trace from your own training loop."""
    message = f"{option('kind')} must be {', '.join(KINDS)}, got {shown(options.kind)}"
    reject((options.kind not in KINDS, message, f"for example {option('kind', 'loop')}"))
    lines = files("gemmscope.cli").joinpath(f"templates/trace_me_{options.kind}.txt").read_text(encoding="utf-8")
    write("-", f"{lines}\n# then: gemmscope explain step.json.gz\n")
    return 0


def compare(options: CompareOptions, outputs: OutputOptions) -> int:
    """Compare run files row by row."""
    result = commands.compare.compare(options.files, options.fail_if_slower, outputs.context(options.files))
    deliver(result, outputs)
    return CHECK_FAILED if result.failing() else TOO_NOISY if result.unresolved() else 0


def report(options: ReportOptions) -> int:
    """Make one self-contained page from run files of any command."""
    alone = options.output is None and options.markdown is None and options.figures is None
    output, folder = REPORT if alone else options.output, options.figures
    targets = {name: place for name, place in (("output", output), ("markdown", options.markdown)) if place is not None}
    check_targets(targets, options.runs)
    check_page("output", output)
    if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"{option('figures')} {folder} is a file, not a folder", f"for example {option('figures', 'figures')}")
    documents, messages = commands.report.report(options.runs)
    if output is not None:
        write(output, writers.content(".html", documents, messages))
    if options.markdown is not None:
        write(options.markdown, writers.content(".md", documents, messages))
    if folder is not None:
        drawn = len(writers.figure.save_figures(documents, Path(folder)))
        say(f"wrote {drawn} figures into {folder}" if drawn else f"there is no chart to draw in {', '.join(options.runs)}")
    if not any(map(to_stdout, targets.values())):
        writers.terminal.show_texts(commands.report.answers(documents))
    return 0


def models(options: ListOptions) -> int:
    """List the models that have a name."""
    writers.terminal.show_table(commands.known.model_table(options.search))
    return 0


def gpus(options: ListOptions) -> int:
    """List the GPUs that can be forecast."""
    writers.terminal.show_table(commands.known.gpu_table(options.search))
    return 0


def doctor(options: DoctorOptions) -> int:
    """Check what this machine can measure, and what is missing."""
    check_targets({"json": options.json} if options.json is not None else {})
    diagnosis = commands.doctor.diagnose()
    if options.json is not None:
        write(options.json, diagnosis.to_json())
        if to_stdout(options.json):
            return 0
    writers.terminal.show_texts([*diagnosis.answer(), "", *diagnosis.lines()])
    writers.terminal.show_table(diagnosis.table())
    if reasons := diagnosis.why_not():
        writers.terminal.show_texts(["", "Why not", *reasons])
    return 0


# --- what several commands do


def _job(model: ModelOptions, run: RunOptions, **more: Any) -> commands.ModelRun:
    """The model that was named, and how it is run: these options first, then what the model's file says."""
    return commands.model_run(commands.load_model(**model.given()), **run.given(), **more)


def _one_thread() -> None:
    """Before numpy is imported: the matrices are small, and threads would only wait."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(option, names))


def _check_model_named(model: ModelOptions, run: RunOptions) -> None:
    """A `UserError` for options of a run without a model."""
    message = f"{_listed(run.given())}: these options need a model, but none is given"
    hint = f"add {option('config', 'PATH')} or {option('preset', 'NAME')}, or remove them"
    reject((run.given() and not model.given(), message, hint))


def _check_bare(shapes: Sequence[Shape] | None, named: Sequence[str]) -> None:
    """A `UserError` for bare GEMMs and a model at once."""
    message = f"{option('shapes')} measures bare GEMMs, but {_listed(named)} describes a model"
    reject((named and shapes is not None, message, f"remove {option('shapes')}, or use it without them"))


def _explain_no_fp8(options: RecipeOptions, gpus: Sequence[str] | None = None) -> None:
    """Print a note if --no-fp8 may surprise: it skips MXFP8 only, and other FP8 recipes are still compared.

    `gpus`: the GPUs to forecast; None for this machine's GPU. There is no note on a CPU, and none on GPUs with MXFP8 if another
    FP8 recipe is skipped by its own flag.
    """
    other_fp8 = [flag for name, flag in skip_flags().items() if name.startswith("FP8")]
    others = [flag for flag in other_fp8 if not getattr(options, flag)]
    if not options.no_fp8 or not others or options.recipes is not None or options.on_cpu:
        return
    able = commands.supported("MXFP8", gpus)
    if able is False or (able and others == other_fp8):
        why = "" if able else f", which {'these GPUs do' if gpus and len(gpus) > 1 else 'this GPU does'} not support"
        flags = in_shell(" ".join(map(option, others)))
        say(f"note: --no-fp8 skips MXFP8 only{why}. To skip the other FP8 recipes, add {flags}")


def _check_sweep(options: MeasuringOptions) -> None:
    """A `UserError` for options that do not apply to many points."""
    if unused := options.of_one_run():
        hint = "vary micro_batch_size or sequence_length instead" if unused[0] == "break_even" else "remove one of them"
        raise UserError(f"{option('sweep')} measures many points, but {option(unused[0])} applies to a single run", hint)


def _check_alone(sweep: SweepOptions) -> None:
    """A `UserError` for options that only a sweep supports."""
    message = f"{option('ray')} spreads many measurements over a cluster, but this is a single one"
    reject((sweep.ray is not None, message, f"add {option('sweep')}, or measure every GPU with gemmscope fleet"))


def _swept(
    outputs: PageOptions,
    options: MeasuringOptions,
    measure: Callable[[commands.RunContext], Any],
    context: commands.RunContext,
) -> int:
    """Measure every point of a sweep, as many at a time as there are GPUs, and write the points so far."""
    written = StreamedFiles(outputs)
    result = measure(replace(context, stream=written.write))
    written.finish()
    if not result.sample_count:
        return NOTHING_MEASURED
    if isinstance(options, BenchOptions) and options.strict and result.has("sweep-fallback"):
        return FALLBACK
    return POINTS_LOST if result.has("sweep-point-lost") else 0


def _bench_sweep(
    sweep: SweepOptions, model: ModelOptions, run: RunOptions, options: BenchOptions, context: commands.RunContext
) -> Any:
    """A sweep of a model's linears, or of one bare GEMM."""
    named, shapes = [*model.given(), *run.given()], options.shapes
    if shapes is None:
        if gemm := [name for name in sweep.sweep or () if name in GEMM_SIZES]:
            raise UserError(
                f"{gemm[0]} is a size of a bare GEMM, but no GEMM is given",
                f"for example {option('shapes', '8192x4096x14336')}, of which {option('sweep')} varies {gemm[0]}",
            )
        return commands.sweep.bench_sweep(model.given(), run.given(), options, sweep, context)
    many = f"{option('sweep')} varies m, k or n of one GEMM, but {option('shapes')} gives {len(shapes) or 'many'}"
    reject(
        (named, f"{option('shapes')} is a bare GEMM, but {_listed(named)} describes a model", ONE_OF_THEM),
        (len(shapes) != 1, many, f"give one: {option('shapes', '8192x4096x14336')} {option('sweep', 'm=1k:16k:1k')}"),
    )
    return commands.sweep.gemm_sweep(shapes[0], options, sweep, context)


def _to_profile(options: BenchOptions, *, named: bool) -> BenchOptions:
    """What --profile runs: the model that is named, else one shape."""
    if not options.profile:
        raise UserError("--profile-shape selects what --profile runs", "add --profile, or use --shapes to measure")
    if named:
        reject((options.profile_shape is not None, "--profile runs a model or --profile-shape, not both", ONE_OF_THEM))
        return options
    chosen = PROFILE_SHAPE if options.profile_shape is None else options.profile_shape
    one = shape(chosen)
    if options.shapes is not None:
        say(f"note: --profile runs --profile-shape {chosen} only: --shapes is ignored")
    return options.but(shapes=[one])


def _profile(job: commands.ModelRun | None, options: BenchOptions, outputs: PageOptions, context: commands.RunContext) -> int:
    """Run everything a few times for Nsight Systems."""
    if outputs.targets():
        say(f"note: --profile times nothing, so {', '.join(f'--{name}' for name in outputs.targets())} is not written")
    tasks = commands.bench.run_for_nsight(job, options, context)
    for task in tasks:
        if task.failure:
            say(f"not run: {task.task.key}: {task.failure}")
    ran = sum(bool(task.facts) and not task.failure for task in tasks)
    say(f"{ran} of {len(tasks)} tasks ran, each in an NVTX range with its name; nothing was timed")
    return 0 if ran else NOTHING_MEASURED


def _gpu_count(text: str | None) -> int | None:
    """The number of GPUs of the full run, as given with --gpus."""
    try:
        return size(text) if text is not None else None
    except ValueError:
        raise UserError(
            f"{option('gpus')} is the number of GPUs of the full run, got {shown(text)}",
            f"for example {option('gpus', 256)}; with {option('sweep')} it names the GPUs that measure",
        ) from None


def _own_gpu(
    rank: commands.Launched,
    job: commands.ModelRun | None,
    options: FleetOptions,
    outputs: FleetOutputs,
    context: commands.RunContext,
) -> int:
    """One of the processes that srun or torchrun started measures its own GPU."""
    started = f"{rank.by} started {'several' if rank.world is None else rank.world} processes"
    for_one = [*(["at_once"] if options.at_once is not None else []), *(["repeat"] if options.repeat > 1 else [])]
    reject(
        (
            options.folder is None,
            f"{started}, and each needs a folder for the run file of its GPU",
            f"add {option('folder', 'OUT')}, a folder that all of them share; then run: gemmscope fleet OUT",
        ),
        (
            for_one,
            f"{started}, one for each GPU, but {_listed(for_one)} applies to one process that measures many GPUs",
            f"remove it, or start one process per node with {option('gpus', 'all')}",
        ),
        (
            outputs.targets(),
            f"{started}: {_listed(outputs.targets())} would be written by each of them",
            f"run: gemmscope fleet {options.folder} …",
        ),
    )
    result, (file, note) = commands.fleet.run_own_gpu(rank, job, options, replace(context, deliver=None))
    if note:
        say(note)
    if result is None:
        say(f"{file} exists: this GPU is not measured again")
    elif file is not None:
        say(f"wrote {file}")
    return NOTHING_MEASURED if result is not None and not commands.fleet.has_figures(result) else 0


def _health(result: Any, *, strict: bool) -> int:
    """The exit code: nothing measured; with --fail-if-outlier, slow GPUs or GPUs that were not measured; run files of --folder
    that could not be written."""
    if not result.measured:
        return NOTHING_MEASURED
    if strict and commands.fleet.unhealthy(result):
        return OUTLIERS
    return UNWRITTEN if result.has("fleet-files-missing") else 0


def _forecast_gemms(file: str, options: ForecastOptions, outputs: FigureOptions, named: list[str]) -> None:
    """Forecast single GEMMs from a file, and write CSV to -o or --csv, else to standard output."""
    named = [*named, *(name for name in ("shapes", "sweep") if getattr(options, name) is not None)]
    unused, alone = [*options.given_recipes(), *options.about_model()], f"{option('gemms')} forecasts single GEMMs"
    figure, csv_only = (outputs.output or "").lower().endswith(writers.FIGURE_ENDINGS), f"{option('gemms')} writes CSV only, not"
    reject(
        (named, f"{alone}, but {_listed(named)} describes a model", ONE_OF_THEM),
        (unused, f"{alone} in the formats of its file: {_listed(unused)} has no effect", "remove it"),
        (figure, f"{option('gemms')} draws no figure, but -o {shown(outputs.output)} names one", "for example -o times.csv"),
        (outputs.json is not None, f"{csv_only} {option('json')}", "give a path with --csv or -o"),
        (outputs.markdown is not None, f"{csv_only} {option('markdown')}", "give a path with --csv or -o"),
        (outputs.csv is not None and outputs.output is not None, "--csv and -o both name an output file", ONE_OF_THEM),
    )
    where = outputs.csv or outputs.output or "-"
    check_targets({"csv" if outputs.csv else "output": where}, [file])
    result = commands.forecast.forecast_gemms(file, options)
    write(where, result.csv)
    for finding in result.findings:
        say(finding.text)


def _files_of(checkpoint: str | None) -> list[str]:
    """The files of a checkpoint: an index names safetensors files beside it, a folder has them with their index and config."""
    if checkpoint is None:
        return []
    path = Path(checkpoint)
    folder = path if path.is_dir() else path.parent if path.suffix == ".json" else None
    beside = [file for pattern in ("*.safetensors", "*.json") for file in folder.glob(pattern)] if folder is not None else []
    return [checkpoint, *map(str, beside)]
