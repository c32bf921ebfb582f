"""`gemmscope bench`: times a model's linears, or bare GEMMs, in every precision on this GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemmscope.app.choose import Choice, Choices, choose
from gemmscope.app.model import LinearCases, ModelRun, as_forward_calls, linear_cases, rank_workload
from gemmscope.app.progress import QUIET, Reporter
from gemmscope.app.spread import read_fleet, with_spread
from gemmscope.bench.campaign import WORKER, LinearCampaign, fingerprint_of
from gemmscope.bench.findings import fixed_counts, linear_findings, measurement_findings
from gemmscope.bench.linears import measured_linears
from gemmscope.engine.journal import RecordedRun, open_journal
from gemmscope.engine.link import LocalWorkers
from gemmscope.engine.rule import StoppingRule, check_limits
from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.gpu.environment import Environment, environment
from gemmscope.recipe.recipes import recipes
from gemmscope.results.base import Result
from gemmscope.results.bench import BenchResult, BenchSettings, Counts, TaskResult
from gemmscope.signals import defer_signals
from gemmscope.workload.cases import bare_gemms, tasks_of

Shape = tuple[int, int, int]

LADDER = (256, 512, 1024, 2048, 4096, 8192, 16384)
LADDER_ON_CPU = LADDER[:3]  # larger ones take minutes there and show nothing more
LARGEST_SIZE = 10**7
MOST_RUNS = 10**6
NSYS = "nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx -o gemmscope --capture-range-end=stop"


@dataclass(frozen=True)
class BenchTiming:
    """How to time, and for how long. Fixed counts, if any is given, replace `precision` and `time_limit`."""

    timing: str = "cuda-events"
    """Or "profiler": by the kernels' own timestamps."""
    precision: float = 0.01
    """Continue until every speedup is known this precisely."""
    time_limit: float = 120.0
    """Time limit in seconds."""
    num_warmup: int | None = None
    num_iters: int | None = None
    gpu_warmup: float | None = None
    cache_weights: bool = False
    """Exclude weight quantization from the times, as if weights were quantized once per step."""
    torchao_filter: bool = True
    """Keep the layers in BF16 that torchao's own filter skips."""

    def check(self) -> None:
        """A `UserError` for an invalid value."""
        if self.timing not in ("cuda-events", "profiler"):
            raise UserError(f"{option('timing')} {shown(self.timing)} is not known", "it can be cuda-events or profiler")
        check_limits(self.precision, self.time_limit)
        if self.num_iters is not None and self.num_iters < 1:
            raise UserError(f"{option('num_iters', self.num_iters)} measures nothing", "it must be 1 or more")
        for name in ("num_iters", "num_warmup"):
            if (getattr(self, name) or 0) > MOST_RUNS:
                raise UserError(f"{option(name)} must be at most {MOST_RUNS}, got {getattr(self, name)}", "100 is usual")
        if self.num_warmup is not None and self.num_warmup < 0:
            raise UserError(f"{option('num_warmup', self.num_warmup)} is invalid", "it must be 0 or more")
        if self.gpu_warmup is not None and not 0 <= self.gpu_warmup < float("inf"):
            raise UserError(f"{option('gpu_warmup', f'{self.gpu_warmup:g}')} is invalid", "it is a number of seconds, 0 for none")

    def counts(self) -> Counts | None:
        """Fixed counts, if any was given."""
        names = ("num_warmup", "num_iters", "gpu_warmup")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return Counts(**given) if given else None

    def settings(self, backend: str, *, for_nsight: bool = False, as_te_benchmark: bool = False) -> BenchSettings:
        """What the worker is told."""
        counts = self.counts()
        # a burst of fixed counts sends nothing until its end, and may be as long as was requested
        fixed: dict[str, Any] = {"max_rounds": counts.rounds, "silence_s": 3600.0} if counts else {}
        if backend == "cpu":  # it has no clock to settle
            fixed |= {"drop_ms": 5.0, "keep_ms": 30.0}
        return BenchSettings(
            backend,
            counts=counts,
            timing="profiler" if self.timing == "profiler" else "cuda-events",
            cache_weights=self.cache_weights,
            filter_layers=self.torchao_filter,
            for_nsight=for_nsight,
            as_te_benchmark=as_te_benchmark,
            **fixed,
        )

    def rule(self) -> StoppingRule:
        """When to stop; with fixed counts, never before the worker does."""
        if self.counts():
            return StoppingRule(target=-1.0, longest_s=float("inf"))
        return StoppingRule(target=self.precision, least_rounds=2, longest_s=self.time_limit)


DEFAULT_CHOICES, DEFAULT_TIMING = Choices(), BenchTiming()


