"""`gemmscope step`: predicts the training step in every recipe, recommends one, and verifies the prediction on request."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from gemmscope.app.bench import not_resumed
from gemmscope.app.choose import Choices, choose
from gemmscope.app.live import for_live, layers_that_fit, live_plan, step_settings
from gemmscope.app.model import ModelRun, rank_workload
from gemmscope.app.progress import QUIET, Reporter
from gemmscope.bench.findings import state_findings
from gemmscope.engine.journal import RecordedRun, open_journal
from gemmscope.engine.link import LocalWorkers, Workers
from gemmscope.engine.rule import StoppingRule, check_limits
from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding, without_repeats
from gemmscope.gpu.environment import environment
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import (
    AtBatch,
    Compile,
    Optimizer,
    Recommendation,
    StepResult,
    StepSettings,
    StepTimes,
    VariantResult,
)
from gemmscope.signals import held
from gemmscope.step.answer import step_times, with_captured
from gemmscope.step.breakeven import break_even_finding, smaller_batches
from gemmscope.step.campaign import StepCampaign, fingerprint_of
from gemmscope.step.cost import Budget, cost
from gemmscope.step.findings import observed_findings, step_findings
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.plan import StackPlan, plan_step
from gemmscope.step.recommend import Plan, candidate, recommend
from gemmscope.units import counted
from gemmscope.workload.summary import totals

__all__ = ["Budget", "run_step"]

CANNOT_CAPTURE = ("cpu",)
BATCH_LIMITS = (0.02, 10.0)  # precision and seconds: smaller batches are measured less precisely


def run_step(
    job: ModelRun,
    *,
    choices: Choices,
    verify: bool = False,
    break_even: bool = False,
    cuda_graphs: bool = False,
    hugging_face: bool = False,
    compile: Compile | None = None,  # noqa: A002
    optimizer: Optimizer | None = None,
    precision: float = 0.01,
    time_limit: float = 30.0,
    observed_speedup: float | None = None,
    budget: Budget | None = None,
    command: str = "",
    resume: bool = False,
    reporter: Reporter = QUIET,
    deliver: Callable[[StepResult], None] = lambda _: None,
) -> StepResult:
    """Measure the training step in every recipe.

    `verify` also runs the real model; `break_even` also runs smaller batches; `cuda_graphs` also runs the step captured in CUDA
    graphs; `hugging_face` runs the model's own Hugging Face class. `compile` is what torch.compile is applied to, `optimizer`
    that of a module or a Hugging Face model. Measuring ends when every speedup is known to `precision`, or after `time_limit`
    seconds. `observed_speedup` is compared with the prediction, and `budget` gives the cost of the full run. `resume` continues
    the same measurement if it was cut short. `deliver` writes the result: only then the measurement is finished.
    """
    check_limits(precision, time_limit)
    if observed_speedup is not None and not 0 < observed_speedup < 100:
        message = f"{option('observed_speedup')} must be between 0 and 100, got {observed_speedup:g}"
        raise UserError(message, f"for example {option('observed_speedup', 1.2)}: the speedup of your run over BF16")
    if budget is not None:
        budget.replicas(job.run)  # raises if the GPUs do not divide, before anything is measured
    if choices.modes is not None and list(choices.modes) == ["pre-quantized"]:
        message = f"a step quantizes as it runs: {option('pre_quantize')} is for GEMMs alone"
        raise UserError(message, "remove it, or use gemmscope bench")
    live = hugging_face or job.source.module is not None
    if live:
        choices = for_live(job, choices, verify=verify, break_even=break_even, cuda_graphs=cuda_graphs)
    model = job.source.model
    if model is None and not live:
        hint = f"add {option('hugging_face')}, to run its Hugging Face class"
        raise UserError(f"{job.source.origin} has no closed form: its step cannot be built from it", hint)
    machine = environment()
    choice = choose(choices, machine, framework=job.source.framework)
    settings = step_settings(choice.backend, compile, optimizer, live=live)
    if choice.backend == "torch":
        raise UserError("PyTorch alone has no layers in low precision to train with", "install transformer_engine or torchao")
    if cuda_graphs and choice.backend in CANNOT_CAPTURE:
        raise UserError(f"{option('cuda_graphs')} needs a GPU", f"remove {option('cuda_graphs')}")
    subject = rank_workload(job, reporter.say)
    summed = totals(subject.workload, subject.run, model, subject.trace.parameters if subject.trace is not None else 0)
    plan, differences = live_plan(job) if live or model is None else plan_step(model, job.run)
    most_layers = layers_that_fit(plan, summed.parameters, machine) if isinstance(plan, ModulePlan) else None
    mark = fingerprint_of(plan, settings, list(choice.recipes))
    with (
        closing(open_journal()) as journal,
        journal.recording(mark, command, resume=resume) as recording,
        LocalWorkers() as workers,
        held() as signals,
    ):
        if resume and (found := not_resumed(recording)) is not None:
            reporter.say(found.text)
        session = _StepSession(plan, choice.recipes, settings, precision, time_limit, recording, workers, reporter, most_layers)
        of = counted(plan.depth, "layer") if plan.depth else job.source.origin
        predicted = session.run(f"running the step of {of} in {', '.join(choice.recipes)} …")
        real, as_deep = session.verify() if verify and not session.interrupted else (None, None)
        verified = [run.results if run is not None else None for run in (real, as_deep)]
        baseline = predicted.results.deepest(BASELINE)
        depth = baseline.variant.depth if baseline is not None else 0
        times = step_times(predicted.results, choice.recipes, summed, subject.run.tokens_per_gpu, *verified)
        times = times.model_copy(update={"unit": "tokens" if subject.run.inputs is None else "samples"})
        graphs = session.capture(depth) if cuda_graphs and not session.interrupted else None
        if graphs is not None:
            times = with_captured(times, graphs.results)
        recommended, mixed = session.recommend(predicted, times)
        batches = session.break_even(times) if break_even and not session.interrupted else ()
        if budget is not None:
            costed = [time.model_copy(update={"cost": cost(time.step_ms, job.run, budget)}) for time in times.recipes]
            times = times.model_copy(update={"recipes": tuple(costed)})
        runs = [run for run in (predicted, real, as_deep, graphs, mixed) if run is not None]
        results = [result for run in runs for result in run.results.tasks.values()]
        findings = [
            *_ended(predicted, interrupted=session.interrupted),
            *([] if times.recipes else [finding("nothing-measured")]),
            *without_repeats(message for run in runs for message in (*run.results.findings, *run.findings)),
            *step_findings(times, graphs=cuda_graphs or live),  # a live model cannot be captured
            *_failures(results, times),
            *(observed_findings(times, observed_speedup) if observed_speedup is not None else ()),
            *(break_even_finding(batches, name) for name in (batches[-1].speedups if batches else ())),
            *_extrapolated(depth, plan.depth, times, predicted.results.weights),
            *session.findings,
            *state_findings([state for result in results for state in result.states if state.get("sm_mhz")]),
            *choice.findings,
            *differences,
            *subject.findings,
        ]
        result = StepResult(
            command=command,
            **subject.about(),
            findings=tuple(findings),
            environment=machine,
            device=dict(predicted.results.hello.device),
            versions=dict(predicted.results.hello.versions),
            settings=settings,
            ran="stack" if not live else "module" if job.source.module is not None else "huggingface",
            depth=depth,
            layers=plan.depth,
            interrupted=session.interrupted,
            seconds=_seconds(runs),
            step=times,
            recommendation=recommended,
            break_even=batches,
            observed_speedup=observed_speedup,
            variants=tuple(results),
        )
        recording.deliver(lambda: deliver(result), complete=not session.interrupted)
        signals.answered = True
    return result


@dataclass
class _StepSession:
    """Runs the step of one plan in several ways. `interrupted`: Ctrl-C ended one of them, and nothing is started after it."""

    plan: StackPlan | ModulePlan
    recipes: Sequence[str]
    settings: StepSettings
    precision: float
    time_limit: float
    recording: RecordedRun
    workers: Workers
    reporter: Reporter
    most_layers: int | None
    findings: list[Finding] = field(default_factory=list)
    interrupted: bool = False

    def run(
        self,
        purpose: str,
        *,
        plan: StackPlan | ModulePlan | None = None,
        recipes: Sequence[str] | None = None,
        mixed: tuple[Plan, ...] = (),
        real: bool = False,
        captured_depth: int | None = None,
        limits: tuple[float, float] | None = None,
    ) -> StepCampaign:
        """One measurement; of another plan, the CPU time to launch is not measured again."""
        self.reporter.say(purpose)
        precision, time_limit = limits or (self.precision, self.time_limit)
        rule = StoppingRule(target=precision, longest_s=min(time_limit, self.time_limit))
        settings = self.settings if plan is None else replace(self.settings, host=False)
        campaign = StepCampaign(
            plan=plan or self.plan,
            recipes=recipes or self.recipes,
            settings=settings,
            rule=rule,
            recording=self.recording,
            workers=self.workers,
            real=real,
            captured_depth=captured_depth,
            mixed=mixed,
            most_layers=self.most_layers,
        )
        with self.reporter.measuring(campaign) as on_message:
            campaign.on_message = on_message
            campaign.run()
        self.interrupted = campaign.interrupted
        return campaign

    def verify(self) -> tuple[StepCampaign | None, StepCampaign | None]:
        """The real model; and, where only some of its layers fit into memory, the prediction of as many."""
        try:
            real = self.run("running the real model …", real=True)
            measured = [result.variant.depth for result in real.results.tasks.values() if result.measured]
            depth = max(measured, default=self.plan.depth)
            if depth == self.plan.depth or self.interrupted:
                return real, None
            self.findings.append(finding("verified-shallower", depth=depth))
            return real, self.run(f"predicting {counted(depth, 'layer')} …", plan=self.plan.with_depth(depth))
        except UserError as error:
            self.findings.append(finding("not-verified", reason=error.message))
            return None, None

    def capture(self, depth: int) -> StepCampaign | None:
        """The same steps as CUDA graphs, at the depth that the launched ones could be run at."""
        try:
            return self.run("capturing the step in CUDA graphs …", captured_depth=depth or self.plan.depth)
        except UserError as error:
            self.findings.append(finding("nothing-captured", reason=error.message))
            return None

    def recommend(self, predicted: StepCampaign, times: StepTimes) -> tuple[Recommendation | None, StepCampaign | None]:
        """The fastest plan; a mixed one only after it was run beside the best single recipe, and won. After Ctrl-C, the fastest
        of what had been measured."""
        usable = [time for time in times.recipes if not time.fell_back]  # a fallback is not a speedup, and never recommended
        if not any(time.recipe != BASELINE for time in times.recipes):
            return None, None
        of_recipes = recommend(predicted.results, [Plan(time.recipe) for time in usable])
        mixed = candidate(predicted.results, times) if not self.interrupted else None
        if mixed is None:
            return of_recipes, None
        best = min(usable, key=lambda time: time.step_ms.value).recipe
        rivals = list(dict.fromkeys([BASELINE, best, mixed.recipe]))
        try:
            proof = self.run(f"measuring {mixed.name} against {', '.join(rivals)} …", recipes=rivals, mixed=(mixed,))
        except UserError as error:
            self.findings.append(finding("mixed-plan-not-tried", plan=mixed.name, reason=error.message))
            return of_recipes, None
        plans = [*map(Plan, rivals), mixed]
        if any(proof.results.step(plan.recipe, plan.left_out) is None for plan in plans):  # cut short, or one of them failed
            return of_recipes, proof
        return recommend(proof.results, plans), proof

    def break_even(self, times: StepTimes) -> tuple[AtBatch, ...]:
        """The step on smaller batches; this one last."""
        batches = []
        for size, length in smaller_batches(self.plan.micro_batch_size, self.plan.sequence_length):
            if self.interrupted:
                break
            batch = f"{size} x {length}"
            try:
                smaller = self.plan.with_batch(size, length)
                step_run = self.run(f"running a batch of {batch} tokens …", plan=smaller, limits=BATCH_LIMITS)
            except UserError as error:
                self.findings.append(finding("batch-not-run", batch=batch, reason=error.message))
                continue
            failed = {result.variant.recipe: result.failure for result in step_run.results.tasks.values() if result.failure}
            for name, reason in failed.items():
                self.findings.append(finding("batch-recipe-not-run", batch=batch, recipe=name, reason=reason))
            others = {name: step_run.results.speedup(name) for name in step_run.recipes if name != BASELINE}
            speedups = {name: speedup for name, speedup in others.items() if speedup is not None}
            batches.append(AtBatch(micro_batch_size=size, sequence_length=length, speedups=speedups))
        here = {time.recipe: time.speedup for time in times.recipes if time.speedup is not None}
        last = AtBatch(micro_batch_size=self.plan.micro_batch_size, sequence_length=self.plan.sequence_length, speedups=here)
        return (*batches, last)


def _ended(predicted: StepCampaign, *, interrupted: bool) -> list[Finding]:
    ended = predicted.rule.ended
    if not interrupted:
        return [ended or finding("all-measured")]
    if ended is not None:
        return [ended, finding("step-interrupted-later")]
    return [finding("step-interrupted" if predicted.results.any_samples() else "step-interrupted-early")]


def _failures(results: Sequence[VariantResult], times: StepTimes) -> list[Finding]:
    """Variants that failed beside recipes that have a step: at another depth, of the real model, of a mixed plan."""
    failed = [result for result in results if result.failure and result.variant.recipe not in times.failures]
    failed = [result for result in failed if not result.variant.captured]  # which `step-not-captured` says
    return [finding("variant-not-measured", variant=result.variant.name, reason=result.failure) for result in failed]


def _extrapolated(depth: int, layers: int, times: StepTimes, weights: Mapping[int, float] | None) -> list[Finding]:
    if not 0 < depth < layers:
        return []
    of_stack = [finding("parts-of-stack", depth=depth)] if any(time.parts_ms for time in times.recipes) else []
    if weights is not None:
        return [finding("step-extrapolated-kinds", layers=layers, depths=list(map(str, weights))), *of_stack]
    return [finding("step-extrapolated", layers=layers, depth=depth, half=max(1, depth // 2)), *of_stack]


def _seconds(runs: Sequence[StepCampaign]) -> dict[str, float]:
    """What each purpose took, all its runs together."""
    sums: dict[str, float] = {}
    for run in runs:
        purpose = (
            "verifying"
            if run.real
            else "capturing"
            if run.captured_depth
            else "trying mixed plans"
            if run.mixed
            else "predicting"
        )
        sums[purpose] = sums.get(purpose, 0.0) + run.seconds
    return {purpose: round(seconds, 1) for purpose, seconds in sums.items()}
