"""Replays the steps of a trace with some work shortened or some waiting of the GPU removed, to tell what that would gain.

Subtracting a time from the step promises too much: behind shorter work the GPU may wait for the next launch, for another stream
or for a collective. The replay keeps what the recording shows:

* work of one stream runs in the same order, and where two kernels of it overlapped, they still overlap in proportion;
* nothing begins before its launch, and the CPU takes as long between its launches as it did;
* a call that waits for the GPU (a synchronization, a blocking copy) returns when the work that it waited for has ended;
* work that waited for another stream still waits for it: by the recorded calls (`cudaStreamWaitEvent`), else where it began right
  after work of another stream had ended;
* collectives take as long as they did; with the traces of several ranks, they end together on all of them, as long after the last
  rank has entered them as they did.

Without changes every piece of work begins when it did. A step is never shorter than the CPU's own time for it, because the CPU
cannot run ahead for more than a few steps.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import itemgetter
from statistics import median

from gemmscope.explain.host_activity import Covered
from gemmscope.explain.recorded_trace import Call, GpuWork
from gemmscope.explain.steps import RecordedStep
from gemmscope.explain.timeline import BLOCKING, Gap
from gemmscope.explain.trace_view import TimedWork, TraceView
from gemmscope.grouping import grouped

MOST_WORK = 200_000  # of a longer trace, only some of the steps are replayed
# A call that waits for the GPU returns this soon after the end of the work, or while the GPU is idle; its own time
RELEASED_US, OWN_US = 50.0, 10.0
LAUNCH_US = 200.0  # the CPU takes at most so long for one launch: more is something else
# Work that waited for another stream begins so soon after the end there, or within this share of its wait
AT_ONCE_US, AT_ONCE = 20.0, 0.1
USUAL_GAP_US = 5.0  # between two kernels of a stream
BLOCKED_US = 100.0  # a longer launch waited for room in the queue, if its work was then queued for as long
LOOK_BACK = 64  # launches before a wait that may have started the work it waits for

Moment = tuple[float, int]  # when the work at a place was launched, or ended
_Entry = tuple[int, float, float]  # a collective: its index, when a rank entered it, from its recorded end on, and its time
_moment = itemgetter(0)


@dataclass(slots=True)
class _Node:
    """One piece of work in a step. `after`: the places of work that it follows; `slack`: from the end of the last of these to its
    begin; `latency`: from its launch to its begin, if the launch is what it waited for; `beside`: the place of the work of its
    stream that it overlapped, and by how much."""

    index: int
    start: float
    end: float
    launched: float | None
    after: list[int]
    beside: tuple[int, float] | None = None
    slack: float = 0.0
    latency: float = 0.0
    launching: float = 0.0  # time of the CPU since the launch before


@dataclass(slots=True)
class _Wait:
    """A call in which the CPU waited for the GPU. `until`: the place of the work that released it, None if none did; `after`: how
    long after the end of that work it returned; `blocked`: until when it only waited, before it copied from pageable memory."""

    start: float
    end: float
    until: int | None
    after: float
    blocked: float


@dataclass
class StepGraph:
    """One step: its work in the order of their begin, the waits of the CPU, and the time that the CPU itself takes."""

    step: RecordedStep
    nodes: list[_Node]
    waits: list[_Wait]
    host_us: float


@dataclass(frozen=True)
class StepChange:
    """What is different in a replay. `saved`: microseconds by which work is shorter, by its index. `gaps`: idle time in which the
    CPU was late, and no longer is. `unlaunched`: the share of the CPU's time for launching work that is saved, by its index."""

    saved: Mapping[int, float] = field(default_factory=dict)
    gaps: Sequence[Gap] = ()
    unlaunched: Mapping[int, float] = field(default_factory=dict)

    @staticmethod
    def shorten(items: Iterable[TimedWork], share: float, *, removed: bool = False) -> "StepChange":
        """Take a share off the time of the work; of communication and copies, off the part that nothing hides. `removed`: so much
        of the work does not run at all, and is not launched either."""
        chosen = list(items)
        saved = {item.index: share * (item.share if item.work_class.rank else item.work.time) for item in chosen}
        return StepChange(saved, unlaunched={item.index: share for item in chosen} if removed else {})


