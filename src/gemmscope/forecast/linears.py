"""The linears of a model in every precision: three products each, and quantizing X, W and dY once each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gemmscope.forecast.estimate import Estimate, total
from gemmscope.forecast.gemm import LAYOUT_OF, GemmModel, State, model
from gemmscope.forecast.physics import Shapes
from gemmscope.forecast.training import doubt_of, facts, product_factor, product_format, quantize_ms
from gemmscope.gpu.specs import GpuSpec
from gemmscope.measure.task import Case
from gemmscope.recipe.recipes import Recipe, recipe

Key = tuple[int, int, int, int, str]  # tokens, inputs, outputs, groups, pass


@dataclass(frozen=True)
class LinearTime:
    """One linear in one recipe: its products by pass, and what quantizing each tensor takes (alone, and inside a step)."""

    products: dict[str, Estimate]
    quantize_ms: dict[str, float]
    in_step_ms: float
    quantize_doubt: float

    def product(self) -> Estimate:
        return total(self.products.values())

    def quantizing(self, *, in_step: bool = False) -> Estimate:
        time_ms = self.in_step_ms if in_step else sum(self.quantize_ms.values())
        return Estimate(time_ms, 0.0, self.quantize_doubt)


class Forecaster:
    """Times of linears on one chip in one state. What was computed once is kept: models share shapes, sweeps share more."""

    def __init__(self, chip: GpuSpec, state: State, *, cache_weights: bool = False, gemms: GemmModel | None = None) -> None:
        self.chip, self.state, self.cache_weights = chip, state, cache_weights
        self.gemms = gemms or model()
        self._known: dict[tuple[str, Key], Estimate] = {}

    def prepare(self, cases: Iterable[Case], recipes: Sequence[str]) -> None:
        """Compute every product of these linears at once."""
        wanted: dict[str, dict[Key, None]] = {}
        formats = {(name, each): product_format(recipe(name), each, self.chip) for name in recipes for each in LAYOUT_OF}
        for case in cases:
            for each in case.passes:
                key = _key(case, each)
                for name in recipes:
                    fmt = formats[name, each]
                    if (fmt, key) not in self._known:
                        wanted.setdefault(fmt, {})[key] = None
        for fmt, keys in wanted.items():
            self._compute(fmt, list(keys))

    def _compute(self, fmt: str, keys: list[Key]) -> None:
        columns = np.array([key[:4] for key in keys], dtype=np.float64).T
        tokens, inputs, outputs, groups = columns
        passes = np.array([key[4] for key in keys])
        dgrad, wgrad = passes == "dgrad", passes == "wgrad"
        shapes = Shapes.of(
            np.where(wgrad, inputs, tokens),
            np.where(wgrad, tokens, np.where(dgrad, outputs, inputs)),
            np.where(dgrad, inputs, outputs),
            groups,
            wgrad & (groups > 1),
        )
        layouts = np.array([LAYOUT_OF[str(each)] for each in passes])
        found = self.gemms.time(self.chip, fmt, shapes, self.state, layout=layouts)
        times = found.gemm_ms * product_factor(fmt, self.chip)
        own = np.sqrt(np.maximum(((found.low + found.high) / 2) ** 2 - found.shared**2, 0.0))
        for key, time_ms, alone, shared in zip(keys, times.tolist(), own.tolist(), found.shared.tolist(), strict=True):
            self._known[fmt, key] = Estimate(time_ms, alone, shared)

    def linear(self, case: Case, name: str) -> LinearTime:
        """One linear in one recipe."""
        asked = recipe(name)
        formats = {each: product_format(asked, each, self.chip) for each in case.passes}
        if any((fmt, _key(case, each)) not in self._known for each, fmt in formats.items()):
            self.prepare([case], [name])
        common = doubt_of("common", self.chip)
        products = {each: self._known[fmt, _key(case, each)].with_shared(common) for each, fmt in formats.items()}
        spent = self._quantize(case, asked, in_step=False)
        in_step = sum(self._quantize(case, asked, in_step=True).values())
        return LinearTime(products, spent, in_step, doubt_of("quantize", self.chip))

    def _quantize(self, case: Case, asked: Recipe, *, in_step: bool) -> dict[str, float]:
        """X, W and dY; bare products have no dY, and cached weights are not quantized here."""
        if not asked.quantizes:
            return {}
        elements = {"X": case.tokens * case.inputs, "W": case.weights, "dY": case.tokens * case.outputs}
        if len(case.passes) == 1:
            del elements["dY"]
        if self.cache_weights:
            del elements["W"]
        return {label: quantize_ms(asked, size, self.chip, in_step=in_step) for label, size in elements.items()}


def _key(case: Case, pass_name: str) -> Key:
    return case.tokens, case.inputs, case.outputs, max(len(case.rows), 1), pass_name


def in_common() -> float:
    """The share of shared doubts that a baseline and a recipe have alike."""
    return float(facts()["common"]["shared_between_formats"])
