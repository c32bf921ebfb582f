"""The GPUs of a fleet with their runs, and their figures as columns of numbers: repeats combined, noise estimated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, inf, nan, pi, sqrt
from statistics import median
from typing import Any, Literal

import numpy as np

from gemmscope.fleet.rule import Sample
from gemmscope.fleet.spread import NORMAL_95, Floats
from gemmscope.fleet.summaries import RunSummary, SummaryFigure, rounded
from gemmscope.grouping import grouped
from gemmscope.interval import Interval, chi_squared
from gemmscope.results.fleet import FleetGpu, GpuCondition

LEAST_FREEDOM = 5  # degrees of freedom from repeats, below which the intervals of the runs say more
LEAST_ROBUST = 5  # repeated GPUs, from which one unstable GPU does not spoil the noise of all
ROBUST_EFFICIENCY = 0.37  # of a median of variances
UNSTABLE = 3.09  # normal quantile of 99.9%: a GPU that varies more than that allows has its own noise
LARGEST_REACH = 100.0  # of an interval, as a logarithm: damaged files hold anything
# The variance of the median of so many normal values, over that of one.
MEDIAN_VARIANCE = {1: 1.0, 2: 0.5, 3: 0.4487, 4: 0.2982, 5: 0.2868, 6: 0.2147, 7: 0.2104, 8: 0.1682, 9: 0.1661}


@dataclass
class Chip:
    """One GPU as far as it is known, and what was measured on it; several runs are repeats."""

    gpu: FleetGpu
    runs: list[RunSummary] = field(default_factory=list)

    def learn(self, **facts: Any) -> None:
        """Add to what is known of the GPU."""
        self.gpu = self.gpu.model_copy(update=facts)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of its last run."""
        return self.runs[-1].versions

    @property
    def product(self) -> str:
        return product_of(self.runs[-1])

    @cached_property
    def condition(self) -> GpuCondition:
        """Its condition: medians over the repeats, health as it was last."""
        conditions = [run.condition for run in self.runs]
        if len(conditions) == 1:
            return conditions[0]
        names = ("sm_mhz", "power_w", "power_limit_w", "temperature_c")
        known = {name: [value for condition in conditions if (value := getattr(condition, name)) is not None] for name in names}
        reasons = {reason for condition in conditions for reason in condition.throttled}
        return GpuCondition(
            **{name: median(values) for name, values in known.items() if values},
            throttled={
                reason: round(sum(condition.throttled.get(reason, 0.0) for condition in conditions) / len(conditions), 3)
                for reason in sorted(reasons)
            },
            health=conditions[-1].health,
        )


def product_of(run: RunSummary) -> str:
    """What GPUs are grouped by: the name of the GPU, or of the CPU."""
    device = run.device
    return f"CPU ({device['cpu']})" if device.get("cpu") and device.get("name") == "CPU" else device.get("name", "")


def gpu_order(gpu: FleetGpu) -> tuple[object, ...]:
    """Sorts as people count: node9 before node10."""
    return (*natural(gpu.node), -1 if gpu.index is None else gpu.index, *natural(gpu.place))


def natural(text: str) -> tuple[str, ...]:
    """A sort key that counts numbers as numbers.

    >>> sorted(["node10", "node9"], key=natural)
    ['node9', 'node10']
    """
    return tuple(part.zfill(12) if part.isdigit() else part for part in re.split(r"([0-9]+)", text))


def label_groups(chips: Sequence[Chip]) -> None:
    """Name the group of every chip: its product, and its power limit where a product has several."""
    limits = {product: set(own) for product, own in grouped((chip.product, _limit(chip)) for chip in chips).items()}
    for chip in chips:
        limit = _limit(chip)
        chip.learn(
            group=chip.product
            + (f", {limit} W" if limit is not None else ", power limit unknown") * (len(limits[chip.product]) > 1)
        )


def _limit(chip: Chip) -> int | None:
    """The power limit in whole watts."""
    limit = chip.runs[-1].condition.power_limit_w
    return round(limit) if limit is not None else None


