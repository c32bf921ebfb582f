"""The result of `gemmscope forecast`: linears and steps as measured ones, with origin forecast, for each GPU; or a sweep.

Nothing in it was measured on the GPU it names, and every interval is a 90% error bar.
"""

from typing import Literal

from gemmscope.findings import Finding
from gemmscope.interval import Interval
from gemmscope.results.base import ModelResult, Part
from gemmscope.results.linears import Linears, Winner
from gemmscope.results.step import StepTimes

Fit = Literal["fits", "tight", "may not fit", "does not fit"]
"""Tight: fits in the usual case, but not at most. May not fit: too much in the usual case, but not at least."""


class RecipeMemory(Part):
    """Bytes of one GPU in one recipe: of the rank that needs most. Computed from sizes and the layout, not measured."""

    recipe: str
    stage: int = 0
    """Its pipeline stage."""
    in_flight: float = 1.0
    """Micro-batches whose activations it holds at once."""
    weights_bytes: float
    gradients_bytes: float
    master_weights_bytes: float
    moments_bytes: float
    activations_bytes: float
    quantized_copies_bytes: float
    communication_bytes: float
    workspace_bytes: float
    """Logits and loss, or the gradients of one layer's activations: whichever is more."""
    reserve_bytes: float
    """CUDA context, libraries, allocator."""
    total_bytes: float
    """The sum: the usual case."""
    least_bytes: float
    """With every setting that the run leaves open at its best."""
    most_bytes: float
    available_bytes: float
    """What the GPU has."""
    fit: Fit


class GpuForecast(Part):
    """One GPU."""

    gpu: str
    title: str
    capability: str
    basis: tuple[str, ...] = ()
    """What each format's GEMMs were measured on, or borrowed from."""
    linears: Linears
    step: StepTimes | None = None
    memory: tuple[RecipeMemory, ...] = ()
    """Of one GPU in every recipe; empty without a training step."""
    findings: tuple[Finding, ...] = ()


class SweepPoint(Part):
    """One configuration of a sweep."""

    values: dict[str, int]
    baseline_step_ms: float | None = None
    speedups: dict[str, Interval] = {}
    winner: Winner | None = None
    host_bound: tuple[str, ...] = ()
    """Recipes whose step takes the CPU longer to launch than the GPU to run: their step takes as long as launching it."""
    not_possible: dict[str, str] = {}
    """Recipe → why it cannot run this configuration."""
    unfit: tuple[str, ...] = ()
    """Recipes that do not fit in the memory of the GPU: they are not ranked. Where none fits there is no winner."""
    may_not_fit: tuple[str, ...] = ()
    """Recipes that usually need more memory than the GPU has, but fit at best."""
    memory_gb: float | None = None
    """What the best recipe needs on one GPU; where none fits, at least that of the smallest."""
    gpus: int | None = None
    """GPUs of the layout."""
    tokens_per_s: float | None = None
    """Of one GPU in the best recipe."""
    why_not: str = ""
    """Why this configuration is not possible at all."""

    @property
    def gains(self) -> bool:
        """Whether the best recipe is faster than BF16 beyond its error bar."""
        return self.winner is not None and self.winner.beats_baseline

    @property
    def place(self) -> str:
        """Its sizes, as a message names it."""
        return " x ".join(map(str, self.values.values()))


class BreakEven(Part):
    """From where on a recipe is faster than BF16 beyond its error bar, to the end of the sweep."""

    recipe: str
    at: int | None = None
    """The value of the second size; null where only one is varied."""
    since: int | None
    """The value of the first size; null: nowhere."""


class GpuSweep(Part):
    """One GPU's sweep."""

    gpu: str
    sizes: tuple[str, ...]
    recipes: tuple[str, ...]
    points: tuple[SweepPoint, ...]
    break_even: tuple[BreakEven, ...] = ()
    findings: tuple[Finding, ...] = ()


class ForecastResult(ModelResult):
    """The whole result."""

    kind: Literal["forecast"] = "forecast"
    coefficients: str
    """Which data the forecast was fitted on."""
    state: Literal["sustained", "burst"]
    dp: int = 1
    interrupted: bool = False
    """A signal ended the sweep early: only the points that were computed until then are here."""
    gpus: tuple[GpuForecast, ...] = ()
    sweeps: tuple[GpuSweep, ...] = ()

    @property
    def sample_count(self) -> int | None:
        """The points of a sweep."""
        return sum(len(sweep.points) for sweep in self.sweeps) if self.sweeps else None