def step_graphs(view: TraceView) -> list[StepGraph]:
    """The chosen steps of a trace, ready to be replayed."""
    steps = list(zip(view.steps.chosen, view.by_step, strict=True))
    every = 1 + sum(len(items) for _, items in steps) // MOST_WORK
    return [_graph(view, step, items) for step, items in steps[::every]]


def replayed_us(graphs: Sequence[StepGraph], change: StepChange) -> float:
    """The time of the steps with the change."""
    return sum(replayed_ranks_us({0: graph}, (), {0: change})[0] for graph in graphs)


def replayed_speedup(graphs: Sequence[StepGraph], change: StepChange) -> float:
    """The speedup of the step; 1 if the change gains nothing."""
    return max(sum(graph.step.time for graph in graphs) / max(replayed_us(graphs, change), 1e-6), 1.0)


def replayed_ranks_us(
    graphs: Mapping[int, StepGraph], matches: Iterable[Mapping[int, int]], changes: Mapping[int, StepChange],
    on_time: Container[int] = (),
) -> dict[int, float]:  # fmt: skip
    """The time of one step on each rank. `matches`: the indices of the same collective, by rank; `on_time`: ranks that nobody has
    to wait for. Ranks that run their collectives in another order do not wait in them."""
    match_of = {(rank, index): match for match in matches for rank, index in match.items()}
    shared = grouped(match_of)
    runs = {rank: _replay(graph, changes.get(rank, StepChange()), set(shared.get(rank, ()))) for rank, graph in graphs.items()}
    answers: dict[int, float | None] = dict.fromkeys(graphs)
    entered: dict[int, _Entry] = {}
    times: dict[int, float] = {}
    while answers:
        for rank, answer in answers.items():
            try:
                entered[rank] = next(runs[rank]) if answer is None else runs[rank].send(answer)
            except StopIteration as end:
                times[rank] = end.value
        collectives = {rank: match_of[rank, index] for rank, (index, _, _) in entered.items()}
        present = {rank: [one for one in match if collectives.get(one) is match] for rank, match in collectives.items()}
        ready = [rank for rank, match in collectives.items() if len(present[rank]) == len(match)] or list(entered)[:1]
        answers = {}
        for rank in ready:
            late = [entered[one][1] for one in present[rank] if one not in on_time] or [entered[rank][1]]
            answers[rank] = max(late) + min(entered[one][2] for one in present[rank])
        entered = {rank: entry for rank, entry in entered.items() if rank not in ready}
    return times


def _graph(view: TraceView, step: RecordedStep, items: Sequence[TimedWork]) -> StepGraph:
    trace = view.trace
    nodes: list[_Node] = []
    before_step = (item.index for item in items if item.work.start < step.begin)
    indices = [*before_step, *view.indices_in(step)]
    calls = [trace.work[index].call for index in indices]
    launched_work = [(call, trace.work[index].start) for call, index in zip(calls, indices, strict=True) if call is not None]
    streams = [trace.work[index].stream for index in indices]
    last: dict[object, int] = {}
    for place, (index, call, stream) in enumerate(zip(indices, calls, streams, strict=True)):
        work = trace.work[index]
        launched = call.start if call is not None and call.start <= work.start else None
        before = last.get(stream)
        overlap = nodes[before].end - work.start if before is not None else 0.0
        after = [before] if before is not None and overlap <= 1e-3 else []
        beside = (before, overlap) if before is not None and not after else None
        nodes.append(_Node(index, work.start, work.end, launched, after, beside))
        if before is None or nodes[before].end <= work.end:
            last[stream] = place
    ends = sorted((node.end, place) for place, node in enumerate(nodes))
    if len(last) > 1:
        _follow_waits(nodes, streams, trace.stream_waits)
        _follow_ends(nodes, streams, ends)
    for node in nodes:
        base = _base(nodes, node)
        late = max(node.start - base, 0.0)
        node.latency, node.slack = (late, 0.0) if base == node.launched else (0.0, late)
    for (moment, _), (next_moment, place) in pairwise(_launched(nodes)):
        nodes[place].launching = min(next_moment - moment, LAUNCH_US)
    waits = _waits(nodes, ends, trace.waits, step, trace.work)
    return StepGraph(step, nodes, waits, _host_us(view, step, launched_work, waits))


