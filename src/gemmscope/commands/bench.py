"""`gemmscope bench`: times a model's linears, or bare GEMMs, in every precision on this GPU."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gemmscope.bench.campaign import WORKER, LinearCampaign, fingerprint_of
from gemmscope.bench.choose import Choice, choose
from gemmscope.bench.findings import fixed_counts, linear_findings, measurement_findings
from gemmscope.bench.linears import measured_linears
from gemmscope.bench.timing import LADDER, bench_settings, check_bare, check_te_benchmark, check_timing, limits, stopping_rule
from gemmscope.engine.campaign import LocalWorkers
from gemmscope.engine.journal import not_resumed
from gemmscope.errors import UserError
from gemmscope.findings import Finding, finding
from gemmscope.fleet.quote import read_fleet, with_spread
from gemmscope.gpu.environment import Environment, environment
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import LinearCases, as_forward_calls, linear_cases, rank_workload
from gemmscope.options.measuring import BenchOptions
from gemmscope.options.values import Shape
from gemmscope.progress import Reporter
from gemmscope.recipe.recipes import recipes
from gemmscope.results.bench import BenchResult, TaskResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.signals import defer_signals
from gemmscope.workload.cases import bare_gemms, tasks_of

LADDER_ON_CPU = LADDER[:3]  # larger ones take minutes there and show nothing more
MEASURED = BenchOptions()
NSYS = "nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx -o gemmscope --capture-range-end=stop"


def run_bench(job: ModelRun | None, options: BenchOptions = MEASURED, context: RunContext = PLAIN) -> BenchResult:
    """Measure the linears of a model, or bare GEMMs; without either, a ladder of square GEMMs. Ctrl-C ends it early, with what
    was measured until then."""
    quoted = read_fleet(options.fleet, "bench") if options.fleet is not None else None
    with _prepared(job, options, context) as bench, defer_signals() as signals:
        campaign = bench.campaign
        beside = [
            *bench.linears.findings,
            *bench.choice.findings,
            *([finding("dgrad-always-measured")] if options.verify_dgrad else []),
            *filter(None, [not_resumed(campaign.recording) if options.resume else None]),
        ]
        ended = _measure(campaign, context.reporter)
        shown_recipes = bench.choice.recipes
        if options.recipes is None:  # those that were named have their column, measured or not
            measured = {task.task.recipe for task in campaign.results.tasks.values() if task.measured}
            shown_recipes = [name for name in shown_recipes if name in measured]
        linears = measured_linears(
            campaign.results,
            shown_recipes,
            bench.choice.modes,
            layers=bench.linears.layers,
            layer_counts=bench.linears.layer_counts,
            backend=campaign.settings.backend,
            cache_weights=campaign.settings.cache_weights,
            as_te_benchmark=campaign.settings.as_te_benchmark,
        )
        precision, time_limit = limits(options)
        result = BenchResult(
            command=context.command,
            **bench.about,
            findings=(*linear_findings(linears), *measurement_findings(campaign.results, linears), ended, *beside),
            settings=campaign.settings,
            precision=None if campaign.settings.counts else precision,
            time_limit_s=None if campaign.settings.counts else time_limit,
            environment=bench.machine,
            device=dict(campaign.results.hello.device),
            versions=dict(campaign.results.hello.versions),
            fingerprint=campaign.part,
            rounds=campaign.results.complete_rounds,
            interrupted=campaign.interrupted,
            linears=linears,
            tasks=tuple(campaign.results.tasks.values()),
        )
        result = with_spread(result, quoted)
        context.finish(campaign.recording, result, complete=not campaign.interrupted)
        signals.answered = True
    return result


def run_for_nsight(job: ModelRun | None, options: BenchOptions = MEASURED, context: RunContext = PLAIN) -> list[TaskResult]:
    """Run everything a few times in NVTX ranges, for Nsight Systems to record; nothing is timed."""
    with _prepared(job, options.but(resume=False, as_te_benchmark=False), context, for_nsight=True) as bench:
        context.reporter.say(f"to record this with Nsight Systems, run:\n  {NSYS} {context.command}")
        with context.reporter.measuring(bench.campaign) as on_message:
            bench.campaign.on_message = on_message
            bench.campaign.run()
    return list(bench.campaign.results.tasks.values())


@dataclass(frozen=True)
class _Bench:
    """A campaign that is ready to run. `about` are the fields of the result that name the model."""

    linears: LinearCases
    about: Mapping[str, Any]
    choice: Choice
    campaign: LinearCampaign = field(repr=False)
    machine: Environment = field(repr=False)


@contextmanager
def _prepared(job: ModelRun | None, options: BenchOptions, context: RunContext, *, for_nsight: bool = False) -> Iterator[_Bench]:
    """Check everything, start the worker, derive what to measure."""
    check_timing(options)
    if options.as_te_benchmark:
        check_te_benchmark(model=job is not None, cache_weights=options.cache_weights)
    check_bare(options.shapes, model=job is not None)
    machine = environment()
    choice = choose(options, machine, framework=job.source.framework if job is not None else "")
    same = {name: other for name, known in recipes().items() if (other := known.same_kernels_as)}
    with LocalWorkers() as workers:
        workers.start_early(WORKER)  # it imports torch, which takes seconds, while the model is read
        if job is not None:
            linears, about = _model_linears(job, context.reporter)
            linears = as_forward_calls(linears) if options.as_te_benchmark else linears
        else:
            linears, about = _bare_gemms(options.shapes, on_cpu=options.on_cpu), {"origin": "shapes"}
        tasks = tasks_of(linears.cases, choice.recipes, choice.modes, same)
        settings = bench_settings(options, choice.backend, for_nsight=for_nsight, as_te_benchmark=options.as_te_benchmark)
        with context.recording(fingerprint_of(tasks, settings), resume=options.resume) as recording:
            campaign = LinearCampaign(
                tasks=tasks, settings=settings, rule=stopping_rule(options), recording=recording, workers=workers
            )
            yield _Bench(linears, about, choice, campaign, machine)


def _bare_gemms(shapes: Sequence[Shape] | None, *, on_cpu: bool) -> LinearCases:
    """The given shapes, or squares from a ladder of sizes."""
    ladder = LADDER_ON_CPU if on_cpu else LADDER
    findings = (finding("small-shapes-on-cpu"),) if on_cpu and not shapes else ()
    return LinearCases(tuple(bare_gemms(shapes or [(side, side, side) for side in ladder])), findings)


def _model_linears(job: ModelRun, reporter: Reporter) -> tuple[LinearCases, dict[str, Any]]:
    """The model's linears, and the fields of the result that name the model."""
    subject = rank_workload(job, reporter.say)
    linears = linear_cases(subject.workload)
    if not linears.cases:
        raise UserError(f"{subject.name} has no linear layers to measure", "gemmscope shapes lists what it runs")
    return replace(linears, findings=(*subject.findings, *linears.findings)), subject.about()


def _measure(campaign: LinearCampaign, reporter: Reporter) -> Finding:
    """Run the campaign. Returns how it ended."""
    with reporter.measuring(campaign) as campaign.on_message:
        campaign.run()
    if campaign.interrupted:
        return finding("interrupted" if campaign.results.any_samples() else "interrupted-early")
    if campaign.settings.counts:
        return fixed_counts(campaign.settings)
    return campaign.rule.ended or finding("all-measured")
