"""The linears of a model in every precision: three GEMMs each, and the quantization of X, W and dY."""

from collections.abc import Iterable, Sequence
from copy import copy
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmscope.choices import ClockState
from gemmscope.forecast.calibration import Calibration
from gemmscope.forecast.estimate import Estimate, total
from gemmscope.forecast.gemm import LAYOUT_OF, chip_limit_ms, model, uncertainty_outside
from gemmscope.forecast.physics import Array, Shapes
from gemmscope.forecast.stacks import Software, reference
from gemmscope.forecast.training import (
    Quantizing,
    facts,
    gemm_factor,
    gemm_format,
    library_uncertainty,
    one_way,
    quantizing,
    recipe_factor,
    uncertainty_of,
)
from gemmscope.gpu.specs import GpuSpec
from gemmscope.parts import StepPart
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import Pass, gemm_size

Key = tuple[int, int, int, int, Pass]  # tokens, inputs, outputs, groups, pass


class LinearTime(NamedTuple):
    """One linear in one recipe: its GEMMs by pass, and what quantizing each tensor takes."""

    gemms: dict[Pass, Estimate]
    quantize_ms: dict[str, float]
    quantize_uncertainty: float

    def all_gemms(self) -> Estimate:
        return total(self.gemms.values())


class LinearTimes(NamedTuple):
    """Linears of one micro-batch: GEMMs, their milliseconds at the clock of a burst, the casts of all activations, and those of
    every weight once."""

    gemms: Estimate
    least_ms: float
    activations: Estimate
    weights: Estimate

    def casts(self, weight_casts: float) -> Estimate:
        """All casts; `weight_casts`: how often a weight is quantized."""
        return total([self.activations, self.weights.times(weight_casts)])


class RecipeCosts(NamedTuple):
    """What a recipe does on one chip: the format of each pass's GEMMs, and its quantization.

    `padding`: tokens that are added to each expert. A router's counts lie anywhere between two multiples, so on average half a
    multiple is added.
    """

    formats: dict[Pass, str]
    quantizes: bool
    quantizing: Quantizing
    gemm_factor: float = 1.0
    padding: int = 0
    one_way: float = 1.0  # the share of a cast that one direction takes


