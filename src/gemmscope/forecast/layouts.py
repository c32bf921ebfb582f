"""The layouts that a model can have on a number of GPUs: how it is split, what is recomputed, what is sharded.

Which values are tried follows from rules with reasons (`Rule`); each rule counts what it excludes. Frameworks follow Megatron:
tensor parallelism splits heads and MLPs inside one NVLink domain, pipeline stages get whole layers, experts are spread over ranks
that tensor, context and data parallelism also use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, get_args

from gemmscope.choices import RECOMPUTE
from gemmscope.errors import UserError
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.limits import LARGEST
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.sharding import check, spread

LEAST_CONTEXT = 4096  # tokens of one context-parallel rank: with fewer, attention is too short to hide the exchange of K and V
UNEVEN = 1.15  # layers of the largest pipeline stage over the mean: the others would wait for it
MOST_MICRO_BATCH = 64  # sequences: larger micro-batches do not make GEMMs faster
FAST_HOST_GBPS = 100  # to the memory of the CPU: slower links do not hide offloaded activations
OFFLOADED = (0.5, 0.75)  # of the layers, with FSDP on systems with a fast link
ZERO = (1, 3)  # a sharded optimizer, as Megatron's distributed optimizer; sharded weights too, as FSDP

Rule = Literal[
    "domain", "gpus", "heads", "layers", "context", "experts", "batch", "virtual", "fsdp pipeline", "fsdp experts", "recipe",
    "memory",
]  # fmt: skip
RULES: tuple[Rule, ...] = get_args(Rule)
OF_SPLITS: tuple[Rule, ...] = ("domain", "gpus", "heads", "layers", "context", "experts")
LISTS: dict[str, tuple[Any, ...]] = {"recompute": RECOMPUTE, "zero": (0, 1, 2, 3)}
AXES = ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch_size", "recompute", "zero")


@dataclass(frozen=True)
class Space:
    """The search space: the given values of each axis, and all sensible values of the other axes."""

    given: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of RunSpec that every layout has

    def values(self, axis: str, usual: Sequence[Any]) -> tuple[Any, ...]:
        """The values of one axis: those given, else the usual ones."""
        return self.given.get(axis, tuple(usual))


@dataclass(frozen=True)
class PlanTask:
    """What to plan: a model on a number of GPUs with a global batch of sequences. `domain`: GPUs that NVLink connects.
    `offloads`: the link to CPU memory is fast enough to offload activations."""

    model: ModelSpec
    gpus: int
    global_batch: int
    sequence_length: int
    domain: int
    offloads: bool = False


@dataclass
class Pruning:
    """How much each rule has excluded, with the first example of each."""

    counts: Counter[Rule] = field(default_factory=Counter)
    examples: dict[Rule, str] = field(default_factory=dict)

    def add(self, rule: Rule, example: str, count: int = 1) -> None:
        """Count what a rule excludes."""
        self.counts[rule] += count
        self.examples.setdefault(rule, example)

    def merge(self, other: Pruning) -> None:
        """Add what another process has counted."""
        self.counts.update(other.counts)
        self.examples = other.examples | self.examples


def powers_of_two(most: int) -> list[int]:
    """All powers of two up to a number.

    >>> powers_of_two(12)
    [1, 2, 4, 8]
    """
    return [1 << place for place in range(max(most, 1).bit_length())]


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layouts(task: PlanTask, space: Space, pruning: Pruning) -> Iterator[RunSpec]:
    """Every valid layout; invalid ones are counted in `pruning`. Layouts that run the same GEMMs follow each other."""
    for split in splits(task, space, pruning):
        yield from _of_split(task, space, split, pruning)


def splits(task: PlanTask, space: Space, pruning: Pruning) -> Iterator[dict[str, Any]]:
    """The ways to split the model over the GPUs: tp, cp, pp, ep, etp and dp."""
    experts = max((layer.mlp.experts for layer in task.model.layers if isinstance(layer.mlp, MoeSpec)), default=1)
    layers = len(task.model.layers)
    stages = sorted({*divisors(layers), *powers_of_two(layers)})
    every = [
        (tp, cp, pp, ep)
        for tp in space.values("tp", powers_of_two(task.gpus))
        for cp in space.values("cp", powers_of_two(task.gpus))
        for pp in space.values("pp", [stage for stage in stages if stage <= task.gpus])
        for ep in space.values("ep", [size for size in powers_of_two(task.gpus) if experts % size == 0])
    ]
    for tp, cp, pp, ep in every:
        split = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
        name = ", ".join(f"{axis} {value}" for axis, value in split.items() if value > 1)
        dp, rest = divmod(task.gpus, tp * cp * pp)
        if rest or not dp:
            pruning.add("gpus", name)
        elif tp > task.domain and "tp" not in space.given:
            pruning.add("domain", name)
        elif cp > 1 and task.sequence_length // cp < LEAST_CONTEXT and "cp" not in space.given:
            pruning.add("context", name)
        else:
            yield from _checked(task, space, {**split, "dp": dp}, name, experts > 1, pruning)


def _checked(
    task: PlanTask, space: Space, split: dict[str, Any], name: str, has_experts: bool, pruning: Pruning
) -> Iterator[dict[str, Any]]:
    """The split with each size of tensor parallelism inside experts, and the layers of its stages, if all of it divides."""
    stages = pipeline_layers(len(task.model.layers), split["pp"])
    if max(stages) * split["pp"] > UNEVEN * len(task.model.layers) and "pp" not in space.given:
        pruning.add("layers", name)
        return
    uneven = {"pp_layers": stages} if len(set(stages)) > 1 else {}
    within = sorted({1, split["tp"]}) if has_experts else [None]
    for etp in space.values("etp", within) if has_experts else within:
        whole = {**split, **uneven, "etp": etp}
        ranks = split["tp"] * split["cp"] * split["dp"]
        if has_experts and ranks % (split["ep"] * (etp or 1)):
            pruning.add("experts", name)
            continue
        try:
            check(task.model, _run(task, space, whole, micro_batch_size=1))
        except UserError as error:
            pruning.add("heads", f"{name}: {error.message}")
            continue
        yield whole


def pipeline_layers(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of each stage: equal if possible; else one fewer in the first and the last, which also have the embedding and
    the head; else one fewer in some.

    >>> pipeline_layers(80, 8)[:2], pipeline_layers(126, 8), pipeline_layers(61, 4)
    ((10, 10), (15, 16, 16, 16, 16, 16, 16, 15), (16, 15, 15, 15))
    """
    if layers % pp == 0:
        return (layers // pp,) * pp
    if (layers + 2) % pp == 0 and pp > 1 and (per_stage := (layers + 2) // pp) > 1:
        return (per_stage - 1, *(per_stage,) * (pp - 2), per_stage - 1)
    return tuple(spread(layers, pp))


def _run(task: PlanTask, space: Space, split: Mapping[str, Any], **rest: Any) -> RunSpec:
    return RunSpec(
        **{"sequence_parallel": split["tp"] > 1, **space.settings, "sequence_length": task.sequence_length, **split, **rest}
    )


def _of_split(task: PlanTask, space: Space, split: Mapping[str, Any], pruning: Pruning) -> Iterator[RunSpec]:
    """The layouts of one split: recomputation, micro-batch (the smallest first), virtual stages and sharding."""
    sequences, rest = divmod(task.global_batch, split["dp"])
    if rest or not sequences:
        pruning.add("batch", f"{split['dp']} data-parallel ranks")
        return
    most, sizes = min(sequences, MOST_MICRO_BATCH), list[tuple[int, int]]()
    for size in sorted(space.values("micro_batch_size", [size for size in range(1, most + 1) if sequences % size == 0])):
        batches, rest = divmod(sequences, size)
        if rest or not 0 < batches <= LARGEST["parallel"]:
            pruning.add("batch", f"micro-batch {size} of {sequences} sequences")
        else:
            sizes.append((size, batches))
    for recompute, (size, batches) in product(space.values("recompute", RECOMPUTE), sizes):
        for virtual in _virtual_stages(task, space, split, batches, pruning):
            for zero in _sharding(space, split, pruning):
                run = _run(
                    task, space, split, micro_batch_size=size, gradient_accumulation=batches, recompute=recompute, vp=virtual,
                    zero=zero,
                )  # fmt: skip
                yield run
                if task.offloads and zero == 3 and split["pp"] == 1 and recompute == "none" and not run.offloaded_layers:
                    for share in OFFLOADED:
                        yield replace(run, offloaded_layers=round(len(task.model.layers) * share))


def _virtual_stages(task: PlanTask, space: Space, split: Mapping[str, Any], batches: int, pruning: Pruning) -> Iterator[int]:
    """How many pieces a stage can consist of: divisors of its most layers, as the embedding and the head count as layers. The
    interleaved schedule needs a multiple of pp micro-batches."""
    pp, stages = split["pp"], pipeline_layers(len(task.model.layers), split["pp"])
    stage = max(stages)
    for virtual in space.values("vp", divisors(stage) if pp > 1 else (1,)):
        if virtual > 1 and (pp == 1 or stage % virtual or batches % pp or stages[-1] < virtual == stages[0]):  # or an empty piece
            pruning.add("virtual", f"vp {virtual}, pp {pp}, gradient accumulation {batches}")
        else:
            yield virtual


def _sharding(space: Space, split: Mapping[str, Any], pruning: Pruning) -> Iterator[int]:
    """The ZeRO stages to try; 0 without data parallelism.

    FSDP gathers the weights for every micro-batch. It is not combined with pipelines, which need many micro-batches, nor with
    experts that are not spread over ranks, most of whose weights a token does not use.
    """
    if split["dp"] * split["cp"] == 1:
        yield 0
        return
    for zero in space.values("zero", ZERO):
        if zero == 3 and "zero" not in space.given and split["etp"] is not None and split["ep"] == 1:
            pruning.add("fsdp experts", f"dp {split['dp']}")
        elif zero == 3 and "zero" not in space.given and split["pp"] > 1:
            pruning.add("fsdp pipeline", f"pp {split['pp']}")
        else:
            yield zero
