"""The step of one recipe as an estimate, and the speedup of one step over another."""

from dataclasses import dataclass
from functools import cached_property
from math import hypot, inf

from gemmscope.forecast.communication import Exposed, cluster
from gemmscope.forecast.estimate import Estimate, ratio, total
from gemmscope.forecast.mixed import without
from gemmscope.model.spec import RunSpec
from gemmscope.parts import StepPart


def launch_ms(recipe: str, dense_layers: float, moe_layers: int, run: RunSpec) -> float:
    """Milliseconds that the CPU needs to launch one micro-batch; few with CUDA graphs."""
    facts = cluster()["host"]
    dense, moe = (table.get(recipe, table["other"]) for table in (facts["layer_ms"], facts["moe_layer_ms"]))
    every = dense * dense_layers + moe * moe_layers
    return float(every * (facts["graphs"] if run.cuda_graphs else 1.0))


def at_least(gpu_ms: float, host_ms: float, ahead_ms: float = 0.0, *, experts: bool) -> float:
    """The time of a micro-batch, given its GPU time and launch time. `ahead_ms`: its share of what the GPU runs once per step.

    The CPU launches ahead of the GPU, so a step takes the longer of both. With experts it does not get far ahead: the CPU
    waits for routing, and in every layer some phases are host-bound and others GPU-bound.

    >>> at_least(10.0, 5.0, experts=False), at_least(10.0, 15.0, 2.0, experts=False), round(at_least(10.0, 8.0, experts=True), 1)
    (10.0, 13.0, 10.9)
    """
    if not experts or not host_ms or not gpu_ms:
        return max(gpu_ms, host_ms - ahead_ms)
    order = float(cluster()["host"]["sharpness"])
    return float((gpu_ms**order + host_ms**order) ** (1 / order))


NOTHING = Estimate(0.0)
CHANGED: tuple[StepPart, ...] = ("GEMMs", "quantization")
PROPORTIONAL: StepPart = "pipeline bubble"
IDLE: StepPart = "idle, host-bound"


@dataclass(frozen=True)
class StepEstimate:
    """One recipe's step: milliseconds by part, what is exchanged, and the launch time on the CPU.

    `common` is the uncertainty of the whole step that all recipes of the same layout share. The uncertainty that the parts share
    is at most `shared_at_most`.
    """

    parts: dict[StepPart, Estimate]
    common: float = 0.0
    shared_at_most: float = inf
    exchanged: tuple[Exposed, ...] = ()
    host_ms: float = 0.0
    host_decides: float = 0.0  # the degree to which launch time determines the step, 0 to 1

    @cached_property
    def total(self) -> Estimate:
        """The time of the step with all its uncertainties."""
        own = total(self.parts.values())
        return own._replace(shared=hypot(min(own.shared, self.shared_at_most), self.common))

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
        return {part: estimate.value for part, estimate in self.parts.items()}

    @property
    def busy_ms(self) -> float:
        """Milliseconds in which the GPU is busy."""
        return self.total.value - self.parts_ms.get(IDLE, 0.0)

    @property
    def host_bound(self) -> bool:
        """Whether the step is host-bound: the GPU waits for launches."""
        return self.host_ms > self.busy_ms


def speedup(
    slow: StepEstimate,
    fast: StepEstimate,
    in_common: float,
    slow_alike: Estimate = NOTHING,
    fast_alike: Estimate = NOTHING,
    differ: float = 1.0,
) -> Estimate:
    """The speedup of the step. Parts that do not depend on the recipe have the same error on both sides, which mostly cancels.

    `in_common`: the share of the shared errors of the GEMMs that both sides have in common. `slow_alike`, `fast_alike`: the
    linears that two mixes run in the same recipe. `differ`: the share of the linears that they run in different recipes.
    """
    value = slow.total.value / fast.total.value
    host = _host_uncertainty(slow, fast) * differ
    before, after, constant = slow.changed, fast.changed, fast.constant
    if fast_alike.value:
        before, after, constant = without(before, slow_alike), without(after, fast_alike), total([constant, fast_alike])
    if not after.value or not before.value:
        return Estimate(value, host)
    share = after.value / (after.value + constant.value)  # the share of the step that depends on the recipe
    gain = ratio(before, after, in_common)
    dilution = constant.shared * (1 - share) * abs(1 - 1 / value)  # an error of the constant part changes the dilution
    return Estimate(value, hypot(gain.own * share, host), hypot(gain.shared * share, dilution))


def _host_uncertainty(slow: StepEstimate, fast: StepEstimate) -> float:
    """The uncertainty that launches add to a speedup: that of their ratio if both steps are host-bound, all of it if one is."""
    known = cluster()["host"]
    both, one = sorted((slow.host_decides, fast.host_decides))
    return hypot(both * known["uncertainty_of_ratio"], (one - both) * known["uncertainty"])
