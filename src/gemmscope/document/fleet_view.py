"""A fleet, arranged for its Document: the speed of every GPU relative to the others, and the order to look at them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gemmscope.interval import Interval
from gemmscope.results.fleet import FleetFigure, FleetGpu, FleetResult, Outlier

ON_CPU = "CPU"


@dataclass(frozen=True)
class Standing:
    """A figure of one GPU, relative to the median of its group: below one is slow. A GPU that is alone in its group has none."""

    figure: FleetFigure
    ratio: Interval


@dataclass(frozen=True)
class FleetView:
    """What the tables and charts of a fleet share."""

    result: FleetResult

    @cached_property
    def names(self) -> list[str]:
        """The names of the metrics, without repetition."""
        return list(dict.fromkeys(figure.name for figure in self.result.figures))

    @cached_property
    def groups(self) -> dict[str, int]:
        """The groups of GPUs that are compared with each other, and how many each has; the largest first."""
        counts: dict[str, int] = {}
        for gpu in self.result.gpus:
            counts[gpu.group] = counts.get(gpu.group, 0) + 1
        return {name: counts[name] for name in sorted(counts, key=lambda name: -counts[name]) if name}

    @cached_property
    def kind(self) -> str:
        """What is measured: GPUs, or CPUs to try out the command."""
        return ON_CPU if self.groups and all(name.startswith(ON_CPU) for name in self.groups) else "GPU"

    @cached_property
    def nodes(self) -> dict[str, list[FleetGpu]]:
        """The GPUs of every node."""
        nodes: dict[str, list[FleetGpu]] = {}
        for gpu in self.result.gpus:
            nodes.setdefault(gpu.node, []).append(gpu)
        return nodes

    @cached_property
    def _called(self) -> tuple[dict[str, list[Outlier]], dict[str, list[Outlier]]]:
        """The outliers by place, and whole nodes by node."""
        places: dict[str, list[Outlier]] = {}
        nodes: dict[str, list[Outlier]] = {}
        for outlier in self.result.outliers:
            (nodes if outlier.whole_node else places).setdefault(outlier.where, []).append(outlier)
        return places, nodes

    def outliers_of(self, gpu: FleetGpu) -> list[Outlier]:
        """The outliers of a GPU: its own, and those of its whole node."""
        places, nodes = self._called
        return [*places.get(gpu.place, ()), *nodes.get(gpu.node, ())]

    def is_slow(self, gpu: FleetGpu) -> bool:
        return any(outlier.side == "slow" for outlier in self.outliers_of(gpu))

    def _on_side(self, side: str) -> list[Outlier]:
        return [outlier for outlier in self.result.outliers if outlier.side == side]

    @cached_property
    def slow(self) -> list[Outlier]:
        """The slow GPUs and nodes, the slowest first."""
        return sorted(self._on_side("slow"), key=lambda outlier: outlier.ratio.value)

    @cached_property
    def fast(self) -> list[Outlier]:
        """The fast GPUs and nodes, the fastest first."""
        return sorted(self._on_side("fast"), key=lambda outlier: -outlier.ratio.value)

    @cached_property
    def standings(self) -> Mapping[str, list[Standing]]:
        """For every place, each of its figures relative to the median."""
        return {gpu.place: self._standings(gpu) for gpu in self.result.gpus}

    def _standings(self, gpu: FleetGpu) -> list[Standing]:
        known = []
        for name, value in gpu.figures.items():
            figure = self.result.figure(name, gpu.group)
            if figure is not None and figure.gpus > 1 and (ratio := relative(value, figure)) is not None:
                known.append(Standing(figure, ratio))
        return known

    @cached_property
    def _worst(self) -> dict[str, Standing | None]:
        return {gpu.place: self._worst_of(gpu) for gpu in self.result.gpus}

    def worst(self, gpu: FleetGpu) -> Standing | None:
        """The metric to show of a GPU: the one in which it is an outlier, else the time in which it is slowest."""
        return self._worst[gpu.place]

    def _worst_of(self, gpu: FleetGpu) -> Standing | None:
        standings = self.standings[gpu.place]
        called = [outlier.figure for outlier in self.outliers_of(gpu)[:1]]
        among = [standing for standing in standings if standing.figure.name in called] or times_of(standings)
        return min(among, key=lambda standing: standing.ratio.value, default=None)

    @cached_property
    def ordered(self) -> list[FleetGpu]:
        """Slow outliers, then GPUs that were not measured, then the others; the slowest first in each."""

        def order(gpu: FleetGpu) -> tuple[int, float]:
            worst = self.worst(gpu)
            slowness = worst.ratio.value if worst is not None else math.inf
            rank = 1 if gpu.failure else 0 if self.is_slow(gpu) else 2
            return rank, slowness

        return sorted(self.result.gpus, key=order)


def relative(value: Interval, figure: FleetFigure) -> Interval | None:
    """The speed of a GPU in one metric, relative to the median GPU; None if one of them is not a positive number."""
    center = figure.center.value
    if not 0 < center < math.inf or not 0 < value.value < math.inf:
        return None
    if figure.higher_is_better:
        return value.times(1 / center)
    low, high = (center / end if end else None for end in (value.high, value.low))
    return Interval(center / value.value, low, high)


def times_of(standings: list[Standing]) -> list[Standing]:
    """The times, or all metrics if there are none: a low speedup is not a slow GPU."""
    return [standing for standing in standings if standing.figure.unit == "ms"] or standings


def gpu_column(gpu: FleetGpu) -> str:
    """The column of a GPU in the heat map: its index on its node."""
    return ON_CPU if gpu.index is None else str(gpu.index)
