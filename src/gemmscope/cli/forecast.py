"""`gemmscope forecast`: the same answer for a GPU that is not here. Nothing is measured and torch is not needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from gemmscope.cli.bench import bare_target, model_target
from gemmscope.cli.bench_options import PLOT_ENDINGS, FileOptions, RecipeOptions
from gemmscope.cli.bench_output import Target
from gemmscope.cli.forecast_options import Axis, ForecastOptions, parse_sweeps, recipes_for, with_value
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import check_targets, say, write
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmscope.cli.forecast_output import Forecast
    from gemmscope.forecast.findings import ForecastFindings
    from gemmscope.forecast.gemm import State
    from gemmscope.forecast.linears import Adjustment
    from gemmscope.forecast.sweep import Configuration, Point
    from gemmscope.gpu.specs import GpuSpec
    from gemmscope.model.spec import ModelSpec, RunSpec
    from gemmscope.step.answer import StepAnswer
    from gemmscope.step.cost import Budget, Cost
    from gemmscope.workload.cases import Mode

EXAMPLES = """\b
Examples:
  gemmscope forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --gpu b300,h200
  gemmscope forecast --preset llama-3.1-70b --micro-batch-size 1 --sequence-length 8192 --tp 4 --gpu b200 -o b200.png
  gemmscope forecast --hidden-size 4096 --intermediate-size 16384 --num-attention-heads 32 --num-hidden-layers 24 \\
    --sequence-length 4096 --gpu b300 --sweep hidden_size=2048:8192:1024 --sweep micro_batch_size=1,2,4,8 -o sweep.png
  gemmscope forecast --preset llama-3.1-70b --micro-batch-size 1 --sequence-length 8192 --tp 4 --gpu h200,b300 \\
    --tokens 2e12 --gpus 256 --price h200=2.5,b300=4
  gemmscope forecast --gpu b200 --gemms products.csv
"""

ONLY_LINEARS = ("--cache-weights", "--pre-quantize", "--autocast-only")


@takes(ModelOptions, RunOptions, RecipeOptions, ForecastOptions, FileOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    choices: RecipeOptions,
    options: ForecastOptions,
    outputs: FileOptions,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="N,MxKxN,…", help="Bare products instead of a model: squares and triplets."),
    ] = None,
) -> None:
    """Forecast a model's linears and its training step on GPUs you do not have, in every precision they run.

    Times come from the chip's published rates and from what libraries were measured to make of them; each has a 90% error
    bar, and precisions whose bars overlap are too close to call. --sweep varies a size or two and shows the best precision
    at each; --gemms forecasts single products from a file.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: its products are small, and threads would only wait
    chips, state = options.chips(), options.known_state()
    named = [*model_options.ways(), *(f"--{name.replace('_', '-')}" for name in run_options.typed())]
    if options.gemms is not None:
        named += [*(["--shapes"] if shapes is not None else []), *(["--sweep"] if options.sweep else [])]
        _gemms(options, outputs, named, [*choices.typed(), *options.typed()])
        return
    if options.library is not None:
        raise UserError("--library belongs to --gemms: a model's forecast is that of training's own library", "leave it out")
    outputs.check(model_options.files())
    modes, budgets = choices.modes(), options.budgets(chips)
    options.replicas()
    recipes, notes = recipes_for(choices, chips)
    if options.sweep:
        if shapes is not None:
            raise UserError(
                "--sweep varies a model, and --shapes names bare products: it is one or the other", "keep one of them"
            )
        only = [each for each in (*choices.typed(), *options.typed()) if each in ONLY_LINEARS]
        if only:
            raise UserError(f"--sweep shows the training step, and {', '.join(only)} is about its linears alone", "leave it out")
        if budgets:
            raise UserError("--tokens and --gpus price one run, and --sweep varies it", "leave out one of them")
        _sweep(model_options, run_options, options, outputs, recipes, notes)
        return
    if not named and shapes is None:
        model_options.source()  # says how a model is named
    target = bare_target(model_options, run_options, shapes, on_cpu=False) or _model(model_options, run_options)
    subject = target.subject
    if budgets and (subject is None or subject.source.model is None):
        raise UserError("--tokens and --gpus price a training step, and there is none", "name a model: --config or --preset")
    dp = options.replicas(subject.run if subject is not None else None)
    caches = options.cache_weights
    found = forecast_of(target, chips, recipes, modes, state=state, dp=dp, notes=notes, cache_weights=caches, budgets=budgets)
    found.deliver(outputs)


def forecast_of(
    target: Target,
    chips: Sequence[GpuSpec],
    recipes: Mapping[str, list[str]],
    modes: list[Mode],
    *,
    state: State = "sustained",
    dp: int = 1,
    notes: Sequence[str] = (),
    cache_weights: bool = False,
    budgets: Mapping[str, Budget] | None = None,
) -> Forecast:
    """A model's linears and its step, or bare products, on each chip; with `budgets`, what a run costs there."""
    from gemmscope.cli.forecast_output import Forecast
    from gemmscope.cli.workload import COMPUTED_AGAIN
    from gemmscope.forecast.findings import ForecastFindings
    from gemmscope.forecast.linears import Forecaster
    from gemmscope.forecast.step import StepForecast, step_answer
    from gemmscope.step.cost import cost

    reports: list[ForecastFindings] = []
    answers: dict[str, StepAnswer] = {}
    costs: dict[str, dict[str, Cost]] = {}
    subject, said = target.subject, list(notes)
    for chip in chips:
        measured = calibrated(chip, said)
        forecaster = Forecaster(chip, state, cache_weights=cache_weights, measured=measured)
        reports.append(ForecastFindings(forecaster, target.cases, recipes[chip.name], modes, target.layer))
        if subject is not None and subject.source.model is not None:
            model, run, workload = subject.source.model, subject.run, subject.workload
            step = StepForecast(forecaster, model, run, workload, dp)
            answers[chip.name] = step_answer(step, recipes[chip.name], model, run, workload)
            if budgets:
                steps = answers[chip.name].recipes
                costs[chip.name] = {each.recipe: cost(each.step, run, budgets[chip.name]) for each in steps}
    if subject is not None and subject.source.model is None:
        said.append("a traced model's linears are forecast, not its step")
    if answers and subject is not None and subject.run.pp > 1 and subject.run.pp_stage is not None:
        said.append(
            f"the step is stage {subject.run.pp_stage}'s own; a pipeline goes at its slowest stage's pace: leave out --pp-stage"
        )
    about = [f"{note}; the step includes it" if answers and note == COMPUTED_AGAIN else note for note in target.notes]
    return Forecast(target, reports, answers, state, dp, [*about, *said], costs)


