"""What recording a trace costs: the profiler slows launches, so a host-bound step is slower in its trace than without it.

`trace_me` times steps before it records, without the profiler; other traces only show which options were on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from gemmscope.explain.recorded_trace import RecordedTrace, as_list
from gemmscope.explain.trace_view import HOST
from gemmscope.findings import Finding, finding
from gemmscope.parts import StepPart
from gemmscope.results.explain import StepAccount

NOTICEABLE = 0.03  # of the step


@dataclass(frozen=True)
class RecordingCost:
    """How much longer the recorded steps of a trace took than steps without the profiler."""

    trace: RecordedTrace
    account: StepAccount

    @cached_property
    def plain_ms(self) -> float | None:
        """A step without the profiler; None where that was not timed."""
        times = [time for time in as_list(self.trace.facts.get("plain_steps_ms")) if isinstance(time, (int, float)) and time > 0]
        return median(times) if times else None

    @property
    def host_ms(self) -> float:
        """The time in which the recorded step waits for launches."""
        return self.account.parts_ms.get(HOST, 0.0)

    @property
    def excess_ms(self) -> float:
        """The part of that which only the recorded step has; 0 where it is not known."""
        return min(max(self.account.step_ms - (self.plain_ms or self.account.step_ms), 0.0), self.host_ms)

    @property
    def unknown(self) -> bool:
        """Whether the step might be faster without the profiler, and nobody timed it."""
        slows = bool(self.trace.slowing_options) and self.host_ms > NOTICEABLE * self.account.step_ms
        return slows and self.plain_ms is None

    @property
    def step_ms(self) -> float:
        """The step without what recording adds, as far as that is known."""
        return self.account.step_ms - self.excess_ms

    @property
    def parts_ms(self) -> dict[StepPart, float]:
        """The parts of that step."""
        times = self.account.parts_ms
        return times | {HOST: self.host_ms - self.excess_ms} if self.excess_ms else times

    def findings(self) -> Iterator[Finding]:
        """What recording changed in this trace, or may have changed."""
        facts = {"step_ms": self.account.step_ms, "host_ms": self.host_ms}
        if self.unknown:
            yield finding("recording-may-slow", options=sorted(self.trace.slowing_options), **facts)
        elif self.excess_ms > NOTICEABLE * self.account.step_ms:
            yield finding("recording-slows", plain_ms=self.plain_ms or 0.0, excess_ms=self.excess_ms, **facts)
