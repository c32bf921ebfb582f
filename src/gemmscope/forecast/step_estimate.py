"""The step of one recipe as an estimate, and the speedup of one over another with what both run alike."""

from dataclasses import dataclass
from functools import cached_property
from math import hypot, inf

from gemmscope.forecast.estimate import Estimate, ratio, total
from gemmscope.forecast.mixed import without
from gemmscope.forecast.overlap import Exposed, cluster
from gemmscope.parts import StepPart

NOTHING = Estimate(0.0)
CHANGED: tuple[StepPart, ...] = ("GEMMs", "quantization")
PROPORTIONAL: StepPart = "pipeline bubble"
IDLE: StepPart = "idle, host-bound"


@dataclass(frozen=True)
class StepEstimate:
    """One recipe's step: milliseconds by part, what is exchanged, and what launching it takes the CPU.

    `common` is the uncertainty of the whole step that no other recipe of the same layout changes. What the parts have in common
    is known at least to `shared_at_most`.
    """

    parts: dict[StepPart, Estimate]
    common: float = 0.0
    shared_at_most: float = inf
    exchanged: tuple[Exposed, ...] = ()
    host_ms: float = 0.0
    host_decides: float = 0.0  # how far the step follows the time of the host: from 0, not at all, to 1

    @cached_property
    def total(self) -> Estimate:
        """The time of the step with all its uncertainties."""
        own = total(self.parts.values())
        return own._replace(shared=hypot(min(own.shared, self.shared_at_most), self.common))

    @cached_property
    def changed(self) -> Estimate:
        """What depends on the recipe."""
        return total(estimate for part, estimate in self.parts.items() if part in CHANGED)

    @cached_property
    def constant(self) -> Estimate:
        """What does not; a pipeline bubble follows the rest of the step."""
        return total(estimate for part, estimate in self.parts.items() if part not in (*CHANGED, PROPORTIONAL))

    @property
    def parts_ms(self) -> dict[StepPart, float]:
        return {part: estimate.value for part, estimate in self.parts.items()}

    @property
    def busy_ms(self) -> float:
        """What the GPU is not idle for."""
        return self.total.value - self.parts_ms.get(IDLE, 0.0)

    @property
    def host_bound(self) -> bool:
        """Launching takes longer than running: the GPU waits."""
        return self.host_ms > self.busy_ms


def speedup(
    slow: StepEstimate,
    fast: StepEstimate,
    in_common: float,
    slow_alike: Estimate = NOTHING,
    fast_alike: Estimate = NOTHING,
    differ: float = 1.0,
) -> Estimate:
    """Of the step. `in_common` is the share of the shared errors of the GEMMs that both sides have alike; parts that both sides
    run alike have the same error, which hardly moves the ratio. Linears of mixes that both run alike are `slow_alike` and
    `fast_alike`; `differ` is the share of the linears that they do not."""
    value = slow.total.value / fast.total.value
    host = _host_uncertainty(slow, fast) * differ
    before, after, constant = slow.changed, fast.changed, fast.constant
    if fast_alike.value:
        before, after, constant = without(before, slow_alike), without(after, fast_alike), total([constant, fast_alike])
    if not after.value or not before.value:
        return Estimate(value, host)
    share = after.value / (after.value + constant.value)  # how much of the step the precision touches
    gain = ratio(before, after, in_common)
    dilution = constant.shared * (1 - share) * abs(1 - 1 / value)  # a wrong constant dilutes more or less
    return Estimate(value, hypot(gain.own * share, host), hypot(gain.shared * share, dilution))


def _host_uncertainty(slow: StepEstimate, fast: StepEstimate) -> float:
    """The uncertainty that launches add to a speedup: of their ratio if the host decides both steps; all if it decides one."""
    known = cluster()["host"]
    both, one = sorted((slow.host_decides, fast.host_decides))
    return hypot(both * known["uncertainty_of_ratio"], (one - both) * known["uncertainty"])
