"""`gemmscope forecast`: linears and the training step on GPUs that need not be here. Nothing is measured, torch is not needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from gemmscope import signals
from gemmscope.app.bench import DEFAULT_CHOICES, Shape, check_shape, check_te_benchmark
from gemmscope.app.choose import Choices
from gemmscope.app.forecast_gpus import chips_of, choose_recipes, common_fields, known_state
from gemmscope.app.model import (
    SIZES,
    LinearCases,
    ModelRun,
    RankWorkload,
    as_forward_calls,
    as_frameworks_run,
    linear_cases,
    load_model,
    model_run,
    rank_workload,
)
from gemmscope.app.progress import QUIET, Reporter
from gemmscope.bench.findings import linear_findings
from gemmscope.errors import UserError, closest, in_python, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.forecast.accumulation import accumulation_finding, cheapest_finding
from gemmscope.forecast.calibration import calibrated
from gemmscope.forecast.eager import eager_finding
from gemmscope.forecast.gemm import State, model
from gemmscope.forecast.gemm_list import GemmForecast, forecast_gemm_list
from gemmscope.forecast.graphs import graphs_finding
from gemmscope.forecast.linear_results import forecast_linears, misaligned
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory_results import memory_findings, memory_result, recipe_memory
from gemmscope.forecast.network import network_of
from gemmscope.forecast.pipeline import bubble_findings
from gemmscope.forecast.step import StepForecast, forecast_step
from gemmscope.forecast.sweep import Configuration, forecast_sweep
from gemmscope.forecast.traced_memory import traced_memory
from gemmscope.forecast.training import gemm_format
from gemmscope.gpu.specs import GpuSpec, gpu
from gemmscope.model.limits import check_size
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.base import ModelSummary
from gemmscope.results.forecast import ForecastResult, GpuForecast, GpuSweep, RecipeMemory, SweepPoint
from gemmscope.results.linears import Linears
from gemmscope.results.step import StepTimes
from gemmscope.step.cost import Budget
from gemmscope.step.findings import step_findings
from gemmscope.step.plan import not_run
from gemmscope.workload.cases import bare_gemms
from gemmscope.workload.derive import HEAD
from gemmscope.workload.ops import Linear
from gemmscope.workload.ranks import Given, solve
from gemmscope.workload.sharding import check, check_schedule

SWEEP_SIZES = (
    *SIZES, "micro_batch_size", "sequence_length", "gradient_accumulation", "global_batch",
    "tp", "cp", "pp", "vp", "ep", "etp", "dp", "zero", "fsdp", "gpus",
)  # fmt: skip
MOST_POINTS = 100_000
MOST_REASONS, OTHER_REASONS = 20, "other reasons, which the table of all points has"
Price = float | Mapping[str, float] | None


def forecast(
    job: ModelRun | None,
    gpus: Sequence[str],
    *,
    shapes: Sequence[Shape] | None = None,
    choices: Choices = DEFAULT_CHOICES,
    state: str = "sustained",
    cache_weights: bool = False,
    as_te_benchmark: bool = False,
    network: str | float | None = None,
    nvlink_domain: int | None = None,
    tokens: float | None = None,
    gpu_count: int | None = None,
    price: Price = None,
    command: str = "",
    reporter: Reporter = QUIET,
) -> ForecastResult:
    """A model's linears and its training step (or bare GEMMs: `shapes`) on each GPU, with 90% error bars.

    `state`: sustained, as in training, or burst, the first moments of a rested GPU. `network`: between NVLink domains of
    `nvlink_domain` GPUs, by name or in GB/s per GPU. `gpu_count`: all GPUs, which gives the data-parallel size. `tokens` at a
    `price` per GPU-hour (one for all, or by GPU): what the run costs. `as_te_benchmark`: linears as forward calls, as Transformer
    Engine's GEMM benchmark script counts them.
    """
    chips, clocks = chips_of(gpus), known_state(state)
    networks = {chip.name: network_of(chip, network, nvlink_domain) for chip in chips}
    job = _on_gpus(as_frameworks_run(job) if job is not None else None, gpu_count)
    known_gpus = gpu_count if job is None or job.run.dp is None else job.run.gpus
    budgets = _budgets(chips, tokens, known_gpus, price) if tokens is not None or price is not None else {}
    by_gpu = choose_recipes(chips, choices, job.source.framework if job is not None else "")
    subject = rank_workload(job, reporter.say) if job is not None else None
    if subject is not None:
        _check_schedule(subject.source, subject.run)
    linears = _cases(subject, shapes)
    if as_te_benchmark:
        check_te_benchmark(job, cache_weights=cache_weights)
        linears = as_forward_calls(linears)
    stepping = subject if not as_te_benchmark else None
    if stepping is None and (budgets or gpu_count is not None):
        problem = f"{option('tokens')} and {option('gpus')} are about a training step, and there is none"
        raise UserError(problem, f"name a model: {option('config')} or {option('preset')}")
    if stepping is not None and stepping.run.inputs is not None and tokens is not None:
        problem = f"{option('tokens')} counts tokens, and the inputs of {stepping.name} are {stepping.run.inputs}"
        raise UserError(problem, f"remove {option('tokens')}")
    may_stay = [case.op for case in linears.cases] if subject is not None and subject.trace is not None else _heads(subject)
    forecasts = []
    for chip in chips:
        (names, recipe_findings), (adjustment, calibration_findings) = by_gpu[chip.name], calibrated(chip.name)
        forecaster = Forecaster(chip, clocks, cache_weights=cache_weights, measured=adjustment, forward_only=as_te_benchmark)
        modes, of_layer = choices.chosen_modes(), (linears.layers, linears.layer_counts)
        times = forecast_linears(
            forecaster, linears.cases, names, modes, *of_layer, heads=may_stay, as_te_benchmark=as_te_benchmark
        )
        step, memory, about_step = None, tuple[RecipeMemory, ...](), _StepFindings()
        if stepping is not None:
            memory = tuple(_memory(stepping, name, chip) for name in names)
            step_forecast = StepForecast(forecaster, stepping.source.model, stepping.run, stepping.workload, networks[chip.name])
            step = forecast_step(step_forecast, names, budgets.get(chip.name), memory)
            about_step = _StepFindings.of(step_forecast, step)
        forecasts.append(
            GpuForecast(
                gpu=chip.name,
                title=chip.title,
                capability=chip.architecture,
                basis=_basis(chip, clocks, names),
                linears=times,
                step=step,
                memory=memory,
                findings=(
                    *about_step.first,
                    *_findings(times, step, subject),
                    *(memory_findings(memory, subject.run) if subject is not None else ()),
                    *about_step.last,
                    *recipe_findings,
                    *calibration_findings,
                ),
            )
        )
    about = subject.about() if subject is not None else {"origin": "shapes"}
    cheapest = cheapest_finding(forecasts)
    findings = (*_common_findings(subject, linears, forecasts), *([cheapest] if cheapest is not None else []))
    common = {**common_fields(command, clocks), "dp": subject.run.data_parallel if subject is not None else 1}
    return ForecastResult(**common, **about, findings=findings, gpus=tuple(forecasts))


class _StepFindings(NamedTuple):
    """What else could be done with a step, the most important first and last in the list of findings."""

    first: tuple[Finding, ...] = ()
    last: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, forecast: StepForecast, step: StepTimes) -> "_StepFindings":
        graphs, repeated = graphs_finding(forecast, step), accumulation_finding(forecast, step)
        eager = eager_finding(forecast)
        return cls(tuple(filter(None, (graphs, eager))), tuple(filter(None, (repeated,))))


def _memory(subject: RankWorkload, name: str, chip: GpuSpec) -> RecipeMemory:
    if subject.source.model is not None:
        return recipe_memory(subject.source.model, subject.run, name, chip)
    assert subject.trace is not None
    return memory_result(traced_memory(subject.trace, subject.run, name, chip), name, chip)


def sweep(
    model: Mapping[str, Any],
    run: Mapping[str, Any],
    axes: Mapping[str, Sequence[int]],
    gpus: Sequence[str],
    *,
    choices: Choices = DEFAULT_CHOICES,
    state: str = "sustained",
    network: str | float | None = None,
    nvlink_domain: int | None = None,
    command: str = "",
    reporter: Reporter = QUIET,
) -> ForecastResult:
    """The training step over one size or two: the best recipe at each point, and from where on each recipe is faster than BF16.

    `model` and `run` are the arguments of `load_model` and `model_run`; `axes` gives a size of either its values. A signal ends
    it early, with the points that were computed until then.
    """
    chips, clocks = chips_of(gpus), known_state(state)
    networks = {chip.name: network_of(chip, network, nvlink_domain) for chip in chips}
    by_gpu = choose_recipes(chips, choices)
    _check_axes(axes, model)
    sweeps: list[GpuSweep] = []
    with signals.held() as held:
        possible, impossible = _configurations(model, run, axes, held)
        points, wanted = 0, len(possible) * len(chips)
        with reporter.counting("points", wanted) as show:

            def on_points(count: int) -> None:
                nonlocal points
                points += count
                show(points)

            for chip in chips:
                (names, recipe_findings), (adjustment, calibration_findings) = by_gpu[chip.name], calibrated(chip.name)
                forecaster = Forecaster(chip, clocks, measured=adjustment)
                swept = forecast_sweep(forecaster, possible, impossible, names, networks[chip.name], on_points)
                if swept is not None:
                    findings = (*swept.findings, *recipe_findings, *calibration_findings)
                    sweeps.append(swept.model_copy(update={"findings": findings}))
        interrupted = held.first is not None
        if interrupted and not sweeps:
            raise held.interruption()
        if interrupted:
            held.answered, held.outcome = True, f"{points} of {wanted} points were computed"
    about = [finding("sweep-interrupted", points=points, wanted=wanted)] if interrupted else []
    reasons: dict[str, list[str]] = {}
    for point in impossible:
        listed = point.why_not in reasons or len(reasons) < MOST_REASONS
        reasons.setdefault(point.why_not if listed else OTHER_REASONS, []).append(point.place)
    about += [finding("sweep-point-not-possible", places=places, reason=reason) for reason, places in reasons.items()]
    replicas = {run.data_parallel for _, _, run in possible}
    common = {**common_fields(command, clocks), "dp": replicas.pop() if len(replicas) == 1 else 1}
    return ForecastResult(
        **common,
        origin="sweep",
        model=_swept_model(possible, axes),
        findings=(finding("forecast-not-measured"), *about),
        interrupted=interrupted,
        sweeps=tuple(sweeps),
    )


def _swept_model(possible: Sequence[Configuration], axes: Mapping[str, Sequence[int]]) -> ModelSummary | None:
    """Which model; without its sizes where some of them vary."""
    if not possible:
        return None
    model = possible[0][1]
    about = ModelSummary.of(model, model.name, model.source)
    varied = any(name in SIZES for name in axes)
    return about.model_copy(update={"hidden_size": None, "num_hidden_layers": None, "description": ""}) if varied else about


def forecast_gemms(file: str, gpus: Sequence[str], *, state: str = "sustained", library: str | None = None) -> GemmForecast:
    """Single GEMMs from a CSV file (`-`: standard input), as CSV with four more columns of milliseconds.

    `library`: as this library was measured; without it the user's own calibration is applied.
    """
    by = library.strip().lower() if library else None
    chips, adjustments, findings = chips_of(gpus), {}, list[Finding]()
    for chip in chips:
        adjustments[chip.name], about = calibrated(chip.name, own_only=True) if by is None else (None, [])
        findings += about
    result = forecast_gemm_list(file, chips, adjustments, known_state(state), by)
    return GemmForecast(result.csv, (finding("forecast-not-measured"), *result.findings, *findings))


def _on_gpus(job: ModelRun | None, gpu_count: int | None) -> ModelRun | None:
    """The job on so many GPUs; a `UserError` if its layout does not divide them."""
    if job is None:
        return None
    if gpu_count is not None:
        check_size(option("gpus"), gpu_count, "parallel")
        job = replace(job, run=replace(job.run, dp=solve(job.run, Given(gpus=gpu_count, dp=job.run.dp)).dp))
    return job


def _check_schedule(source: ModelSource, run: RunSpec) -> None:
    if source.framework != "torchtitan":  # its schedules take any number of micro-batches
        check_schedule(run)


def _budgets(chips: Sequence[GpuSpec], tokens: float | None, gpu_count: int | None, price: Price) -> dict[str, Budget]:
    """What the run's cost is asked for, by GPU; empty if it is not."""
    by_gpu = {gpu(name).name: float(value) for name, value in price.items()} if isinstance(price, Mapping) else None
    budget = Budget.asked(tokens, gpu_count, 0.0 if by_gpu is not None else price)  # type: ignore[arg-type]
    if budget is None:
        return {}
    names = [chip.name for chip in chips]
    if strange := [name for name in by_gpu or () if name not in names]:
        raise UserError(f"{option('price')} names {strange[0]}, which is not among the GPUs", f"they are {', '.join(names)}")
    return {name: budget if by_gpu is None else budget.at(by_gpu.get(name)) for name in names}