def run_bench(
    job: ModelRun | None = None,
    *,
    shapes: Sequence[Shape] | None = None,
    choices: Choices = DEFAULT_CHOICES,
    timing: BenchTiming = DEFAULT_TIMING,
    resume: bool = False,
    verify_dgrad: bool = False,
    as_te_benchmark: bool = False,
    fleet: str | Path | Result | None = None,
    command: str = "",
    reporter: Reporter = QUIET,
    deliver: Callable[[BenchResult], None] = lambda _: None,
) -> BenchResult:
    """Measure the linears of a model, or bare GEMMs of these shapes; without either, a ladder of square GEMMs.

    Ctrl-C ends it early, with what was measured until then. `resume` continues the same measurement if it was cut short.
    `verify_dgrad` has no effect: dgrad is always measured. `as_te_benchmark`: every GEMM as a forward call of its own, as
    Transformer Engine's GEMM benchmark script runs them. `fleet`: a fleet, or its run file; the result then says what another GPU
    of that fleet would give. `deliver` writes the result; the measurement is finished only after that.
    """
    quoted = read_fleet(fleet, "bench") if fleet is not None else None
    prepared = _prepared(job, shapes, choices, timing, command, reporter, resume=resume, as_te_benchmark=as_te_benchmark)
    with prepared as bench, defer_signals() as signals:
        campaign = bench.campaign
        beside = [*bench.linears.findings, *bench.choice.findings]
        beside += [finding("dgrad-always-measured")] if verify_dgrad else []
        if resume and (warning := not_resumed(campaign.recording)) is not None:
            beside.append(warning)
            reporter.say(warning.text)
        ended = _measure(campaign, reporter)
        shown_recipes = bench.choice.recipes
        if choices.recipes is None:  # those that were named have their column, measured or not
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
        result = BenchResult(
            command=command,
            **bench.about,
            findings=(*linear_findings(linears), *measurement_findings(campaign.results, linears), ended, *beside),
            settings=campaign.settings,
            precision=None if campaign.settings.counts else timing.precision,
            time_limit_s=None if campaign.settings.counts else timing.time_limit,
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
        campaign.recording.deliver(lambda: deliver(result), complete=not campaign.interrupted)
        signals.answered = True
    return result


def not_resumed(recording: RecordedRun) -> Finding | None:
    """Why `resume` begins anew; None if it does not."""
    if recording.resumed:
        return None
    return finding("resume-runs-elsewhere" if recording.running_elsewhere else "nothing-to-resume")


def run_for_nsight(
    job: ModelRun | None = None,
    *,
    shapes: Sequence[Shape] | None = None,
    choices: Choices = DEFAULT_CHOICES,
    timing: BenchTiming = DEFAULT_TIMING,
    command: str = "",
    reporter: Reporter = QUIET,
) -> list[TaskResult]:
    """Run everything a few times in NVTX ranges, for Nsight Systems to record; nothing is timed."""
    with _prepared(job, shapes, choices, timing, command, reporter, for_nsight=True) as bench:
        reporter.say(f"to record this with Nsight Systems, run:\n  {NSYS} {command}")
        with reporter.measuring(bench.campaign) as on_message:
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
def _prepared(
    job: ModelRun | None,
    shapes: Sequence[Shape] | None,
    choices: Choices,
    timing: BenchTiming,
    command: str,
    reporter: Reporter,
    *,
    for_nsight: bool = False,
    resume: bool = False,
    as_te_benchmark: bool = False,
) -> Iterator[_Bench]:
    """Check everything, start the worker, derive what to measure."""
    timing.check()
    if as_te_benchmark:
        check_te_benchmark(job, cache_weights=timing.cache_weights)
    if job is not None and shapes is not None:
        raise UserError(f"{option('shapes')} measures bare GEMMs, but a model was given", "give one of the two")
    for shape in shapes or ():
        check_shape(shape)
    machine = environment()
    framework = job.source.framework if job is not None else ""
    choice = choose(choices, machine, cache_weights=timing.cache_weights, framework=framework)
    same = {name: other for name, known in recipes().items() if (other := known.same_kernels_as)}
    with LocalWorkers() as workers, closing(open_journal()) as journal:
        workers.start_early(WORKER)  # it imports torch, which takes seconds, while the model is read
        if job is not None:
            linears, about = _model_linears(job, reporter)
            linears = as_forward_calls(linears) if as_te_benchmark else linears
        else:
            linears, about = _bare_gemms(shapes, on_cpu=choices.on_cpu), {"origin": "shapes"}
        tasks = tasks_of(linears.cases, choice.recipes, choice.modes, same)
        settings = timing.settings(choice.backend, for_nsight=for_nsight, as_te_benchmark=as_te_benchmark)
        with journal.recording(fingerprint_of(tasks, settings), command, resume=resume) as recording:
            campaign = LinearCampaign(tasks=tasks, settings=settings, rule=timing.rule(), recording=recording, workers=workers)
            yield _Bench(linears, about, choice, campaign, machine)


def check_te_benchmark(job: ModelRun | None, *, cache_weights: bool) -> None:
    """A `UserError` for what does not go together with counting as Transformer Engine's script does."""
    name = option("as_te_benchmark")
    if job is None:
        raise UserError(
            f"{name} applies to the linears of a model; bare GEMMs are already single forward calls", f"remove {name}"
        )
    if cache_weights:
        problem = f"{name} quantizes the weight in every call, but {option('cache_weights')} never does"
        raise UserError(problem, "use only one of them")


def check_shape(shape: Shape) -> None:
    """A `UserError` for sizes that are not those of a matrix."""
    written = "x".join(map(str, shape))
    if min(shape) < 1:
        raise UserError(f"{written} is not a shape: every size must be at least 1", "for example 8192x4096x14336")
    if max(shape) > LARGEST_SIZE:
        raise UserError(f"{shown(written)} is too large: a size can be at most {LARGEST_SIZE}", "for example 8192x4096x14336")


def _bare_gemms(shapes: Sequence[Shape] | None, *, on_cpu: bool) -> LinearCases:
    """The given shapes, or squares from a ladder of sizes."""
    ladder = LADDER_ON_CPU if on_cpu else LADDER
    findings = (finding("small-shapes-on-cpu"),) if on_cpu and shapes is None else ()
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
