"""`gemmscope step`: predicts the training step in every recipe, recommends one, and verifies the prediction on request."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gemmscope.bench.choose import Choice, check_for_step, choose, supported
from gemmscope.bench.findings import state_findings
from gemmscope.bench.timing import limits
from gemmscope.engine.campaign import LocalWorkers
from gemmscope.engine.rule import StoppingRule, check_limits
from gemmscope.errors import UserError, option, reject
from gemmscope.findings import Finding, finding, without_repeats
from gemmscope.fleet.quote import read_fleet, with_spread
from gemmscope.gpu.environment import environment
from gemmscope.grouping import grouped
from gemmscope.job.load import ModelRun, sources_of
from gemmscope.job.rank_workload import RankWorkload, rank_workload
from gemmscope.model.spec import RunSpec
from gemmscope.numerics.evaluation.requested_mix import Mixes, MixRequest, priced_mixes, quantized_ops, requested_mix
from gemmscope.options.measuring import StepOptions
from gemmscope.recipe.frameworks import backends
from gemmscope.recipe.recipes import recipe
from gemmscope.results.step import StepResult, StepTimes
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.signals import defer_signals
from gemmscope.step.cost import Budget, cost
from gemmscope.step.live_settings import for_live, layers_that_fit, live_plan, step_settings
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.session import MeasuredStep, StepSession
from gemmscope.step.stack_plan import check_kept, keeps_half_an_mlp, plan_step
from gemmscope.step.step_campaign import StepCampaign, fingerprint_of
from gemmscope.step.waterfall import break_even_finding, observed_findings, step_findings
from gemmscope.units import counted
from gemmscope.workload.summary import totals

MEASURED = StepOptions()
TIME_LIMIT_S = 30.0
CANNOT_CAPTURE = ("cpu",)
DISTURBED = 0.05  # of the time in which steps were launched, waiting for a core


def run_step(job: ModelRun, options: StepOptions = MEASURED, context: RunContext = PLAIN) -> StepResult:
    """Measure the training step in every recipe. Ctrl-C ends it early, with what was measured until then."""
    job = job.as_measured()
    precision, time_limit = limits(options, time_limit=TIME_LIMIT_S)
    check_limits(precision, time_limit)
    asked = requested_mix(options.mix, options.keep_higher)
    quoted = read_fleet(options.fleet, "step") if options.fleet is not None else None
    budget = Budget.asked(options.tokens, options.gpu_count, options.price)
    _check_arguments(job, options, budget)
    live = options.hugging_face or job.source.module is not None
    if live:
        options = for_live(job, options)
    model = job.source.model
    if model is None and not live:
        hint = f"add {option('hugging_face')}, to run its Hugging Face class"
        raise UserError(f"{job.source.origin} has no closed form, so its step cannot be built from sizes", hint)
    machine = environment()
    choice = choose(options, machine, framework=job.source.framework)
    settings = step_settings(choice.backend, options.compile, options.optimizer, live=live)
    _check_backend(choice.backend, cuda_graphs=options.cuda_graphs)
    subject = rank_workload(job, context.reporter.say)
    summed = totals(subject.workload, subject.run, model, subject.trace.parameters if subject.trace is not None else 0)
    plan, differences = live_plan(job) if live or model is None else plan_step(model, job.run)
    mixes = _mixes(asked, choice, subject, live=live)
    recipes = list(dict.fromkeys([*choice.recipes, *mixes.names]))
    on_cpu = choice.backend in backends("cpu")
    most_layers = layers_that_fit(plan, summed.parameters, machine, on_cpu=on_cpu) if isinstance(plan, ModulePlan) else None
    mark = fingerprint_of(plan, settings, [recipes, sources_of(job.source)])
    with (
        context.recording(mark, resume=options.resume) as recording,
        LocalWorkers() as workers,
        defer_signals() as signals,
    ):
        campaign = StepCampaign(
            plan=plan,
            recipes=recipes,
            settings=settings,
            rule=StoppingRule(target=precision, longest_s=time_limit),
            recording=recording,
            workers=workers,
            most_layers=most_layers,
        )
        session = StepSession(campaign, context.reporter)
        measured = session.measure(
            (counted(plan.depth, "layer") if plan.depth else job.source.origin), summed, subject.run, options
        )
        result = StepResult(
            command=context.command,
            **subject.about(),
            findings=(
                *_findings(measured, session, options),
                *choice.findings,
                *mixes.findings,
                *differences,
                *(about for about in subject.findings if about.code != "no-loss-traced"),  # a step always has a loss
            ),
            environment=machine,
            device=dict(measured.predicted.results.hello.device),
            versions=dict(measured.predicted.results.hello.versions),
            settings=settings,
            ran="stack" if not live else "module" if job.source.module is not None else "huggingface",
            depth=measured.depth,
            layers=plan.depth,
            interrupted=session.interrupted,
            fingerprint=mark,
            seconds=_seconds(measured.runs),
            step=measured.times if budget is None else _with_cost(measured.times, job.run, budget),
            recommendation=measured.recommendation,
            break_even=measured.batches,
            observed_speedup=options.observed_speedup,
            variants=tuple(measured.variants),
        )
        result = with_spread(result, quoted)
        context.finish(recording, result, complete=not session.interrupted)
        signals.answered = True
    return result


def _check_arguments(job: ModelRun, options: StepOptions, budget: Budget | None) -> None:
    observed_speedup = options.observed_speedup
    if observed_speedup is not None and not 0 < observed_speedup < 100:
        message = f"{option('observed_speedup')} must be between 0 and 100, got {observed_speedup:g}"
        raise UserError(message, f"for example {option('observed_speedup', 1.2)}: the speedup of your run over BF16")
    if budget is not None:
        budget.replicas(job.run)  # raises if the GPUs do not divide, before anything is measured
    check_for_step(options)


def _check_backend(backend: str, *, cuda_graphs: bool) -> None:
    none, graphs = "PyTorch itself has no low-precision layers for training", option("cuda_graphs")
    reject(
        (backend == "torch", none, "install transformer_engine or torchao"),
        (cuda_graphs and backend in CANNOT_CAPTURE, f"{graphs} needs a GPU", f"remove {graphs}"),
    )


def _mixes(asked: MixRequest | None, choice: Choice, subject: RankWorkload, *, live: bool) -> Mixes:
    """The mixes to measure; a `UserError` for what this machine or a stack of layers cannot run."""
    if asked is None:
        return Mixes()
    model = subject.source.model
    if live or model is None:
        raise UserError(
            f"{asked.given} is not yet supported for a live module: a step converts all its linears to one recipe",
            "remove it, or use gemmscope forecast",
        )
    for name in (recipe(given).name for given in (asked.recipe, asked.kept.recipe) if given is not None):
        if choice.backend not in recipe(name).backends:
            homes = " or ".join(recipe(name).backends)
            raise UserError(f"{asked.given} needs {name}, which {choice.backend} does not have", f"{option('backend')}: {homes}")
        if supported(name) is False:
            raise UserError(
                f"{asked.given} needs {name}, which this GPU does not support", "use gemmscope forecast for another GPU"
            )
    ops = quantized_ops(model, subject.run, subject.workload)
    mixes = priced_mixes(asked, choice.recipes, ops, model)
    for name in mixes.names:
        check_kept(name, ops)
    unfused = choice.backend == "transformer_engine" and any(keeps_half_an_mlp(name) for name in mixes.names)
    return Mixes(mixes.names, (*mixes.findings, *([finding("mix-mlp-unfused")] if unfused else [])))


def _with_cost(times: StepTimes, run: RunSpec, budget: Budget) -> StepTimes:
    return times.model_copy(
        update={"recipes": tuple([time.model_copy(update={"cost": cost(time.step_ms, run, budget)}) for time in times.recipes])}
    )


def _findings(measured: MeasuredStep, session: StepSession, options: StepOptions) -> Iterator[Finding]:
    """Findings about how the step ran, the most important first."""
    times, batches, results = measured.times, measured.batches, measured.variants
    yield from _ended(measured.predicted, interrupted=session.interrupted)
    if not times.recipes:
        yield finding("nothing-measured")
    yield from without_repeats(message for run in measured.runs for message in (*run.results.findings, *run.findings))
    yield from step_findings(times)
    yield from _disturbed([state for result in measured.predicted.results.tasks.values() for state in result.states])
    for failed in (result for result in results if result.failure and result.variant.recipe not in times.failures):
        if not failed.variant.captured:  # reported by `step-not-captured`
            yield finding("variant-not-measured", variant=failed.variant.name, reason=failed.failure)
    if options.observed_speedup is not None:
        yield from observed_findings(times, options.observed_speedup)
    yield from (break_even_finding(batches, name) for name in (batches[-1].speedups if batches else ()))
    depths = measured.predicted.results.weights if isinstance(session.campaign.plan, ModulePlan) else ()
    yield from _extrapolated(measured.depth, session.campaign.plan.depth, times, depths)
    yield from session.findings
    yield from state_findings([state for result in results for state in result.states if state.get("sm_mhz")])


def _disturbed(states: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether other processes took the CPU while steps were launched."""
    shares = [float(state["run_delay"]) for state in states if "run_delay" in state]
    if shares and (share := sum(shares) / len(shares)) > DISTURBED:
        yield finding("cpu-disturbed", share=share)


