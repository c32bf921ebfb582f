"""`gemmscope plan`: the fastest layouts of a model on a number of GPUs, among all that divide and fit. Nothing is measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from gemmscope import signals
from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.findings import Fact, Finding, finding
from gemmscope.forecast.calibration import calibrated
from gemmscope.forecast.communication import network_of
from gemmscope.forecast.gpus_and_recipes import choose_recipes, common_fields, known_state, one_chip
from gemmscope.forecast.layouts import AXES, FAST_HOST_GBPS, LISTS, PlanTask, Pruning, Space, layouts, splits
from gemmscope.forecast.linear_results import padded_experts
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import memory_of
from gemmscope.forecast.plan import MOST_LISTED, Search, order, pruned, ranked, run_searches, smallest_layout
from gemmscope.forecast.stacks import software_on, stacks
from gemmscope.gpu.specs import GB, GpuSpec
from gemmscope.interval import Interval
from gemmscope.job.load import NO_FILE, assumption, usual_length
from gemmscope.model.limits import check_size
from gemmscope.model.spec import ModelSource, ModelSpec, RunSpec
from gemmscope.model.vary import SIZES, check_varied, varied
from gemmscope.options.estimating import LayoutOptions, PlanOptions
from gemmscope.paste.emit import layout_to_paste
from gemmscope.recipe.recipes import recipe
from gemmscope.results.base import ModelSummary
from gemmscope.results.plan import PlanPoint, PlanResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.step.cost import Budget
from gemmscope.sweep.axes import possible_points
from gemmscope.workload.sharding import check
from gemmscope.workload.summary import count_parameters

VARIED = (*SIZES, "sequence")
ALSO_CALLED = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_experts": "experts",
    "sequence_length": "sequence",
}
MOST_POINTS = 100
WORTH_SAYING = 0.005  # of a step
KINDS = {"context": "keys and values (context parallelism)", "stages": "activations between pipeline stages"}
MOST_GPUS = 1 << 17
MOST_DOUBLINGS = 10
SETTINGS = ("lora", "lora_linears", "imbalance", "optimizer_state", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")
"""Settings that all layouts of a plan share."""
OF_FILE = (*SETTINGS, "vocab_multiple", "separate_projections", "sequence_parallel_linears")
"""Settings taken from the model's file: those that are not part of a layout."""


