"""When the GPU must have been busy although no work was recorded: a gap in the recording is not idle time.

Two things show it. A CUDA graph was replayed, and its kernels are missing from the trace, or fewer than in other replays of the
same graph. Or the CPU waited for the GPU in a synchronization or a copy, which returns only when the GPU has finished.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from gemmscope.explain.host import Covered
from gemmscope.explain.trace import Call, GpuWork, RecordedTrace

LONG_WAIT_US = 500.0  # a shorter wait may be the time that the call itself takes
MISSING = 0.9  # of the kernels of a complete replay


def unrecorded_spans(trace: RecordedTrace) -> Covered:
    """Spans in which the GPU worked on something that may be missing from the trace."""
    return Covered([*_waits(trace), *_replays(trace)])


def _waits(trace: RecordedTrace) -> Iterator[tuple[float, float]]:
    """While the CPU waits for the GPU. A copy to the CPU waits until it begins; other copies may be busy on the CPU."""
    for wait in trace.waits:
        if "Synchronize" in wait.name and wait.end - wait.start > LONG_WAIT_US:
            yield wait.start, wait.end
    for work in trace.work:
        if work.copy and "DtoH" in work.name and (call := trace.launches.get(work.correlation)) is not None:
            end = min(call.end, work.start)
            if end - call.start > LONG_WAIT_US:
                yield call.start, end


def _replays(trace: RecordedTrace) -> Iterator[tuple[float, float]]:
    """From the launch of a graph whose kernels are missing until the next work of another launch begins, or a wait ends."""
    incomplete = incomplete_replays(trace)
    if not incomplete:
        return
    calls = ((trace.launches.get(work.correlation), work.start) for work in trace.work)
    launched = sorted((call.start, start) for call, start in calls if call is not None)
    moments = [moment for moment, _ in launched]
    synchronizations = [wait for wait in trace.waits if "Synchronize" in wait.name]
    last = max(work.end for work in trace.work)
    for replay in incomplete:
        at = bisect_right(moments, replay.start)
        end = launched[at][1] if at < len(launched) else max(last, replay.end)
        wait = bisect_left(synchronizations, replay.start, key=lambda call: call.start)
        if wait < len(synchronizations):
            end = min(end, max(synchronizations[wait].end, replay.end))
        if end > replay.start:
            yield replay.start, end


def incomplete_replays(trace: RecordedTrace) -> list[Call]:
    """Launches of graphs without kernels, or with fewer than other replays that begin with the same kernel."""
    replays = {key: call for key, call in trace.launches.items() if "GraphLaunch" in call.name}
    if not replays:
        return []
    kernels: dict[object, list[GpuWork]] = {key: [] for key in replays}
    for work in trace.work:
        if work.correlation in kernels:
            kernels[work.correlation].append(work)
    complete: dict[str, int] = {}
    for group in kernels.values():
        if group:
            complete[group[0].name] = max(complete.get(group[0].name, 0), len(group))
    return [
        call
        for key, call in sorted(replays.items(), key=lambda replay: replay[1].start)
        if not (group := kernels[key]) or len(group) < MISSING * complete[group[0].name]
    ]
