"""The linears of a model in every precision: three GEMMs each, and quantizing X, W and dY once each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmscope.forecast.estimate import Estimate, total
from gemmscope.forecast.gemm import LAYOUT_OF, GemmModel, State, chip_limit_ms, model, uncertainty_outside
from gemmscope.forecast.physics import Array, Shapes
from gemmscope.forecast.training import Quantizing, facts, gemm_factor, gemm_format, quantizing, uncertainty_of
from gemmscope.gpu.specs import GpuSpec
from gemmscope.parts import StepPart
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import Pass, gemm_size

CALIBRATED_UNCERTAINTY = 0.03
CALIBRATED_PART_UNCERTAINTY = 0.06
OTHER_STATE_UNCERTAINTY = 0.06  # where the other state of the chip was measured
Key = tuple[int, int, int, int, Pass]  # tokens, inputs, outputs, groups, pass


class LinearTime(NamedTuple):
    """One linear in one recipe: its GEMMs by pass, and what quantizing each tensor takes."""

    gemms: dict[Pass, Estimate]
    quantize_ms: dict[str, float]
    quantize_uncertainty: float

    def all_gemms(self) -> Estimate:
        return total(self.gemms.values())

    def quantization(self) -> Estimate:
        return Estimate(sum(self.quantize_ms.values()), 0.0, self.quantize_uncertainty)


class StepLinears(NamedTuple):
    """Many linears in one micro-batch of a step: GEMMs, what they take at the clock of a burst, quantization by tensor.

    `weights` is quantizing every weight once; a step that caches them, or has many micro-batches, does so once.
    """

    gemms: Estimate
    least_ms: float
    activations: Estimate
    weights: Estimate


class Adjustment(NamedTuple):
    """Measured over forecast: factors on GEMMs by format and pass, sustained and in a burst, on quantizing by recipe, on a
    step's other parts. `own_chip`: it was the reader's own; what was measured on another chip of the kind corrects times, and
    takes nothing off their uncertainty.
    """

    gemms: Mapping[str, Mapping[Pass, float]]
    quantize: Mapping[str, float]
    parts: Mapping[StepPart, float] = {}
    burst: Mapping[str, Mapping[Pass, float]] = {}
    own_chip: bool = True

    def gemm(self, fmt: str, pass_name: Pass, state: State) -> tuple[float, float] | None:
        """The factor on one kind of GEMM and its uncertainty; that of the other state where only it was measured.

        >>> Adjustment({"bf16": {"fprop": 1.1}}, {}).gemm("bf16", "fprop", "sustained")
        (1.1, 0.03)
        >>> Adjustment({"bf16": {"fprop": 1.1}}, {}).gemm("bf16", "fprop", "burst")[1] > 0.06
        True
        """
        own, other = (self.gemms, self.burst) if state == "sustained" else (self.burst, self.gemms)
        for factors, further in ((own, 0.0), (other, OTHER_STATE_UNCERTAINTY)):
            if pass_name in factors.get(fmt, {}):
                return factors[fmt][pass_name], hypot(CALIBRATED_UNCERTAINTY, further)
        return None


class _Factors(NamedTuple):
    """On GEMMs, one for each; their uncertainties, zero where nothing was measured on the chip itself."""

    values: Array
    uncertainties: Array


class RecipeCosts(NamedTuple):
    """What a recipe does on one chip: the format of each pass's GEMMs, and its quantization."""

    formats: dict[Pass, str]
    quantizes: bool
    quantizing: Quantizing