def plan(source: ModelSource, options: PlanOptions, context: RunContext = PLAIN) -> PlanResult:
    """The layouts of a model on a number of GPUs of one type: the fastest first. A signal ends it early, with the layouts that
    were computed until then."""
    if flags := [name for name in ("pre_quantize", "autocast_only") if getattr(options, name)]:
        raise UserError(f"{option(flags[0])} applies only to linears, but a plan is about training steps", "remove it")
    chip, clocks = one_chip(options.gpu, options.power_limit), known_state(options.state)
    links = network_of(chip, options.network, options.nvlink_domain)
    if source.model is None:
        raise UserError(f"{source.origin} is traced, so its layouts are unknown", "give a model that has a closed form")
    if options.gpus is None:
        raise UserError(f"{option('gpus')} is not given: the number of GPUs to train on", f"for example {option('gpus', 64)}")
    count = check_size(option("gpus"), options.gpus, "parallel")
    typed = {"sequence_length": options.sequence_length, "global_batch": options.global_batch}
    of_model = {"sequence_length": source.run_settings.get("sequence_length"), "global_batch": source.global_batch}
    given = {name: of_model[name] if value is None else value for name, value in typed.items()}
    assumed = {"sequence_length": usual_length(source)} if given["sequence_length"] is None else {}
    length = check_size(option("sequence_length"), {**given, **assumed}["sequence_length"], "sequence_length")
    if given["global_batch"] is None:  # some sequences for every GPU
        assumed["global_batch"] = ceil(NO_FILE["tokens_per_step"] / length / count) * count
    batch = check_size(option("global_batch"), {**given, **assumed}["global_batch"], "sequence_length")
    Budget(options.tokens if options.tokens is not None else 1e9, count, options.price)  # checks them
    names, recipe_findings = choose_recipes([chip], options, source.framework)[chip.name]
    if options.recipes is not None:  # BF16 only if it was named
        named = {recipe(name).name for name in options.recipes}
        names = [name for name in names if name in named]
    of_file = {name: value for name, value in source.run_settings.items() if name in OF_FILE}
    settings = {name: value for name in SETTINGS if (value := getattr(options, name)) not in (None, ())}
    settings |= {"lora_linears": tuple(settings["lora_linears"])} if "lora_linears" in settings else {}
    adjustment, calibration_findings = calibrated(chip.name)
    software = software_on(chip, options.stack, source.stack, names if options.recipes is not None else (), gpus=count)
    possible = {name: tuple(of) for name, of in stacks()[software.name].layouts.items()} if software.name in stacks() else {}
    space = Space(possible | _restricted(options), {"optimizer_state": "fp32", **of_file, **settings})  # the same in all layouts
    check(source.model, RunSpec(1, length, **space.settings))
    sizes = _axes(options.vary or {}, source.model)
    forecaster = Forecaster(chip, clocks, measured=adjustment, software=software)
    with signals.defer_signals() as deferred:
        task = PlanTask(source.model, count, batch, length, links.domain, offloads=links.host_gbps >= FAST_HOST_GBPS)
        tasks, impossible = _tasks(source.model, sizes, task)
        searches = [Search(task, space) for _, task in tasks]
        wanted = sum(len(search.runs) for search in searches) * len(names)
        _check_any(searches, space)
        with context.reporter.counting("layouts", wanted) as show:
            done = run_searches(forecaster, searches, names, links, deferred, show)
        if done < wanted:
            if not any(search.candidates for search in searches):
                raise deferred.interruption()
            deferred.answered, deferred.outcome = True, f"{done} of {wanted} layouts were computed"
    most = MOST_LISTED // len(searches)
    points = [_point(values, search, forecaster, names, most) for (values, _), search in zip(tasks, searches, strict=True)]
    fitting = [(point, search) for point, search in zip(points, searches, strict=True) if point.layouts]
    if not fitting:
        raise _nothing_fits(points[0], searches[0], chip, count, sizes)
    first, winner = fitting[0]
    best = first.best or first.layouts[0]
    layers = source.model.layers
    experts = any(layer.is_moe for layer in layers)
    interrupted = [] if done == wanted else [finding("plan-interrupted", layouts=done, wanted=wanted)]
    return PlanResult(
        **common_fields(context.command, clocks),
        origin=source.origin,
        model=ModelSummary.of(source.model, source.model.name, source.origin),
        run=sorted(winner.candidates, key=order)[first.layouts.index(best)].run,
        findings=(
            finding("forecast-not-measured"),
            *([assumption(assumed)] if assumed else []),
            *source.findings,
            *interrupted,
            *_findings(points[0], searches[0], chip, source, names),
            *(padded_experts(names) if experts else ()),
            *recipe_findings,
            *calibration_findings,
        ),
        gpu=chip.name,
        title=chip.title,
        gpus=count,
        memory_gb=chip.memory_bytes / GB,
        network_gbps=links.gbps,
        network=links.name,
        nvlink_domain=links.domain,
        tokens=options.tokens,
        price=options.price,
        recipes=tuple(names),
        points=(*points, *impossible),
        varied=tuple(sizes),
        ready_to_paste={} if sizes or best.may_not_fit else layout_to_paste(best, batch, length, len(layers), experts=experts),
        interrupted=done < wanted,
    )


def _restricted(options: LayoutOptions) -> dict[str, tuple[Any, ...]]:
    """The values of each axis, checked; one value stands for a list of it."""
    result = {}
    for name in AXES:
        if (values := getattr(options, name)) is None:
            continue
        listed = tuple(values) if isinstance(values, (list, tuple, range, set)) else (values,)
        if not listed:
            raise UserError(f"{option(name)} has no values", f"for example {option(name, '1,2,4')}")
        for value in listed:
            if name not in LISTS:
                check_size(option(name), value, "micro_batch_size" if name == "micro_batch_size" else "parallel")
            elif value not in LISTS[name]:
                known = ", ".join(map(str, LISTS[name]))
                raise UserError(f"{option(name)} must be some of {known}, not {shown(value)}", "separate several by commas")
        result[name] = tuple(dict.fromkeys(listed))
    return result