def _ended(predicted: StepCampaign, *, interrupted: bool) -> list[Finding]:
    ended = predicted.rule.ended
    if not interrupted:
        return [ended or finding("all-measured")]
    if ended is not None:
        return [ended, finding("step-interrupted-later")]
    return [finding("step-interrupted" if predicted.results.any_samples() else "step-interrupted-early")]


def _extrapolated(depth: int, layers: int, times: StepTimes, depths: Iterable[int]) -> list[Finding]:
    """How the step of all layers follows from fewer. `depths`: those of a live model, which has several."""
    if not 0 < depth < layers:
        return []
    of_stack = [finding("parts-of-stack", depth=depth)] if any(time.parts_ms for time in times.recipes) else []
    if several := list(map(str, depths)):
        return [finding("step-extrapolated-kinds", layers=layers, depths=several), *of_stack]
    return [finding("step-extrapolated", layers=layers, depth=depth, half=max(1, depth // 2)), *of_stack]


def _seconds(runs: Sequence[StepCampaign]) -> dict[str, float]:
    """What each purpose took, all its runs together."""
    return {purpose: round(sum(seconds), 1) for purpose, seconds in grouped((_purpose(run), run.seconds) for run in runs).items()}


def _purpose(run: StepCampaign) -> str:
    if run.real or run.captured_depth is not None:
        return "verifying" if run.real else "capturing"
    return "trying mixed plans" if run.mixed else "predicting"
