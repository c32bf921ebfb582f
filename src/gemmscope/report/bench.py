"""The result of `gemmscope bench` as tables and sentences. A number that was not measured is a dash, never a zero."""

from __future__ import annotations

from collections.abc import Sequence

from gemmscope.measure.breakdown import Breakdown, breakdown
from gemmscope.measure.results import Results
from gemmscope.measure.stats import Interval
from gemmscope.measure.task import Case, Mode
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.report.shapes import Table
from gemmscope.report.units import percent
from gemmscope.workload.ops import PASSES

TITLES: dict[Mode, str] = {
    "autocast": "Autocast: forward and backward, X, W and dY quantized once each (ms; quantization charged to its passes)",
    "pre-quantized": "Pre-quantized: the products alone (ms)",
}


class BenchReport:
    """Everything to be said about a campaign's results."""

    def __init__(self, results: Results, recipes: Sequence[str], modes: Sequence[Mode]) -> None:
        self.results, self.recipes, self.modes = results, list(recipes), list(modes)
        self.cells: dict[tuple[Case, str, Mode], Breakdown | None] = {
            (case, name, mode): breakdown(results, case, name, mode)
            for case in results.cases()
            for name in recipes
            for mode in modes
        }

    def cell(self, case: Case, name: str, mode: Mode) -> Breakdown | None:
        """One op in one recipe. A recipe with another's products shows that one's, in pre-quantized mode."""
        return self.cells.get((case, self.measured_as(name, mode), mode))

    def measured_as(self, name: str, mode: Mode) -> str:
        other = recipe(name).same_kernels_as
        return other if mode == "pre-quantized" and other in self.recipes else name

    def columns(self, mode: Mode) -> list[str]:
        """The recipes that have numbers of their own in this mode."""
        return [name for name in self.recipes if self.measured_as(name, mode) == name]

    def tables(self) -> list[Table]:
        return [self._table(mode) for mode in self.modes]

    def _table(self, mode: Mode) -> Table:
        names = self.columns(mode)
        rows = [row for case in self.results.cases() for row in self._rows(case, mode, names)]
        totals = ["Model", "all", "", *(self._total(name, mode) for name in names)]
        speedups = ["", "speedup", "", *(self._speedup(name, mode) for name in names)]
        return Table(TITLES[mode], ("Op", "Pass", "M x K x N", *names), (*rows, tuple(totals), tuple(speedups)))

    def _rows(self, case: Case, mode: Mode, names: Sequence[str]) -> list[tuple[str, ...]]:
        t, k, n = case.tokens, case.inputs, case.outputs
        shapes = {"fprop": f"{t}x{k}x{n}", "dgrad": f"{t}x{n}x{k}", "wgrad": f"{k}x{t}x{n}"}
        cells = [self.cell(case, name, mode) for name in names]
        rows = []
        for index, pass_name in enumerate(PASSES):
            texts = [_time(cell, pass_name, case.flops) for cell in cells]
            rows.append((case.op if index == 0 else "", pass_name, shapes[pass_name], *texts))
        return [*rows, ("", "all", f"x {case.count}", *(_whole(cell, cells[0]) for cell in cells))]

    def _total(self, name: str, mode: Mode) -> str:
        totals = self.results.totals(name, mode)
        return f"{totals.mean():.2f} ms" if totals is not None else "-"

    def _speedup(self, name: str, mode: Mode) -> str:
        if name == BASELINE:
            return "1"
        if self.falls_back(name, mode):
            return "FALLBACK"
        found = self.results.speedup(name, mode)
        return _interval(found) if found else "-"

    def falls_back(self, name: str, mode: Mode) -> bool:
        return any(
            cell.fallback
            for (_, cell_name, cell_mode), cell in self.cells.items()
            if cell and (cell_name, cell_mode) == (name, mode)
        )

    def sentences(self) -> list[str]:
        """What to know beside the numbers: fallbacks, failures, losers, quantization, host, clocks."""
        return [
            *self._fallbacks(),
            *self._failures(),
            *self._same(),
            *self._quantization(),
            *self._losers(),
            *self._host(),
            *self._state(),
        ]

    def _fallbacks(self) -> list[str]:
        return [
            f"FALLBACK: {case.op} in {name}, {mode}: {cell.fallback}; left out of the speedups"
            for (case, name, mode), cell in self.cells.items()
            if cell and cell.fallback
        ]

    def _failures(self) -> list[str]:
        by_reason: dict[tuple[str, str], list[str]] = {}
        for result in self.results.tasks.values():
            if result.failure:
                by_reason.setdefault((result.task.recipe, result.failure), []).append(result.task.case.op)
        return [f"not measured: {name}, {', '.join(dict.fromkeys(ops))}: {reason}" for (name, reason), ops in by_reason.items()]

    def _same(self) -> list[str]:
        return [
            f"pre-quantized {name} is the same kernel as {self.measured_as(name, 'pre-quantized')}: see there"
            for name in self.recipes
            if "pre-quantized" in self.modes and self.measured_as(name, "pre-quantized") != name
        ]

    def _quantization(self) -> list[str]:
        shares = []
        for name in self.recipes:
            cells = [cell for case in self.results.cases() if (cell := self.cell(case, name, "autocast")) and cell.quantize_ms]
            if cells and recipe(name).quantizes:
                spent = sum(sum(cell.quantize_ms.values()) * cell.case.count for cell in cells)
                shares.append(f"{name} {percent(spent / sum(cell.total.value * cell.case.count for cell in cells))}")
        return [f"time spent quantizing: {', '.join(shares)}"] if shares else []

    def _losers(self) -> list[str]:
        lines = []
        for name in self.recipes[1:]:
            for case in self.results.cases():
                found = self.results.speedup(name, "autocast", [case])
                if found is not None and found.high < 1:
                    lines.append(f"{case.op} loses with {name}: {_interval(found)}")
        return lines

    def _host(self) -> list[str]:
        bound = [cell for cell in self.cells.values() if cell and cell.host_bound]
        if not bound:
            return []
        worst = max(bound, key=lambda cell: cell.host_ms / cell.total.value)
        times = f"{worst.host_ms:.2f} ms against {worst.total.value:.2f} ms"
        return [
            f"HOST-BOUND: {len(bound)} of the linears take the CPU longer to launch than the GPU to run (worst: {worst.case.op} "
            f"in {worst.recipe}, {times}); without CUDA graphs, training waits there"
        ]

    def _state(self) -> list[str]:
        states = [state for result in self.results.tasks.values() for state in result.states if state.get("sm_mhz")]
        if not states:
            return []
        clocks = sorted(state["sm_mhz"] for state in states)
        power = sorted(state["power_w"] for state in states if state["power_w"])
        reasons = sorted({reason for state in states for reason in state["throttle"]})
        return [
            f"while measuring: SM clock {clocks[0]} to {clocks[-1]} MHz, power {power[len(power) // 2]:.0f} W"
            + (f", held back by {', '.join(reasons)}" if reasons else "")
        ]


def _time(cell: Breakdown | None, pass_name: str, flops: int) -> str:
    if cell is None or pass_name not in cell.pass_ms:
        return "-"
    time_ms = cell.pass_ms[pass_name]
    return f"{time_ms:.3f} ({flops / time_ms / 1e9:.0f} TF/s)"


def _whole(cell: Breakdown | None, baseline: Breakdown | None) -> str:
    if cell is None:
        return "-"
    gain = f" {baseline.total.value / cell.total.value:.2f}x" if baseline and cell is not baseline and not cell.fallback else ""
    return f"{cell.total.value:.3f}{gain}"


def _interval(found: Interval) -> str:
    return f"{found.value:.3f}x [{found.low:.3f}, {found.high:.3f}]"
