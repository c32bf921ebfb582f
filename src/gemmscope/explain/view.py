"""Everything known about the steps of a trace: each piece of work with its operators, its class, its GEMM and its time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gemmscope.explain.gemms import TracedGemm, traced_gemms
from gemmscope.explain.place import PlacedWork, place
from gemmscope.explain.scopes import Scope, scopes
from gemmscope.explain.steps import Steps, find_steps
from gemmscope.explain.timeline import Shares, share_out
from gemmscope.explain.trace import GpuWork, RecordedTrace


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One piece of work in one step. `share` is its part of the step's time, in microseconds."""

    index: int
    work: GpuWork
    scope: Scope
    placed: PlacedWork
    share: float
    gemm: TracedGemm | None


@dataclass
class TraceView:
    """A trace with its steps. `shares`: how the time of each chosen step is divided."""

    trace: RecordedTrace
    steps: Steps
    scopes: list[Scope]
    placed: list[PlacedWork]
    gemms: dict[int, TracedGemm]
    shares: list[Shares]

    def by_step(self) -> Iterator[list[TimedWork]]:
        """The work of each chosen step, in the order it ran."""
        for shares in self.shares:
            yield [
                TimedWork(index, self.trace.work[index], self.scopes[index], self.placed[index], share, self.gemms.get(index))
                for index, share in sorted(shares.of.items())
            ]

    def items(self) -> list[TimedWork]:
        """The work of all chosen steps."""
        return [item for step in self.by_step() for item in step]

    @property
    def count(self) -> int:
        """How many steps are averaged."""
        return len(self.steps.chosen)

    def ms(self, items: Iterable[TimedWork]) -> float:
        """Milliseconds per step."""
        return sum(item.share for item in items) / 1000 / self.count


def view_trace(trace: RecordedTrace, step_count: int | None = None) -> TraceView:
    """Find the steps and divide the time of each among its work."""
    steps = find_steps(trace, step_count)
    sources = scopes(trace)
    placed = place(trace, sources)
    gemms = {gemm.work: gemm for gemm in traced_gemms(trace, sources, placed)}
    ranks = [work.rank for work in placed]
    calls = sorted(call.end for call in trace.launches.values())
    starts = [work.start for work in trace.work]
    longest = max(work.time for work in trace.work)
    shares = [share_out(trace, sources, step, ranks, calls, bisect_left(starts, step.begin - longest)) for step in steps.chosen]
    return TraceView(trace, steps, sources, placed, gemms, shares)
