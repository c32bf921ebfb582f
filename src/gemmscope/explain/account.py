"""The account of a training step: where its time went, class by class, and what was counted on the way.

`look` puts everything that is known of each piece of work side by side; `account` adds it up over the steps that are alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from gemmscope.explain.place import ORDER, UNKNOWN_PRECISION, Placed, place
from gemmscope.explain.products import Product, census
from gemmscope.explain.scopes import Scope, scopes
from gemmscope.explain.steps import Step, Steps, find_steps
from gemmscope.explain.timeline import HOST_IDLE, Gap, Shares, share_out
from gemmscope.explain.trace import Trace, Work

EXPOSED = "communication, exposed"
HOST = "idle: waiting for the host"
IDLE = "idle: other"
CLASSES = (*(name for name in ORDER if name not in ("communication", "other")), EXPOSED, "other", HOST, IDLE)


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of work in one step. `share` is its part of the step's time, in microseconds."""

    index: int
    work: Work
    scope: Scope
    placed: Placed
    share: float
    product: Product | None


@dataclass
class Look:
    """Everything known of a trace's steps."""

    trace: Trace
    steps: Steps
    scopes: list[Scope]
    placed: list[Placed]
    products: dict[int, Product]
    shares: list[Shares]  # of each chosen step

    def items(self) -> Iterator[list[Item]]:
        """The work of each chosen step, in the order it ran."""
        for shares in self.shares:
            yield [
                Item(index, self.trace.work[index], self.scopes[index], self.placed[index], share, self.products.get(index))
                for index, share in sorted(shares.of.items())
            ]

    def all_items(self) -> list[Item]:
        return [item for step in self.items() for item in step]

    @property
    def count(self) -> int:
        return len(self.steps.chosen)


@dataclass(frozen=True)
class Row:
    """One line of the census: products of one precision. Per step."""

    precision: str
    count: float
    time_ms: float
    flops: float


@dataclass(frozen=True)
class Account:
    """Milliseconds and counts per step. `classes` sum to `step_ms`."""

    step_ms: float
    busy_ms: float
    classes: dict[str, float]
    idle: dict[str, float]
    hidden_ms: float  # of communication, beside computation
    overlapped_ms: float  # several kernels computing at once
    census: tuple[Row, ...]
    kernels: float
    launches: float
    micro_batches: int
    casts: float  # quantization kernels
    low_products: float
    kernels_per_product: float  # of GEMMs, casts and copies in linears, by products
    named_share: float
    unknown: tuple[tuple[str, float, float], ...]  # name, milliseconds, count
    notes: tuple[str, ...] = field(default=())

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_ms / self.step_ms if self.step_ms else 0.0

    def share(self, *names: str) -> float:
        """Of the step's time."""
        return sum(self.classes.get(name, 0.0) for name in names) / self.step_ms if self.step_ms else 0.0


def look(trace: Trace, step_count: int | None = None) -> Look:
    """Find the steps, and divide each among its work."""
    steps = find_steps(trace, step_count)
    found = scopes(trace)
    placed = place(trace, found)
    products = {product.work: product for product in census(trace, found, placed)}
    ranks = [each.rank for each in placed]
    calls = sorted(call.end for call in trace.launches.values())
    starts = [work.start for work in trace.work]
    longest = max(work.time for work in trace.work)
    shares = [share_out(trace, found, step, ranks, calls, bisect_left(starts, step.begin - longest)) for step in steps.chosen]
    return Look(trace, steps, found, placed, products, shares)


