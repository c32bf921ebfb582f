"""`gemmscope forecast`: linears and the training step on GPUs that need not be here. Nothing is measured, torch is not needed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemmscope import signals
from gemmscope.bench.choose import chosen_modes
from gemmscope.bench.findings import linear_findings
from gemmscope.bench.timing import LADDER, check_shape, check_te_benchmark
from gemmscope.choices import ClockState, Mode
from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.forecast.calibration import calibrated, known_gpu
from gemmscope.forecast.communication import Network, network_of
from gemmscope.forecast.gemm import model
from gemmscope.forecast.gemm_list import GemmForecast, forecast_gemm_list
from gemmscope.forecast.gpus_and_recipes import chips_of, choose_recipes, common_fields, known_state, mixes_on
from gemmscope.forecast.linear_results import forecast_linears, misaligned, padded_experts
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory_results import memory_findings, memory_of_recipe
from gemmscope.forecast.stacks import Software, software_on
from gemmscope.forecast.step import StepForecast, forecast_step, learned_from
from gemmscope.forecast.step_findings import (
    accumulation_finding,
    bubble_findings,
    eager_finding,
    graphs_finding,
    layers_finding,
    power_findings,
    software_finding,
)
from gemmscope.forecast.sweep import Configuration, forecast_sweep
from gemmscope.forecast.training import gemm_format
from gemmscope.gpu.specs import GpuSpec, gpu
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import LinearCases, RankWorkload, as_forward_calls, linear_cases, rank_workload
from gemmscope.model import presets
from gemmscope.model.limits import check_size
from gemmscope.model.spec import ModelSource, ModelSpec, RunSpec
from gemmscope.numerics.evaluation.requested_mix import Mixes, MixRequest, requested_mix
from gemmscope.options.estimating import ForecastOptions
from gemmscope.options.values import Shape
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.base import ModelSummary
from gemmscope.results.forecast import ForecastResult, GpuForecast, RecipeMemory
from gemmscope.results.linears import Linears
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult, StepTimes
from gemmscope.results.sweep import GpuSweep, SweepPoint
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.step.cost import Budget
from gemmscope.step.stack_plan import not_run
from gemmscope.step.waterfall import step_findings
from gemmscope.sweep.axes import FORECAST_SIZES, by_reason, check_axes, configurations, swept_model
from gemmscope.workload.cases import bare_gemms
from gemmscope.workload.derive import HEAD, derive
from gemmscope.workload.ops import Linear
from gemmscope.workload.sharding import Given, check, check_schedule, solve


def forecast(job: ModelRun | None, options: ForecastOptions, context: RunContext = PLAIN) -> ForecastResult:
    """A model's linears and its training step, or bare GEMMs, on each GPU, with 90% error bars."""
    asked = requested_mix(options.mix, options.keep_higher)
    chips, clocks = chips_of(options.gpu, options.power_limit), known_state(options.state)
    networks = {chip.name: network_of(chip, options.network, options.nvlink_domain) for chip in chips}
    job = _on_gpus(job, options.gpus)
    budgets = _budgets(chips, options, (options.gpus if job is None or job.run.dp is None else job.run.gpus))
    by_gpu = choose_recipes(chips, options, job.source.framework if job is not None else "")
    subject = rank_workload(job, context.reporter.say) if job is not None else None
    if subject is not None:
        _check_schedule(subject.source, subject.run)
    linears = _cases(subject, options.shapes)
    if options.as_te_benchmark:
        check_te_benchmark(model=job is not None, cache_weights=options.cache_weights)
        linears = as_forward_calls(linears)
    task = _ForecastTask(subject, linears, chosen_modes(options), clocks, asked, options)
    _check_step(task, asks_for_cost=bool(budgets) or options.gpus is not None)
    forecasts = [task.on(chip, *by_gpu[chip.name], networks[chip.name], budgets.get(chip.name)) for chip in chips]
    about = subject.about() if subject is not None else {"origin": "shapes"}
    findings = tuple(_common_findings(subject, linears, forecasts))
    common = {**common_fields(context.command, clocks), "dp": subject.run.data_parallel if subject is not None else 1}
    return ForecastResult(**common, **about, findings=findings, gpus=tuple(forecasts))


