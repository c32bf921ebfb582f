"""Divides the time of a step among the work that ran in it, so that the parts sum to the step.

Computation comes first: communication and copies that run at the same time are hidden behind it. Time in which communication
runs without computation is exposed, with or without copies beside it (as Holistic Trace Analysis defines it). Time in which only
copies run counts as copies, and time in which nothing runs as idle, unless kernels are missing from the trace. Kernels that
compute at the same time share that time equally.

Idle time has one owner. Up to the end of the launch of the work that ended a gap it is the CPU: it launched late, waited for the
GPU before, or did something else. From then on it is what the work waited for: another stream or rank.

A gap in the recording is not idle time where the GPU must have been busy. Three things show it: kernels or a graph were launched,
and are missing from the trace; the CPU waited for the GPU in a synchronization or a blocking copy, which return only when the GPU
has finished; or the first recorded work of a stream began long after its launch, behind work from before the recording.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from gemmscope.errors import UserError, option
from gemmscope.explain.host_activity import HOST_ACTIVITIES, Covered, by_key
from gemmscope.explain.recorded_trace import Call, GpuWork, RecordedTrace
from gemmscope.explain.scopes import Scope
from gemmscope.explain.steps import RecordedStep
from gemmscope.results.explain import FrameKind

# Why the GPU was idle: "between kernels", "other stream", "launch not recorded", or, where the CPU was late:
LATE = ("late launch", "late launch after synchronization")
HOST_IDLE = (
    *LATE, "no launch for over 1 ms", *(entry["name"] for entry in HOST_ACTIVITIES),
)  # fmt: skip
UNKNOWN_LAUNCH, OTHER_STREAM = "launch not recorded", "other stream"
NOT_RECORDED = "not recorded"  # the GPU was busy, but its kernels are missing from the trace
NOWHERE = Scope()
KERNEL_LAUNCH = re.compile("LaunchKernel|GraphLaunch|LaunchCooperative")
BLOCKING = "WithStream"  # hipMemcpyWithStream; cudaMemcpyAsync from pageable memory is busy on the CPU instead
PROMPT_US, SHORT_US = 100.0, 10.0  # from the end of a launch to the begin of its work, and between two kernels, if nothing delays
MOST_SHARES = 1_000_000  # pieces of work that run through several steps
NO_LAUNCH_US = 1000.0  # without a single launch the CPU is busy with something else


LONG_WAIT_US = 500.0  # a shorter wait may be the time that the call itself takes
MOST_OPEN, COVERED = 200, 0.5  # activities of the CPU at one moment; of a gap, that an activity must cover to explain it
NOT_TELLING = ("ProfilerStep", "<built-in", "nccl:")


@dataclass(frozen=True)
class Gap:
    """Idle time of the GPU. `why`: the reason, as far as the launches show it; `scope`: of the work that ended it."""

    begin: float
    end: float
    why: str
    scope: Scope = NOWHERE

    @property
    def time(self) -> float:
        return self.end - self.begin


@dataclass
class Shares:
    """Microseconds of one step. `of`: by the index of each piece of work; `hidden`: communication behind computation."""

    of: dict[int, float] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    hidden: float = 0.0
    overlapped: float = 0.0  # several kernels computed at once


def share_out(
    trace: RecordedTrace, scopes: Sequence[Scope], steps: Sequence[RecordedStep], ranks: Sequence[int],
    before: Container[int],
) -> list[Shares]:  # fmt: skip
    """The shares of each step. `ranks`: of all work, 0 computation, 1 communication, 2 copies. `before`: work of no step."""
    host = _HostTimeline(trace)
    left = MOST_SHARES + 2 * len(trace.work)
    result = [Shares() for _ in steps]
    running: list[int] = []  # work that began before the step
    at = 0
    for step, shares in sorted(zip(steps, result, strict=True), key=lambda pair: pair[0].begin):
        first = bisect_left(trace.work, step.begin, lo=at, key=lambda work: work.start)
        earlier = (*running, *(number for number in range(at, first) if number not in before))
        running = [number for number in earlier if trace.work[number].end > step.begin]
        at = first
        inside = [*running, *range(at, bisect_left(trace.work, step.end, lo=at, key=lambda work: work.start))]
        left -= len(inside)
        if left < 0:
            raise UserError(
                f"{trace.path}: too many kernels run through several of its {len(steps):,} steps",
                f"give the number of training steps with {option('steps', 'N')}",
            )
        _share_out(shares, trace, scopes, step, ranks, host, inside)
    return result


class _HostTimeline:
    """What the CPU did, for the reasons of gaps."""

    def __init__(self, trace: RecordedTrace) -> None:
        self.calls = sorted(call.end for call in trace.launches.values())
        kernels = {work.correlation for work in trace.work if not work.copy}
        launches = (call for correlation, call in trace.launches.items() if correlation in kernels)
        self._launches = sorted(launches, key=lambda call: call.start)
        threads = Counter(call.thread for call in trace.launches.values())
        self.main_thread = threads.most_common(1)[0][0] if threads else None
        self._activities = by_key(
            ((name, call.thread), call.start, call.end) for name, calls in trace.host_work.items() for call in calls
        )
        self._waits, self._lost = by_key(_waits(trace)), Covered(_lost(trace))
        self.first_on_stream = {work.stream: work for work in reversed(trace.work)}

    def was_busy(self, begin: float, end: float, next_call: Call | None) -> bool:
        """Whether the GPU must have been busy in a gap, although nothing was recorded. `next_call`: what launched the work that
        ended the gap. If that was launched before the gap, a wait was for that."""
        half = 0.5 * (end - begin)
        if self._lost.within(begin, end) > half:
            return True
        waits = self._waits.get(next_call.thread) if next_call is not None and next_call.start > begin else None
        return waits is not None and waits.within(begin, end) > half

    def thread_before(self, moment: float) -> Any:
        """The thread that launched the last kernel before a moment: of backward, for which the main thread waits at its end."""
        at = bisect_left(self._launches, moment, key=lambda call: call.start)
        return self._launches[at - 1].thread if at else self.main_thread

    def activities(self, threads: Iterable[Any], begin: float, end: float) -> Iterator[tuple[str, float]]:
        """What the threads were busy with, and for how long; where activities are inside each other, the first of them counts."""
        left = end - begin
        for name in [entry["name"] for entry in HOST_ACTIVITIES] if self._activities else ():
            covered = [self._activities[name, thread] for thread in threads if (name, thread) in self._activities]
            time = min(sum(spans.within(begin, end) for spans in covered), left)
            if time > SHORT_US:
                left -= time
                yield name, time


def _share_out(
    result: Shares, trace: RecordedTrace, scopes: Sequence[Scope], step: RecordedStep, ranks: Sequence[int],
    host: _HostTimeline, inside: Sequence[int],
) -> None:  # fmt: skip
    edges: list[tuple[float, int, int]] = []
    for number in inside:
        work = trace.work[number]
        begin, end = max(work.start, step.begin), min(work.end, step.end)
        if end > begin:
            edges += [(begin, 1, number), (end, 0, number)]
    edges.sort()
    # By rank: the work that runs, with the time that had been credited to its rank when it began; and that time.
    running: tuple[dict[int, float], ...] = ({}, {}, {})
    credited = [0.0, 0.0, 0.0]
    before = step.begin
    for moment, opens, number in edges:
        first = next((rank for rank, since in enumerate(running) if since), None)
        if first is not None:
            credited[first] += (moment - before) / len(running[first])
            result.overlapped += moment - before if first == 0 and len(running[0]) > 1 else 0.0
            result.hidden += moment - before if first == 0 and running[1] else 0.0
        elif moment > before:
            result.gaps += _gaps(trace, before, moment, trace.work[number], scopes[number], host)
        before, rank = moment, ranks[number]
        if opens:
            running[rank][number] = credited[rank]
        elif share := credited[rank] - running[rank].pop(number):
            result.of[number] = share
        if not running[rank]:
            credited[rank] = 0.0
    if step.end > before:
        at = bisect_left(trace.work, step.end - 1e-3, key=lambda work: work.start)
        after = trace.work[at] if at < len(trace.work) else None
        result.gaps += _gaps(trace, before, step.end, after, NOWHERE, host)


def _gaps(
    trace: RecordedTrace, begin: float, end: float, until: GpuWork | None, scope: Scope, host: _HostTimeline
) -> Iterator[Gap]:
    """An idle period by its owners, one after the other. `until`: the work that ended it."""
    call = until.call if until is not None else None
    if end - begin > SHORT_US and host.was_busy(begin, end, call):
        yield Gap(begin, end, NOT_RECORDED)
        return
    launched = end if call is None or end - call.end <= PROMPT_US else max(call.end, begin)
    if call is not None and (call.end <= begin or (call.start <= begin and end - begin <= SHORT_US)):
        launched = begin
    if launched > begin:
        yield from _before_launch(trace, begin, launched, call, scope, host, over=until is None)
    if end > launched:
        short, begun = end - launched <= SHORT_US, until is not None and host.first_on_stream.get(until.stream) is until
        yield Gap(launched, end, "between kernels" if short else NOT_RECORDED if begun else OTHER_STREAM)


def _before_launch(
    trace: RecordedTrace, begin: float, end: float, call: Call | None, scope: Scope, host: _HostTimeline, *, over: bool
) -> Iterator[Gap]:
    """The part of an idle period that belongs to the CPU. Its activities come first, each with its own time. `over`: the step
    ended with it, and nothing more was launched."""
    why, at = _reason(trace, begin, call, scope, host), begin
    if over and trace.launches:
        why = "no launch for over 1 ms"
    thread, latest = (call.thread, min(end, call.end)) if call is not None else (host.main_thread, end)
    for activity, time in host.activities({thread, host.thread_before(begin)}, begin, latest):
        yield Gap(at, at + time, activity, scope)
        at += time
    if end > at:
        yield Gap(at, end, why, scope if call is not None else NOWHERE)


def _reason(trace: RecordedTrace, begin: float, call: Call | None, scope: Scope, host: _HostTimeline) -> str:
    """Why the work that ended the gap was launched late, if that is known (`call`)."""
    if call is None:
        return UNKNOWN_LAUNCH
    awaited = _waited_until(trace, begin, call.start)
    at = bisect_left(host.calls, call.start)
    previous = host.calls[at - 1] if at else begin
    # A function of a framework may take long before it launches.
    entered = min((operator.start for operator in scope.operators), default=call.start)
    silent_from = max(previous, awaited or previous, begin - NO_LAUNCH_US)
    if scope.phase != "optimizer" and min(entered, call.start) - silent_from > NO_LAUNCH_US:
        return "no launch for over 1 ms"
    return "late launch after synchronization" if awaited is not None else "late launch"


def _waited_until(trace: RecordedTrace, begin: float, launched: float) -> float | None:
    """The end of a synchronization that the last GPU work released, shortly before the launch."""
    at = bisect_right(trace.waits, begin, key=lambda wait: wait.start) - 1
    for wait in reversed(trace.waits[max(at - 6, 0) : at + 1]):
        if wait.start < begin and begin - 20.0 <= wait.end <= launched:
            return wait.end
    return None


def _waits(trace: RecordedTrace) -> Iterator[tuple[Any, float, float]]:
    """When each thread waits for the GPU: in a synchronization, and in a blocking copy until it begins."""
    for wait in trace.waits:
        if "Synchronize" in wait.name and wait.end - wait.start > LONG_WAIT_US:
            yield wait.thread, wait.start, wait.end
    for work in trace.work:
        if (
            work.copy
            and (call := work.call) is not None
            and ("DtoH" in work.name or "HtoD" not in work.name or BLOCKING in call.name)
        ):
            end = min(call.end, work.start)
            if end - call.start > LONG_WAIT_US:
                yield call.thread, call.start, end


def _lost(trace: RecordedTrace) -> Iterator[tuple[float, float]]:
    """Time from a launch whose kernels are missing until the next work of another launch begins, or a wait ends."""
    lost = lost_launches(trace)
    launched = sorted((work.call.start, work.start) for work in trace.work if work.call is not None)
    synchronizations = [wait for wait in trace.waits if "Synchronize" in wait.name]
    last = max(work.end for work in trace.work)
    for call in lost:
        at = bisect_right(launched, call.start, key=lambda launch: launch[0])
        end = launched[at][1] if at < len(launched) else max(last, call.end)
        wait = bisect_left(synchronizations, call.start, key=lambda wait: wait.start)
        if wait < len(synchronizations):
            end = min(end, max(synchronizations[wait].end, call.end))
        if end > call.start:
            yield call.start, end


def lost_launches(trace: RecordedTrace) -> list[Call]:
    """Launches of kernels and graphs that are missing from the trace, unless they were captured or ran on another GPU."""
    if trace.other_gpus or any("BeginCapture" in name for name in trace.calls):
        return []
    recorded = {work.correlation for work in trace.work}
    lost = (call for key, call in trace.launches.items() if key not in recorded and KERNEL_LAUNCH.search(call.name))
    return sorted(lost, key=lambda call: call.start)


def frames_of(trace: RecordedTrace, gaps: Sequence[Gap]) -> Iterable[tuple[str, FrameKind]]:
    """What the CPU did in each gap; `gaps` in the order of their begin."""
    marks = [mark for mark in trace.marks if not mark.name.startswith(NOT_TELLING)]
    every: list[Call] = sorted([*trace.activities, *marks], key=lambda activity: activity.start)
    annotations = {id(mark) for mark in marks}
    at, opened = 0, list[Call]()
    for gap in gaps:
        begin, end = gap.begin, max(min(gap.scope.launched or gap.end, gap.end), gap.begin)
        needed = COVERED * (end - begin)
        while at < len(every) and every[at].start <= end - needed:
            opened.append(every[at])
            at += 1
        open_now = (activity for activity in opened if activity.end > begin and not activity.name.startswith(NOT_TELLING))
        opened = nlargest(MOST_OPEN, open_now, key=lambda activity: activity.end)
        covers = [activity for activity in opened if min(activity.end, end) - max(activity.start, begin) >= needed]
        if covers:
            inner = min(covers, key=lambda activity: activity.end - activity.start)
            yield inner.name, "annotation" if id(inner) in annotations else frame_kind(inner.name)
        elif gap.scope.operators:
            yield gap.scope.operators[-1].name, "operator"
        else:
            yield "", "nothing recorded"


def frame_kind(name: str) -> FrameKind:
    """What a name of the profiler stands for.

    >>> [frame_kind(name) for name in ("cudaStreamSynchronize", "train.py(12): step", "aten::item")]
    ['GPU API call', 'Python function', 'operator']
    """
    if re.match(r"(cuda|hip|cu)[A-Z]", name):
        return "GPU API call"
    return "Python function" if ".py(" in name or name.startswith(("nn.Module", "<")) else "operator"