class Forecaster:
    """Times of linears on one chip in one state. Computed GEMMs are cached, because models and sweeps repeat shapes."""

    def __init__(
        self,
        chip: GpuSpec,
        state: ClockState,
        *,
        cache_weights: bool = False,
        measured: Calibration | None = None,
        forward_only: bool = False,
        software: Software | None = None,
    ) -> None:
        """`forward_only`: a linear that runs forward alone quantizes its weight for that direction. `software`: it runs steps."""
        self.chip, self.state, self.cache_weights, self.measured = chip, state, cache_weights, measured
        self.software = software or reference(chip)
        self._forward_only = forward_only
        # GEMMs by format, and the share of each one's time that it takes at the clock of a burst.
        self._known: dict[tuple[str, Key], tuple[Estimate, float]] = {}
        self._costs: dict[str, RecipeCosts] = {}
        self._uncertainty = uncertainty_of("quantize", chip)

    def running(self, software: Software) -> "Forecaster":
        """The same chip and GEMMs with other software around them."""
        other = copy(self)
        other.software = software
        return other

    def costs(self, name: str) -> RecipeCosts:
        """What a recipe costs on this chip."""
        if name not in self._costs:
            chosen = recipe(name)
            formats = {pass_name: gemm_format(chosen, pass_name, self.chip) for pass_name in LAYOUT_OF}
            casts = quantizing(chosen, self.chip)
            if self.measured is not None and name in self.measured.quantize:
                casts = casts.times(self.measured.multiplier(self.measured.quantize[name], "casts", self._uncertainty).factor)
            padding = chosen.experts_multiple_of // 2
            self._costs[name] = RecipeCosts(
                formats, chosen.quantizes, casts, recipe_factor(chosen), padding, one_way(chosen, self.chip)
            )
        return self._costs[name]

    def in_common(self, first: str, second: str) -> float:
        """The share of the shared errors that two recipes have in common: all of it if both run the same GEMMs on this chip."""
        if BASELINE in (first, second) or self.costs(first).formats != self.costs(second).formats:
            return in_common()
        return 1.0

    def other(self, time_ms: float, part: StepPart, uncertainty: float) -> Estimate:
        """The time of non-GEMM work in one part of a step: calibrated if possible, else with the given uncertainty."""
        if self.measured is None or part not in self.measured.parts:
            return Estimate(time_ms, 0.0, uncertainty)
        known = self.measured.multiplier(self.measured.parts[part], "parts", uncertainty)
        return Estimate(time_ms * known.factor, 0.0, known.half_width)

    def prepare(self, cases: Iterable[Case], recipes: Sequence[str]) -> None:
        """Compute every GEMM of these linears at once."""
        wanted: dict[str, dict[Key, None]] = {}
        every = [self.costs(name) for name in recipes]
        formats = {name: list(dict.fromkeys((costs.formats[name], costs.padding) for costs in every)) for name in LAYOUT_OF}
        for case in cases:
            for pass_name in case.passes:
                for fmt, padding in formats[pass_name]:
                    key = _key(case, pass_name, padding)
                    if (fmt, key) not in self._known:
                        wanted.setdefault(fmt, {})[key] = None
        for fmt, keys in wanted.items():
            self._compute(fmt, list(keys))

    def forget(self, beyond: int) -> None:
        """Clear the cache of GEMMs if it holds more than `beyond`."""
        if len(self._known) > beyond:
            self._known.clear()

    def _compute(self, fmt: str, keys: list[Key]) -> None:
        sizes = [(*gemm_size(tokens, inputs, outputs, pass_name), groups) for tokens, inputs, outputs, groups, pass_name in keys]
        m, k, n, groups = np.array(sizes, dtype=np.float64).T
        passes = np.array([key[4] for key in keys])
        dgrad, wgrad = passes == "dgrad", passes == "wgrad"
        shapes = Shapes.of(m, k, n, groups, wgrad & (groups > 1))
        layouts = np.select([dgrad, wgrad], [LAYOUT_OF["dgrad"], LAYOUT_OF["wgrad"]], LAYOUT_OF["fprop"])
        times = model().time(self.chip, fmt, shapes, self.state, layout=layouts, in_training=True)
        own = np.sqrt(np.maximum(((times.low + times.high) / 2) ** 2 - times.shared**2, 0.0))
        shared = np.hypot(times.shared, library_uncertainty(fmt, self.chip))
        factors, uncertainties = self._measured_factors(fmt, passes, self.state)
        if self.measured is not None and self.measured.own_chip:  # the error that all shapes share was measured
            known = uncertainties > 0
            shared[known] = np.hypot(uncertainties, uncertainty_outside(shapes))[known]
        floor = np.maximum(
            times.burst_ms * self._measured_factors(fmt, passes, "burst")[0], chip_limit_ms(shapes, fmt, self.chip)
        )
        gemm_ms = np.maximum(times.gemm_ms * factors, floor)
        estimates = map(Estimate, gemm_ms.tolist(), own.tolist(), shared.tolist())
        shares = (floor / gemm_ms).tolist()
        self._known.update(zip(((fmt, key) for key in keys), zip(estimates, shares, strict=True), strict=True))

    def _measured_factors(self, fmt: str, passes: NDArray[np.str_], state: ClockState) -> tuple[Array, Array]:
        """Factors on GEMM times and their uncertainties: training relative to the widely measured library, times the calibration.

        The uncertainty is zero where the calibration has no such GEMM.
        """
        factors, uncertainties = np.full(len(passes), gemm_factor(fmt, self.chip)), np.zeros(len(passes))
        for name in LAYOUT_OF:
            if self.measured is not None and (known := self.measured.gemm(fmt, name, state, self.chip)) is not None:
                factors[passes == name] *= known.factor
                uncertainties[passes == name] = known.half_width
        return factors, uncertainties

    def linear(self, case: Case, name: str) -> LinearTime:
        """One linear in one recipe."""
        costs = self.costs(name)
        keys = {pass_name: (costs.formats[pass_name], _key(case, pass_name, costs.padding)) for pass_name in case.passes}
        if any(key not in self._known for key in keys.values()):
            self.prepare([case], [name])
        gemms = {pass_name: self._known[key][0].times(costs.gemm_factor) for pass_name, key in keys.items()}
        bare, frozen = len(case.passes) == 1, "wgrad" not in case.passes
        quantize_ms = dict(zip(("X", "W", "dY"), self._cast_ms(case, costs), strict=True)) if costs.quantizes else {}
        for tensor, never in (("W", self.cache_weights or (frozen and not bare)), ("dY", bare)):
            if never:
                quantize_ms.pop(tensor, None)
        return LinearTime(gemms, quantize_ms, self._uncertainty)

    def in_step(self, linears: Iterable[tuple[Case, int, float]], name: str) -> LinearTimes:
        """Many linears in one micro-batch of a step: (case, count, forward runs) for each. Fast: sweeps call it for every
        point."""
        costs = self.costs(name)
        formats, quantizes, _, factor, padding, _ = costs
        known, value, squares, shared, least, activations, weights = self._known, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for case, count, runs in linears:
            inputs, outputs, groups = case.inputs, case.outputs, len(case.rows) or 1
            tokens = case.tokens + padding * len(case.rows)
            for pass_name in case.passes:
                key = (formats[pass_name], (tokens, inputs, outputs, groups, pass_name))
                if key not in known:
                    self.prepare([case], [name])
                (gemm_ms, own_part, shared_part), least_share = known[key]
                time_ms = gemm_ms * factor * (count * runs if pass_name == "fprop" else count)
                value += time_ms
                squares += (time_ms * own_part) ** 2
                shared += time_ms * shared_part
                least += time_ms * least_share
            if quantizes:
                input_ms, weight_ms, gradient_ms = self._cast_ms(case, costs)
                activations += (input_ms + gradient_ms * (len(case.passes) > 1)) * count * (2 + runs) / 3
                weights += weight_ms * count * ("wgrad" in case.passes)  # a frozen one is quantized before training
        gemms = Estimate(value, sqrt(squares) / value, shared / value) if value else Estimate(0.0)
        casts = (Estimate(elements_ms, 0.0, self._uncertainty) for elements_ms in (activations, weights))
        return LinearTimes(gemms, least, *casts)

    def _cast_ms(self, case: Case, costs: RecipeCosts) -> tuple[float, float, float]:
        """Milliseconds to quantize X, W and dY once. Without wgrad, X and dY are quantized for one direction."""
        tokens, time_ms = case.tokens + costs.padding * len(case.rows), costs.quantizing.time_ms
        weight_ms = time_ms(case.weights) * (costs.one_way if self._forward_only else 1)
        share = 1 if "wgrad" in case.passes or len(case.passes) == 1 else costs.one_way
        return time_ms(tokens * case.inputs) * share, weight_ms, time_ms(tokens * case.outputs) * share

    def least_ms(self, case: Case, name: str) -> float:
        """A linear's GEMMs at the clock of a burst."""
        gemms, costs = self.linear(case, name).gemms, self.costs(name)
        keys = {pass_name: (costs.formats[pass_name], _key(case, pass_name, costs.padding)) for pass_name in gemms}
        return sum(part.value * self._known[keys[pass_name]][1] for pass_name, part in gemms.items())


def _key(case: Case, pass_name: Pass, padding: int) -> Key:
    return case.tokens + padding * len(case.rows), case.inputs, case.outputs, len(case.rows) or 1, pass_name


def in_common() -> float:
    """The share of shared uncertainties that a baseline and a recipe have in common."""
    return float(facts()["common"]["shared_between_formats"])