@dataclass(frozen=True)
class _ForecastTask:
    """What is forecast on every GPU. `subject`: the model; None for bare GEMMs."""

    subject: RankWorkload | None
    linears: LinearCases
    modes: Sequence[Mode]
    clocks: ClockState
    asked: MixRequest | None
    options: ForecastOptions

    @property
    def stepping(self) -> RankWorkload | None:
        """The model, if its training step is forecast too."""
        return self.subject if not self.options.as_te_benchmark else None

    @property
    def may_stay(self) -> list[str]:
        """Linears that frameworks leave in BF16 where a recipe cannot run them: the output head, and all of a module."""
        return (
            [case.op for case in self.linears.cases]
            if (self.subject is not None and self.subject.trace is not None)
            else _heads(self.subject)
        )

    def _measured(self, software: Software, chip: GpuSpec, of_file: str) -> Software:
        """The software as the user measured it, if so."""
        if self.options.measured is None:
            return software
        result, model, gpu_count = _measured_step(self.options.measured, self.subject)
        there, run = known_gpu(result.where), result.run or RunSpec(1, 1)
        if 0 < result.depth < len(model.layers):
            model = replace(model, layers=model.layers[: result.depth])
        check(model, run)
        same = there.name == chip.name
        stack = software if same else software_on(there, self.options.stack, of_file, gpus=gpu_count)
        forecaster = Forecaster(there, "sustained", measured=calibrated(there.name)[0], software=stack)
        return software.after(
            learned_from(result.step, StepForecast(forecaster, model, run, derive(model, run)), same_gpu=same), there.title
        )

    def on(
        self, chip: GpuSpec, names: Sequence[str], recipe_findings: Sequence[Finding], links: Network, budget: Budget | None
    ) -> GpuForecast:
        """The forecast for one GPU, in the recipes `names`."""
        adjustment, calibration_findings = calibrated(chip.name)
        cached, as_calls = self.options.cache_weights, self.options.as_te_benchmark
        of_file = self.subject.source.stack if self.subject is not None else ""
        asked = names if self.options.recipes is not None else ()
        software = software_on(
            chip, self.options.stack, of_file, asked, gpus=(self.subject.run.gpus if self.subject is not None else 1)
        )
        software = self._measured(software, chip, of_file)
        settings: dict[str, Any] = {"cache_weights": cached, "forward_only": as_calls, "software": software}
        forecaster = Forecaster(chip, self.clocks, measured=adjustment, **settings)
        linears = forecast_linears(
            forecaster,
            self.linears.cases,
            names,
            self.modes,
            self.linears.layers,
            self.linears.layer_counts,
            heads=self.may_stay,
            as_te_benchmark=as_calls,
        )
        step, memory, mixes = None, tuple[RecipeMemory, ...](), Mixes()
        other_ways, repeated = list[Finding | None](), None  # findings about other ways to run the step
        if (stepping := self.stepping) is not None:
            step_forecast = StepForecast(forecaster, stepping.source.model, stepping.run, stepping.workload, links)
            mixes = mixes_on(chip, self.asked, names, stepping)
            of_step = list(dict.fromkeys([*names, *mixes.names]))
            memory = tuple(memory_of_recipe(stepping, name, chip, step_forecast) for name in of_step)
            step = forecast_step(step_forecast, of_step, budget, memory)
            layers = stepping.trace.layers if stepping.trace is not None else 0
            by_layer = layers_finding(step_forecast, step, layers) if layers else None
            other_ways = [graphs_finding(step_forecast, step), by_layer, eager_finding(step_forecast)]
            other_ways.append(software_finding(step_forecast) if stepping.trace is None else None)
            repeated = accumulation_finding(step_forecast, step)
        formats = dict.fromkeys(gemm_format(recipe(name), pass_name, chip) for name in names for pass_name in ("fprop", "wgrad"))
        return GpuForecast(
            gpu=chip.name,
            title=chip.title,
            capability=chip.architecture,
            basis=tuple(model().basis(chip, fmt, self.clocks, in_training=True).description for fmt in formats),
            linears=linears,
            step=step,
            memory=memory,
            findings=(
                *mixes.findings,
                *filter(None, other_ways),
                *_findings(linears, step, self.subject),
                *(memory_findings(memory, self.subject.run) if self.subject is not None else ()),
                *filter(None, [repeated]),
                *recipe_findings,
                *calibration_findings,
                *power_findings(chip, software),
            ),
        )


def _measured_step(given: Any, subject: RankWorkload | None) -> tuple[StepResult, ModelSpec, int]:
    """The step that `measured` names, the model, and the GPUs of its run; a `UserError` if the step is of another model."""
    result = read_result(given, ("step",)) if isinstance(given, (str, Path)) else given
    if subject is None or subject.source.model is None or not isinstance(result, StepResult):
        raise UserError(f"{option('measured')} is a step of a model with a closed form", "name the same model, without --shapes")
    model = ModelSummary.of(subject.source.model, subject.source.model.name, "")
    if result.model is None or (result.model.layers, result.model.description) != (model.layers, model.description):
        other = result.model.description or result.model.name if result.model is not None else "GEMMs"
        named = option("preset", model.name) if model.name in presets.names() else option("config", subject.source.origin)
        raise UserError(
            f"{option('measured')} is a step of another model ({other}), but {model.name} is forecast ({model.description})",
            f"measure this one: gemmscope step {named} --json step.json",
        )
    return result, subject.source.model, subject.run.gpus


