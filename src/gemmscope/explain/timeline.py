"""Divides every moment of a step among what the GPU did in it, so that the parts sum to the step.

At any moment computation comes first: what runs beside it is hidden by it. Where only copies run the moment is theirs, where only
communication runs it is exposed, and where nothing runs the GPU is idle. Kernels that compute at the same time share the moment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemmscope.explain.scopes import Scope
from gemmscope.explain.steps import Step
from gemmscope.explain.trace import Trace, Work

Idle = Literal["launching", "after a wait", "host elsewhere", "between kernels", "another stream", "not recorded"]
HOST_IDLE: tuple[Idle, ...] = ("launching", "after a wait", "host elsewhere")
NOWHERE = Scope()
SHORT_US = 10.0  # from one kernel to the next that was waiting in line
ELSEWHERE_US = 1000.0  # without a single launch: the host does something else


@dataclass(frozen=True)
class Gap:
    """The GPU had nothing to do. `until`: the work that ended it; `why`: what the launches tell."""

    begin: float
    end: float
    why: Idle
    until: Work | None = None
    scope: Scope = NOWHERE

    @property
    def time(self) -> float:
        return self.end - self.begin


@dataclass
class Shares:
    """Of one step. `of`: microseconds by the index of each piece of work; `hidden`: of communication beside computation."""

    of: dict[int, float] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    hidden: float = 0.0
    overlapped: float = 0.0  # microseconds in which several kernels computed at once


def share_out(
    trace: Trace, found_in: Sequence[Scope], step: Step, ranks: Sequence[int], calls: Sequence[float], first: int = 0
) -> Shares:
    """`ranks`: of all work, 0 computation, 1 copies, 2 communication. `calls`: the moments of all launches, in order.

    `first`: where in the trace's work the step's may begin.
    """
    found = Shares()
    edges: list[tuple[float, int, int]] = []
    for number in range(first, len(trace.work)):
        work = trace.work[number]
        if work.start >= step.end:
            break
        begin, end = max(work.start, step.begin), min(work.end, step.end)
        if end > begin:
            edges += [(begin, 1, number), (end, 0, number)]
    edges.sort()
    active: tuple[dict[int, None], ...] = ({}, {}, {})
    before = step.begin
    idle_from: float | None = step.begin
    for moment, opens, number in edges:
        if moment > before:
            _divide(found, active, moment - before)
        before = moment
        group = active[ranks[number]]
        if opens:
            if idle_from is not None and moment > idle_from:
                found.gaps.append(_gap(trace, idle_from, moment, trace.work[number], found_in[number], calls))
            idle_from = None
            group[number] = None
        else:
            group.pop(number, None)
            if not any(active):
                idle_from = moment
    if idle_from is not None and step.end > idle_from:
        at = bisect_left(trace.work, step.end - 1e-3, key=lambda work: work.start)
        after = trace.work[at] if at < len(trace.work) else None
        found.gaps.append(_gap(trace, idle_from, step.end, after, Scope(), calls))
    return found


def _divide(found: Shares, active: tuple[dict[int, None], ...], time: float) -> None:
    group = next((each for each in active if each), None)
    if group is None:
        return
    for number in group:
        found.of[number] = found.of.get(number, 0.0) + time / len(group)
    if len(group) > 1 and group is active[0]:
        found.overlapped += time
    if active[2] and group is not active[2]:
        found.hidden += time


def _gap(trace: Trace, begin: float, end: float, until: Work | None, scope: Scope, calls: Sequence[float]) -> Gap:
    """Why the GPU was idle: was the work that ended it launched in time?"""
    call = trace.launches.get(until.correlation) if until is not None else None
    if call is None:
        if not trace.launches or until is not None:
            return Gap(begin, end, "not recorded", until)
        return Gap(begin, end, "host elsewhere", None)  # the step ended, and nothing was launched any more
    if call.start <= begin:
        return Gap(begin, end, "between kernels" if end - begin < SHORT_US else "another stream", until)
    awaited = _waited_until(trace, begin, call.start)
    previous = calls[bisect_left(calls, call.start) - 1] if calls and calls[0] < call.start else begin
    entered = min((each.start for each in scope.operators), default=call.start)  # a framework's function takes its time
    if (
        scope.phase != "optimizer"
        and min(entered, call.start) - max(previous, awaited or previous, begin - ELSEWHERE_US) > ELSEWHERE_US
    ):
        return Gap(begin, end, "host elsewhere", until, scope)
    return Gap(begin, end, "after a wait" if awaited is not None else "launching", until, scope)


def _waited_until(trace: Trace, begin: float, launched: float) -> float | None:
    """The end of a wait of the host that the GPU's last work released, shortly before the launch."""
    at = bisect_right(trace.waits, begin, key=lambda wait: wait.start) - 1
    for number in range(at, max(at - 7, -1), -1):
        wait = trace.waits[number]
        if wait.start < begin and begin - 20.0 <= wait.end <= launched:
            return wait.end
    return None