def account(seen: Look) -> Account:
    """Add it up, per step."""
    count, items = seen.count, seen.all_items()
    step_ms = sum(step.time for step in seen.steps.chosen) / 1000 / count
    classes: dict[str, float] = {}
    for item in items:
        name = EXPOSED if item.placed.name == "communication" else item.placed.name
        classes[name] = classes.get(name, 0.0) + item.share / 1000 / count
    busy_ms = sum(classes.values())
    idle = _idle([gap for shares in seen.shares for gap in shares.gaps], count)
    classes[HOST] = sum(time for why, time in idle.items() if why in HOST_IDLE)
    classes[IDLE] = sum(time for why, time in idle.items() if why not in HOST_IDLE)
    own = [item for step, each in zip(seen.steps.chosen, seen.items(), strict=True) for item in each if _begins(item, step)]
    products = [item for item in own if item.product is not None and not item.product.reduces]
    casts = [item for item in own if item.placed.name == "quantization"]
    unknown: dict[str, tuple[float, float]] = {}
    for item in items:
        if item.placed.name == "other":
            time, times = unknown.get(item.work.name, (0.0, 0.0))
            unknown[item.work.name] = time + item.share / 1000 / count, times + 1 / count
    listed = sorted(((name, *found) for name, found in unknown.items()), key=lambda row: -row[1])
    return Account(
        step_ms=step_ms,
        busy_ms=busy_ms,
        classes={name: classes[name] for name in CLASSES if classes.get(name, 0.0) > 0},
        idle=idle,
        hidden_ms=sum(shares.hidden for shares in seen.shares) / 1000 / count,
        overlapped_ms=sum(shares.overlapped for shares in seen.shares) / 1000 / count,
        census=_census(items, count),
        kernels=len(own) / count,
        launches=len({item.work.correlation for item in own}) / count,
        micro_batches=micro_batches(seen),
        casts=len(casts) / count,
        low_products=sum(item.product.low for item in products if item.product) / count,
        kernels_per_product=(len(products) + len(casts)) / len(products) if products else 0.0,
        named_share=1 - classes.get("other", 0.0) / busy_ms if busy_ms else 0.0,
        unknown=tuple(listed),
        notes=tuple(_notes(seen)),
    )


def _begins(item: Item, step: Step) -> bool:
    """Work that runs over the end of a step counts for the one it began in."""
    return step.begin <= item.work.start < step.end


def _idle(gaps: list[Gap], count: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for gap in gaps:
        found[gap.why] = found.get(gap.why, 0.0) + gap.time / 1000 / count
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _census(items: list[Item], count: int) -> tuple[Row, ...]:
    rows: dict[str, list[float]] = {}
    for item in items:
        if item.product is not None and item.placed.is_product:
            row = rows.setdefault(item.product.precision, [0.0, 0.0, 0.0])
            row[0] += (not item.product.reduces) / count
            row[1] += item.share / 1000 / count
            row[2] += item.product.flops / count
    return tuple(Row(precision, *row) for precision, row in sorted(rows.items(), key=lambda each: -each[1][1]))


def micro_batches(seen: Look) -> int:
    """How many times a step runs forward: once for every time that it follows backward, or more often.

    In a pipeline several forwards run before the first backward: stretches are counted by the products of the usual one.
    """
    found = []
    for items in seen.items():
        launched = sorted(
            (item for item in items if item.product is not None and item.scope.launched is not None),
            key=lambda item: item.scope.launched or 0.0,
        )
        phases = [item.scope.phase for item in launched if item.scope.phase in ("forward", "backward")]
        found.append(sum(forwards([len(list(run)) for phase, run in groupby(phases) if phase == "forward"])))
    return max(sorted(found)[len(found) // 2], 1) if found else 1


def forwards(products: list[int]) -> list[int]:
    """Micro-batches in each stretch of forward, by the products in it: the usual number of them is one micro-batch.

    >>> forwards([64]), forwards([64, 64, 64]), forwards([256, 64, 64, 64]), forwards([64, 1]), forwards([])
    ([1], [1, 1, 1], [4, 1, 1, 1], [1, 0], [])
    """
    usual, times = Counter(count for count in products if count).most_common(1)[0] if any(products) else (1, 2)
    if times < 2:
        usual = max(products)
    return [round(count / usual) for count in products]


def _notes(seen: Look) -> Iterator[str]:
    trace, steps = seen.trace, seen.steps
    left = len(steps.every) - len(steps.chosen)
    if left:
        worst = max(step.time for step in steps.every) / 1000
        yield f"{left} of {len(steps.every)} steps took much longer (up to {worst:.1f} ms) and are left out: a compilation?"
    if len(steps.every) == 1:
        yield "one step only: what varies from step to step cannot be seen"
    if trace.others:
        yield f"{len(trace.others) + 1} GPUs are in this file; the one with most kernels is looked at"
    if trace.skew_us:
        yield f"the GPU's clock was {trace.skew_us / 1000:+.3f} ms off the host's in this file, and was set right"
    if not trace.launches:
        yield "launches were not recorded: what the GPU waited for cannot be told"
    if not trace.operators:
        yield "operators were not recorded (ProfilerActivity.CPU): forward and backward cannot be told apart"
    unknown = sum(product.precision == UNKNOWN_PRECISION for product in seen.products.values())
    if unknown:
        yield f"{unknown} of {len(seen.products)} products do not tell in which precision they ran: by name or operator"
    if trace.operators and not any(product.flops for product in seen.products.values()):
        yield "shapes were not recorded (record_shapes=True): products are counted and timed, their FLOPs are not known"