def _axes(vary: Mapping[str, Sequence[int]], model: ModelSpec) -> dict[str, list[int]]:
    """The sizes to vary by their short names, with their values; a `UserError` for what cannot vary."""
    axes: dict[str, list[int]] = {}
    for name, values in vary.items():
        size = ALSO_CALLED.get(name, name)
        if size not in VARIED:
            similar = did_you_mean(name, [*VARIED, *ALSO_CALLED], 1)
            raise UserError(f"{shown(name)} is not a size that a plan can vary", f"{similar}sizes: {', '.join(VARIED)}")
        if not values:
            raise UserError(f"{option('vary')} gives {name} no values", f"for example {option('vary', 'hidden=5120,6144')}")
        axes[size] = list(dict.fromkeys(values))
    if (points := prod(map(len, axes.values()))) > MOST_POINTS:
        raise UserError(f"{option('vary')} makes {points} models, more than {MOST_POINTS}", "give fewer values")
    check_varied(model, axes)
    return axes


def _tasks(
    model: ModelSpec, axes: Mapping[str, Sequence[int]], task: PlanTask
) -> tuple[list[tuple[dict[str, int], PlanTask]], list[PlanPoint]]:
    """A task for every combination of sizes, and the combinations that make no model, with the reason."""

    def described(values: Mapping[str, int]) -> PlanTask:
        other = varied(model, {name: value for name, value in values.items() if name in SIZES})
        return replace(
            task,
            model=other,
            sequence_length=check_size("sequence", values.get("sequence", task.sequence_length), "sequence_length"),
        )

    tasks, impossible = possible_points(axes, described)
    about = PlanPoint(
        values={}, model=ModelSummary.of(model, model.name, model.source), parameters=0, global_batch=task.global_batch,
        sequence_length=task.sequence_length,
    )  # fmt: skip
    return tasks, [about.model_copy(update={"values": values, "why_not": why}) for values, why in impossible]


def _check_any(searches: Sequence[Search], space: Space) -> None:
    """A `UserError` if nothing divides, with sizes that do."""
    if any(search.runs for search in searches):
        return
    task = searches[0].task
    given = " ".join(option(name, ",".join(map(str, values))) for name, values in space.given.items())
    if ranks := sorted({split["dp"] for split in splits(task, space, Pruning())}):
        size = min(space.given.get("micro_batch_size", (1,))) * ranks[0]
        below = task.global_batch // size * size
        near = [option("global_batch", batch) for batch in (below, below + size) if batch]
        message = f"{option('global_batch', task.global_batch)} does not split over {task.gpus} GPUs in any layout"
        raise UserError(f"{message} with {given}" if given else message, f"the nearest that work: {' or '.join(near)}")
    for name, values in space.given.items():
        others = Space({axis: kept for axis, kept in space.given.items() if axis != name}, space.settings)
        if possible := sorted({getattr(run, name) for run in layouts(task, others, Pruning())}, key=str):
            listed = ", ".join(map(str, sorted(possible)))
            wrong = option(name, ",".join(map(str, values)))
            raise UserError(f"{wrong}: no layout of {task.model.name} on {task.gpus} GPUs has it", f"possible values: {listed}")
    message = f"no layout of {task.model.name} divides into {task.gpus} GPUs"
    power_of_two = 1 << (task.gpus.bit_length() - 1)
    raise UserError(f"{message} with {given}" if given else message, f"for example {option('gpus', power_of_two)}")


def _point(values: dict[str, int], search: Search, forecaster: Forecaster, names: Sequence[str], most: int) -> PlanPoint:
    task = search.task
    listed = ranked(search, forecaster, most)
    smallest = smallest_layout(search) if not listed else None
    if smallest is not None:
        smallest = smallest.model_copy(update={"gpus_needed": _gpus_needed(search, forecaster.chip, names)})
    return PlanPoint(
        values=values,
        model=ModelSummary.of(task.model, task.model.name, task.model.source),
        parameters=count_parameters(task.model)[0],
        global_batch=task.global_batch,
        sequence_length=task.sequence_length,
        layouts=tuple(listed),
        fitting=sum(candidate.fit != "may not fit" for candidate in search.candidates),
        pruned=pruned(search.pruning),
        smallest=smallest,
        why_not="" if listed else "no layout fits in memory" if search.runs else "no layout divides",
    )


