"""The time that each linear saves in each recipe, as a share of the BF16 time of the step or of all linears.

The total savings of a recipe come from its measured or forecast speedup. They are divided among the linears by the times of each
op where these are known (`bench`, `forecast`), otherwise by FLOPs (`step`). The time of a mix, relative to BF16, is 1 minus the
savings of every linear in the recipe that it runs in.

Without speeds, the number of bits stands for the time: tensor cores run FP8 at twice the rate of BF16, and FP4 at twice the rate
of FP8. That is enough to prefer one mix to another, but no speedup is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from gemmscope.findings import Finding, finding
from gemmscope.interval import Interval
from gemmscope.numerics.evaluation.error_table import ErrorTable, Values
from gemmscope.recipe.precisions import number_format
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.base import Origin
from gemmscope.results.bench import BenchResult
from gemmscope.results.forecast import ForecastResult, GpuForecast
from gemmscope.results.linears import Linears, too_close
from gemmscope.results.step import StepResult

SpeedResult = BenchResult | StepResult | ForecastResult
Ratio = Callable[..., Interval | None]
"""The speedup of a recipe over BF16, or `over` another one."""
MOST_SAVED = 0.9  # share of the BF16 time that the linears with a gain may save; more is implausible


@dataclass(frozen=True)
class Savings:
    """The savings of one recipe in all linears: `totals` are shares of the BF16 time (the value and both ends of its interval),
    `shares` is each cell's share of the total."""

    totals: tuple[float, float, float]
    shares: Values

    @property
    def by_cell(self) -> Values:
        """What every cell saves."""
        return self.totals[0] * self.shares


@dataclass(frozen=True)
class Speeds:
    """Every recipe whose speed is known. Without a speed file (`of` is None), bits stand for times, and there are no speedups."""

    savings: Mapping[str, Savings]
    speedups: Mapping[str, Interval] = field(default_factory=dict)
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Recipe → recipes whose speed is too close to call against its own."""
    origin: Origin | None = None
    of: Literal["step", "linears"] | None = None
    gpu: str = ""
    findings: tuple[Finding, ...] = ()

    def time(self, parts: Mapping[str, Values], end: int = 0) -> float:
        """The time of a mix relative to BF16. `parts`: recipe → 1 for the cells that run in it, else 0; `end` of the interval."""
        shares = {name: float((self.savings[name].shares * cells).sum()) for name, cells in parts.items()}
        return 1 - sum(self.savings[name].totals[end] * share for name, share in shares.items())

    def speedup(self, parts: Mapping[str, Values]) -> Interval | None:
        """The speedup of a mix over BF16. Its interval assumes that the errors of the recipes' speedups are fully correlated."""
        if self.of is None:
            return None
        known = all(self.speedups[name].known for name in parts if name != BASELINE)
        return Interval(*(1 / self.time(parts, end) for end in range(3 if known else 1)))


def nominal_speeds(table: ErrorTable) -> Speeds:
    """Nominal speeds for every recipe of the table, by the bits of its operands."""
    savings = {}
    for name in table.squares:
        passes = recipe(name).operands.values()
        saved = 1 - sum(max(number_format(operand)["bits"] for operand in formats) for formats in passes) / 16 / len(passes)
        savings[name] = Savings((saved, saved, saved), table.flops * (1 - table.skipped.get(name, 0.0)))
    return Speeds(savings)


def speeds_of(result: SpeedResult, table: ErrorTable, gpu: str = "") -> Speeds:
    """The speeds of a measured or forecast result, for recipes that are also in the table. `gpu`: which GPU of a forecast."""
    chosen: BenchResult | StepResult | GpuForecast = (
        next((one for one in result.gpus if one.gpu == gpu), result.gpus[0]) if isinstance(result, ForecastResult) else result
    )
    linears = None if isinstance(chosen, StepResult) else chosen.linears
    step = None if isinstance(chosen, BenchResult) else chosen.step
    where = chosen.title if isinstance(chosen, GpuForecast) else chosen.where
    if step is not None:
        ratio: Ratio = step.speedup
        measured = {time.recipe: time.speedup for time in step.recipes if not time.fell_back}
    else:
        assert linears is not None
        mode = _mode(linears)
        ratio = partial(linears.speedup, mode=mode)
        measured = {name: ratio(name) for name in linears.recipes if not linears.falls_back(name, mode)}
    speedups = {
        name: speedup for name, speedup in measured.items() if speedup is not None and speedup.value > 0 and name in table.squares
    }
    findings = [warning for warning in chosen.findings if warning.code == "step-host-bound"]
    if missing := [name for name in table.squares if name not in speedups and name != BASELINE]:
        findings.append(finding("numerics-no-speed", recipes=missing, where=where))
    savings = {BASELINE: Savings((0.0, 0.0, 0.0), table.flops)}
    by_flops = []
    for name, speedup in speedups.items():
        shares = _shares(linears, table, name, 1 - 1 / speedup.value) if linears is not None else None
        by_flops += [name] if shares is None else []
        value, low, high = (1 - 1 / (end or speedup.value) for end in (speedup.value, speedup.low, speedup.high))
        divided = shares if shares is not None else table.flops
        savings[name] = Savings((value, low, high), divided * (1 - table.skipped.get(name, 0.0)))
    if by_flops:
        findings.append(finding("numerics-speed-by-flops", recipes=by_flops))
    return Speeds(
        savings,
        speedups,
        {name: _rivals(name, speedups, ratio) for name in speedups},
        origin="forecast" if isinstance(result, ForecastResult) else "measured",
        of="step" if step is not None else "linears",
        gpu=where,
        findings=tuple(findings),
    )


def _rivals(name: str, speedups: Mapping[str, Interval], ratio: Ratio) -> tuple[str, ...]:
    """The recipes that are too close to call against this one, by the interval of their ratio; the fastest first."""
    rivals = [other for other in speedups if other != name and too_close(ratio(name, over=other))]
    return tuple(sorted(rivals, key=lambda other: -speedups[other].value))


def _mode(linears: Linears) -> Literal["autocast", "pre-quantized"]:
    return "autocast" if "autocast" in linears.modes else "pre-quantized"


def _shares(linears: Linears, table: ErrorTable, name: str, total: float) -> Values | None:
    """The share of each cell in the recipe's savings (`total`), from the times of its op; None if they do not determine it."""
    mode, columns = _mode(linears), []
    for place, op in enumerate(table.ops):
        low, high = linears.op_time(op, name, mode), linears.op_time(op, BASELINE, mode)
        if not op or low is None or high is None:
            return None
        fused_flops = sum(table.flops[:, other].sum() for other, own in enumerate(table.ops) if own == op)  # of one fused GEMM
        part = table.flops[:, place].sum() / fused_flops
        present = (table.flops[:, place] > 0).astype(float)
        columns.append((high.total_ms.value - low.total_ms.value) * part * present)
    saved = np.stack(columns, axis=1)
    whole, gained = float(saved.sum()), float(saved[saved > 0].sum())
    if whole * total <= 0 or total * gained / whole > MOST_SAVED:  # the linears contradict the total or cancel: noise
        return None
    return saved / whole
