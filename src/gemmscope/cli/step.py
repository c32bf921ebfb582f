"""`gemmscope step`: predicts the training step in every precision, and verifies it where asked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gemmscope.cli.bench_options import ChoiceOptions
from gemmscope.cli.choose import choose
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import write
from gemmscope.cli.workload import Subject, subject_of
from gemmscope.errors import UserError

if TYPE_CHECKING:
    from gemmscope.step.answer import StepAnswer
    from gemmscope.step.predict import StepRun

EXAMPLES = """\b
Examples:
  gemmscope step --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --pp 4
  gemmscope step --config config.json --micro-batch-size 4 --sequence-length 4096 --recipes fp8current --verify
"""


@takes(ModelOptions, RunOptions, ChoiceOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    choices: ChoiceOptions,
    verify: Annotated[bool, typer.Option("--verify", help="Also run the real model, as deep as memory allows.")] = False,
    precision: Annotated[float, typer.Option(metavar="SHARE", help="Go on until every speedup is known this well.")] = 0.01,
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="Stop measuring after so long all the same.")] = 40.0,
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None,
) -> None:
    """Predict the training step: forward, backward and optimizer of the whole model, in every precision.

    The step is run at the model's own depth with the weights of at most four layers, in the state that training runs in,
    precisions in turn. A waterfall says what becomes of the products' speedup on its way to the step.
    """
    from gemmscope.gpu.environment import environment
    from gemmscope.measure.sampler import StoppingRule
    from gemmscope.report import formats
    from gemmscope.report.step import sentences, tables
    from gemmscope.step.plan import plan_step
    from gemmscope.step.predict import StepRun, StepSettings
    from gemmscope.store.journal import Journal, state_folder

    source = model_options.source()
    run, overridden = run_options.run_spec(source)
    if source.model is None:
        raise UserError(f"{source.origin} has no closed form: its step cannot be built", "gemmscope shapes traces it")
    choice = choose(choices, environment())
    if choice.backend == "torch":
        raise UserError("PyTorch alone has no layers in low precision to train with", "install transformer_engine or torchao")
    subject = subject_of(source, run, overridden)
    plan, notes = plan_step(source.model, run)
    settings = StepSettings(choice.backend, host=choice.backend != "torchao")
    journal = Journal(state_folder() / "journal.sqlite3")

    def step_run(*, real: bool) -> StepRun:
        rule = StoppingRule(target=precision, longest_s=longest)
        return StepRun(plan, choice.recipes, settings, rule, journal, command=sys.argv[1:], real=real)

    predicted = step_run(real=False)
    predicted.run()
    truth = step_run(real=True) if verify else None
    if truth is not None:
        truth.run()
    found = _answer(predicted, truth, subject)
    above = [f"{subject.name} on {predicted.results.hello.get('device', {}).get('name', 'this machine')}", predicted.rule.why]
    warnings = [f"warning: {words}" for words in predicted.results.warnings]
    said = [*subject.notes, *notes, *predicted.notes, *(truth.notes if truth else ())]
    below = [*warnings, *sentences(found), *(f"note: {note}" for note in said)]
    if markdown is not None:
        write(markdown, formats.markdown(tables(found), above, below))
    if markdown != "-":
        formats.print_tables(tables(found), above, below)


def _answer(predicted: StepRun, truth: StepRun | None, subject: Subject) -> StepAnswer:
    from gemmscope.step.answer import answer
    from gemmscope.workload.summary import totals

    summed = totals(subject.workload, subject.run, subject.source.model)
    tokens = subject.run.tokens * subject.run.gradient_accumulation
    return answer(predicted.results, predicted.recipes, summed, tokens, truth.results if truth else None)