def _launched(nodes: Sequence[_Node]) -> list[Moment]:
    """The moments of launches in order, with the places of the work."""
    return sorted((node.launched, place) for place, node in enumerate(nodes) if node.launched is not None)


def _base(nodes: Sequence[_Node], node: _Node) -> float:
    """The moment from which on it could have begun, as far as is known; its begin, if nothing is."""
    ends = [nodes[place].end for place in node.after]
    ends += [nodes[node.beside[0]].end - node.beside[1]] if node.beside is not None else []
    return max([*ends, *([node.launched] if node.launched is not None else [])], default=node.start)


def _follow_waits(nodes: Sequence[_Node], streams: Sequence[object], calls: Sequence[Call]) -> None:
    """The next work launched after `cudaStreamWaitEvent` waits for work of another stream: the last that was launched before and
    had ended when it began."""
    launched = _launched(nodes)
    if not launched:
        return
    first, end = (bisect_left(calls, moment, key=lambda call: call.start) for moment in (launched[0][0], launched[-1][0]))
    for call in calls[first:end]:
        at = bisect_right(launched, call.start, key=_moment)
        _follow(nodes, streams, launched[at][1], launched[max(at - LOOK_BACK, 0) : at])


def _follow_ends(nodes: Sequence[_Node], streams: Sequence[object], ends: Sequence[Moment]) -> None:
    """Work that began late for its launch and its stream, right after work of another stream had ended, waited for that."""
    for place, node in enumerate(nodes):
        if (waited := node.start - _base(nodes, node)) > USUAL_GAP_US:
            since = node.start - max(AT_ONCE_US, AT_ONCE * waited)
            first, last = bisect_left(ends, since, key=_moment), bisect_right(ends, node.start, key=_moment)
            _follow(nodes, streams, place, ends[first:last])


def _follow(nodes: Sequence[_Node], streams: Sequence[object], place: int, candidates: Sequence[Moment]) -> None:
    """Let work follow the latest of the candidates that ran on another stream and had ended when it began."""
    for _, other in reversed(candidates):
        if streams[other] != streams[place] and nodes[other].end <= nodes[place].start and other < place:
            nodes[place].after.append(other)
            return


def _waits(
    nodes: Sequence[_Node], ends: Sequence[Moment], calls: Sequence[Call], step: RecordedStep, works: Sequence[GpuWork]
) -> list[_Wait]:
    """Calls of the CPU that wait for the GPU, each with the work that released it."""
    begin = min((node.launched for node in nodes if node.launched is not None), default=step.end)
    copies = {node.launched: place for place, node in enumerate(nodes) if node.launched is not None}
    busy = Covered((node.start, node.end) for node in nodes)
    waits = []
    starts = (bisect_left(calls, moment, key=lambda call: call.start) for moment in (begin, step.end))
    for call in calls[slice(*starts)]:
        if call.end <= step.end:
            first, last = (bisect_right(ends, moment, key=_moment) for moment in (call.start, call.end))
            until = copies.get(call.start) if "Memcpy" in call.name else None
            if until is None or not call.start < nodes[until].end <= call.end + RELEASED_US:
                until = ends[last - 1][1] if last > first else None
            after = call.end - nodes[until].end if until is not None else 0.0
            released = until is not None and (after <= RELEASED_US or not busy.within(nodes[until].end, call.end))
            staged = until is not None and BLOCKING not in call.name and "HtoD" in works[nodes[until].index].name
            blocked = nodes[until].start if staged and until is not None else call.end
            waits.append(_Wait(call.start, call.end, until if released else None, after, blocked))
    return sorted(waits, key=lambda wait: wait.end)


def _host_us(view: TraceView, step: RecordedStep, launched: Sequence[tuple[Call, float]], waits: Sequence[_Wait]) -> float:
    """The CPU's own time for the step: from its first launch to the first of the next step, without waiting for the GPU."""
    calls = [call for call, _ in launched]
    if not calls:
        return 0.0
    begin, end = min(call.start for call in calls), max(call.end for call in calls)
    at = bisect_left(view.trace.work, step.end, key=lambda work: work.start)
    after = view.trace.work[at].call if at < len(view.trace.work) else None
    end = max(end, after.start) if after is not None else end
    usual = median(call.end - call.start for call in calls)
    full = (call for call, begun in launched if min(call.end - call.start, begun - call.end) > BLOCKED_US)
    blocked = [(call.start + usual, call.end) for call in full]
    blocked += [(wait.start + OWN_US, wait.blocked) for wait in waits if wait.until is not None]
    blocked_us = Covered((first, last) for first, last in blocked if last > first).within(begin, end)
    return max(min(end - begin - blocked_us, step.time), 0.0)


