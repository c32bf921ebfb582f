"""The result of `gemmscope forecast`: linears and steps as measured ones, with origin forecast, for each GPU; or a sweep.

Nothing in it was measured on the GPU it names, and every interval is a 90% error bar.
"""

from typing import Literal

from gemmscope.choices import ClockState
from gemmscope.findings import Finding
from gemmscope.results.base import ModelResult, Part
from gemmscope.results.linears import Linears
from gemmscope.results.step import StepTimes
from gemmscope.results.sweep import GpuSweep

Fit = Literal["fits", "tight", "may not fit", "does not fit"]
"""Tight: fits in the usual case, but not at most. May not fit: too much in the usual case, but not at least."""


class RecipeMemory(Part):
    """Bytes of one GPU in one recipe: the rank that needs the most. Computed from sizes and the layout, not measured."""

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
    """The forecast for one GPU."""

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


class ForecastResult(ModelResult):
    """The result of `gemmscope forecast`: linears and the training step on each GPU, or sweeps of the step."""

    kind: Literal["forecast"] = "forecast"
    coefficients: str
    """Which data the forecast was fitted on."""
    state: ClockState
    dp: int = 1
    interrupted: bool = False
    """A signal ended the sweep early: only the points that were computed until then are here."""
    gpus: tuple[GpuForecast, ...] = ()
    sweeps: tuple[GpuSweep, ...] = ()

    @property
    def sample_count(self) -> int | None:
        """The points of a sweep."""
        return sum(len(sweep.points) for sweep in self.sweeps) if self.sweeps else None
