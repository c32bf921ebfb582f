"""The linears of a model in every precision: three products each, and quantizing X, W and dY once each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmscope.forecast.estimate import Estimate, total
from gemmscope.forecast.gemm import LAYOUT_OF, GemmModel, State, chip_limit_ms, doubt_outside, model
from gemmscope.forecast.physics import Array, Shapes
from gemmscope.forecast.training import Quantizing, doubt_of, facts, product_factor, product_format, quantizing
from gemmscope.gpu.specs import GpuSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.workload.cases import Case

CALIBRATED_DOUBT = 0.03
CALIBRATED_ROW_DOUBT = 0.06
OTHER_STATE_DOUBT = 0.06  # where the other state of the chip was measured
Key = tuple[int, int, int, int, str]  # tokens, inputs, outputs, groups, pass


class LinearTime(NamedTuple):
    """One linear in one recipe: its products by pass, and what quantizing each tensor takes."""

    products: dict[str, Estimate]
    quantize_ms: dict[str, float]
    quantize_doubt: float

    def product(self) -> Estimate:
        return total(self.products.values())

    def quantizing(self) -> Estimate:
        return Estimate(sum(self.quantize_ms.values()), 0.0, self.quantize_doubt)


class Together(NamedTuple):
    """Many linears in one micro-batch of a step: products, what they take at the clock of a burst, quantization by tensor.

    `weights` is quantizing every weight once; a step that caches them, or has many micro-batches, does so once.
    """

    products: Estimate
    least_ms: float
    activations: Estimate
    weights: Estimate


class Adjustment(NamedTuple):
    """Measured over forecast: factors on products by format and pass, sustained and in a burst, on quantizing by recipe, on a
    step's other rows. `own_chip`: it was the reader's own; what was measured on another chip of the kind corrects times, and
    takes nothing off their doubt.
    """

    products: Mapping[str, Mapping[str, float]]
    quantize: Mapping[str, float]
    rows: Mapping[str, float] = {}
    burst: Mapping[str, Mapping[str, float]] = {}
    own_chip: bool = True

    def product(self, fmt: str, pass_name: str, state: State) -> tuple[float, float] | None:
        """The factor on one kind of product and its doubt; that of the other state where only it was measured.

        >>> Adjustment({"bf16": {"fprop": 1.1}}, {}).product("bf16", "fprop", "sustained")
        (1.1, 0.03)
        >>> Adjustment({"bf16": {"fprop": 1.1}}, {}).product("bf16", "fprop", "burst")[1] > 0.06
        True
        """
        own, other = (self.products, self.burst) if state == "sustained" else (self.burst, self.products)
        for products, further in ((own, 0.0), (other, OTHER_STATE_DOUBT)):
            if pass_name in products.get(fmt, {}):
                return products[fmt][pass_name], hypot(CALIBRATED_DOUBT, further)
        return None


class _Factors(NamedTuple):
    """On products, one for each; their doubts, zero where nothing was measured on the chip itself."""

    values: Array
    doubts: Array


class Habits(NamedTuple):
    """What a recipe does on one chip: the format of each pass's products, and its quantization."""

    formats: dict[str, str]
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
        self._least: dict[tuple[str, Key], float] = {}  # of a product at the clock of a burst: a share of its time
        self._habits: dict[str, Habits] = {}
        self._common, self._doubt = doubt_of("common", chip), doubt_of("quantize", chip)

    def habits(self, name: str) -> Habits:
        """Of a recipe on this chip."""
        if name not in self._habits:
            asked = recipe(name)
            formats = {each: product_format(asked, each, self.chip) for each in LAYOUT_OF}
            costs = quantizing(asked, self.chip)
            if self.measured is not None and name in self.measured.quantize:
                costs = costs.times(self.measured.quantize[name])
            self._habits[name] = Habits(formats, asked.quantizes, costs)
        return self._habits[name]

    def other(self, time_ms: float, row: str, doubt: float) -> Estimate:
        """What is no product, in one row of a step: as it was measured on this chip, or with the doubt it has without."""
        if self.measured is None or row not in self.measured.rows:
            return Estimate(time_ms, 0.0, doubt)
        return Estimate(time_ms * self.measured.rows[row], 0.0, CALIBRATED_ROW_DOUBT if self.measured.own_chip else doubt)

    def prepare(self, cases: Iterable[Case], recipes: Sequence[str]) -> None:
        """Compute every product of these linears at once."""
        wanted: dict[str, dict[Key, None]] = {}
        formats = {each: {self.habits(name).formats[each] for name in recipes} for each in LAYOUT_OF}
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
        tokens, inputs, outputs, groups = np.array([key[:4] for key in keys], dtype=np.float64).T
        passes = np.array([key[4] for key in keys])
        dgrad, wgrad = passes == "dgrad", passes == "wgrad"
        shapes = Shapes.of(
            np.where(wgrad, inputs, tokens),
            np.where(wgrad, tokens, np.where(dgrad, outputs, inputs)),
            np.where(dgrad, inputs, outputs),
            groups,
            wgrad & (groups > 1),
        )
        layouts = np.select([dgrad, wgrad], [LAYOUT_OF["dgrad"], LAYOUT_OF["wgrad"]], LAYOUT_OF["fprop"])
        found = self.gemms.time(self.chip, fmt, shapes, self.state, layout=layouts, in_training=True)
        own = np.sqrt(np.maximum(((found.low + found.high) / 2) ** 2 - found.shared**2, 0.0))
        shared = np.hypot(found.shared, self._common)
        factors, in_burst = (self._measured_factors(fmt, passes, state) for state in (self.state, "burst"))
        if self.measured is not None and self.measured.own_chip:  # what all shapes share is known
            known = factors.doubts > 0
            shared[known] = np.hypot(factors.doubts, doubt_outside(shapes))[known]
        floor = np.maximum(found.burst_ms * in_burst.values, chip_limit_ms(shapes, fmt, self.chip))
        times = np.maximum(found.gemm_ms * factors.values, floor)
        numbers = zip(keys, times.tolist(), own.tolist(), shared.tolist(), (floor / times).tolist(), strict=True)
        for key, time_ms, alone, together, share in numbers:
            self._known[fmt, key], self._least[fmt, key] = Estimate(time_ms, alone, together), share

    def _measured_factors(self, fmt: str, passes: NDArray[np.str_], state: State) -> _Factors:
        """Training's products over those that were measured widely, and over those forecast where this very chip was measured."""
        values, doubts = np.full(len(passes), product_factor(fmt, self.chip)), np.zeros(len(passes))
        for name in LAYOUT_OF if self.measured is not None else ():
            if self.measured is not None and (found := self.measured.product(fmt, name, state)) is not None:
                values[passes == name] *= found[0]
                doubts[passes == name] = found[1]
        return _Factors(values, doubts)

    def linear(self, case: Case, name: str) -> LinearTime:
        """One linear in one recipe."""
        habits = self.habits(name)
        keys = {each: (habits.formats[each], _key(case, each)) for each in case.passes}
        if any(key not in self._known for key in keys.values()):
            self.prepare([case], [name])
        products = {each: self._known[key] for each, key in keys.items()}
        quantize = self._quantize(case, habits.quantizing) if habits.quantizes else {}
        return LinearTime(products, quantize, self._doubt)

    def together(self, linears: Sequence[tuple[Case, int, int]], name: str) -> Together:
        """Many linears inside a step: (case, count, forward runs) each. Sweeps take this way."""
        formats, quantizes, costs = self.habits(name)
        known, value, squares, shared, least, activations, weights = self._known, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for case, count, runs in linears:
            tokens, inputs, outputs, groups = case.tokens, case.inputs, case.outputs, len(case.rows) or 1
            for each in case.passes:
                key = (formats[each], (tokens, inputs, outputs, groups, each))
                found = known.get(key)
                part = found if found is not None else self.linear(case, name).products[each]
                time_ms = part[0] * (count * runs if each == "fprop" else count)
                value += time_ms
                squares += (time_ms * part[1]) ** 2
                shared += time_ms * part[2]
                least += time_ms * self._least[key]
            if quantizes:
                casts = costs.in_step * count
                activations += (costs.time_ms(tokens * inputs) + costs.time_ms(tokens * outputs)) * casts * (2 + runs) / 3
                weights += costs.time_ms(case.weights) * casts
        products = Estimate(value, sqrt(squares) / value, shared / value) if value else Estimate(0.0)
        return Together(products, least, Estimate(activations, 0.0, self._doubt), Estimate(weights, 0.0, self._doubt))

    def least_ms(self, case: Case, name: str) -> float:
        """A linear's products at the clock of a burst."""
        found, formats = self.linear(case, name), self.habits(name).formats
        return sum(part.value * self._least[formats[each], _key(case, each)] for each, part in found.products.items())

    def _quantize(self, case: Case, costs: Quantizing) -> dict[str, float]:
        """X, W and dY; bare products have no dY, and cached weights are not quantized here."""
        times = {"X": costs.time_ms(case.tokens * case.inputs)}
        if not self.cache_weights:
            times["W"] = costs.time_ms(case.weights)
        if len(case.passes) > 1:
            times["dY"] = costs.time_ms(case.tokens * case.outputs)
        return times


def _key(case: Case, pass_name: str) -> Key:
    return case.tokens, case.inputs, case.outputs, len(case.rows) or 1, pass_name


def in_common() -> float:
    """The share of shared doubts that a baseline and a recipe have alike."""
    return float(facts()["common"]["shared_between_formats"])
