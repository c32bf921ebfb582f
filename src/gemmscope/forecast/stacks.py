"""The software that runs a step: how much longer each part takes than in NVIDIA's current software, and how certain that is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import hypot, log2
from typing import Any

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.forecast.communication import Exposed
from gemmscope.forecast.estimate import Estimate
from gemmscope.gpu.specs import GpuSpec
from gemmscope.parts import StepPart
from gemmscope.toml import load_data

USUAL = "nvidia"
WAITING: StepPart = "exposed communication"
SCALES_FROM = 8  # GPUs


@dataclass(frozen=True)
class SoftwareStack:
    """One stack. Its factors are in `coefficients/stacks.toml`."""

    name: str
    title: str
    attention: str
    parts: Mapping[str, float] = field(default_factory=dict)
    step: float = 1.0
    per_doubling: float = 0.0
    uncertainty: float = 0.0

    def part(self, part: StepPart, estimate: Estimate, chip: GpuSpec) -> Estimate:
        """The time of a part in this software."""
        longer = self.parts.get(part, 1.0)
        if part != "attention":
            return estimate.times(longer)
        known = _facts()["attention"][self.attention]
        factor = longer * known.get(chip.architecture, known["other"])
        return Estimate(estimate.value * factor, estimate.own, hypot(estimate.shared, known["uncertainty"]))

    def exchange(self, wait: Exposed) -> Exposed:
        """What is exposed of an exchange in this software."""
        factor = self.parts.get(WAITING, 1.0)
        return wait._replace(exposed_ms=wait.exposed_ms * factor, unsure_ms=wait.unsure_ms * factor)

    def slower(self, gpus: int) -> float:
        """The factor on the whole step on this number of GPUs."""
        return self.step * (1 + self.per_doubling * max(log2(gpus / SCALES_FROM), 0.0))


@cache
def _facts() -> dict[str, Any]:
    return load_data("gemmscope.forecast", "coefficients/stacks.toml")


@cache
def stacks() -> dict[str, SoftwareStack]:
    """All stacks by name."""
    return {name: SoftwareStack(name, **facts) for name, facts in _facts()["stacks"].items()}


def stack(name: str | None, framework: str = "") -> SoftwareStack:
    """The stack of this name; if none is named, that of the framework whose file was read, else NVIDIA's current one."""
    if name is None:
        return stacks().get(framework, stacks()[USUAL])
    if name in stacks():
        return stacks()[name]
    similar = closest(name, stacks(), 1)
    raise UserError(
        f"{option('stack')} {shown(name)} is not a known software stack",
        f"{f'did you mean {similar[0]}? ' if similar else ''}give one of {', '.join(stacks())}",
    )
