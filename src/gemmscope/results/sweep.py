"""Sweeps: the best recipe over one size or two, forecast or measured. `SweepResult` is a measured one; a forecast has its sweeps
in a `ForecastResult`.

A point is one configuration. All recipes of a measured point ran on the same GPU, so that both sides of a speedup share one chip.
"""

from collections.abc import Sequence
from typing import Literal

from gemmscope.findings import Finding
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.base import ModelResult, Origin, Part
from gemmscope.results.linears import Winner

Swept = Literal["training step", "linears", "GEMM"]


class SweepPoint(Part):
    """One configuration of a sweep."""

    values: dict[str, int]
    baseline_step_ms: Interval | None = None
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
    """What the best recipe needs on one GPU; where none fits, the smallest."""
    gpus: int | None = None
    """GPUs of the layout."""
    tokens_per_s: float | None = None
    """Of one GPU in the best recipe."""
    why_not: str = ""
    """Why this configuration is not possible at all."""

    @property
    def baseline_ms(self) -> Interval | None:
        """The time in BF16."""
        return self.baseline_step_ms

    @property
    def reason(self) -> str:
        """Why it has no times; empty if it has."""
        return self.why_not

    @property
    def gains(self) -> bool:
        """Whether the best recipe is faster than BF16 beyond its error bar."""
        return self.winner is not None and self.winner.beats_baseline

    @property
    def place(self) -> str:
        """Its sizes, as messages name it."""
        return " x ".join(map(str, self.values.values()))


class MeasuredPoint(SweepPoint):
    """One configuration that was measured, or why it was not."""

    times_ms: dict[str, Interval] = {}
    """Recipe → milliseconds, with 95% intervals: of the step, of all linears of a micro-batch, or of one GEMM."""
    tflops: float | None = None
    """Of the GEMM in the best recipe."""
    gpu: str = ""
    """The GPU that measured it: its node and its number there."""
    uuid: str = ""
    failure: str = ""
    """Why it could not be measured, although the configuration is possible."""

    @property
    def baseline_ms(self) -> Interval | None:
        return self.times_ms.get(BASELINE)

    @property
    def reason(self) -> str:
        return self.why_not or self.failure


class BreakEven(Part):
    """The size from which on a recipe is faster than BF16 beyond its error bar, to the end of the sweep."""

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

    @property
    def origin(self) -> Origin:
        return "forecast"

    @property
    def subject(self) -> Swept:
        """What was timed."""
        return "training step"


class MeasuredSweep(GpuSweep):
    """A measured sweep of the step, or of linears in one mode. `gpu`: its type; points may come from several GPUs."""

    what: Swept
    mode: str = ""
    points: tuple[MeasuredPoint, ...]

    @property
    def origin(self) -> Origin:
        return "measured"

    @property
    def subject(self) -> Swept:
        return self.what


class SweepGpu(Part):
    """A GPU that measured points."""

    place: str
    """Its node and its number there."""
    uuid: str = ""
    name: str = ""
    """Its type: "NVIDIA H200"."""
    versions: dict[str, str] = {}
    """Driver, frameworks and libraries."""
    points: int
    """How many points it measured."""


class SweepResult(ModelResult):
    """A measured sweep: every point in the recipes requested, on one GPU or several."""

    kind: Literal["sweep"] = "sweep"
    of: Literal["bench", "step"]
    """Which command measured every point."""
    shape: tuple[int, int, int] | None = None
    """M, K and N of the bare GEMM whose sizes vary; null for a model."""
    backend: str = ""
    precision: float | None = None
    """A point was measured until every speedup was known to this precision."""
    time_limit_s: float | None = None
    """Or until this much time had passed."""
    wanted: int
    """Points that can be measured: those that are possible."""
    interrupted: bool = False
    """Not all points are here: the measurement is still running, or was ended early."""
    gpus: tuple[SweepGpu, ...] = ()
    sweeps: tuple[MeasuredSweep, ...] = ()
    """Of a bench, one for each mode, with the same points."""

    @property
    def sample_count(self) -> int:
        """Points that were measured."""
        return sum(not point.reason for point in self.sweeps[0].points) if self.sweeps else 0

    @property
    def where(self) -> str:
        return ", ".join(list(dict.fromkeys(gpu.name for gpu in self.gpus if gpu.name))) or "this machine"


def break_evens(points: Sequence[SweepPoint], recipes: Sequence[str]) -> tuple[BreakEven, ...]:
    """The break-even of every recipe; with two sizes, for every value of the second one that has points with times. `points` are
    in the order of their sizes."""
    lines = grouped((dict(enumerate(point.values.values())).get(1), point) for point in points if not point.reason)
    low = [name for name in recipes if name != BASELINE]
    return tuple(BreakEven(recipe=name, at=at, since=break_even(line, name)) for name in low for at, line in lines.items())


def break_even(points: Sequence[SweepPoint], name: str) -> int | None:
    """The first value of the first size from which a recipe is faster to the end, beyond its error bar; None if it never is.

    A point that is not possible, or was not measured, does not count.

    >>> gains = {1: Interval(0.9, 0.8, 1.0), 2: Interval(1.2, 1.1, 1.3)}
    >>> break_even([SweepPoint(values={"tp": tp}, speedups={"FP8": gain}) for tp, gain in gains.items()], "FP8")
    2
    """
    since: int | None = None
    for point in points:
        if point.reason:
            continue
        gain = point.speedups.get(name)
        if gain is None or not gain.above_one:
            since = None
        elif since is None:
            since = next(iter(point.values.values()))
    return since