def _replay(graph: StepGraph, change: StepChange, shared: Container[int]) -> Generator[_Entry, float, float]:
    """Microseconds of the step. Yields every collective that it enters, and is told how much later than recorded it ends."""
    step, nodes = graph.step, graph.nodes
    gaps = [gap for gap in change.gaps if step.begin <= gap.begin < step.end]
    # Of a launch, if one ended the gap; else of the work that began then; else of the end of the step
    removed = [(gap.begin if gap.scope.launched is None else gap.scope.launched, gap.time) for gap in gaps]
    starts = [node.start for node in nodes]
    ended_by = ((bisect_left(starts, gap.end - 1e-3), gap.time) for gap in gaps if gap.scope.launched is None)
    earlier = {place: sum(times) for place, times in grouped(ended_by).items()}
    shares = ((node, change.unlaunched.get(node.index, 0.0)) for node in nodes)
    removed += [(node.launched, share * node.launching) for node, share in shares if share and node.launched is not None]
    host = _HostTime(graph.waits, removed)
    begins: list[float] = []
    ends: list[float] = []
    for place, node in enumerate(nodes):
        begin = node.start - earlier.get(place, 0.0)
        if node.start >= step.begin and (node.after or node.beside is not None or node.launched is not None):
            slack = node.slack - min(earlier.get(place, 0.0), node.slack)
            begin = max((ends[one] for one in node.after), default=-inf) + slack
            if node.beside is not None:
                other, overlap = node.beside
                shorter = (ends[other] - begins[other]) / max(nodes[other].end - nodes[other].start, 1e-9)
                begin = max(begin, begins[other], ends[other] - overlap * shorter + slack)
            if node.launched is not None:
                begin = max(begin, node.launched + host.shift_at(node.launched, ends) + node.latency)
        begins.append(begin)
        time = max(node.end - node.start - change.saved.get(node.index, 0.0), 0.0)
        if node.index in shared:
            ends.append(node.end + (yield node.index, begin - node.end, time))
        else:
            ends.append(begin + time)
    inside = [place for place, node in enumerate(nodes) if node.end > step.begin]
    last = max((min(nodes[place].end, step.end) for place in inside), default=step.begin)
    new_last = max((ends[place] - max(nodes[place].end - step.end, 0.0) for place in inside), default=step.begin)
    tail = step.end - last
    end = new_last + tail if tail <= USUAL_GAP_US else max(new_last, step.end + host.shift_at(step.end, ends))
    own = graph.host_us - sum(time for _, time in removed)
    return min(max(end - step.begin, own, 0.0), step.time)


class _HostTime:
    """How much earlier the CPU is than in the recording, at any moment of it."""

    def __init__(self, waits: Sequence[_Wait], removed: Sequence[tuple[float, float]]) -> None:
        events: list[tuple[float, _Wait | float]] = [*((wait.end, wait) for wait in waits), *removed]
        self._events = sorted(events, key=lambda event: event[0])
        self._moments, self._shifts = [-inf], [0.0]
        self._at = 0

    def shift_at(self, moment: float, ends: Sequence[float]) -> float:
        """`ends`: of the work that has been replayed."""
        while self._at < len(self._events) and self._events[self._at][0] <= moment:
            when, event = self._events[self._at]
            shift = self._shifts[-1]
            if isinstance(event, _Wait):
                time = event.end - event.start
                new = event.start + shift + (min(time, OWN_US) if event.until is not None else time)
                if event.until is not None and event.until < len(ends):
                    new = max(new, ends[event.until] + event.after)
                shift = min(new - event.end, 0.0)
            else:
                shift -= event
            self._moments.append(when)
            self._shifts.append(shift)
            self._at += 1
        return self._shifts[bisect_right(self._moments, moment) - 1]