def _check_step(task: _ForecastTask, *, asks_for_cost: bool) -> None:
    """A `UserError` for options that apply to a training step if there is none, or to tokens if its inputs are others."""
    step = task.stepping
    if step is None and asks_for_cost:
        raise UserError(
            f"{option('tokens')} and {option('gpus')} apply to a training step, but there is none",
            f"name a model: {option('config')} or {option('preset')}",
        )
    if step is not None and step.run.inputs is not None and task.options.tokens is not None:
        raise UserError(
            f"{option('tokens')} counts tokens, but the inputs of {step.name} are {step.run.inputs}",
            f"remove {option('tokens')}",
        )
    if step is None and task.asked is not None:
        raise UserError(
            f"{task.asked.given} applies to a training step, but there is none",
            f"remove it, or name a model: {option('preset')}",
        )


def sweep(
    model: Mapping[str, Any], run: Mapping[str, Any], options: ForecastOptions, context: RunContext = PLAIN
) -> ForecastResult:
    """The training step over one size or two: the best recipe at each point, and from where on each recipe is faster than BF16.

    `model` and `run` are the arguments of `load_model` and `model_run`. A signal ends it early, with the points that were
    computed until then.
    """
    axes = options.sweep or {}
    chips, clocks = chips_of(options.gpu, options.power_limit), known_state(options.state)
    networks = {chip.name: network_of(chip, options.network, options.nvlink_domain) for chip in chips}
    by_gpu = choose_recipes(chips, options)
    check_axes(axes, FORECAST_SIZES, model)
    sweeps: list[GpuSweep] = []
    with signals.defer_signals() as deferred:
        possible, impossible = _configurations(model, run, axes, deferred)
        wanted = len(possible) * len(chips)
        gpu_count = max((run.gpus for _, _, run in possible), default=1)
        with context.reporter.counting("points", wanted) as show:
            for number, chip in enumerate(chips):
                (names, recipe_findings), (adjustment, calibration_findings) = by_gpu[chip.name], calibrated(chip.name)
                asked = names if options.recipes is not None else ()
                forecaster = Forecaster(
                    chip, clocks, measured=adjustment, software=software_on(chip, options.stack, recipes=asked, gpus=gpu_count)
                )
                sweeps += forecast_sweep(
                    forecaster,
                    possible,
                    impossible,
                    names,
                    networks[chip.name],
                    findings=(*recipe_findings, *calibration_findings),
                    on_points=show,
                    before=number * len(possible),
                )
        points = sum(len(swept.points) - len(impossible) for swept in sweeps)
        interrupted = deferred.first is not None
        if interrupted and not sweeps:
            raise deferred.interruption()
        if interrupted:
            deferred.answered, deferred.outcome = True, f"{points} of {wanted} points were computed"
    findings = [finding("sweep-interrupted", points=points, wanted=wanted)] if interrupted else []
    reasons = by_reason(impossible)
    findings += [finding("sweep-point-not-possible", places=places, reason=reason) for reason, places in reasons.items()]
    replicas = {run.data_parallel for _, _, run in possible}
    common = {**common_fields(context.command, clocks), "dp": replicas.pop() if len(replicas) == 1 else 1}
    return ForecastResult(
        **common,
        origin="sweep",
        model=swept_model(possible[0][1], possible[0][1].source, axes) if possible else None,
        run=possible[0][2] if possible else None,
        findings=(finding("forecast-not-measured"), *findings),
        interrupted=interrupted,
        sweeps=tuple(sweeps),
    )


def forecast_gemms(file: str, options: ForecastOptions) -> GemmForecast:
    """Single GEMMs from a CSV file (`-`: standard input), as CSV with four more columns of milliseconds.

    With `library`, as this library was measured; without it the user's own calibration is applied.
    """
    by = options.library.strip().lower() if options.library else None
    chips, adjustments, findings = chips_of(options.gpu, options.power_limit), {}, list[Finding]()
    for chip in chips:
        adjustments[chip.name], about = calibrated(chip.name, own_only=True) if by is None else (None, [])
        findings += about
    result = forecast_gemm_list(file, chips, adjustments, known_state(options.state), by)
    return GemmForecast(result.csv, (finding("forecast-not-measured"), *result.findings, *findings))


def _on_gpus(job: ModelRun | None, gpu_count: int | None) -> ModelRun | None:
    """The job on so many GPUs; a `UserError` if its layout does not divide them."""
    if job is None or gpu_count is None:
        return job
    check_size(option("gpus"), gpu_count, "parallel")
    return replace(job, run=replace(job.run, dp=solve(job.run, Given(gpus=gpu_count, dp=job.run.dp)).dp))


