"""`gemmscope step`: predicts the training step in every precision, says what to use, and verifies it where asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmscope.cli.bench_options import ChoiceOptions, check_limits
from gemmscope.cli.choose import choose
from gemmscope.cli.options import GPUS, TOKENS, ModelOptions, RunOptions, number, takes
from gemmscope.cli.output import check_targets, interrupted, say
from gemmscope.cli.progress import Progress
from gemmscope.cli.step_output import Stepped
from gemmscope.cli.workload import Subject, subject_of
from gemmscope.errors import UserError
from gemmscope.recipe.recipes import BASELINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gemmscope.model.source import ModelSource
    from gemmscope.model.spec import RunSpec
    from gemmscope.step.answer import StepAnswer
    from gemmscope.step.breakeven import AtBatch
    from gemmscope.step.cost import Budget
    from gemmscope.step.plan import StackPlan
    from gemmscope.step.predict import StepRun, StepSettings
    from gemmscope.step.recommend import Plan, Recommendation
    from gemmscope.store.journal import Journal

EXAMPLES = """\b
Examples:
  gemmscope step --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --pp 4
  gemmscope step --config config.json --micro-batch-size 4 --sequence-length 4096 --recipes fp8current --verify
  gemmscope step --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --tokens 1e12 --gpus 256 --price 2.5

