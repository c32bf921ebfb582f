"""The runs behind one `gemmscope step`: the step in every recipe; on request the real model, CUDA graphs and smaller batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemmscope.engine.rule import StoppingRule
from gemmscope.errors import UserError
from gemmscope.findings import Finding, finding
from gemmscope.model.spec import RunSpec
from gemmscope.options.measuring import StepOptions
from gemmscope.progress import Reporter
from gemmscope.recipe.frameworks import backends
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import AtBatch, Recommendation, StepTimes, VariantResult
from gemmscope.step.answer import PartialRecipe, candidate, recommend, step_times, wants_graphs
from gemmscope.step.step_campaign import StepCampaign
from gemmscope.step.waterfall import smaller_batches
from gemmscope.units import counted
from gemmscope.workload.summary import Totals

BATCH_LIMITS = (0.02, 10.0)  # precision and seconds: smaller batches are measured less precisely


@dataclass(frozen=True)
class MeasuredStep:
    """What was run, and what follows from it. `depth`: the number of layers that were run; 0 if none could be."""

    predicted: StepCampaign
    runs: Sequence[StepCampaign]
    times: StepTimes
    depth: int
    recommendation: Recommendation | None
    batches: tuple[AtBatch, ...]

    @property
    def variants(self) -> list[VariantResult]:
        return [result for run in self.runs for result in run.results.tasks.values()]


@dataclass
class StepSession:
    """Runs the step of one plan in several ways: as `campaign` says, and with changes. `interrupted`: Ctrl-C ended one of them,
    and nothing is started after it."""

    campaign: StepCampaign
    reporter: Reporter
    findings: list[Finding] = field(default_factory=list)
    interrupted: bool = False

    def measure(self, of: str, summed: Totals, run: RunSpec, options: StepOptions) -> MeasuredStep:
        """Everything that was asked for. `of`: a description of what is run; `summed`: the work of the step, all layers
        together."""
        predicted = self.run(f"running the step of {of} in {', '.join(self.campaign.recipes)} …")
        real, as_deep = self.verify() if options.verify and not self.interrupted else (None, None)
        baseline = predicted.results.deepest(BASELINE)
        depth = baseline.variant.depth if baseline is not None else 0
        useful = options.cuda_graphs or (self.on_gpu and wants_graphs(predicted.results, self.campaign.recipes))
        graphs = self.capture(depth) if useful and not self.interrupted else None
        beside = {"real": real, "as_deep": as_deep, "captured": graphs}
        measured = {name: campaign.results for name, campaign in beside.items() if campaign is not None}
        by_graphs = options.cuda_graphs
        times = step_times(predicted.results, self.campaign.recipes, summed, run.tokens_per_gpu, by_graphs=by_graphs, **measured)
        times = times.model_copy(update={"unit": "tokens" if run.inputs is None else "samples"})
        decided_by = graphs if graphs is not None and times.decided_by == "graphs" else predicted
        recommended, mixed = self.recommend(decided_by, times, try_mixed=options.try_mixed and decided_by is predicted)
        batches = self.break_even(times) if options.break_even and not self.interrupted else ()
        runs = [campaign for campaign in (predicted, real, as_deep, graphs, mixed) if campaign is not None]
        return MeasuredStep(predicted, runs, times, depth, recommended, batches)

    @property
    def on_gpu(self) -> bool:
        """Whether the step runs on a GPU."""
        return self.campaign.settings.backend not in backends("cpu")

    def run(self, purpose: str, limits: tuple[float, float] | None = None, **changes: Any) -> StepCampaign:
        """One measurement, with these changes; of another plan, the CPU time to launch is not measured again."""
        self.reporter.say(purpose)
        longest_s, settings = self.campaign.rule.longest_s, self.campaign.settings
        precision, time_limit = limits or (self.campaign.rule.target, longest_s)
        rule = StoppingRule(target=precision, longest_s=min(time_limit, longest_s))
        settings = replace(settings, host=settings.host and "plan" not in changes)
        campaign = replace(self.campaign, rule=rule, settings=settings, findings=[], **changes)
        with self.reporter.measuring(campaign) as campaign.on_message:
            campaign.run()
        self.interrupted = campaign.interrupted
        return campaign

    def verify(self) -> tuple[StepCampaign | None, StepCampaign | None]:
        """The real model; and, where only some of its layers fit into memory, the prediction of as many."""
        try:
            real = self.run("running the real model …", real=True)
            measured = [result.variant.depth for result in real.results.tasks.values() if result.measured]
            depth = max(measured, default=self.campaign.plan.depth)
            if depth == self.campaign.plan.depth or self.interrupted:
                return real, None
            self.findings.append(finding("verified-shallower", depth=depth))
            return real, self.run(f"predicting {counted(depth, 'layer')} …", plan=self.campaign.plan.with_depth(depth))
        except UserError as error:
            self.findings.append(finding("not-verified", reason=error.message))
            return None, None

    def capture(self, depth: int) -> StepCampaign | None:
        """The same steps as CUDA graphs, at the depth that the launched ones could be run at."""
        try:
            return self.run("measuring GPU time: the step in CUDA graphs …", captured_depth=depth or self.campaign.plan.depth)
        except UserError as error:
            self.findings.append(finding("nothing-captured", reason=error.message))
            return None

    def recommend(
        self, predicted: StepCampaign, times: StepTimes, *, try_mixed: bool
    ) -> tuple[Recommendation | None, StepCampaign | None]:
        """The fastest plan; a mixed one only after it was run beside the best single recipe, and won. After Ctrl-C, the fastest
        of what had been measured."""
        usable = [time for time in times.recipes if not time.fell_back]  # a fallback is not a speedup, and never recommended
        if not any(time.recipe != BASELINE for time in times.recipes):
            return None, None
        of_recipes = recommend(predicted.results, [PartialRecipe(time.recipe) for time in usable])
        mixed = candidate(predicted.results, times) if try_mixed and not self.interrupted else None
        if mixed is None:
            return of_recipes, None
        best = min(usable, key=lambda time: time.step_ms.value).recipe
        rivals = list(dict.fromkeys([BASELINE, best, mixed.recipe]))
        try:
            proof = self.run(f"measuring {mixed.name} against {', '.join(rivals)} …", recipes=rivals, mixed=(mixed,))
        except UserError as error:
            self.findings.append(finding("mixed-plan-not-tried", plan=mixed.name, reason=error.message))
            return of_recipes, None
        plans = [*map(PartialRecipe, rivals), mixed]
        if any(proof.results.step(plan.recipe, plan.left_out) is None for plan in plans):  # cut short, or one of them failed
            return of_recipes, proof
        return recommend(proof.results, plans), proof

    def break_even(self, times: StepTimes) -> tuple[AtBatch, ...]:
        """The step on smaller batches; this one last."""
        batches = []
        for size, length in smaller_batches(self.campaign.plan.micro_batch_size, self.campaign.plan.sequence_length):
            if self.interrupted:
                break
            batch = f"{size} x {length}"
            try:
                smaller = self.campaign.plan.with_batch(size, length)
                step_run = self.run(f"running a batch of {batch} tokens …", plan=smaller, limits=BATCH_LIMITS)
            except UserError as error:
                self.findings.append(finding("batch-not-run", batch=batch, reason=error.message))
                continue
            failed = {result.variant.recipe: result.failure for result in step_run.results.tasks.values() if result.failure}
            self.findings += [
                finding("batch-recipe-not-run", batch=batch, recipe=name, reason=reason) for name, reason in failed.items()
            ]
            others = {name: step_run.results.speedup(name) for name in step_run.recipes if name != BASELINE}
            speedups = {name: speedup for name, speedup in others.items() if speedup is not None}
            batches.append(AtBatch(micro_batch_size=size, sequence_length=length, speedups=speedups))
        here = {time.recipe: time.speedup for time in times.recipes if time.speedup is not None}
        last = AtBatch(
            micro_batch_size=self.campaign.plan.micro_batch_size,
            sequence_length=self.campaign.plan.sequence_length,
            speedups=here,
        )
        return (*batches, last)