def _cases(subject: RankWorkload | None, shapes: Sequence[Shape] | None) -> LinearCases:
    """The linears to forecast: of the model, or bare GEMMs."""
    if subject is None:
        if shapes is None:
            raise UserError("there is nothing to forecast", f"name a model, or give {option('shapes')}")
        for shape in shapes:
            check_shape(shape)
        return LinearCases(tuple(bare_gemms(shapes)))
    if shapes is not None:
        raise UserError(f"{option('shapes')} are bare GEMMs, and a model is named too", "use only one of them")
    linears = linear_cases(subject.workload)
    if not linears.cases:
        problem = f"{subject.name} has no linear layers, which are all that low precision speeds up"
        raise UserError(problem, "gemmscope shapes lists what it runs")
    return linears


def _basis(chip: GpuSpec, state: State, names: Sequence[str]) -> tuple[str, ...]:
    """What the GEMMs of every format on this GPU are based on."""
    formats = dict.fromkeys(gemm_format(recipe(name), pass_name, chip) for name in names for pass_name in ("fprop", "wgrad"))
    return tuple(model().basis(chip, fmt, state, in_training=True).description for fmt in formats)


def _findings(linears: Linears, step: StepTimes | None, subject: RankWorkload | None) -> Iterator[Finding]:
    if step is not None:
        yield from step_findings(step.model_copy(update={"failures": {}}))  # the sizes below are the reason for all of them
        winner = step.winner
        if winner is not None and winner.best != BASELINE and (rivals := [name for name in winner.rivals if name != BASELINE]):
            yield finding("too-close-to-call", recipe=winner.best, over=rivals, what="the training step")
        yield from bubble_findings(step, subject.run) if subject is not None else ()
    yield from linear_findings(linears)
    left = subject is not None and subject.trace is not None
    yield from misaligned(linears.cases, linears.recipes, _heads(subject), left=left)