\b
Exit codes: 0 done, 1 nothing could be measured, 2 wrong input, 130 interrupted.
"""


@dataclass(frozen=True)
class StepOptions:
    """What is asked of the step beside the model."""

    verify: Annotated[bool, typer.Option("--verify", help="Also run the real model, as deep as memory allows.")] = False
    break_even: Annotated[
        bool, typer.Option("--break-even", help="Also run smaller batches: from which on does each precision win?")
    ] = False
    hugging_face: Annotated[
        bool, typer.Option("--hugging-face", help="Run the config's own Hugging Face class, a few layers of it, with torchao.")
    ] = False
    precision: Annotated[float, typer.Option(metavar="SHARE", help="Go on until every speedup is known this well.")] = 0.01
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="Stop measuring after so long all the same.")] = 30.0
    observed_speedup: Annotated[
        float | None, typer.Option(parser=number, metavar="X", help="What your own run gained: held against the prediction.")
    ] = None
    tokens: Annotated[float | None, TOKENS] = None
    gpus: Annotated[int | None, GPUS] = None
    price: Annotated[float | None, typer.Option(parser=number, metavar="X", help="For one GPU and hour.")] = None
    json: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write everything as JSON, samples included.")] = None
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None

    def check(self, reads: Iterable[str] = ()) -> None:
        """Whatever cannot be meant, or could not be written, is said before measuring begins. `reads` is not written over."""
        places = {"--json": self.json, "--markdown": self.markdown}
        check_targets({option: place for option, place in places.items() if place is not None}, reads)
        check_limits(self.precision, self.longest)
        if self.observed_speedup is not None and not 0 < self.observed_speedup < 100:
            raise UserError(f"--observed-speedup {self.observed_speedup:g} is no speedup", "for example 1.2, over BF16")
        self.budget()

    def budget(self) -> Budget | None:
        """Tokens, GPUs and price, if they were asked for."""
        from gemmscope.step.cost import Budget

        return Budget.asked(self.tokens, self.gpus, self.price)


@takes(ModelOptions, RunOptions, ChoiceOptions, StepOptions)
def command(model_options: ModelOptions, run_options: RunOptions, choices: ChoiceOptions, options: StepOptions) -> None:
    """Predict the training step: forward, backward and optimizer of the whole model, in every precision.

    The step is run at the model's own depth with the weights of at most four layers, in the state that training runs in,
    precisions in turn. A waterfall says what becomes of the products' speedup on its way to the step, and a recommendation
    which precision to use, and where not.
    """
    options.check(model_options.files())
    source = model_options.source()
    run, overridden = run_options.run_spec(source)
    outcome = run_steps(source, run, overridden, choices, options)
    outcome.deliver(options.json, options.markdown)
    if outcome.interrupted:
        raise typer.Exit(130)
    if not outcome.found.recipes:
        raise typer.Exit(1)


@dataclass
class Measure:
    """Runs steps of one plan in several ways, saying what for. `interrupted`: Ctrl-C ended one of them."""

    plan: StackPlan
    recipes: list[str]
    settings: StepSettings
    options: StepOptions
    journal: Journal
    config: Mapping[str, Any] | None
    interrupted: bool = False

    def __call__(
        self,
        what: str,
        *,
        real: bool = False,
        recipes: list[str] | None = None,
        mixed: tuple[Plan, ...] = (),
        batch: tuple[int, int] | None = None,
        depth: int | None = None,
    ) -> StepRun:
        from gemmscope.measure.sampler import StoppingRule
        from gemmscope.step.predict import StepRun

        say(what)
        rule = StoppingRule(target=self.options.precision, longest_s=self.options.longest)
        how, of = self.settings, self.plan
        if batch is not None:
            rule = StoppingRule(target=0.02, longest_s=min(self.options.longest, 10.0))
            how, of = replace(how, host=False), of.with_batch(*batch)
        if depth is not None:
            how, of = replace(how, host=False), of.with_depth(depth)
        made = StepRun(
            of, recipes or self.recipes, how, rule, self.journal, sys.argv[1:], real=real, mixed=mixed, config=self.config
        )
        with Progress(made) as show:
            made.on_message = show
            try:
                made.run()
            except KeyboardInterrupt:
                made.rule.why = interrupted(measured=made.results.any_samples())
                self.interrupted = True
        return made


def run_steps(source: ModelSource, run: RunSpec, overridden: list[str], choices: ChoiceOptions, options: StepOptions) -> Stepped:
    """Run everything that was asked for."""
    from gemmscope.gpu.environment import environment
    from gemmscope.step.cost import cost
    from gemmscope.step.plan import plan_step
    from gemmscope.step.predict import StepSettings
    from gemmscope.store.journal import Journal, state_folder

    budget = options.budget()
    if budget is not None:
        budget.replicas(run)  # says if the GPUs do not divide, before anything is measured
    if choices.pre_quantize:
        raise UserError(
            "a step quantizes as it goes: --pre-quantize is for products alone", "leave it out, or see gemmscope bench"
        )
    if options.hugging_face:
        choices = _for_hugging_face(source, run, choices, options)
    if source.model is None:
        raise UserError(f"{source.origin} has no closed form: its step cannot be built", "gemmscope shapes traces it")
    machine = environment()
    choice = choose(choices, machine)
    if choice.backend == "torch":
        raise UserError("PyTorch alone has no layers in low precision to train with", "install transformer_engine or torchao")
    subject = subject_of(source, run, overridden)
    plan, notes = plan_step(source.model, run)
    if options.hugging_face:
        notes = []  # of what the stack leaves out; the model's own layers have all of it
    settings = StepSettings(choice.backend, host=choice.backend != "torchao")
    config = source.config if options.hugging_face else None
    if choice.backend == "cpu":  # it has no clock to settle
        settings = replace(settings, drop_ms=5.0, keep_ms=30.0)
    journal = Journal(state_folder() / "journal.sqlite3")

    measure = Measure(plan, choice.recipes, settings, options, journal, config)
    predicted = measure(f"running the step of {_layers(plan.depth)} in {', '.join(choice.recipes)} …")
    truth, as_deep = _verify(measure, plan, notes) if options.verify and not measure.interrupted else (None, None)
    found = _answer(predicted, truth, as_deep, subject)
    recommended, mixed = _recommend(predicted, found, measure, notes)
    batches = _break_even(found, plan, measure, notes) if options.break_even and not measure.interrupted else []
    costs = {each.recipe: cost(each.step, run, budget) for each in found.recipes} if budget is not None else {}
    runs = [made for made in (predicted, truth, as_deep, mixed) if made is not None]
    said = [*subject.notes, *notes, *(note for made in runs for note in made.notes)]
    return Stepped(
        subject, machine, settings, runs, found, costs, recommended, batches, said, options.observed_speedup, measure.interrupted
    )


def _layers(count: int) -> str:
    """So many of them, in words."""
    return f"{count} layer{'s' if count != 1 else ''}"


def _verify(measure: Measure, plan: StackPlan, notes: list[str]) -> tuple[StepRun | None, StepRun | None]:
    """The real model; and, where only some of its layers fit into memory, the prediction of as many."""
    try:
        truth = measure("running the real model …", real=True)
        depth = max((each.variant.depth for each in truth.results.variants.values() if each.measured), default=plan.depth)
        if depth == plan.depth or measure.interrupted:
            return truth, None
        notes.append(f"the real model fits into memory with {_layers(depth)}: verified against the prediction of as many")
        return truth, measure(f"predicting {_layers(depth)} …", depth=depth)
    except UserError as error:
        notes.append(f"not verified: {error.message}")
        return None, None


def _answer(predicted: StepRun, truth: StepRun | None, as_deep: StepRun | None, subject: Subject) -> StepAnswer:
    from gemmscope.step.answer import answer
    from gemmscope.workload.summary import totals

    summed = totals(subject.workload, subject.run, subject.source.model)
    tokens = subject.run.tokens * subject.run.gradient_accumulation
    real, alike = truth.results if truth else None, as_deep.results if as_deep else None
    return answer(predicted.results, predicted.recipes, summed, tokens, real, alike)


def _recommend(
    predicted: StepRun, found: StepAnswer, measure: Measure, notes: list[str]
) -> tuple[Recommendation | None, StepRun | None]:
    """The fastest plan; a mixed one only after it was run beside the best single recipe, and won. After Ctrl-C, the fastest of
    what had been measured."""
    from gemmscope.step.recommend import Plan, as_asked, best_recipe, candidate, recommend

    if not any(each.recipe != BASELINE for each in found.recipes):
        return None, None
    singles = [Plan(each.recipe) for each in as_asked(found)]
    mixed = candidate(predicted.results, found) if not measure.interrupted else None
    if mixed is None:
        return recommend(predicted.results, singles), None
    rivals = list(dict.fromkeys([BASELINE, best_recipe(found), mixed.recipe]))
    try:
        proof = measure(f"measuring {mixed.words} against {', '.join(rivals)} …", recipes=rivals, mixed=(mixed,))
    except UserError as error:
        notes.append(f"{mixed.words} could not be tried: {error.message}")
        return recommend(predicted.results, singles), None
    plans = [*(Plan(name) for name in rivals), mixed]
    if any(proof.results.step(plan.recipe, plan.left_out) is None for plan in plans):  # cut short, or one of them failed
        return recommend(predicted.results, singles), proof
    return recommend(proof.results, plans), proof


def _break_even(found: StepAnswer, plan: StackPlan, measure: Measure, notes: list[str]) -> list[AtBatch]:
    """The step on smaller batches; this one last."""
    from gemmscope.step.breakeven import AtBatch, smaller_batches

    measured = []
    for batch in smaller_batches(plan.micro_batch_size, plan.sequence_length):
        if measure.interrupted:
            break
        try:
            made = measure(f"running a batch of {batch[0]} x {batch[1]} tokens …", batch=batch)
        except UserError as error:
            notes.append(f"a batch of {batch[0]} x {batch[1]} tokens could not be run: {error.message}")
            continue
        gains = {name: gain for name in made.recipes if (gain := made.results.speedup(name)) is not None}
        failed = {result.variant.recipe: result.failure for result in made.results.variants.values() if result.failure}
        notes += [f"on a batch of {batch[0]} x {batch[1]} tokens, {name} was not measured: {why}" for name, why in failed.items()]
        measured.append(AtBatch(*batch, {name: gain for name, gain in gains.items() if name != BASELINE}))
    here = {each.recipe: each.speedup for each in found.recipes if each.speedup is not None}
    return [*measured, AtBatch(plan.micro_batch_size, plan.sequence_length, here)]


def _for_hugging_face(source: ModelSource, run: RunSpec, choices: ChoiceOptions, options: StepOptions) -> ChoiceOptions:
    """What `--hugging-face` asks of the rest."""
    if source.config is None or source.model is None:
        raise UserError(
            "--hugging-face needs a Hugging Face config", "give it with --config: config.json, its folder, or a hub id"
        )
    if run.recompute == "selective":
        raise UserError(
            "--hugging-face can compute whole layers again, not attention alone", "use --recompute full, or leave out one of them"
        )
    if options.verify:
        raise UserError("--hugging-face runs the real layers already: there is nothing to verify them against", "leave out one")
    if len(set(source.model.layers)) > 1:
        raise UserError(
            f"{source.origin} has layers of several kinds: a few of them do not stand for all", "leave out --hugging-face"
        )
    if run.tp * run.cp * run.ep * run.pp > 1:
        raise UserError(
            "--hugging-face runs whole layers: it cannot split them", "leave out --hugging-face, or --tp and the like"
        )
    if choices.backend not in (None, "torchao", "cpu"):
        raise UserError(f"--hugging-face runs with torchao, not with {choices.backend}", "leave out --backend")
    return choices if choices.backend or choices.device == "cpu" else replace(choices, backend="torchao")
