"""When the GPU must have been busy although no work was recorded: a gap in the recording is not idle time.

Two things show it. A CUDA graph was replayed, and its kernels are missing from the trace, or most of those that other replays of
it have. Or the CPU waited for the GPU in a synchronization or a copy, which returns only when the GPU has finished.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gemmscope.explain.host import Covered, by_key
from gemmscope.explain.trace import Call, GpuWork, RecordedTrace

LONG_WAIT_US = 500.0  # a shorter wait may be the time that the call itself takes
MISSING = 0.5  # of the kernels of a complete replay
COMPLETE = 2  # replays that are alike show what a complete one is


class UnrecordedWork:
    """Answers whether the GPU was busy, as far as the CPU shows it, although nothing was recorded."""

    def __init__(self, trace: RecordedTrace) -> None:
        self._waits = by_key(_waits(trace))
        self._replays = Covered(_replays(trace))

    def explains(self, begin: float, end: float, next_call: Call | None) -> bool:
        """`next_call`: what launched the work that ended the gap. If that was launched before the gap, a wait was for that."""
        half = 0.5 * (end - begin)
        if self._replays.within(begin, end) > half:
            return True
        waits = self._waits.get(next_call.thread) if next_call is not None and next_call.start > begin else None
        return waits is not None and waits.within(begin, end) > half


def _waits(trace: RecordedTrace) -> Iterator[tuple[Any, float, float]]:
    """When each thread waits for the GPU. A copy to the CPU waits until it begins; other copies may be busy on the CPU."""
    for wait in trace.waits:
        if "Synchronize" in wait.name and wait.end - wait.start > LONG_WAIT_US:
            yield wait.thread, wait.start, wait.end
    for work in trace.work:
        if work.copy and "DtoH" in work.name and (call := trace.launches.get(work.correlation)) is not None:
            end = min(call.end, work.start)
            if end - call.start > LONG_WAIT_US:
                yield call.thread, call.start, end


def _replays(trace: RecordedTrace) -> Iterator[tuple[float, float]]:
    """Time from the launch of a graph whose kernels are missing until the next work of another launch begins, or a wait ends."""
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
    """Launches of graphs whose kernels are missing from the trace, or most of them."""
    replays = {key: call for key, call in trace.launches.items() if "GraphLaunch" in call.name}
    if not replays:
        return []
    kernels: dict[object, list[GpuWork]] = {key: [] for key in replays}
    for work in trace.work:
        if work.correlation in kernels:
            kernels[work.correlation].append(work)
    sequences = {key: tuple(work.name for work in group) for key, group in kernels.items()}
    times = Counter(sequences.values())
    longest: dict[str, tuple[str, ...]] = {}
    for names in times:
        if names and times[names] >= COMPLETE and len(names) > len(longest.get(names[0], ())):
            longest[names[0]] = names
    replayed = sorted(replays.items(), key=lambda replay: replay[1].start)
    return [call for key, call in replayed if _is_incomplete(sequences[key], longest, times)]


def _is_incomplete(names: tuple[str, ...], longest: Mapping[str, tuple[str, ...]], times: Mapping[tuple[str, ...], int]) -> bool:
    """Without kernels, or the begin of a sequence that other replays have: graphs that begin alike are not the same graph."""
    if not names:
        return True
    complete = longest.get(names[0], ())
    return times[names] == 1 and len(names) < MISSING * len(complete) and complete[: len(names)] == names
