"""The search of `gemmscope plan`: memory and training step of every layout of a model, ranked, and compared with the best.

Memory comes first: layouts that do not fit are not forecast. Layouts that differ only in virtual stages or sharding run the same
GEMMs, which are derived once. The shares of the work go to several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import ceil, sqrt
from typing import Any, NamedTuple, get_args

from gemmscope import signals
from gemmscope.forecast.communication import Network
from gemmscope.forecast.estimate import Estimate
from gemmscope.forecast.layouts import OF_SPLITS, RULES, PlanTask, Pruning, Space, layouts
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import memory_of
from gemmscope.forecast.processes import computed, no_garbage_collection, processes_for
from gemmscope.forecast.stacks import WAITING
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import CHANGED, StepEstimate
from gemmscope.gpu.specs import GB, GpuSpec
from gemmscope.interval import Interval
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import Fit
from gemmscope.results.plan import PlanLayout, Pruned, SmallestLayout
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals

AT_A_TIME = 60  # runs of one share
WORTH_SHARING = 300  # runs
MOST_KEPT = 50_000  # GEMMs remembered from one share to the next
ALIKE_WAITING = 0.8  # of the errors of one kind of exchange, or of the host, what two layouts have alike
ALIKE_SOFTWARE = 0.85  # of the errors of whole steps: each release runs some layouts better than others
SHAPES = ("tp", "cp", "ep", "etp", "micro_batch_size")  # what decides the sizes of GEMMs
MOST_LISTED = 10_000  # layouts of one result: run files with more values are not read
MAY_NEED = 1.22  # of the memory of a GPU: published layouts that ran usually need up to 1.21 of it, with settings that need less
LESS_RECOMPUTED = (0.25, 0.5, 0.75)  # of the layers
BESIDE_BATCH = ("tp", "cp", "pp", "vp", "ep", "etp", "zero", "recompute", "offloaded_layers")
FITS: tuple[Fit, ...] = get_args(Fit)
Fitting = tuple[StepForecast, dict[str, tuple[float, Fit, float]]]  # a run, with its memory in GB and the verdict in each recipe
Smallest = tuple[float, int, str]  # the least memory that was seen, in GB, by which run in which recipe


class Candidate(NamedTuple):
    """A layout that fits, in one recipe."""

    run: RunSpec
    recipe: str
    step: StepEstimate
    memory_gb: float
    fit: Fit
    most_gb: float


@dataclass
class Search:
    """The search for one model: its valid layouts, and the candidates among them."""

    task: PlanTask
    space: Space
    pruning: Pruning = field(default_factory=Pruning)
    runs: list[RunSpec] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    smallest: Smallest | None = None

    def __post_init__(self) -> None:
        self.runs = list(layouts(self.task, self.space, self.pruning))


@dataclass
class _Share:
    """The result of one share of the work: the number of its search, and of its first run."""

    place: tuple[int, int]
    candidates: list[Candidate]
    pruning: Pruning
    smallest: Smallest | None
    layouts: int


def run_searches(
    forecaster: Forecaster,
    searches: Sequence[Search],
    recipes: Sequence[str],
    network: Network,
    pending: signals.DeferredSignals,
    on_layouts: Callable[[int], None],
) -> int:
    """Fill in the candidates of every search. Returns how many layouts were computed: a signal ends the search early.

    `on_layouts` is called with the number so far.
    """
    places = [(index, first) for index, search in enumerate(searches) for first in range(0, len(search.runs), AT_A_TIME)]
    runs = sum(len(search.runs) for search in searches)
    function, done, shares = partial(_share, forecaster, searches, recipes, network), 0, list[_Share]()
    for share in computed(function, _spread(places), processes_for(runs, WORTH_SHARING), pending):
        shares.append(share)
        done += share.layouts
        on_layouts(done)
    for share in sorted(shares, key=lambda share: share.place):  # they arrive in any order
        search = searches[share.place[0]]
        search.candidates += share.candidates
        search.pruning.merge(share.pruning)
        search.smallest = min(filter(None, (search.smallest, share.smallest)), default=None)
    return done


def _spread(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Reorder the places so that an interrupted search has seen all kinds of layouts."""
    strides = 8
    return [place for stride in range(strides) for place in places[stride::strides]]


@no_garbage_collection()
def _share(
    forecaster: Forecaster, searches: Sequence[Search], recipes: Sequence[str], network: Network, place: tuple[int, int]
) -> _Share:
    number, first = place
    search = searches[number]
    runs = search.runs[first : first + AT_A_TIME]
    share = _Share(place, [], Pruning(), None, len(runs) * len(recipes))
    wanted = list(_that_fit(search, first, runs, recipes, forecaster, network, share))
    if "recompute" not in search.space.given:
        less = list(_less_recomputed(wanted, search.task.model, forecaster.chip))
        wanted += _that_fit(search, first, less, recipes, forecaster, network, share)
    forecaster.prepare((case for step, _ in wanted for case in step.cases), [BASELINE, *recipes])
    for step, needed in wanted:
        for name, memory in needed.items():
            share.candidates.append(Candidate(step.run, name, step.step(name), *memory))
    forecaster.forget(beyond=MOST_KEPT)
    return share