def _gpus_needed(search: Search, chip: GpuSpec, names: Sequence[str]) -> int | None:
    """The smallest number of GPUs with which some layout fits: doubled again and again, with as large a batch as they need."""
    task = search.task
    small = Space({**search.space.given, "micro_batch_size": (1,)}, search.space.settings)
    for doublings in range(1, MOST_DOUBLINGS + 1):
        gpus = task.gpus << doublings
        if gpus > MOST_GPUS:
            return None
        other = replace(task, gpus=gpus, global_batch=-(-task.global_batch // gpus) * gpus)
        for run in layouts(other, small, Pruning()):
            needed = memory_of(task.model).rank(run, names, chip)
            if any(memory.fit in ("fits", "tight") for memory in needed.values()):
                return gpus
    return None


def _nothing_fits(point: PlanPoint, search: Search, chip: GpuSpec, gpus: int, sizes: Mapping[str, Any]) -> UserError:
    smallest = point.smallest
    if smallest is None:
        return UserError(f"no layout of {point.model.name} can be forecast on {gpus} {chip.name}", "try other sizes")
    model = "any of these models" if sizes else point.model.name
    message = (
        f"no layout of {model} fits on {gpus} {chip.name} with {chip.memory_bytes / GB:.0f} GB each: the smallest needs "
        f"{smallest.memory_gb:.0f} GB per GPU ({smallest.recipe}, {smallest.layout})"
    )
    needed = smallest.gpus_needed
    hint = f"it fits with {option('gpus', needed)}" if needed is not None else "use GPUs with more memory, or a shorter sequence"
    if all(run.state_precision != "bf16" for run in search.runs):
        hint += f"; {option('optimizer_state', 'bf16')} instead of FP32 states needs less"
    if any(rule.rule.startswith("fsdp") for rule in point.pruned) and all(run.zero_stage < 3 for run in search.runs):
        hint += f"; or try FSDP: {option('zero', 3)}"
    return UserError(message, hint)


def _findings(point: PlanPoint, search: Search, chip: GpuSpec, source: ModelSource, names: Sequence[str]) -> Iterator[Finding]:
    """Findings about the best layout of the first model, the layout of the model's file, and recipes that no layout runs in."""
    possible, reason = {candidate.recipe for candidate in search.candidates}, search.pruning.examples.get("recipe", "")
    if reason and (impossible := [name for name in names if name not in possible]):
        yield finding("plan-recipes-excluded", recipes=impossible, reason=reason)
    if point.best is None:
        return
    if unsure := [layout for layout in point.layouts if layout.may_not_fit]:
        first = min(unsure, key=lambda layout: layout.step_ms.value)
        about: dict[str, Fact] = {"needed_gb": first.memory_gb, "memory_gb": chip.memory_bytes / GB, "recipe": first.recipe}
        yield finding(
            ("plan-only-may-fit" if point.best.may_not_fit else "plan-may-not-fit"),
            count=len(unsure),
            layout=first.splits,
            **about,
        )
    if point.best.tight:
        yield finding("plan-memory-tight", needed_gb=point.best.memory_gb, memory_gb=chip.memory_bytes / GB)
    if point.best.host_bound:
        yield finding("plan-host-bound")
    settings = {name: source.run_settings[name] for name in AXES if name in source.run_settings}
    if settings and not point.values:
        yield _file_layout(source.origin, settings, point)
    step = min(search.candidates, key=order).step
    kinds = [
        KINDS.get(exchange.kind, exchange.kind)
        for exchange in step.exchanged
        if exchange.basis == "prior" and max(exchange.exposed_ms, exchange.unsure_ms) > WORTH_SAYING * step.time_ms
    ]
    if kinds:  # the best layout waits for communication whose overlap was not checked against any published run
        yield finding("plan-prior", kinds=kinds)


def _file_layout(origin: str, settings: Mapping[str, Any], point: PlanPoint) -> Finding:
    """Where the layout of the model's file stands, in the recipe that suits it best."""
    layout = ", ".join(f"{name} {value}" for name, value in settings.items())
    for rank, listed in enumerate(point.layouts, start=1):
        if all(getattr(listed, name) == value for name, value in settings.items()):
            slower = listed.slowdown if listed.slowdown is not None else Interval(1.0, 1.0, 1.0)
            of_file = {"origin": origin, "layout": layout, "recipe": listed.recipe}
            return finding("plan-file-layout", **of_file, rank=rank, fitting=point.fitting, slowdown=slower)
    return finding("plan-file-layout-excluded", origin=origin, layout=layout)
