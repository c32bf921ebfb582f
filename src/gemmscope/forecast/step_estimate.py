"""The step of one recipe as an estimate, and the speedup of one step over another."""

from dataclasses import dataclass
from functools import cached_property
from math import hypot, inf

from gemmscope.forecast.communication import Exposed
from gemmscope.forecast.estimate import Estimate, ratio, total
from gemmscope.forecast.launching import LaunchedStep, speedup_interval, step_interval
from gemmscope.forecast.mixed import without
from gemmscope.interval import Interval
from gemmscope.parts import StepPart

NOTHING = Estimate(0.0)
GPU_ONLY = LaunchedStep()
CHANGED: tuple[StepPart, ...] = ("GEMMs", "quantization")
PROPORTIONAL: StepPart = "pipeline bubble"
IDLE: StepPart = "idle, host-bound"
LEAST_IDLE = 0.001  # of the step


@dataclass(frozen=True)
class StepEstimate:
    """One recipe's step: GPU time by part in milliseconds, what is exchanged, and how the CPU launches it.

    `common` is the uncertainty of the whole step that all recipes of the same layout share. The uncertainty that the parts share
    is at most `shared_at_most`.
    """

    parts: dict[StepPart, Estimate]
    common: float = 0.0
    shared_at_most: float = inf
    exchanged: tuple[Exposed, ...] = ()
    launched: LaunchedStep = GPU_ONLY

    @cached_property
    def gpu(self) -> Estimate:
        """The GPU time: the step where launches are never late, with all its uncertainties."""
        own = total(self.parts.values())
        return own._replace(shared=hypot(min(own.shared, self.shared_at_most), self.common))

    @cached_property
    def interval(self) -> Interval:
        """The time of the step as launched, with its error bar."""
        return step_interval(self.launched, self.gpu)

    @property
    def time_ms(self) -> float:
        """The time of the step as launched."""
        return self.interval.value

    @cached_property
    def changed(self) -> Estimate:
        """The parts that depend on the recipe."""
        return total(estimate for part, estimate in self.parts.items() if part in CHANGED)

    @cached_property
    def constant(self) -> Estimate:
        """The parts that do not depend on the recipe, without the pipeline bubble, which is proportional to the rest."""
        return total(estimate for part, estimate in self.parts.items() if part not in (*CHANGED, PROPORTIONAL))

    @property
    def parts_ms(self) -> dict[StepPart, float]:
        """The GPU time by part, and the time that the GPU waits for launches as a part of its own."""
        waiting_ms = self.time_ms - self.gpu.value
        idle: dict[StepPart, float] = {IDLE: waiting_ms} if waiting_ms > LEAST_IDLE * self.time_ms else {}
        return {part: estimate.value for part, estimate in self.parts.items()} | idle

    @cached_property
    def errors(self) -> dict[StepPart, tuple[float, float]]:
        """The effect of the own and the shared error of each part on the step, relative to the step."""
        share = (1 - self.launched.decided_by_launches) / self.gpu.value
        return {part: (one.value * share * one.own, one.value * share * one.shared) for part, one in self.parts.items()}

    @property
    def host_bound(self) -> bool:
        """Whether the step is host-bound: the GPU waits for launches."""
        return self.launched.launch_ms > self.gpu.value


def gpu_speedup(
    slow: StepEstimate,
    fast: StepEstimate,
    in_common: float,
    slow_alike: Estimate = NOTHING,
    fast_alike: Estimate = NOTHING,
) -> Estimate:
    """The speedup of the GPU time. Parts that do not depend on the recipe have equal errors on both sides, which mostly cancel.

    `in_common`: the share of the shared errors of the GEMMs that both sides have in common. `slow_alike`, `fast_alike`: the
    linears that two mixes run in the same recipe.
    """
    value = slow.gpu.value / fast.gpu.value
    before, after, constant = slow.changed, fast.changed, fast.constant
    if fast_alike.value:
        before, after, constant = without(before, slow_alike), without(after, fast_alike), total([constant, fast_alike])
    if not after.value or not before.value:
        return Estimate(value)
    share = after.value / (after.value + constant.value)  # the share of the step that depends on the recipe
    gain = ratio(before, after, in_common)
    dilution = constant.uncertainty * (1 - share) * abs(1 - 1 / value)  # an error of the constant part changes the dilution
    return Estimate(value, gain.own * share, hypot(gain.shared * share, dilution))


def speedup(slow: StepEstimate, fast: StepEstimate, of_gpu: Estimate, differ: float = 1.0) -> Interval:
    """The speedup of the step as launched, given that of the GPU time: the ratio of both times, with its error bar. `differ`: the
    share of the linears that both run in different recipes."""
    interval = speedup_interval(slow.launched, fast.launched, slow.gpu, of_gpu, differ)
    return interval.times(slow.time_ms / fast.time_ms / interval.value)