def _heads(subject: RankWorkload | None) -> list[str]:
    """The linears of the output head, which frameworks leave in BF16."""
    ops = subject.workload.ops if subject is not None else ()
    return list(dict.fromkeys(op.name for op in ops if isinstance(op, Linear) and op.section == HEAD))


def _common_findings(subject: RankWorkload | None, linears: LinearCases, forecasts: Sequence[GpuForecast]) -> Iterator[Finding]:
    yield finding("forecast-not-measured")
    if subject is None:
        return
    has_step = any(gpu.step is not None for gpu in forecasts)
    yield from subject.findings
    for about in linears.findings:
        yield finding("recompute-in-step") if has_step and about.code == "recompute-not-in-linears" else about
    if not has_step:
        return
    if subject.source.model is not None and (special := not_run(subject.source.model)):
        yield finding("layers-not-run", what=special)
    if subject.run.dp is None and subject.source.run_settings.get("zero"):
        sharing = {"gpus": subject.run.gpus, "example": subject.run.gpus * 8}
        yield finding("gpus-unknown", origin=subject.source.origin, zero=subject.run.zero_stage, **sharing)
    if subject.run.pp > 1 and subject.run.pp_stage is not None:
        yield finding("one-stage-only", stage=subject.run.pp_stage)
    left = {cell.op for gpu in forecasts for cell in gpu.linears.ops if cell.left_in_baseline}
    heads = [op for op in _heads(subject) if op not in left]
    steps = [gpu.step for gpu in forecasts if gpu.step is not None]
    if heads and any(recipe(time.recipe).quantizes for step in steps for time in step.recipes):
        yield finding("head-in-baseline", ops=heads)