def _check_schedule(source: ModelSource, run: RunSpec) -> None:
    if source.framework != "torchtitan":  # its schedules take any number of micro-batches
        check_schedule(run)


def _budgets(chips: Sequence[GpuSpec], options: ForecastOptions, gpu_count: int | None) -> dict[str, Budget]:
    """The budget of the run by GPU; empty if no cost was requested."""
    tokens, price = options.tokens, options.price
    by_gpu = {gpu(name).name: float(value) for name, value in price.items()} if isinstance(price, Mapping) else None
    budget = Budget.asked(
        tokens, gpu_count if (tokens is not None or price is not None) else None, 0.0 if isinstance(price, Mapping) else price
    )
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
        return LinearCases(tuple(bare_gemms(shapes or [(side, side, side) for side in LADDER])))
    if shapes is not None:
        raise UserError(f"{option('shapes')} are bare GEMMs, but a model is given too", "use only one of them")
    linears = linear_cases(subject.workload, as_run=True)
    if not linears.cases:
        raise UserError(
            f"{subject.name} has no linear layers, and low precision speeds up only these", "gemmscope shapes lists what it runs"
        )
    return linears


def _findings(linears: Linears, step: StepTimes | None, subject: RankWorkload | None) -> Iterator[Finding]:
    if step is not None:
        yield from step_findings(step.model_copy(update={"failures": {}}))  # the sizes below are the reason for all of them
        winner = step.winner
        if winner is not None and winner.best != BASELINE and (rivals := [name for name in winner.rivals if name != BASELINE]):
            yield finding("too-close-to-call", recipe=winner.best, over=rivals, what="the training step")
        yield from bubble_findings(step, subject.run) if subject is not None else ()
    yield from linear_findings(linears)
    if any(case.rows for case in linears.cases):
        yield from padded_experts(linears.recipes)
    left = subject is not None and subject.trace is not None
    if left and step is not None and step.failures and len(step.recipes) == 1:
        yield finding("nothing-quantized", reason=next(iter(step.failures.values())))
    yield from misaligned(linears.cases, linears.recipes, _heads(subject), left=left)


def _heads(subject: RankWorkload | None) -> list[str]:
    """The linears of the output head, which frameworks leave in BF16."""
    return list(
        dict.fromkeys(
            op.name
            for op in (subject.workload.ops if subject is not None else ())
            if isinstance(op, Linear) and op.section == HEAD
        )
    )


def _common_findings(subject: RankWorkload | None, linears: LinearCases, forecasts: Sequence[GpuForecast]) -> Iterator[Finding]:
    yield finding("forecast-not-measured")
    if subject is None:
        return
    steps = [gpu.step for gpu in forecasts if gpu.step is not None]
    yield from subject.findings
    for about in linears.findings:
        yield finding("recompute-in-step") if steps and about.code == "recompute-not-in-linears" else about
    if not steps:
        return
    if subject.source.model is not None and (special := not_run(subject.source.model)):
        yield finding("layers-not-run", what=special)
    if subject.run.dp is None and subject.source.run_settings.get("zero"):
        about_gpus = {"gpus": subject.run.gpus, "example": subject.run.gpus * 8}
        yield finding("gpus-unknown", origin=subject.source.origin, zero=subject.run.zero_stage, **about_gpus)
    if subject.run.pp > 1 and subject.run.pp_stage is not None:
        yield finding("one-stage-only", stage=subject.run.pp_stage)
    left = {cell.op for gpu in forecasts for cell in gpu.linears.ops if cell.left_in_baseline}
    heads = [op for op in _heads(subject) if op not in left]
    if heads and any(recipe(time.recipe).quantizes for step in steps for time in step.recipes):
        yield finding("head-in-baseline", ops=heads)


def _configurations(
    model: Mapping[str, Any], run: Mapping[str, Any], axes: Mapping[str, Sequence[int]], deferred: signals.DeferredSignals
) -> tuple[list[Configuration], list[SweepPoint]]:
    """Every combination that is possible, and the others with the reason; only a model with a closed form can be varied."""

    def described(job: ModelRun) -> tuple[ModelSpec, RunSpec]:
        source, run = job.source, job.run
        if source.model is None:
            raise UserError(f"{source.origin} is traced and cannot be varied", "give a model that has a closed form")
        check(source.model, run)
        _check_schedule(source, run)
        return source.model, run

    possible, impossible = configurations(model, run, axes, described, deferred)
    return [(values, *pair) for values, pair in possible], [SweepPoint(values=values, why_not=why) for values, why in impossible]
