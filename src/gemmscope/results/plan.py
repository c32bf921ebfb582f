"""The result of `gemmscope plan`: the layouts that fit, the fastest first, and what was excluded. Nothing in it was measured."""

from typing import Literal

from gemmscope.choices import ClockState
from gemmscope.interval import Interval
from gemmscope.parts import StepPart
from gemmscope.results.base import ModelResult, ModelSummary, Part


class PlanLayout(Part):
    """One way to train the model on these GPUs."""

    recipe: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    micro_batch_size: int
    micro_batches: int
    """Of one step and data-parallel rank: gradient accumulation steps."""
    recompute: str = "none"
    recompute_share: float = 1.0
    """Of the layers."""
    zero: int = 0
    """What data-parallel ranks share: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too (FSDP)."""
    offloaded_layers: int = 0
    """Layers whose activations wait in the memory of the CPU."""
    pp_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage, where they differ."""
    step_ms: Interval
    tokens_per_s: Interval
    """Of one GPU."""
    mfu: float
    memory_gb: float
    """Of the GPU that needs most, in the usual case."""
    most_memory_gb: float | None = None
    """With an unfused loss and a fragmented allocator."""
    tight: bool = False
    """Some settings, or a fragmented allocator, would need more than the GPU has."""
    may_not_fit: bool = False
    """It usually needs more than the GPU has, and fits with settings that need less."""
    slowdown: Interval | None = None
    """Its step over that of the best layout; null for the best itself. Errors that both have alike cancel."""
    on_front: bool = False
    """No other layout is faster with as little memory."""
    host_bound: bool = False
    parts_ms: dict[StepPart, float] = {}
    """Of the layouts on the front and of the best one of each recipe."""

    @property
    def recomputed(self) -> str:
        """What is recomputed: `none`, `selective`, `full`, or `25% of layers`."""
        return self.recompute if self.recompute_share == 1 else f"{self.recompute_share:.0%} of layers"

    @property
    def close(self) -> bool:
        """Whether it is too close to call against the best layout; false for the best itself."""
        return self.slowdown is not None and not self.slowdown.above_one and not self.may_not_fit

    @property
    def splits(self) -> str:
        """How the model is split, in a table: `TP4 PP8 VP5`; replicas or FSDP alone: `DP64`."""
        parts = [
            f"{name}{size}"
            for name, size in {"TP": self.tp, "PP": self.pp, "VP": self.vp, "CP": self.cp, "EP": self.ep}.items()
            if size > 1
        ]
        if self.ep > 1 and self.etp != self.tp:
            parts.append(f"ETP{self.etp}")
        return " ".join(parts) or f"DP{self.dp}"


class Pruned(Part):
    """What one rule excluded. A split divides the model among the GPUs; each split has many layouts."""

    rule: str
    count: int
    unit: Literal["splits", "layouts"]
    example: str = ""


class SmallestLayout(Part):
    """The layout that needs the least memory, if none fits."""

    recipe: str
    layout: str
    memory_gb: float
    gpus_needed: int | None = None
    """The smallest number of GPUs, doubled again and again, with which some layout fits; null: none was found."""


class PlanPoint(Part):
    """The plan of one model. Without `vary` there is one."""

    values: dict[str, int] = {}
    """The sizes that were varied."""
    model: ModelSummary
    parameters: int
    global_batch: int
    sequence_length: int
    layouts: tuple[PlanLayout, ...] = ()
    """The fastest first."""
    fitting: int = 0
    """How many layouts fit; more than are listed if there are very many."""
    pruned: tuple[Pruned, ...] = ()
    smallest: SmallestLayout | None = None
    why_not: str = ""

    @property
    def best(self) -> PlanLayout | None:
        """The layout to use: the fastest; where its memory is tight, or it offloads, which no published run has shown to be
        hidden, the fastest that is as fast as far as is known, and neither."""
        fastest = self.layouts[0] if self.layouts else None
        safe = (layout for layout in self.layouts if layout is fastest or layout.close)
        return next((layout for layout in safe if not (layout.tight or layout.offloaded_layers)), fastest)

    @property
    def place(self) -> str:
        """Its sizes, as messages name it."""
        return " x ".join(map(str, self.values.values()))


class PlanResult(ModelResult):
    """The result of `gemmscope plan`: the layouts of a model on a number of GPUs, the fastest first."""

    kind: Literal["plan"] = "plan"
    coefficients: str
    """Which data the forecast was fitted on."""
    state: ClockState
    gpu: str
    title: str
    gpus: int
    memory_gb: float
    """Of one GPU."""
    network_gbps: float
    """GB/s per GPU and direction between NVLink domains."""
    network: str = ""
    """The name of the network."""
    nvlink_domain: int
    """GPUs that NVLink connects."""
    tokens: float | None = None
    price: float | None = None
    """Of one GPU-hour."""
    recipes: tuple[str, ...]
    points: tuple[PlanPoint, ...]
    varied: tuple[str, ...] = ()
    ready_to_paste: dict[str, str] = {}
    """The best layout: framework → settings."""
    next_command: str = ""
    """In files of earlier versions."""
    interrupted: bool = False
    """A signal ended the search early: only the layouts that were computed until then are here."""

    @property
    def best(self) -> PlanLayout | None:
        """The fastest layout of the first model that has one."""
        return next((point.best for point in self.points if point.best is not None), None)

    @property
    def layouts(self) -> tuple[PlanLayout, ...]:
        """The layouts of the first model."""
        return self.points[0].layouts if self.points else ()

    @property
    def sample_count(self) -> int | None:
        """The number of layouts."""
        return sum(len(point.layouts) for point in self.points)