def _check_axes(axes: Mapping[str, Sequence[int]], model: Mapping[str, Any]) -> None:
    """A `UserError` for sizes that cannot vary, too many of them, or too many points."""
    for name in axes:
        if name not in SWEEP_SIZES:
            similar = closest(name, SWEEP_SIZES)
            hint = f"did you mean {' or '.join(similar)}? " if similar else ""
            raise UserError(f"{shown(name)} is not a size that a sweep can vary", f"{hint}sizes: {', '.join(SWEEP_SIZES)}")
    if not 1 <= len(axes) <= 2:
        raise UserError(f"a sweep varies one size or two, not {len(axes)}", "use one or two")
    if single := [name for name, values in axes.items() if not isinstance(values, Sequence) or isinstance(values, str)]:
        raise UserError(
            f"the sweep needs a list of values for {single[0]}, not {shown(axes[single[0]])}", f"for example {single[0]} 1, 2, 4"
        )
    if empty := [name for name, values in axes.items() if not values]:
        raise UserError(f"the sweep gives {empty[0]} no values", f"for example {empty[0]} 1, 2, 4")
    if (points := prod(map(len, axes.values()))) > MOST_POINTS:
        raise UserError(f"the sweep has {points} points, more than {MOST_POINTS}", "take larger steps")
    other = [way for way in ("config", "preset", "module") if model.get(way) is not None]
    varied = [name for name in axes if name in SIZES]
    if other and varied:
        raise UserError(
            f"the sweep varies {varied[0]} of a model given by its sizes, and {option(other[0])} names one",
            "give the sizes (hidden_size and so on) instead, or vary the run: micro_batch_size, sequence_length, tp …",
        )


