"""The result of `gemmscope step`: the training step in every recipe, where its time goes, and what to use.

`StepTimes` is what a measured and a forecast step have in common.
"""

import random
from dataclasses import asdict, dataclass, field
from math import hypot, isfinite
from typing import Annotated, Any, Literal

from pydantic import Field

from gemmscope.choices import Compile, OptimizerName
from gemmscope.findings import Finding
from gemmscope.interval import Interval
from gemmscope.parts import StepPart
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.base import OneGpuResult, Origin, Part, Samples
from gemmscope.results.linears import Speedup, Winner


class WaterfallLevel(Part):
    """One part of the step: its time in BF16 and in the recipe, and the speedup of all parts up to this one."""

    part: StepPart
    baseline_ms: float
    recipe_ms: float
    speedup: float


class Cost(Part):
    """The cost of the full training run in one recipe."""

    days: Interval
    gpu_hours: Interval
    money: Interval | None = None
    tokens: float | None = None
    gpus: int | None = None
    price: float | None = None
    """Of one GPU-hour."""
    global_batch: int | None = None
    """Sequences of one step on all GPUs."""


ExchangeKind = Literal["tensor", "context", "experts", "stages", "gradients", "weights", "offload"]


class Exchanged(Part):
    """What one rank exchanges in one step for one reason, in milliseconds."""

    kind: ExchangeKind
    time_ms: float
    exposed_ms: float
    """What the step waits for; the rest is hidden behind computation."""
    unsure_ms: float
    """Half-width of the 90% error bar of exposed_ms."""
    crosses: bool
    """Whether some of it leaves the NVLink domain."""
    basis: str
    """Where the exposed share comes from: fitted to published runs, or a prior."""


class Verified(Part):
    """The real model's step compared with the prediction of the same run: the speedup, or the baseline's milliseconds."""

    depth: int
    predicted: Interval
    actual: Interval

    @property
    def error(self) -> float:
        return self.predicted.value / self.actual.value - 1

    @property
    def agrees(self) -> bool | None:
        """Whether the error is within both intervals combined; None where one of them is not known."""
        reach = hypot(self.predicted.half_width, self.actual.half_width)
        return abs(self.error) <= reach if isfinite(reach) else None


class CapturedTime(Part):
    """The step captured as one CUDA graph."""

    step_ms: Interval
    speedup: Interval | None = None
    """Over BF16, captured too."""
    sm_mhz: float | None = None
    """Clock of the GPU: a step that waits for launches runs at a higher one."""


class StepTime(Part):
    """One recipe: milliseconds of one step on one rank."""

    recipe: str
    step_ms: Interval
    speedup: Interval | None = None
    """Over BF16."""
    tokens_per_s: float
    """Of one GPU."""
    total_tokens_per_s: float | None = None
    """Of all GPUs of the layout; null for a measurement, which has one."""
    model_tflops: float
    """FLOPs of linears and attention on one GPU, recomputation left out, over the step's time. A forecast takes the mean of all
    pipeline stages; a measurement has one stage."""
    mfu: float | None = None
    """Model FLOPs utilization: model_tflops over the GPU's dense BF16 rate, in every precision."""
    gpu_ms: Interval | None = None
    """GPU time: the step where launches are never late."""
    gpu_speedup: Interval | None = None
    """Of the GPU time over that of BF16."""
    launch_ms: Annotated[Interval | None, Field(alias="host_ms")] = None
    """Launch time: what the CPU takes to launch the step. In run files it has its first name, `host_ms`."""
    gpu_time_from: Literal["graph", "timely rounds", "kernels"] | None = None
    """How the GPU time of a measured step was measured: the step as a CUDA graph, the rounds in which the CPU launched early
    enough, or the timestamps of its kernels."""
    sm_mhz: float | None = None
    """Clock of the GPU in the rounds as launched."""
    rounds: int | None = None
    """Of bursts as launched."""
    late_rounds: int = 0
    """In how many of them the CPU launched too late, so that the GPU waited: then `step_ms` and `speedup` are the median and the
    range of the rounds."""
    peak_bytes: float | None = None
    """Peak memory of one GPU with the real model: measured, or what a forecast expects of the rank that needs most."""
    parts_ms: dict[StepPart, float] = {}
    """Where the time goes; of as many layers as were run."""
    exchanged: tuple[Exchanged, ...] = ()
    """What a forecast of several GPUs counts as communication."""
    waterfall: tuple[WaterfallLevel, ...] = ()
    """From the speedup of the GEMMs alone to that of the step."""
    named_share: float | None = None
    """Share of GPU time in kernels of a known kind."""
    unknown_kernels: tuple[str, ...] = ()
    attention_kernels: dict[str, float] = {}
    """Which kernels attention ran with, and their milliseconds in the profiled step: flash, cuDNN, memory-efficient, math."""
    verdict: Finding | None = None
    """Why the step has this speedup."""
    verified: Verified | None = None
    captured: CapturedTime | None = None
    """As a CUDA graph, where that was asked for and could be done."""
    cost: Cost | None = None

    @property
    def fell_back(self) -> bool:
        """Whether GEMMs ran in BF16 that were requested in low precision."""
        return self.verdict is not None and self.verdict.code == "step-fallback"

    @property
    def host_bound(self) -> bool:
        """Launching the step takes longer than running it."""
        return self.launch_ms is not None and self.gpu_ms is not None and self.launch_ms.value > self.gpu_ms.value


