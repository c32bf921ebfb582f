"""The result of `gemmscope fleet`: the same measurement on many GPUs, how they differ, and which of them are outliers.

A run file of 10,000 GPUs has about 30 MB: a GPU holds only what differs from the others, and numbers have six digits.
"""

from functools import cached_property
from typing import Literal

from gemmscope.findings import Finding
from gemmscope.interval import Interval
from gemmscope.results.base import ModelResult, Part
from gemmscope.results.compare import EnvironmentDifference

Side = Literal["slow", "fast"]


class GpuCondition(Part):
    """A GPU under the load of the measurement: medians over its bursts. Null: the driver does not say."""

    sm_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttled: dict[str, float] = {}
    """Why the clock was below its maximum: the reason, and the share of bursts in which the driver gave it."""
    health: dict[str, int | str] = {}
    """Memory errors (ECC), remapped rows, PCIe and NVLink state, by the names of `gpu/health.toml`; without the values that the
    fleet's `health` has."""


class FleetGpu(Part):
    """One GPU. `failure`: why it was not measured."""

    place: str
    """The node and the number of the GPU there."""
    node: str
    index: int | None = None
    uuid: str = ""
    group: str = ""
    """The GPUs that it is compared with: one product at one power limit."""
    versions: dict[str, str] = {}
    """Driver, frameworks and libraries, where they are not those of the fleet's `versions`; empty text: not installed."""
    figures: dict[str, Interval] = {}
    """By the names of the fleet's figures; 95% intervals of this GPU's own samples, or of its repeats."""
    repeats: int = 1
    """How often it was measured: its figures are medians of these."""
    condition: GpuCondition = GpuCondition()
    failure: str = ""
    findings: tuple[Finding, ...] = ()
    """Warnings and errors of its own run, without those that every GPU has."""
    file: str = ""
    """Its own run file."""


class FleetFigure(Part):
    """One number that every GPU has, over all GPUs of one group."""

    name: str
    """For example "FP8Block speedup", "BF16 step", "BF16 linears" or "FP8Block linears (pre-quantized)"."""
    unit: Literal["ms", "x"]
    group: str
    """One product, at one power limit where the fleet has several."""
    recipe: str
    mode: str = ""
    flops: float | None = None
    """Of the work that a time in milliseconds is for: flops / time is a rate. Null for speedups."""
    gpus: int
    center: Interval
    """The median over the GPUs, with a 95% interval."""
    lowest: float
    highest: float
    spread: Interval | None = None
    """The relative standard deviation from chip to chip, outliers and noise of the measurement removed, with a 95% interval; null
    for fewer than three GPUs."""
    another: Interval | None = None
    """Where another GPU of this fleet would be measured, with 90% probability."""
    noise: float | None = None
    """The relative standard error of one GPU's figure, the median over the GPUs; null: not known."""
    noise_from: Literal["repeats", "runs"] = "runs"
    """Whether the noise is the variation between repeats on one GPU, or the intervals of single runs, which are narrower."""
    limit: float | None = None
    """Outliers are at least this far from the center, relatively; null: not tested, or too few GPUs to tell."""

    @property
    def higher_is_better(self) -> bool:
        return self.unit == "x"


class FleetNode(Part):
    """One machine of the fleet."""

    node: str
    gpus: int
    measured: int
    speed: dict[str, float] = {}
    """By the names of the fleet's figures: the median over its GPUs of their speed, relative to the center of their group."""


class Outlier(Part):
    """A GPU, or a whole node, that differs from the others by more than chance allows. Each is listed once."""

    where: str
    """A place; or a node."""
    node: str
    whole_node: bool = False
    """The median of the node's GPUs is compared with those of the other nodes."""
    gpus: tuple[str, ...] = ()
    """Of a whole node: those of its GPUs that would be outliers by themselves."""
    group: str = ""
    figure: str
    """The figure in which it differs most."""
    side: Side
    ratio: Interval
    """Its speed (or its speedup) over that of the center: below one is slow, whatever the unit of the figure is."""
    score: float
    """How many robust standard deviations it is away."""
    also: dict[str, float] = {}
    """The other figures in which it is an outlier, and its ratio in each."""
    evidence: tuple[Finding, ...] = ()
    """What else differs there: clock, temperature, power, throttle reasons, memory errors, links, versions."""


class OutlierRule(Part):
    """How outliers are called."""

    false_alarms: float
    """The probability of one or more false alarms in the whole fleet, if its chips are normally distributed."""
    tolerance: float
    """Smaller differences are never called, however certain they are."""
    least_gpus: int
    """With fewer GPUs of one kind, none is called; the same for nodes."""
    figures: tuple[str, ...] = ()
    """The figures that are tested."""


class FleetResult(ModelResult):
    """The result of `gemmscope fleet`: every GPU, how they differ, and which of them are outliers."""

    kind: Literal["fleet"] = "fleet"
    of: Literal["bench", "step"]
    """What every GPU measured."""
    fingerprint: str = ""
    """The same for fleets that measured the same."""
    versions: dict[str, str] = {}
    """Driver, frameworks and libraries of most GPUs."""
    health: dict[str, int | str] = {}
    """The state of most GPUs, by the names of `gpu/health.toml`."""
    differences: tuple[EnvironmentDifference, ...] = ()
    """Versions, drivers and limits that are not the same everywhere: each value with who has it, the most common first."""
    outliers: tuple[Outlier, ...] = ()
    """The slowest first."""
    rule: OutlierRule
    figures: tuple[FleetFigure, ...] = ()
    nodes: tuple[FleetNode, ...] = ()
    gpus: tuple[FleetGpu, ...]
    interrupted: bool = False

    @property
    def measured(self) -> list[FleetGpu]:
        return [gpu for gpu in self.gpus if not gpu.failure]

    @property
    def sample_count(self) -> int | None:
        """The measurements of all GPUs."""
        return sum(gpu.repeats for gpu in self.measured)

    @cached_property
    def _figures(self) -> dict[tuple[str, str], FleetFigure]:
        return {(figure.group, figure.name): figure for figure in self.figures}

    def figure(self, name: str, group: str) -> FleetFigure | None:
        """A figure of one group."""
        return self._figures.get((group, name))

    def speed(self, gpu: FleetGpu, name: str) -> float | None:
        """A GPU's speed relative to the center of its group: below one is slow. None where it has no such figure."""
        figure, own = self.figure(name, gpu.group), gpu.figures.get(name)
        if figure is None or own is None or own.value <= 0 or figure.center.value <= 0:
            return None
        ratio = own.value / figure.center.value
        return ratio if figure.higher_is_better else 1 / ratio

    def versions_of(self, gpu: FleetGpu) -> dict[str, str]:
        """All versions of one GPU's software."""
        return {name: version for name, version in (self.versions | gpu.versions).items() if version}

    def health_of(self, gpu: FleetGpu) -> dict[str, int | str]:
        """All of one GPU's state."""
        return {name: value for name, value in (self.health | gpu.condition.health).items() if value != ""}
