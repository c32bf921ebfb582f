"""Explains a step's speedup: from the products alone, down through everything that dilutes it, to the step.

Every kernel of a profiled step belongs to a part (`marks.py`) and has a class (`measure/kernels.py`); together they say which row
of the waterfall it falls into. Each row adds its time to both sides, and the speedup after it is that of everything so far: the
first row is what the hardware gives, the last one what training gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from gemmscope.measure.kernels import CAST_SHARE, classify, evidence, work_in_step
from gemmscope.recipe.recipes import Recipe
from gemmscope.step.results import Part

Row = Literal[
    "products", "quantization", "norms and activations", "attention", "routing", "head and loss", "embedding", "optimizer",
    "communication", "pipeline bubble", "waiting for the host",
]  # fmt: skip
ROWS: tuple[Row, ...] = (
    "products", "quantization", "norms and activations", "attention", "routing", "head and loss", "embedding", "optimizer",
    "communication", "pipeline bubble", "waiting for the host",
)  # fmt: skip

LINEARS = ("qkv", "attn out", "mlp", "experts", "shared expert")
WHOLE_PARTS: dict[str, Row] = {
    "attention": "attention",
    "head": "head and loss",
    "loss": "head and loss",
    "embedding": "embedding",
    "optimizer": "optimizer",
    "router": "routing",
    "combine": "routing",
}
BY_CLASS: dict[str, Row] = {
    "gemm": "products", "quantize": "quantization", "update": "quantization", "attention": "attention", "optimizer": "optimizer",
    "loss": "head and loss", "embedding": "embedding",
}  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """One kernel with the part of the step that it belongs to."""

    part: str
    direction: str
    name: str
    time_us: float
    quantizes: bool = True  # the recipe does

    @property
    def rows(self) -> dict[Row, float]:
        """Where it falls, in microseconds: by its part, and within linears by its class. What looks like a cast is none where
        nothing is cast; a cast that a compiler fused with a norm or an activation is divided between the two."""
        if self.part in WHOLE_PARTS:
            return {WHOLE_PARTS[self.part]: self.time_us}
        work = work_in_step(self.name)
        row = BY_CLASS.get(work.kernel_class, "norms and activations")
        if row != "quantization":
            return {row: self.time_us}
        if not self.quantizes:
            return {"norms and activations": self.time_us}
        if work.beside is None:
            return {row: self.time_us}
        cast_us = CAST_SHARE * self.time_us
        return {row: cast_us, BY_CLASS.get(work.beside, "norms and activations"): self.time_us - cast_us}

    @property
    def rides(self) -> bool:
        """Whether it is such a cast."""
        return "quantization" in self.rows and len(self.rows) > 1


def place(parts: Sequence[Part], *, quantizes: bool = True) -> list[Placed]:
    """Give every kernel to a part. Forward, a mark opens its part; backward it closes it: what came before belongs to it.

    What follows the last forward mark is that part's, its own backward included; what follows the last backward mark, up to the
    optimizer, is the embedding's.

    >>> marks = [("mlp", "forward"), ("loss", "forward"), ("loss", "backward"), ("mlp", "backward"), ("optimizer", "step")]
    >>> [(each.part, each.direction) for each in place([(*mark, [["kernel", 1.0, 7]]) for mark in marks])]
    [('mlp', 'forward'), ('loss', 'forward'), ('mlp', 'backward'), ('embedding', 'backward'), ('optimizer', 'step')]
    """
    placed = []
    for (part, direction, kernels), (next_part, next_direction, _) in pairwise([*parts, ("end", "step", [])]):
        owner = part
        if direction == "backward":  # of the first layer: what is left is the embedding's
            owner = "embedding" if next_direction == "step" else next_part
        placed += [Placed(owner, direction, str(name), float(time), quantizes) for name, time, *_ in kernels]
    return placed


@dataclass(frozen=True)
class Level:
    """One row: its time on both sides, and the speedup of everything down to it."""

    row: Row
    slow_ms: float
    fast_ms: float
    speedup: float


@dataclass(frozen=True)
class Waterfall:
    """From products to the step. `named` is the share of GPU time whose kernels have a known class."""

    levels: tuple[Level, ...]
    named: float
    unknown: tuple[str, ...]

    @property
    def products(self) -> float:
        return self.levels[0].speedup

    @property
    def step(self) -> float:
        return self.levels[-1].speedup


@dataclass(frozen=True)
class Side:
    """One precision: its kernels in one step, what a step takes, and what launching it takes the CPU (None: not known).

    Kernels were seen in one step, at the clock of that moment: they are scaled so that they and what the step waits for add up to
    the measured one. A step waits only where launching takes about as long as running.
    """

    placed: Sequence[Placed]
    wall_ms: float
    host_ms: float | None = None
    busy_ms: float | None = None  # of the profiled step, kernels that run at once counted once

    @property
    def waiting_ms(self) -> float:
        """For the CPU, of each step."""
        if self.host_ms is not None and self.host_ms < RUNS_AHEAD * self.wall_ms:
            return 0.0
        busy = self.busy_ms if self.busy_ms is not None else sum(each.time_us for each in self.placed) / 1000
        return max(self.wall_ms - busy, 0.0)

    def sums(self) -> dict[Row, float]:
        """Milliseconds of each row; together they are the step."""
        found: dict[Row, float] = {}
        for each in self.placed:
            for row, time_us in each.rows.items():
                found[row] = found.get(row, 0.0) + time_us / 1000
        waiting = self.waiting_ms
        scale = (self.wall_ms - waiting) / sum(found.values())
        rows = {row: time * scale for row, time in found.items()}
        return {**rows, "waiting for the host": waiting} if waiting else rows


def waterfall(slow: Side, fast: Side) -> Waterfall:
    """Hold a recipe's step against the baseline's."""
    levels = levels_of(slow.sums(), fast.sums())
    every = [*slow.placed, *fast.placed]
    unknown = [each for each in every if classify(each.name).kernel_class == "other"]
    total = sum(each.time_us for each in every)
    named = 1 - sum(each.time_us for each in unknown) / total if total else 0.0
    return Waterfall(levels, named, tuple(dict.fromkeys(each.name for each in unknown)))


def levels_of(slow: Mapping[Row, float], fast: Mapping[Row, float]) -> tuple[Level, ...]:
    """The rows that either side has, each with the speedup of everything down to it.

    >>> [level.speedup for level in levels_of({"products": 4.0, "attention": 2.0}, {"products": 2.0, "attention": 2.0})]
    [2.0, 1.5]
    """
    levels, slow_ms, fast_ms = [], 0.0, 0.0
    for row in ROWS:
        slow_ms, fast_ms = slow_ms + slow.get(row, 0.0), fast_ms + fast.get(row, 0.0)
        if row in slow or row in fast:
            levels.append(Level(row, slow.get(row, 0.0), fast.get(row, 0.0), slow_ms / fast_ms if fast_ms else float("nan")))
    return tuple(levels)


RUNS_AHEAD = 0.85  # of the step: a CPU that needs less to launch it is ahead of the GPU all the time
HOST_BOUND = 0.05  # of the step spent waiting
EATEN = 0.5  # of what the products gain
MOST_OF_IT = 0.5  # of the step
AS_EXPECTED = 0.9  # of the products' speedup reaches the step
RIDING = f"casts fused with norms or activations are counted by {CAST_SHARE:.0%}"


NOT_RUNNING = "not running in low precision"


def verdict(found: Waterfall, recipe: Recipe, fast: Sequence[Placed]) -> str:
    """The number in words: why the step gains what it gains."""
    fallen = fallbacks(recipe, fast)
    if fallen:
        return f"{NOT_RUNNING}: {fallen}"
    lost = _losses(found)
    worst = max(lost, key=lambda row: lost[row]) if lost else None
    waiting = next((level.fast_ms for level in found.levels if level.row == "waiting for the host"), 0.0)
    if waiting > HOST_BOUND * sum(level.fast_ms for level in found.levels) and worst == "waiting for the host":
        return f"host-bound: the GPU waits {waiting:.1f} ms of each step for the CPU"
    if found.products <= 1:
        return f"it loses: its products alone take longer than BF16's ({found.products:.2f}x)"
    if (found.step > 1 and found.step >= AS_EXPECTED * found.products) or worst is None:
        return "GEMM-bound, as expected"
    if worst == "quantization" and lost[worst] >= EATEN * (found.products - 1):
        return f"eaten by quantization, which takes {_time(found, worst):.1f} ms of each step{_shared(fast)}{_most(found)}"
    main = sorted(lost, key=lambda row: -lost[row])[:3]
    named = [row for row in main if lost[row] > 0.1 * sum(lost.values())]
    words = ", ".join(f"{row} ({_time(found, row):.1f} ms)" for row in named)
    return f"diluted by {words}" + (_shared(fast) if "quantization" in named else "")


def _most(found: Waterfall) -> str:
    """What takes most of the step, if that is nothing that a precision changes."""
    largest = max(found.levels[1:], key=lambda level: level.fast_ms)
    if largest.row == "quantization" or largest.fast_ms < MOST_OF_IT * sum(level.fast_ms for level in found.levels):
        return ""
    return f"; {largest.row} takes {largest.fast_ms:.1f} ms in any precision"


def _shared(fast: Sequence[Placed]) -> str:
    """How casts were counted that a compiler fused with norms or activations; nothing where there are few."""
    casts_us = sum(each.rows.get("quantization", 0.0) for each in fast)
    riding_us = sum(each.rows["quantization"] for each in fast if each.rides)
    return f" ({RIDING})" if riding_us > 0.1 * casts_us else ""


def _time(found: Waterfall, row: str) -> float:
    return next(level.fast_ms for level in found.levels if level.row == row)


def _losses(found: Waterfall) -> dict[str, float]:
    """How far each row pulls the speedup down."""
    lost, before = {}, found.products
    for level in found.levels[1:]:
        lost[str(level.row)] = max(before - level.speedup, 0.0)
        before = level.speedup
    return {row: drop for row, drop in lost.items() if drop > 0}


def fallbacks(recipe: Recipe, placed: Sequence[Placed]) -> str:
    """Which parts' products ran in BF16 though the recipe asks for less, in words; empty if none did.

    Forward, a product is wrong if it is no fprop of the recipe; backward, if it is neither dgrad nor wgrad. Where activations are
    computed again, backward products stand among forward ones: only BF16 is wrong there. A model whose parts are not marked has
    products that belong in BF16 (the head's): it is wrong if all are.
    """
    found: dict[str, list[str]] = {}
    unparted = [classify(each.name) for each in placed if each.part == "model"]
    products = {facts.operands for facts in unparted if facts.kernel_class == "gemm"}
    if recipe.quantizes and products == {("bf16", "bf16")}:
        found[f"ran bf16 x bf16, asked for {' x '.join(recipe.operands['fprop'])}"] = ["every product"]
    for part in LINEARS:
        for direction, passes in (("forward", ("fprop",)), ("backward", ("dgrad", "wgrad"))):
            names = dict.fromkeys(each.name for each in placed if (each.part, each.direction) == (part, direction))
            for name in names:
                proofs = [evidence(recipe, each, [name]) for each in passes]
                in_bf16 = classify(name).operands == ("bf16", "bf16")
                if in_bf16 and all(proof.verdict == "fallback" for proof in proofs):
                    found.setdefault(proofs[0].words, []).append(f"{part} {direction}")
                    break
    return "; ".join(f"{', '.join(where)}: {words}" for words, where in found.items())