class Forecaster:
    """Times of linears on one chip in one state. What was computed once is kept: models share shapes, sweeps share more."""

    def __init__(
        self,
        chip: GpuSpec,
        state: State,
        *,
        cache_weights: bool = False,
        gemms: GemmModel | None = None,
        measured: Adjustment | None = None,
    ) -> None:
        self.chip, self.state, self.cache_weights = chip, state, cache_weights
        self.gemms, self.measured = gemms or model(), measured
        self._known: dict[tuple[str, Key], Estimate] = {}
        self._least: dict[tuple[str, Key], float] = {}  # of a GEMM at the clock of a burst: a share of its time
        self._costs: dict[str, RecipeCosts] = {}
        self._common, self._uncertainty = uncertainty_of("common", chip), uncertainty_of("quantize", chip)

    def costs(self, name: str) -> RecipeCosts:
        """Of a recipe on this chip."""
        if name not in self._costs:
            asked = recipe(name)
            formats = {each: gemm_format(asked, each, self.chip) for each in LAYOUT_OF}
            costs = quantizing(asked, self.chip)
            if self.measured is not None and name in self.measured.quantize:
                costs = costs.times(self.measured.quantize[name])
            self._costs[name] = RecipeCosts(formats, asked.quantizes, costs)
        return self._costs[name]

    def in_common(self, first: str, second: str) -> float:
        """The share of the shared errors that two recipes have alike: all of it where both run the same GEMMs on this chip."""
        same = BASELINE not in (first, second) and self.costs(first).formats == self.costs(second).formats
        return 1.0 if same else in_common()

    def other(self, time_ms: float, part: StepPart, uncertainty: float) -> Estimate:
        """What is not a GEMM, in one part of a step: as measured on this chip, or with the uncertainty it has otherwise."""
        if self.measured is None or part not in self.measured.parts:
            return Estimate(time_ms, 0.0, uncertainty)
        known = CALIBRATED_PART_UNCERTAINTY if self.measured.own_chip else uncertainty
        return Estimate(time_ms * self.measured.parts[part], 0.0, known)

    def prepare(self, cases: Iterable[Case], recipes: Sequence[str]) -> None:
        """Compute every GEMM of these linears at once."""
        wanted: dict[str, dict[Key, None]] = {}
        formats = {each: {self.costs(name).formats[each] for name in recipes} for each in LAYOUT_OF}
        for case in cases:
            for each in case.passes:
                key = _key(case, each)
                for fmt in formats[each]:
                    if (fmt, key) not in self._known:
                        wanted.setdefault(fmt, {})[key] = None
        for fmt, keys in wanted.items():
            self._compute(fmt, list(keys))

    def forget(self, beyond: int) -> None:
        """Drop what was computed if it has become more than that."""
        if len(self._known) > beyond:
            self._known.clear()
            self._least.clear()

    def _compute(self, fmt: str, keys: list[Key]) -> None:
        sizes = [(*gemm_size(tokens, inputs, outputs, each), groups) for tokens, inputs, outputs, groups, each in keys]
        m, k, n, groups = np.array(sizes, dtype=np.float64).T
        passes = np.array([key[4] for key in keys])
        dgrad, wgrad = passes == "dgrad", passes == "wgrad"
        shapes = Shapes.of(m, k, n, groups, wgrad & (groups > 1))
        layouts = np.select([dgrad, wgrad], [LAYOUT_OF["dgrad"], LAYOUT_OF["wgrad"]], LAYOUT_OF["fprop"])
        found = self.gemms.time(self.chip, fmt, shapes, self.state, layout=layouts, in_training=True)
        own = np.sqrt(np.maximum(((found.low + found.high) / 2) ** 2 - found.shared**2, 0.0))
        shared = np.hypot(found.shared, self._common)
        factors, in_burst = (self._measured_factors(fmt, passes, state) for state in (self.state, "burst"))
        if self.measured is not None and self.measured.own_chip:  # what all shapes share is known
            known = factors.uncertainties > 0
            shared[known] = np.hypot(factors.uncertainties, uncertainty_outside(shapes))[known]
        floor = np.maximum(found.burst_ms * in_burst.values, chip_limit_ms(shapes, fmt, self.chip))
        times = np.maximum(found.gemm_ms * factors.values, floor)
        numbers = zip(keys, times.tolist(), own.tolist(), shared.tolist(), (floor / times).tolist(), strict=True)
        for key, time_ms, alone, together, share in numbers:
            self._known[fmt, key], self._least[fmt, key] = Estimate(time_ms, alone, together), share

    def _measured_factors(self, fmt: str, passes: NDArray[np.str_], state: State) -> _Factors:
        """Training's GEMMs over those that were measured widely, and over those forecast where this very chip was measured."""
        values, uncertainties = np.full(len(passes), gemm_factor(fmt, self.chip)), np.zeros(len(passes))
        for name in LAYOUT_OF if self.measured is not None else ():
            if self.measured is not None and (found := self.measured.gemm(fmt, name, state)) is not None:
                values[passes == name] *= found[0]
                uncertainties[passes == name] = found[1]
        return _Factors(values, uncertainties)

    def linear(self, case: Case, name: str) -> LinearTime:
        """One linear in one recipe."""
        costs = self.costs(name)
        keys = {each: (costs.formats[each], _key(case, each)) for each in case.passes}
        if any(key not in self._known for key in keys.values()):
            self.prepare([case], [name])
        gemms = {each: self._known[key] for each, key in keys.items()}
        quantize = self._quantize(case, costs.quantizing) if costs.quantizes else {}
        return LinearTime(gemms, quantize, self._uncertainty)

    def in_step(self, linears: Sequence[tuple[Case, int, int]], name: str) -> StepLinears:
        """Many linears inside a step: (case, count, forward runs) for each. Fast, because sweeps call it for every point."""
        formats, quantizes, costs = self.costs(name)
        known, value, squares, shared, least, activations, weights = self._known, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for case, count, runs in linears:
            tokens, inputs, outputs, groups = case.tokens, case.inputs, case.outputs, len(case.rows) or 1
            for each in case.passes:
                key = (formats[each], (tokens, inputs, outputs, groups, each))
                found = known.get(key)
                part = found if found is not None else self.linear(case, name).gemms[each]
                time_ms = part[0] * (count * runs if each == "fprop" else count)
                value += time_ms
                squares += (time_ms * part[1]) ** 2
                shared += time_ms * part[2]
                least += time_ms * self._least[key]
            if quantizes:
                share = costs.in_step * count
                activations += (costs.time_ms(tokens * inputs) + costs.time_ms(tokens * outputs)) * share * (2 + runs) / 3
                weights += costs.time_ms(case.weights) * share
        gemms = Estimate(value, sqrt(squares) / value, shared / value) if value else Estimate(0.0)
        casts = [Estimate(time_ms, 0.0, self._uncertainty) for time_ms in (activations, weights)]
        return StepLinears(gemms, least, *casts)

    def least_ms(self, case: Case, name: str) -> float:
        """A linear's GEMMs at the clock of a burst."""
        found, formats = self.linear(case, name), self.costs(name).formats
        return sum(part.value * self._least[formats[each], _key(case, each)] for each, part in found.gemms.items())

    def _quantize(self, case: Case, costs: Quantizing) -> dict[str, float]:
        """X, W and dY; bare GEMMs have no dY, and cached weights are not quantized here."""
        times = {"X": costs.time_ms(case.tokens * case.inputs)}
        if not self.cache_weights:
            times["W"] = costs.time_ms(case.weights)
        if len(case.passes) > 1:
            times["dY"] = costs.time_ms(case.tokens * case.outputs)
        return times


def _key(case: Case, pass_name: Pass) -> Key:
    return case.tokens, case.inputs, case.outputs, len(case.rows) or 1, pass_name


def in_common() -> float:
    """The share of shared uncertainties that a baseline and a recipe have alike."""
    return float(facts()["common"]["shared_between_formats"])
