"""Everything known about the steps of a trace: each piece of work with its operators, its class, its GEMM and its time."""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from gemmscope.explain.gemms import NO_GEMM, TracedGemm, traced_gemms
from gemmscope.explain.place import PlacedWork, place
from gemmscope.explain.scopes import Scope, scopes
from gemmscope.explain.steps import RecordedStep, Steps, find_steps
from gemmscope.explain.timeline import Shares, share_out
from gemmscope.explain.trace import GpuWork, RecordedTrace

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One piece of work in one step. `share` is its part of the step's time, in microseconds; `gemm`: NO_GEMM if it is none."""

    index: int
    work: GpuWork
    scope: Scope
    placed: PlacedWork
    share: float
    gemm: TracedGemm

    @property
    def name(self) -> str:
        """The class of the kernel."""
        return self.placed.name

    @property
    def is_gemm(self) -> bool:
        return self.placed.is_gemm

    def mentions(self, *texts: str) -> bool:
        """Whether the name of the kernel contains one of the texts."""
        return any(text in self.work.name for text in texts)


@dataclass
class TraceView:
    """A trace with its steps. `shares`: how the time of each chosen step is divided; `every_shares`: of each step."""

    trace: RecordedTrace
    steps: Steps
    scopes: list[Scope]
    placed: list[PlacedWork]
    gemms: dict[int, TracedGemm]
    shares: list[Shares]
    every_shares: list[Shares]

    @cached_property
    def _timed(self) -> list[list[TimedWork]]:
        work, scopes, placed, gemms = self.trace.work, self.scopes, self.placed, self.gemms
        return [
            [
                TimedWork(index, work[index], scopes[index], placed[index], share, gemms.get(index, NO_GEMM))
                for index, share in sorted(shares.of.items())
            ]
            for shares in self.shares
        ]

    def by_step(self) -> Iterator[list[TimedWork]]:
        """The work of each chosen step, in the order it ran."""
        return iter(self._timed)

    def indices_in(self, step: RecordedStep) -> range:
        """All work that begins in a step, also what is hidden behind other work."""
        begin, end = (bisect_left(self.trace.work, moment, key=lambda work: work.start) for moment in (step.begin, step.end))
        return range(begin, end)

    def items(self) -> list[TimedWork]:
        return [item for step in self.by_step() for item in step]

    @property
    def count(self) -> int:
        """How many steps are averaged."""
        return len(self.steps.chosen)

    def ms(self, items: Iterable[TimedWork]) -> float:
        """Milliseconds per step."""
        return sum(item.share for item in items) / 1000 / self.count


def view_trace(trace: RecordedTrace, step_count: int | None) -> TraceView:
    """Find the steps and divide the time of each among its work."""
    steps = find_steps(trace, step_count)
    sources = scopes(trace)
    placed = place(trace, sources)
    gemms = {gemm.work: gemm for gemm in traced_gemms(trace, sources, placed)}
    shares = share_out(trace, sources, steps.every, [work.rank for work in placed], steps.before)
    chosen = shares[len(steps.every) - len(steps.chosen) :]  # only first ones are left out
    return TraceView(trace, steps, sources, placed, gemms, chosen, shares)


def in_launch_order(items: Iterable[TimedWork]) -> list[TimedWork]:
    """The work whose launch is known."""
    launched = [item for item in items if item.scope.launched is not None]
    return sorted(launched, key=lambda item: item.scope.launched or 0.0)


def add_up(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """The sum of the values of each key.

    >>> add_up([("norms", 1.0), ("loss", 2.0), ("norms", 3.0)])
    {'norms': 4.0, 'loss': 2.0}
    """
    sums: dict[Key, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return sums
