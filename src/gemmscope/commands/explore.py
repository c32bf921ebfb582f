"""`gemmscope explore`: the training step on GPUs, with stacks, batches, layouts and recomputation, computed for one page.

Every point is what `gemmscope forecast` prints for it, as texts: the answer, its reasons, and the table of recipes.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

from gemmscope import signals, units
from gemmscope.choices import RECOMPUTE
from gemmscope.document.common import phrase, same_model
from gemmscope.document.palette import part_key, recipe_key
from gemmscope.document.step_parts import step_answer, step_summary
from gemmscope.errors import UserError, in_shell, option
from gemmscope.forecast.calibration import calibrated
from gemmscope.forecast.communication import network_of
from gemmscope.forecast.gpus_and_recipes import chips_of, choose_recipes
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import rank_memory
from gemmscope.forecast.processes import computed, processes_for
from gemmscope.forecast.stacks import software_on, stacks_on
from gemmscope.forecast.step import StepForecast, forecast_step
from gemmscope.forecast.sweep import AT_A_TIME, Configuration, points_of
from gemmscope.gpu.specs import GpuSpec
from gemmscope.job.load import model_run, usual_length
from gemmscope.model.spec import ModelSource, ModelSpec
from gemmscope.options.declare import options_of
from gemmscope.options.estimating import ExploreOptions
from gemmscope.options.job import ModelOptions
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.step.cost import Budget
from gemmscope.workload.sharding import check, check_schedule

BATCHES, STACKS = (1, 2, 4, 8), ("nvidia", "torchtitan", "pytorch")
SPLITS = (("tp", 2), ("tp", 4), ("tp", 8), ("pp", 2), ("pp", 4), ("cp", 2), ("ep", 8))
ACCUMULATION = 8  # micro-batches of a step: with one, sharding and pipelines would dominate it
MOST_POINTS = 50_000
WORTH_SHARING = 400  # points
Settings = dict[str, Any]


def explore(source: ModelSource, options: ExploreOptions, context: RunContext = PLAIN) -> Settings:
    """The data of the page: its controls, and a point for every combination of their values, in their order."""
    if source.model is None:
        raise UserError(f"{source.origin} is traced and cannot be varied", "give a model that has a closed form")
    chips, longest = chips_of(options.gpu), usual_length(source)
    lengths = options.sequence_length or (longest, longest // 2, longest // 4)
    usual = [name for name in STACKS if all(name in [stack.name for stack in stacks_on(chip)] for chip in chips)]
    controls: dict[str, dict[str, Settings]] = {
        "GPU": {chip.title: {"gpu": chip.name} for chip in chips},
        "Software": {"not named": {}, **{name: {"stack": name} for name in options.stack or usual}},
        "Layout": dict(_layouts(source.model, options.gpus)),
        "Micro-batch": {str(batch): {"micro_batch_size": batch} for batch in options.micro_batch_size or BATCHES},
        "Sequence": {f"{length:,}": {"sequence_length": length} for length in lengths},
        "Recomputation": {kind: {"recompute": kind} for kind in RECOMPUTE},
    }
    if (wanted := prod(map(len, controls.values()))) > MOST_POINTS:
        raise UserError(f"the page would have {wanted:,} points, more than {MOST_POINTS:,}", "name fewer GPUs, stacks or sizes")
    recipes, points = choose_recipes(chips, options, source.framework), list[Settings]()
    fixed = {"gradient_accumulation": ACCUMULATION}
    runs = [
        {**fixed, **layout, **batch, **length, **kind}
        for layout, batch, length, kind in product(*[list(choices.values()) for choices in list(controls.values())[2:]])
    ]
    with signals.defer_signals() as pending, context.reporter.counting("points", wanted) as show:
        for chip, stack in product(chips, controls["Software"].values()):
            points += _points(source, source.model, chip, stack.get("stack"), recipes[chip.name][0], runs, options, pending)
            show(len(points))
    if pending.first is not None:
        raise pending.interruption()
    cost = units.tokens(options.tokens) + (f" at {options.price:g} per GPU-hour" if options.price is not None else "")
    given = {name: getattr(options, name) for name in ("tokens", "price", "recipes")}
    shared = {name: ",".join(value) if name == "recipes" else f"{value:g}" for name, value in given.items() if value is not None}
    named = same_model("forecast", context, "", tuple(options_of(ModelOptions)))
    return {
        "model": source.model.name,
        "about": [
            source.model.describe(),
            phrase("explore-fixed", micro_batches=ACCUMULATION, cost=cost),
            phrase("clocks-sustained"),
        ],
        "command": " ".join([named, *_flags({**fixed, **shared})]),
        "controls": [
            [name, [[label, " ".join(_flags(own))] for label, own in known.items()]] for name, known in controls.items()
        ],
        "points": points,
    }


def _layouts(model: ModelSpec, gpus: int) -> Iterator[tuple[str, Settings]]:
    """One GPU, then this many: data parallel, sharded, and with each way to split the model."""
    yield "1 GPU", {"gpus": 1}
    whole: Settings = {"gpus": gpus, "zero": 1}
    if gpus > 1:
        yield f"{gpus} GPUs, data parallel", whole
        yield f"{gpus} GPUs, FSDP", {**whole, "zero": 3}
    experts = any(layer.is_moe for layer in model.layers)
    for name, size in SPLITS:
        if gpus % size == 0 and gpus >= size and (name != "ep" or experts):
            yield f"{gpus} GPUs, {name.upper()}{size}", {**whole, name: size}


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [in_shell(option(name, value)) for name, value in settings.items()]


def _points(
    source: ModelSource, model: ModelSpec, chip: GpuSpec, stack: str | None, recipes: Sequence[str], runs: Sequence[Settings],
    options: ExploreOptions, pending: signals.DeferredSignals,
) -> list[Settings]:  # fmt: skip
    """Every run on one GPU with one stack; a run that is not possible has only the reason."""
    points: dict[int, Settings] = {}
    by_software: dict[bool, list[Configuration]] = {True: [], False: []}  # on several GPUs, an unnamed stack is any of them
    for place, settings in enumerate(runs):
        try:
            run = model_run(source, **settings).run
            check(model, run)
            check_schedule(run)
            by_software[run.gpus > 1].append(({"place": place}, model, run))
        except UserError as error:
            points[place] = {"why_not": in_shell(error.message)}
    links, point = network_of(chip, None, None), partial(_point, options.tokens, options.price)
    for several, possible in by_software.items():
        software = software_on(chip, stack, source.stack, gpus=1 + several)
        forecaster = Forecaster(chip, "sustained", measured=calibrated(chip.name)[0], software=software)
        shares = partial(points_of, forecaster, possible, recipes, links, point)
        starts = range(0, len(possible), AT_A_TIME)
        for some in computed(shares, starts, processes_for(len(possible), WORTH_SHARING), pending):
            points.update(some)
    return [points.get(place, {}) for place in range(len(runs))]


def _point(
    tokens: float, price: float | None, values: dict[str, int], model: ModelSpec, forecast: StepForecast, recipes: Sequence[str]
) -> tuple[int, Settings]:
    """What `gemmscope forecast` says about one run, and the parts of the step in every recipe."""
    chip, run = forecast.forecaster.chip, forecast.run
    memory = [rank_memory(model, run, name, chip) for name in recipes]
    times = forecast_step(forecast, recipes, Budget(tokens, run.gpus, price), memory)
    answer, because = step_answer(times, chip.title)
    summary = step_summary({chip.name: times})
    return values["place"], {
        "answer": answer,
        "because": because,
        "columns": [column.name for column in summary.columns] if summary is not None else [],
        "rows": [[cell.text for cell in row] for row in summary.rows] if summary is not None else [],
        "best": times.winner.best if times.winner is not None else "",
        "colors": [recipe_key(time.recipe, place) for place, time in enumerate(times.recipes)],
        "parts": [[[part, part_key(part), round(ms, 3)] for part, ms in time.parts_ms.items()] for time in times.recipes],
    }
