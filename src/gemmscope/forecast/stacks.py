"""The software that runs a step: multipliers on what the hardware model says, each with a mean and a spread.

The reference is NVIDIA's current software, which the coefficients of GEMMs, casts and all other ops describe. Another stack
multiplies parts of the step, and an unnamed one is the mixture of all stacks that run on the GPU. `coefficients/stacks.toml` is
the one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import exp, hypot, log, log2, sqrt
from statistics import NormalDist, mean, pvariance
from typing import Any, NamedTuple

from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.forecast.communication import Exposed
from gemmscope.forecast.estimate import Estimate
from gemmscope.gpu.specs import GpuSpec
from gemmscope.parts import StepPart
from gemmscope.recipe.frameworks import frameworks
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.toml import load_data

REFERENCE, MIXTURE = "nvidia", "unnamed"
LAUNCHES = "launches"
WAITING: StepPart = "exposed communication"
CHANGED = ("GEMMs", "quantization")
SCALES_FROM = 8  # GPUs
HALF_WIDTHS = NormalDist().inv_cdf(0.95)  # of a 90% error bar, in standard deviations


@dataclass(frozen=True)
class Multiplier:
    """A factor on the time of something: the mean and the variance of its logarithm."""

    log: float = 0.0
    variance: float = 0.0

    @cached_property
    def factor(self) -> float:
        return exp(self.log)

    @cached_property
    def half_width(self) -> float:
        """Of its 90% error bar, as a logarithm."""
        return HALF_WIDTHS * sqrt(self.variance)

    def of_this(self, estimate: Estimate) -> Estimate:
        """The estimate multiplied; the error is its own."""
        return Estimate(estimate.value * self.factor, hypot(estimate.own, self.half_width), estimate.shared)

    def of_all(self, estimate: Estimate) -> Estimate:
        """The estimate multiplied; others that are multiplied have the same error."""
        return Estimate(estimate.value * self.factor, estimate.own, hypot(estimate.shared, self.half_width))

    def and_also(self, other: Multiplier) -> Multiplier:
        """Both factors, whose errors are independent."""
        return Multiplier(self.log + other.log, self.variance + other.variance)

    def updated(self, seen: Multiplier) -> Multiplier:
        """What is known after a measurement: both weighted by their certainty. The one rule for everything that is measured.

        What a measurement contradicts was believed too firmly: its spread is then at least what the measurement shows.

        >>> Multiplier(0.1, 0.01).updated(Multiplier(0.0, 0.01))
        Multiplier(log=0.05, variance=0.005)
        >>> round(Multiplier(0.5, 0.01).updated(Multiplier(0.0, 0.01)).log, 3)
        0.02
        """
        if not self.variance:
            return self
        moves = seen.log - self.log
        share = 1 / (1 + seen.variance / max(self.variance, moves**2 - seen.variance))
        return Multiplier(self.log + share * moves, seen.variance * share)


ONE = Multiplier()


class Learned(NamedTuple):
    """What a measurement says of a multiplier: how much its logarithm moves, and the share of its variance that is left."""

    moves: float
    left: float


@dataclass(frozen=True)
class Software:
    """One stack (or the mixture of several) on one GPU: a multiplier for each part of the step, for the whole `step`, for low
    precision, and for the casts of each recipe; what each step takes once, in milliseconds; and what each doubling of the
    GPUs adds."""

    name: str
    title: str
    multipliers: Mapping[str, Multiplier] = field(default_factory=dict)
    once_ms: float = 0.0
    once_variance: float = 0.0  # of its milliseconds
    per_doubling: float = 0.0
    attention: str = ""  # its implementation, as `step` and `explain` name it; empty where stacks differ
    variant: str = ""  # of the GPU, which its published runs were on

    def of(self, what: str) -> Multiplier:
        return self.multipliers.get(what, ONE)

    def part(self, part: StepPart, estimate: Estimate) -> Estimate:
        """The time of a part. Of parts that a recipe changes, other recipes have the same error."""
        known = self.multipliers.get(part)
        if known is None:
            return estimate
        return known.of_all(estimate) if part in CHANGED else known.of_this(estimate)

    def low_precision(self, name: str) -> tuple[Multiplier, Multiplier]:
        """Of the GEMMs in recipe `name`, and of its casts."""
        chosen = recipe(name)
        if not chosen.quantizes:
            return ONE, ONE
        gemms, casts = self.of("GEMMs in low precision"), self.of(f"quantization of {chosen.name}")
        if "transformer_engine" in chosen.backends:
            return gemms, casts
        return gemms.and_also(self.of("GEMMs by torchao")), casts.and_also(self.of("quantization by torchao"))

    def exchange(self, wait: Exposed) -> Exposed:
        """What is exposed of an exchange."""
        known = self.of(WAITING)
        factor = known.factor * self.of("step").factor
        unsure_ms = hypot(wait.unsure_ms, wait.exposed_ms * known.half_width) * factor
        return wait._replace(exposed_ms=wait.exposed_ms * factor, unsure_ms=unsure_ms)

    def once(self) -> Estimate:
        """What every step takes beside its parts: data, clipping, logging, synchronization."""
        return Estimate(self.once_ms, HALF_WIDTHS * sqrt(self.once_variance) / self.once_ms if self.once_ms else 0.0)

    def slower(self, gpus: int) -> float:
        """The factor on all computation on this number of GPUs."""
        return self.of("step").factor * (1 + self.per_doubling * max(log2(gpus / SCALES_FROM), 0.0))

    def uncertainty(self, *, experts: bool) -> float:
        """Of the whole step: the half-width of its 90% error bar, as a logarithm."""
        further = self.of("experts").variance if experts else 0.0
        return HALF_WIDTHS * sqrt(self.of("step").variance + self.of("runs").variance + further)

    def after(self, learned: Mapping[str, Learned], device: str) -> Software:
        """The same software after a measurement: each multiplier moves, and keeps a share of its variance."""
        known = dict(self.multipliers)
        for what, (moves, left) in learned.items():
            before = self.of(what)
            known[what] = Multiplier(before.log + moves, before.variance * left)
        return replace(self, title=_facts()["measured"]["title"].format(title=self.title, device=device), multipliers=known)


@dataclass(frozen=True)
class SoftwareStack:
    """One stack as the table has it. Pairs are a factor (or milliseconds) and the spread of its logarithm. `layouts`: the only
    values of parts of a layout that it has."""

    name: str
    title: str
    gpus: Sequence[str] = ()
    uses: Sequence[str] = ()
    step: tuple[float, float] = (1.0, 0.0)
    once_ms: tuple[float, float] = (0.0, 0.0)
    per_doubling: float = 0.0
    backends: Sequence[str] = ("transformer_engine",)
    layouts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def on(self, chip: GpuSpec) -> Software:
        """Its multipliers on this GPU."""
        table, known, variant = _facts(), {"step": _multiplier(self.step)}, ""
        attention = table["attention"]
        places = (chip.name, chip.architecture) if chip.power_limit_w is None else (chip.architecture,)
        for name in (*table["all"], *self.uses):
            facts = table["multipliers"][name]
            place = next((place for place in places if place in facts["at"]), "other")
            known[facts["part"]] = known.get(facts["part"], ONE).and_also(_multiplier(facts["at"][place]))
            attention, variant = facts.get("implementation", attention), name if place == chip.name else variant
        once_ms, spread = self.once_ms
        about = {"attention": attention, "variant": variant}
        return Software(self.name, self.title, known, once_ms, (once_ms * spread) ** 2, self.per_doubling, **about)

    def runs(self, name: str) -> bool:
        """Whether it trains in this recipe."""
        return name == BASELINE or any(backend in recipe(name).backends for backend in self.backends)


def _multiplier(pair: Sequence[float]) -> Multiplier:
    return Multiplier(log(pair[0]), pair[1] ** 2)


@cache
def _facts() -> dict[str, Any]:
    return load_data("gemmscope.forecast", "coefficients/stacks.toml")


@cache
def stacks() -> dict[str, SoftwareStack]:
    """All stacks by name."""
    return {name: SoftwareStack(name, **facts) for name, facts in _facts()["stacks"].items()}


def stacks_on(chip: GpuSpec) -> list[SoftwareStack]:
    """The stacks that run on a GPU."""
    return [stack for stack in stacks().values() if not stack.gpus or chip.architecture in stack.gpus]


def mixture(chip: GpuSpec) -> Software:
    """Any of the stacks that run on this GPU, each as likely as the others: for each multiplier the mean, the spread of each
    stack, and the spread between them."""
    members = stacks_on(chip)
    software = [stack.on(chip) for stack in members]
    mixed = {}
    for what in dict.fromkeys(what for one in software for what in one.multipliers):
        alike = [
            one for stack, one in zip(members, software, strict=True) if "by torchao" not in what or "torchao" in stack.backends
        ]
        known = [one.of(what) for one in alike]
        mixed[what] = Multiplier(
            mean(one.log for one in known), mean(one.variance for one in known) + pvariance([one.log for one in known])
        )
    times = [one.once_ms for one in software]
    variance = mean(one.once_variance for one in software) + pvariance(times)
    doubling = mean(one.per_doubling for one in software)
    return Software(MIXTURE, _facts()["mixture"]["title"], mixed, mean(times), variance, doubling)


def reference(chip: GpuSpec) -> Software:
    """What `gemmscope step` would run on this GPU, which is what the coefficients were measured with."""
    software = stacks()[REFERENCE].on(chip)
    return replace(software, title=_facts()["reference"]["title"], multipliers={**software.multipliers, "runs": ONE})


def software_on(
    chip: GpuSpec, name: str | None = None, of_file: str = "", recipes: Iterable[str] = (), *, gpus: int = 1
) -> Software:
    """The software of this name on a GPU: one that is named, else that of the model's file, else any; on a single GPU, what
    `gemmscope step` would run there. `recipes`: those that were asked for; a stack that is named must run them.
    """
    if name is None and of_file not in stacks():
        return mixture(chip) if gpus > 1 else reference(chip)
    chosen = stacks().get(of_file if name is None else name.strip().lower())
    if chosen is None:
        raise UserError(
            f"{option('stack')} {shown(name)} is not a known software stack",
            f"{did_you_mean(str(name), stacks(), 1)}give one of {', '.join(stacks())}",
        )
    possible = stacks_on(chip)
    if chosen not in possible:
        if name is None:
            return mixture(chip)
        names = ", ".join(stack.name for stack in possible)
        raise UserError(f"{option('stack', chosen.name)}: {chosen.title} does not run on {chip.name}", f"stacks that do: {names}")
    if name is not None and (impossible := [other for other in recipes if not chosen.runs(other)]):
        names = ", ".join(stack.name for stack in possible if all(map(stack.runs, impossible)))
        libraries = " and ".join(frameworks()[backend].title for backend in chosen.backends)
        raise UserError(
            f"{option('stack', chosen.name)}: {chosen.title} trains with {libraries}, which has no {impossible[0]}",
            f"stacks that have it: {names}",
        )
    return chosen.on(chip)
