"""A forecast in the form that tables, pictures and files of `bench` are made from: no samples, the same questions answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemmscope.forecast.estimate import Estimate, ratio, total
from gemmscope.forecast.linears import Forecaster, in_common
from gemmscope.forecast.training import NEVER_QUANTIZED
from gemmscope.interval import Interval
from gemmscope.measure.attribution import quantization_by_pass
from gemmscope.measure.breakdown import Breakdown
from gemmscope.measure.findings import Findings, Layer
from gemmscope.measure.results import Results
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.workload.cases import Case, Mode


class ForecastFindings(Findings):
    """What `Findings` says of a measurement, said of a forecast. Every interval is a 90% error bar."""

    interval_name = "90% error bar"
    kind = "FORECAST"

    def __init__(
        self,
        forecaster: Forecaster,
        cases: Sequence[Case],
        recipes: Sequence[str],
        modes: Sequence[Mode],
        layer: Layer | None = None,
    ) -> None:
        self.forecaster, self.chip = forecaster, forecaster.chip
        self.results = Results([])
        self.results.hello = {"device": {"name": self.chip.title, "compute_capability": self.chip.architecture}}
        self.recipes, self.modes, self.cases, self.layer = list(recipes), list(modes), list(cases), layer
        self.backend, self.cache_weights = "transformer_engine", forecaster.cache_weights
        self._speedups: dict[tuple[str, Mode, Case | None, str], Interval | None] = {}
        forecaster.prepare(self.cases, self.recipes)
        self._estimates: dict[tuple[Case, str, Mode], Estimate] = {}
        self._cells: dict[tuple[Case, str, Mode], Breakdown | None] = {}
        for case in self.cases:
            for name in self.recipes:
                for mode in self.modes:
                    key = (case, name, mode)
                    self._cells[key] = self._make(*key)

    def _make(self, case: Case, name: str, mode: Mode) -> Breakdown | None:
        """One cell; None where the sizes do not fit the recipe, as nothing pads them."""
        asked, left = recipe(name), ""
        if asked.quantizes and case.op in NEVER_QUANTIZED:
            asked, left = recipe(BASELINE), f"left in {BASELINE}, as frameworks do"
        elif asked.quantizes and asked.misaligned(case.sizes()):
            return None
        found = self.forecaster.linear(case, asked.name)
        quantize = found.quantize_ms if mode == "autocast" else {}
        shares = quantization_by_pass(quantize, case.passes)
        estimate = total([found.product(), found.quantizing()]) if mode == "autocast" else found.product()
        self._estimates[case, name, mode] = estimate
        pass_ms = {each: part.value + shares[each] for each, part in found.products.items()}
        return Breakdown(case, name, mode, estimate.interval(), pass_ms, quantize, {}, host_ms=0.0, note=left, left_as_is=left)

    def misaligned(self) -> list[str]:
        """What cannot run, in words: each reason once, with all its linears and recipes."""
        ops: dict[str, dict[str, None]] = {}
        names: dict[str, dict[str, None]] = {}
        for name in self.recipes:
            for case in self.cases:
                applies = recipe(name).quantizes and case.op not in NEVER_QUANTIZED
                words = recipe(name).misaligned(case.sizes()) if applies else ""
                if words:
                    reason = words.replace(f" {name} ", " {} ")
                    ops.setdefault(reason, {})[case.op] = None
                    names.setdefault(reason, {})[name] = None
        return [f"{', '.join(ops[reason])}: {reason.format(', '.join(names[reason]))}" for reason in ops]

    def estimate(self, name: str, mode: Mode, case: Case | None = None) -> Estimate | None:
        """One op once, or all of a micro-batch's linears; None where a part cannot run."""
        chosen: Iterable[Case] = [case] if case is not None else self.cases
        name = self.measured_as(name, mode)
        parts = [(self._estimates.get((each, name, mode)), 1 if case is not None else each.count) for each in chosen]
        known = [part.times(count) for part, count in parts if part is not None]
        return total(known) if len(known) == len(parts) else None

    def total(self, name: str, mode: Mode) -> Interval | None:
        """Milliseconds of one micro-batch's linears."""
        found = self.estimate(name, mode)
        return found.interval() if found is not None else None

    def _speedup(self, name: str, mode: Mode, case: Case | None, over: str) -> Interval | None:
        sides = [self.measured_as(name, mode), self.measured_as(over, mode)]
        fast, slow = self.estimate(sides[0], mode, case), self.estimate(sides[1], mode, case)
        if sides[0] == sides[1] or fast is None or slow is None:
            return None
        if case is not None and any(self.left_as_is(case, side, mode) for side in sides):
            return None
        common = 1.0 if BASELINE not in sides and self._same_products(*sides) else in_common()
        return ratio(slow, fast, common).interval()

    def _same_products(self, first: str, second: str) -> bool:
        """Whether two recipes multiply in the same formats on this chip: then their products err alike."""
        return self.forecaster.habits(first).formats == self.forecaster.habits(second).formats