def _less_recomputed(wanted: Iterable[Fitting], model: ModelSpec, chip: GpuSpec) -> Iterator[RunSpec]:
    """The runs with the fewest recomputed layers that fit, and that surely fit, where all surely do and none do not."""

    def verdict(run: RunSpec, share: float) -> int:
        memory = memory_of(model).rank(replace(run, recompute_share=share), needed, chip)
        return max(FITS.index(known.fit) for known in memory.values())

    for run, needed in ((step.run, needed) for step, needed in wanted if step.run.recompute == "full"):
        if all(fit == "fits" for _, fit, _ in needed.values()) and (without := verdict(run, 0.0)):
            piece = max(run.pp_layers or (len(model.layers) // run.pp,)) // run.vp
            shares = sorted({ceil(share * piece) / piece for share in LESS_RECOMPUTED} - {1.0})
            verdicts = {share: verdict(run, share) for share in shares}
            least = {next((share for share in shares if verdicts[share] <= most), 1.0) for most in range(min(without, 2))}
            yield from (replace(run, recompute_share=share) for share in sorted(least - {1.0}))


def _that_fit(
    search: Search,
    first: int,
    runs: Sequence[RunSpec],
    recipes: Sequence[str],
    forecaster: Forecaster,
    network: Network,
    share: _Share,
) -> Iterator[Fitting]:
    """The runs that fit in some recipe, with the memory of each: recipe → GB, and the verdict."""
    model, chip, hopeless = search.task.model, forecaster.chip, set[tuple[Any, ...]]()
    for _, alike in groupby(enumerate(runs, first), key=lambda numbered: vars(numbered[1]) | {"vp": 1, "zero": None}):
        step: StepForecast | None = None
        reasons: dict[str, str] = {}
        for place, run in alike:
            beside_batch = tuple(getattr(run, name) for name in BESIDE_BATCH)
            if beside_batch in hopeless:
                share.pruning.add("memory", "", len(recipes))
                continue
            needed: dict[str, tuple[float, Fit, float]] = {}
            for name, memory in memory_of(model).rank(run, recipes, chip).items():
                memory_gb = memory.total_bytes / GB
                share.smallest = min(share.smallest or (memory_gb, place, name), (memory_gb, place, name))
                if memory.fit != "does not fit" and memory.total_bytes <= MAY_NEED * memory.available_bytes:
                    needed[name] = memory_gb, memory.fit, memory.most_bytes / GB
                else:
                    share.pruning.add("memory", f"{_name(run)} in {name} needs {memory_gb:.0f} GB")
            if not needed:
                hopeless.add(beside_batch)  # larger micro-batches, which come later, need more
            else:
                step = step.again(run) if step else StepForecast(forecaster, model, run, derive(model, run), network)
                reasons = reasons or {name: step.why_not(name) for name in recipes}
                for name in [name for name in needed if reasons[name]]:
                    share.pruning.add("recipe", f"{name}: {reasons[name]}")
                    del needed[name]
            if step and needed:
                yield step, needed


def _name(run: RunSpec) -> str:
    sizes = {"tp": run.tp, "pp": run.pp, "vp": run.vp, "cp": run.cp, "ep": run.ep}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join([*parts, f"micro-batch {run.micro_batch_size}"])


def order(candidate: Candidate) -> tuple[bool, float, float, str]:
    """Sort key: what may not fit comes last, the fastest first, then the least memory. Times are rounded so that rounding errors
    do not decide."""
    return candidate.fit == "may not fit", float(f"{candidate.step.time_ms:.8g}"), candidate.memory_gb, candidate.recipe


def ranked(search: Search, forecaster: Forecaster, most: int = MOST_LISTED) -> list[PlanLayout]:
    """The best candidates as results, in order, at most `most`."""
    task = search.task
    ordered = sorted(search.candidates, key=order)
    if not ordered:
        return []
    front, best_of_recipe = _front(ordered), {candidate.recipe: candidate for candidate in reversed(ordered)}
    whole = derive(task.model, RunSpec(1, task.sequence_length))
    flops = totals(whole, RunSpec(1, task.sequence_length), task.model).model_flops * task.global_batch / task.gpus
    tokens = task.global_batch * task.sequence_length / task.gpus
    best, listed = ordered[0], []
    for candidate in ordered[:most]:
        step_ms, run = candidate.step.interval, candidate.run
        shown = candidate is best_of_recipe[candidate.recipe] or id(candidate) in front
        listed.append(
            PlanLayout(
                recipe=candidate.recipe, tp=run.tp, cp=run.cp, pp=run.pp, vp=run.vp, ep=run.ep, etp=run.expert_tp,
                dp=run.data_parallel, micro_batch_size=run.micro_batch_size, micro_batches=run.gradient_accumulation,
                recompute=run.recompute, recompute_share=run.recompute_share, zero=run.zero_stage,
                offloaded_layers=run.offloaded_layers, pp_layers=run.pp_layers,
                step_ms=step_ms,
                tokens_per_s=_rate(step_ms, tokens * 1000),
                mfu=flops / step_ms.value / 1e9 / forecaster.chip.tflops["bf16"],
                memory_gb=candidate.memory_gb, most_memory_gb=candidate.most_gb,
                tight=candidate.fit == "tight", may_not_fit=candidate.fit == "may not fit",
                slowdown=slowdown(best, candidate, forecaster).interval() if candidate is not best else None,
                on_front=id(candidate) in front, host_bound=candidate.step.host_bound,
                parts_ms=candidate.step.parts_ms if shown else {},
            )
        )  # fmt: skip
    return listed


def _rate(step_ms: Interval, amount: float) -> Interval:
    """The rate for an amount per step, with its error bar."""
    low, high = (amount / end if end else None for end in (step_ms.high, step_ms.low))
    return Interval(amount / step_ms.value, low, high)


def _front(ordered: Sequence[Candidate]) -> set[int]:
    """The Pareto front: layouts for which no faster one needs as little memory. `ordered` is sorted by time."""
    least, front = float("inf"), set()
    for candidate in ordered:
        if candidate.memory_gb < least:
            least = candidate.memory_gb
            front.add(id(candidate))
    return front


def slowdown(best: Candidate, other: Candidate, forecaster: Forecaster) -> Estimate:
    """The step time of another layout divided by that of the best, without the errors that both have in common.

    Errors about the library or the GPU, and most errors about the software, affect both layouts. Equal GEMMs have equal errors,
    and different shapes have errors of their own; the same holds for exchanges.
    """
    one, two, first, second = best.step, other.step, best.run, other.run
    same_shapes = all(getattr(first, name) == getattr(second, name) for name in SHAPES)
    same_layout = same_shapes and (first.pp, first.vp, first.zero) == (second.pp, second.vp, second.zero)
    formats = 1.0 if best.recipe == other.recipe else forecaster.in_common(best.recipe, other.recipe)
    squares = _apart(one.common, two.common, 1.0 if same_layout else ALIKE_SOFTWARE)
    for part in {**one.parts, **two.parts}:
        if part == WAITING:
            continue
        (own_one, shared_one), (own_two, shared_two) = (step.errors.get(part, (0.0, 0.0)) for step in (one, two))
        alike = formats if part in CHANGED else 1.0
        squares += _apart(shared_one, shared_two, alike)
        squares += _apart(own_one, own_two, formats if same_shapes else 0.0)
    of_one, of_two = (step.launched.decided_by_launches * step.launched.unsure for step in (one, two))
    squares += _apart(of_one, of_two, ALIKE_WAITING)
    waits = _waits(one), _waits(two)
    for kind in {**waits[0], **waits[1]}:
        squares += _apart(waits[0].get(kind, 0.0), waits[1].get(kind, 0.0), ALIKE_WAITING)
    return Estimate(two.time_ms / one.time_ms, 0.0, sqrt(squares))


def _apart(one: float, two: float, alike: float) -> float:
    """The squared error of a ratio, given the errors of both sides and the share that they have in common."""
    return max(one**2 + two**2 - 2 * alike * one * two, 0.0)


def _waits(step: StepEstimate) -> dict[str, float]:
    """The effect of the error of each exchange on the step, relative to the step."""
    return {exchange.kind: exchange.unsure_ms / step.time_ms for exchange in step.exchanged}


def pruned(pruning: Pruning) -> tuple[Pruned, ...]:
    """What each rule excluded, in the order in which they apply."""
    return tuple(
        Pruned(rule=rule, count=count, unit="splits" if rule in OF_SPLITS else "layouts", example=pruning.examples[rule])
        for rule in RULES
        if (count := pruning.counts[rule])
    )


def smallest_layout(search: Search) -> SmallestLayout | None:
    """The layout that needs least memory."""
    if search.smallest is None:
        return None
    memory_gb, number, name = search.smallest
    run = search.runs[number]
    recompute = f", recompute {run.recompute}" if run.recompute != "none" else ""
    return SmallestLayout(recipe=name, layout=f"{_name(run)}{recompute}", memory_gb=memory_gb)
