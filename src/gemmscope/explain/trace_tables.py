"""All tables of one diagnosis; and those of how the CPU feeds the GPU: the longest kernels, launches and their queue, what the
CPU did in idle time, the allocator."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import inf

from gemmscope.explain.attention_speed import attention_rows
from gemmscope.explain.collectives import collective_totals, collectives_of
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.gemm_speed import gemm_shapes
from gemmscope.explain.recorded_trace import Call, RecordedTrace
from gemmscope.explain.step_evidence import StepEvidence
from gemmscope.explain.timeline import HOST_IDLE, SHORT_US, Gap
from gemmscope.explain.trace_view import TITLES, TraceView, counted
from gemmscope.results.explain import AllocatorCall, ExplainTables, FrameKind, IdleFrame, LaunchStatistics, MemoryPoint, TopKernel

MOST_KERNELS = 20
MOST_FRAMES = 15
MOST_POINTS = 200
MOST_OPEN = 200  # activities of the CPU at one moment
COVERED = 0.5  # of a gap: what the CPU did for that long explains it
ALLOCATES = re.compile(r"^(cuda|hip|cu)(Malloc|Free|HostAlloc|HostFree|Mem(Alloc|Free|Create|Map|Unmap|Release|AddressReserve))")
NOT_TELLING = ("ProfilerStep", "<built-in", "nccl:")


def top_kernels(step: StepEvidence) -> tuple[TopKernel, ...]:
    """The kernels that take the most time."""
    times = counted((item.work.name, item.work.time) for item in step.items)
    classes, steps = {item.work.name: TITLES[item.name] for item in step.items}, step.view.count
    return tuple(
        TopKernel(
            name=name, kernel_class=classes[name], count=count / steps, time_ms=time / 1000 / steps, mean_us=time / count,
        )
        for name, (count, time) in list(times.items())[:MOST_KERNELS]
    )  # fmt: skip


def launch_statistics(step: StepEvidence) -> LaunchStatistics:
    """How the work that begins in the chosen steps was launched."""
    view, trace = step.view, step.view.trace
    steps = view.count
    own = [trace.work[index] for chosen in view.steps.chosen for index in view.indices_in(chosen)]
    short = [work.time for work in own if not work.copy and work.time < SHORT_US]
    known = [work for work in trace.work if work.call is not None]
    launched = sorted(work.call.start for work in trace.work if work.call is not None)
    started, ended = sorted(work.start for work in known), sorted(work.end for work in known)
    pairs = [(work.call.start, work) for work in own if work.call is not None]
    delays = sorted(work.start - moment for moment, work in pairs)
    # Of everything launched before each launch: what has not begun, and what has not ended.
    before = [(bisect_left(launched, moment), moment) for moment, _ in pairs]
    depths = [max(count - bisect_right(started, moment), 0) for count, moment in before]
    empty = sum(count <= bisect_right(ended, moment) for count, moment in before)
    return LaunchStatistics(
        launches=len({work.correlation for work in own}) / steps,
        short_kernels=len(short) / steps,
        short_ms=sum(short) / 1000 / steps,
        delay_median_us=delays[len(delays) // 2] if delays else None,
        delay_p90_us=delays[int(0.9 * (len(delays) - 1))] if delays else None,
        queue_mean=sum(depths) / len(depths) if depths else None,
        queue_most=max(depths, default=None),
        queue_empty_share=empty / len(pairs) if pairs else None,
    )


def idle_frames(step: StepEvidence) -> tuple[IdleFrame, ...]:
    """Idle time in which the CPU was late, by what it did: the innermost activity that covers most of the gap."""
    gaps = sorted((gap for shares in step.view.shares for gap in shares.gaps if gap.why in HOST_IDLE), key=lambda gap: gap.begin)
    frames = zip(_frames(step.view.trace, gaps), (gap.time for gap in gaps), strict=True)
    steps = step.view.count
    return tuple(
        IdleFrame(frame=name, kind=kind, gaps=count / steps, time_ms=time / 1000 / steps)
        for (name, kind), (count, time) in list(counted(frames).items())[:MOST_FRAMES]
    )


def _frames(trace: RecordedTrace, gaps: Sequence[Gap]) -> Iterable[tuple[str, FrameKind]]:
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
        opened = [activity for activity in opened if activity.end > begin][-MOST_OPEN:]
        covers = [
            activity
            for activity in opened
            if min(activity.end, end) - max(activity.start, begin) >= needed and not activity.name.startswith(NOT_TELLING)
        ]
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


def allocator_calls(view: TraceView) -> tuple[AllocatorCall, ...]:
    """Calls that allocate or free memory of the GPU during the chosen steps."""
    calls = [call for call in view.trace.launches.values() if ALLOCATES.match(call.name)]
    chosen = sorted((step.begin, step.end) for step in view.steps.chosen)
    inside = [call for call in calls if (at := bisect_right(chosen, (call.start, inf))) and call.start < chosen[at - 1][1]]
    times = counted((call.name, call.end - call.start) for call in inside)
    return tuple(
        AllocatorCall(name=name, count=count / view.count, time_ms=time / 1000 / view.count)
        for name, (count, time) in times.items()
    )


def memory_points(view: TraceView) -> tuple[MemoryPoint, ...]:
    """Memory over the chosen steps: of each stretch of time, the reading with the most memory in use."""
    begin, end = min(step.begin for step in view.steps.chosen), max(step.end for step in view.steps.chosen)
    inside = (reading for reading in view.trace.memory if begin <= reading[0] <= end)
    stretches = groupby(inside, lambda reading: int((reading[0] - begin) / max(end - begin, 1e-9) * MOST_POINTS))
    highest = (max(readings, key=lambda reading: reading[1]) for _, readings in stretches)
    return tuple(
        MemoryPoint(time_ms=(moment - begin) / 1000, allocated=allocated, reserved=reserved)
        for moment, allocated, reserved in highest
    )


def explain_tables(diagnosis: TraceDiagnosis, waits_us: Mapping[int, float]) -> ExplainTables:
    """`waits_us`: how long this rank waits in each collective, by the identity of its work, if other ranks show it."""
    step, view = diagnosis.evidence, diagnosis.view
    return ExplainTables(
        gemm_shapes=gemm_shapes(step),
        attention=tuple(row for row, _ in attention_rows(step)),
        collectives=collective_totals(collectives_of(view), view.count, view.trace.world_size, waits_us),
        kernels=top_kernels(step),
        launches=launch_statistics(step),
        idle_frames=idle_frames(step),
        allocator=allocator_calls(view),
        memory=memory_points(view),
    )