class StepTimes(Part):
    """All recipes of one step, the baseline first."""

    origin: Origin
    recipes: tuple[StepTime, ...]
    speedups: tuple[Speedup, ...] = ()
    """Of every recipe over every other one."""
    winner: Winner | None = None
    decided_by: Literal["launched", "graphs"] = "launched"
    """What the winner is the fastest as: launched here, or captured in CUDA graphs, where these were asked for."""
    failures: dict[str, str] = {}
    """Recipe → why it has no step."""
    not_captured: dict[str, str] = {}
    """Recipe → why its step could not be captured as a CUDA graph."""
    unfit: tuple[str, ...] = ()
    """Recipes that do not fit in the memory of the GPU: neither winners nor priced."""
    may_not_fit: tuple[str, ...] = ()
    """Recipes that usually need more memory than the GPU has, but fit at best."""
    gpus: int | None = None
    """GPUs of the layout; null for a measurement."""
    global_batch: int | None = None
    """Sequences of one step on all of them."""
    unit: Literal["tokens", "samples"] = "tokens"
    """What rates count: samples of a module that brings its own inputs, where a sequence means nothing."""

    @property
    def unranked(self) -> tuple[str, ...]:
        """Recipes that are not recommended: those that do not fit, and those that may not, unless no other one is left."""
        return (
            *self.unfit,
            *(self.may_not_fit if ({time.recipe for time in self.recipes} - {*self.unfit, *self.may_not_fit}) else ()),
        )

    @property
    def batch_unit(self) -> str:
        """What a batch consists of."""
        return "sample" if self.unit == "samples" else "sequence"

    def of(self, name: str) -> StepTime | None:
        return next((time for time in self.recipes if time.recipe == name), None)

    def speedup(self, name: str, over: str = BASELINE) -> Interval | None:
        return next((ratio.speedup for ratio in self.speedups if (ratio.recipe, ratio.over) == (name, over)), None)


class AtBatch(Part):
    """The speedups of every recipe on one batch."""

    micro_batch_size: int
    sequence_length: int
    speedups: dict[str, Interval]

    @property
    def name(self) -> str:
        return f"{self.micro_batch_size} x {self.sequence_length}"


class Recommendation(Part):
    """What to use: a recipe, and the parts of every layer that stay in BF16."""

    recipe: str
    left_out: tuple[str, ...] = ()
    speedup: Interval | None = None
    rivals: tuple[str, ...] = ()
    """Plans that are too close to call against it."""
    ready_to_paste: dict[str, str] = {}
    """Framework → the text that selects this plan."""


@dataclass(frozen=True)
class StepSettings:
    """How to measure. A burst runs steps for `drop_ms`, then for `keep_ms` (and at least `least_steps`) that count."""

    backend: str
    compile: Compile | None = None  # what torch.compile is applied to; None: not recorded, or nothing was
    optimizer: OptimizerName = "adamw"
    drop_ms: float = 400.0
    keep_ms: float = 1000.0
    least_steps: int = 3
    max_rounds: int = 1_000_000  # in practice no limit: precision and time decide
    host: bool = True  # also measure the CPU time to launch a step
    silence_s: float = 180.0
    seed: int = field(default_factory=lambda: random.randrange(1 << 30))  # of the order of bursts


@dataclass(frozen=True)
class Variant:
    """A recipe, the parts left in BF16, a depth. `real`: every layer has its own weights, as in training; else layers share
    those of a few."""

    recipe: str
    depth: int
    left_out: tuple[str, ...] = ()
    real: bool = False
    captured: bool = False  # as a CUDA graph

    @property
    def plan_name(self) -> str:
        """The recipe, and the parts that it leaves in BF16."""
        return self.recipe + (f" without {', '.join(self.left_out)}" if self.left_out else "")

    @property
    def name(self) -> str:
        layers = f" / {self.depth} layers" if self.depth else ""  # a module runs as it is
        return f"{self.plan_name}{layers}" + " / real" * self.real + " / captured" * self.captured

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name}


ProfiledPart = tuple[str, str, list[list[Any]]]  # part, direction, its kernels (name, microseconds, stream)


@dataclass(repr=False)
class VariantResult(Samples):
    """One variant with its samples, and the kernels of one profiled step by part."""

    variant: Variant
    parts: list[ProfiledPart] = field(default_factory=list)
    busy_ms: float | None = None
    busy_each_ms: list[float] = field(default_factory=list)
    """Of every step whose kernels were recorded."""
    host_ms: float | None = None
    host_each_ms: list[float] = field(default_factory=list)


class StepResult(OneGpuResult):
    """The result of `gemmscope step`: the training step in every recipe, and the recommendation."""

    kind: Literal["step"] = "step"
    settings: StepSettings
    ran: Literal["stack", "module", "huggingface"] = "stack"
    """A stack of layers built from the model's sizes, the user's own module, or the Hugging Face class of a config."""
    depth: int
    """Of the stacks that were run; 0 for a module, which runs as it is."""
    layers: int
    seconds: dict[str, float] = {}
    """How long predicting and verifying took."""
    step: StepTimes
    recommendation: Recommendation | None = None
    break_even: tuple[AtBatch, ...] = ()
    """Smaller batches, and this one last."""
    observed_speedup: float | None = None
    """The speedup of the user's own run."""
    variants: tuple[VariantResult, ...] = ()

    @property
    def sample_count(self) -> int:
        return sum(variant.sample_count for variant in self.variants)