def calibrated(chip: GpuSpec, notes: list[str], *, own_only: bool = False) -> Adjustment | None:
    """What was measured on this chip, by this user or (unless `own_only`) for this package; a note says so."""
    from gemmscope.forecast.calibration import load, place, shipped

    own = load(chip.name)
    found = own or (None if own_only else shipped(chip.name))
    if found is None:
        return None
    where = str(place(chip.name)) if own else "ships with gemmscope; your own replaces it"
    notes.append(f"{chip.name}: calibrated on {found.device} by gemmscope calibrate ({where})")
    return found.adjustment(other_chip=own is None)


def _model(model_options: ModelOptions, run_options: RunOptions) -> Target:
    source = model_options.source()
    run, overridden = run_options.run_spec(source)
    return model_target(source, run, overridden)


def _gemms(options: ForecastOptions, outputs: FileOptions, named: list[str], unused: list[str]) -> None:
    """Single products from a file, as CSV to where -o or --csv says, else to standard output."""
    from gemmscope.cli.forecast_gemms import gemms_csv

    if named:
        raise UserError(f"--gemms forecasts single products, and {', '.join(named)} describes a model", "keep one of them")
    if unused:
        raise UserError(
            f"--gemms forecasts single products in the formats of its file: {', '.join(unused)} changes nothing", "leave it out"
        )
    if outputs.output is not None and outputs.output.lower().endswith(PLOT_ENDINGS):
        raise UserError(f"--gemms draws no picture, and -o {shown(outputs.output)} names one", "for example -o times.csv")
    for option, place in (("--json", outputs.json), ("--markdown", outputs.markdown)):
        if place is not None:
            raise UserError(f"--gemms writes CSV only, not {option}", "name a place with --csv or -o; without, it is printed")
    if outputs.csv is not None and outputs.output is not None:
        raise UserError("--csv and -o both name a place for the products", "keep one of them")
    where = outputs.csv or outputs.output or "-"
    assert options.gemms is not None
    check_targets({"--csv" if outputs.csv else "-o": where}, [options.gemms])
    library = options.library.strip().lower() if options.library else None
    notes: list[str] = []
    chips = [(chip, calibrated(chip, notes, own_only=True) if library is None else None) for chip in options.chips()]
    text, basis = gemms_csv(options.gemms, chips, options.known_state(), library)
    write(where, text)
    say("FORECAST, not measured; low_ms and high_ms are the ends of the 90% error bar")
    for line in (*basis, *(f"note: {note}, products only" for note in notes)):
        say(line)


def _sweep(
    model_options: ModelOptions,
    run_options: RunOptions,
    options: ForecastOptions,
    outputs: FileOptions,
    recipes: dict[str, list[str]],
    notes: list[str],
) -> None:
    """The plane of configurations on every GPU."""
    from gemmscope.cli.forecast_output import Swept
    from gemmscope.forecast.linears import Forecaster
    from gemmscope.forecast.sweep import forecast_points

    axes = parse_sweeps(options.sweep or [])
    possible, impossible = _configurations(axes, model_options, run_options)
    swept: dict[str, list[Point]] = {}
    for chip in options.chips():
        forecaster = Forecaster(chip, options.known_state(), measured=calibrated(chip, notes))
        points = forecast_points(forecaster, possible, recipes[chip.name], options.replicas())
        order = {point.values: point for point in [*points, *impossible]}
        swept[chip.name] = [order[values] for values in sorted(order)]
    Swept(axes, swept, recipes, options.known_state(), notes).deliver(outputs)


def _described(model: ModelOptions, run: RunOptions) -> tuple[ModelSpec, RunSpec]:
    """The model and the run of these options; only a closed form can be varied."""
    source = model.source()
    if source.model is None:
        raise UserError(f"{source.origin} is traced: it cannot be varied", "give a model that has a closed form")
    return source.model, run.run_spec(source)[0]


def _configurations(
    axes: list[Axis], model_options: ModelOptions, run_options: RunOptions
) -> tuple[list[Configuration], list[Point]]:
    """Every combination that is possible, and the others with the reason. If none is, that reason is the answer."""
    from itertools import product

    from gemmscope.forecast.sweep import Point
    from gemmscope.workload.sharding import check

    possible: list[Configuration] = []
    impossible: list[Point] = []
    first: UserError | None = None
    for values in product(*(axis.values for axis in axes)):
        model, run = model_options, run_options
        for axis, value in zip(axes, values, strict=True):
            model, run = with_value(model, run, axis.name, value)
        try:
            described, spec = _described(model, run)
            check(described, spec)
            possible.append((values, described, spec))
        except UserError as error:
            first = first or error
            impossible.append(Point(values, why_not=error.message))
    if not possible and first is not None:
        raise first
    return possible, impossible