@dataclass(frozen=True)
class FigureColumn(Sample):
    """One figure over the chips of a group, as a sample for the rule. NaN: not measured, or not known."""

    figure: SummaryFigure
    values: Floats
    ends: Sequence[Interval | None]
    """As its single run gave it; None for repeats."""
    noise_from: Literal["repeats", "runs"]
    freedom: float
    """The degrees of freedom of the noise."""

    @property
    def sign(self) -> int:
        """Of its logarithms as speeds: a time is slow where it is large."""
        return 1 if self.figure.unit == "x" else -1

    def between(self, value: float, ends: tuple[float, float] | None) -> Interval:
        """A value of the figure with the ends of its interval, which are logarithms of speeds."""
        low, high = sorted(exp(self.sign * end) for end in ends) if ends is not None else (None, None)
        return rounded(Interval(value, low, high))

    def interval(self, chip: int) -> Interval | None:
        """The figure of one chip, with its interval; None where it has none."""
        value, error, own = float(self.values[chip]), float(self.errors[chip]), self.ends[chip]
        if not np.isfinite(value):
            return None
        if own is not None and self.noise_from == "runs":
            return own
        if not np.isfinite(error):
            return rounded(Interval(value))
        reach = exp(min(NORMAL_95 * error, LARGEST_REACH))  # errors are those of logarithms
        return rounded(Interval(value, value / reach, value * reach))


def columns(chips: Sequence[Chip]) -> list[FigureColumn]:
    """Every figure of a group of chips, in the order of the first run that has it."""
    every = [(row, figure) for row, chip in enumerate(chips) for run in chip.runs for figure in run.figures]
    cells = grouped(((figure.name, row), figure.value) for row, figure in every)
    figures = grouped((figure.name, figure) for _, figure in every)
    return [_column(first, [cells.get((name, row), []) for row in range(len(chips))]) for name, (first, *_) in figures.items()]


def _column(figure: SummaryFigure, cells: Sequence[Sequence[Interval]]) -> FigureColumn:
    values = np.array([median([interval.value for interval in cell]) if cell else np.nan for cell in cells])
    ends = [cell[0] if len(cell) == 1 else None for cell in cells]
    speeds = np.log(values) * (1 if figure.unit == "x" else -1)
    noise = _repeat_noise(cells)
    if noise is not None:
        return FigureColumn(figure.name, speeds, noise[0], figure, values, ends, "repeats", noise[1])
    return FigureColumn(figure.name, speeds, np.array([_run_error(cell) for cell in cells]), figure, values, ends, "runs", inf)


def _run_error(cell: Sequence[Interval]) -> float:
    """The relative standard error of a figure by the intervals of its runs."""
    known = [interval.half_width / NORMAL_95 for interval in cell if interval.half_width < inf]
    return median(known) * sqrt(median_variance(len(cell))) if known else nan


def median_variance(count: int) -> float:
    """The variance of the median of so many normal values, over that of one."""
    return MEDIAN_VARIANCE.get(count, pi / 2 / max(count, 1))


def _repeat_noise(cells: Sequence[Sequence[Interval]]) -> tuple[Floats, float] | None:
    """The standard error of every chip's figure by the variation between repeats, and its degrees of freedom; None if there are
    too few repeats."""
    logarithms = {row: np.log([interval.value for interval in cell]) for row, cell in enumerate(cells) if len(cell) > 1}
    variances = {row: (float(np.var(values, ddof=1)), len(values) - 1) for row, values in logarithms.items()}
    freedom: float = sum(own for _, own in variances.values())
    if freedom < LEAST_FREEDOM:
        return None
    if len(variances) < LEAST_ROBUST:
        pooled = sum(variance * own for variance, own in variances.values()) / freedom
    else:
        pooled = median([variance / chi_squared(own, 0.0) for variance, own in variances.values()])
        freedom *= ROBUST_EFFICIENCY
    errors = np.array([np.sqrt(pooled * median_variance(len(cell))) if cell else np.nan for cell in cells])
    for row, (variance, own) in variances.items():
        if variance > pooled * chi_squared(own, UNSTABLE):
            errors[row] = np.sqrt(variance * median_variance(own + 1))
    return errors, freedom