def _configurations(
    model: Mapping[str, Any], run: Mapping[str, Any], axes: Mapping[str, Sequence[int]], held: signals.Held
) -> tuple[list[Configuration], list[SweepPoint]]:
    """Every combination that is possible, and the others with the reason; if none is, that is the error. A signal ends it."""
    possible: list[Configuration] = []
    impossible: list[SweepPoint] = []
    first: UserError | None = None
    load = cache(lambda sizes: load_model(**{**model, **dict(sizes)}))  # most sweeps vary the run, not the model
    for combination in product(*(dict.fromkeys(values) for values in axes.values())):
        if held.first is not None:
            break
        values = dict(zip(axes, combination, strict=True))
        try:
            possible.append((values, *_described(load, run, values)))
        except UserError as error:
            first = first or error
            impossible.append(SweepPoint(values=values, why_not=in_python(error.message)))
    if not possible and first is not None:
        raise first
    return possible, impossible


def _described(
    load: Callable[[tuple[tuple[str, int], ...]], ModelSource], run: Mapping[str, Any], values: Mapping[str, int]
) -> tuple[ModelSpec, RunSpec]:
    """The model and the run with these sizes, checked; only a model with a closed form can be varied."""
    source = load(tuple((name, value) for name, value in values.items() if name in SIZES))
    if source.model is None:
        raise UserError(f"{source.origin} is traced: it cannot be varied", "give a model that has a closed form")
    described = as_frameworks_run(
        model_run(source, **{**run, **{name: value for name, value in values.items() if name not in SIZES}})
    )
    check(source.model, described.run)
    _check_schedule(source, described.run)
    return source.model, described.run
