"""Finds the training steps on the GPU timeline.

A step begins when the CPU has begun it *and* the GPU has finished the previous one. So steps neither overlap nor leave gaps,
whether the CPU runs ahead or the GPU waits for it. Without step marks of the profiler, a step ends where the optimizer ends. GPU
work that was launched before the recording belongs to no step. What is no training has no
optimizer: there the whole recording is one step.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from gemmscope.engine.kernels import classify
from gemmscope.errors import UserError, option
from gemmscope.explain.recorded_trace import GpuWork, Operator, RecordedTrace
from gemmscope.explain.scopes import optimizer_spans
from gemmscope.explain.trace_file import HOW_TO_RECORD
from gemmscope.grouping import grouped

QUEUED_US = 100.0  # a kernel that starts this long after its launch waited for the GPU, not for the CPU
ADAM = re.compile(r"[Aa]dam|[Ss]gd|Lion|lion_|Muon|[Ll]amb(?!da)|[Oo]ptimizer")
FEWEST = 3  # GEMMs between two optimizer runs that belong to different steps
# A first step is left out that is longer than this many times the median of the others and the slowest; with two steps, the other
SIMILAR, SLOWEST, APART = 1.25, 1.1, 4.0


@dataclass(frozen=True)
class RecordedStep:
    """A span of the GPU timeline, in microseconds."""

    name: str
    begin: float
    end: float

    @property
    def time(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Steps:
    """All steps, those that are averaged, and how they were found. `marked`: how many steps the profiler marked; `before`: the
    indices of GPU work that was launched before the recording and belongs to no step."""

    every: tuple[RecordedStep, ...]
    chosen: tuple[RecordedStep, ...]
    found_by: str
    marked: int = 0
    before: frozenset[int] = frozenset()


def find_steps(trace: RecordedTrace, count: int | None) -> Steps:
    """`count`: the number of steps in the trace, if the user gives it."""
    begin, end = _recorded_work(trace)[0].start, max(work.end for work in trace.work)
    if count is not None:
        if count > len(trace.work):
            raise UserError(
                f"{option('steps', count)}: {trace.path} has only {len(trace.work):,} kernels and copies",
                "give the number of training steps that were recorded",
            )
        if end <= begin:
            raise UserError(f"{trace.path} is not valid: all GPU work begins and ends at the same time", HOW_TO_RECORD)
        steps = tuple(_between([begin + number * ((end - begin) / count) for number in range(count + 1)]))
        return Steps(steps, steps, "the number of steps given", len(_marked(trace)), _launched_before(trace, begin))
    finders: dict[str, Callable[[RecordedTrace], list[RecordedStep]]] = {
        "profiler step marks": _marked,
        "optimizer annotations": _optimizer_marks,
    }
    if trace.phase.without_optimizer:
        finders["the whole recording"] = lambda _: _between([begin, end])
    else:
        finders["optimizer kernels"] = _optimizer_kernels
    for how, find in finders.items():
        if recorded := find(trace):
            return Steps(tuple(recorded), _without_warm_up(recorded), how, before=_launched_before(trace, recorded[0].begin))
    raise UserError(
        f"{trace.path} does not show where a training step begins: it has no ProfilerStep marks with launches and no optimizer",
        f"give the number of steps with {option('steps', 'N')}, or {HOW_TO_RECORD}",
    )


def _between(edges: Sequence[float]) -> list[RecordedStep]:
    """Steps that follow each other, from the begin of the first to the end of the last."""
    return [RecordedStep(f"step {number}", begin, end) for number, (begin, end) in enumerate(pairwise(edges), start=1)]


def _without_warm_up(steps: Sequence[RecordedStep]) -> tuple[RecordedStep, ...]:
    """All but a first one that took much longer than any other: it fills the queue of the GPU, and often compiles or allocates.
    Other slow steps count: they are part of the training."""
    times = sorted(step.time for step in steps[1:])
    if not times:
        return tuple(steps)
    longest = max(SIMILAR * times[len(times) // 2], SLOWEST * times[-1]) if len(times) > 1 else APART * times[0]
    return tuple(steps[1:] if steps[0].time > longest else steps)


def _launched_before(trace: RecordedTrace, begin: float) -> frozenset[int]:
    """Work that started before the first step, and whose launch was not recorded although that of others was."""
    early = range(bisect_left(trace.work, begin, key=lambda work: work.start))
    return frozenset(number for number in early if trace.launches and trace.work[number].call is None)


def _recorded_work(trace: RecordedTrace) -> Sequence[GpuWork]:
    """All work from the first on whose launch was recorded; all, if no launch was."""
    launched = (number for number, work in enumerate(trace.work) if work.call is not None)
    return trace.work[next(launched, 0) :]


def _marked(trace: RecordedTrace) -> list[RecordedStep]:
    """`ProfilerStep#N` on the CPU, if launches connect it to the GPU; else its counterpart on the GPU."""
    windows = _profiler_steps(trace.marks)
    if windows and any(work.call is not None for work in trace.work):
        return _host_windows(trace, _with_optimizer(trace, windows))
    # The mark on the GPU does not cover backward.
    return _until_next(_profiler_steps(trace.gpu_marks), max(work.end for work in trace.work))


def _profiler_steps(marks: Sequence[Operator]) -> list[RecordedStep]:
    first = {mark.name: mark for mark in reversed(marks) if mark.name.startswith("ProfilerStep")}
    return [RecordedStep(mark.name, mark.start, mark.end) for mark in sorted(first.values(), key=lambda mark: mark.start)]


def _until_next(steps: Sequence[RecordedStep], end: float) -> list[RecordedStep]:
    """Each step ends where the next begins; those that take no time are dropped."""
    ends = [*(step.begin for step in steps[1:]), end]
    return [RecordedStep(step.name, step.begin, end) for step, end in zip(steps, ends, strict=False) if end > step.begin]


def _with_optimizer(trace: RecordedTrace, windows: list[RecordedStep]) -> list[RecordedStep]:
    """Where `prof.step()` was called for every micro-batch: merge windows so that each ends with its optimizer."""
    moments = [mark.start for mark in trace.marks if mark.name.startswith("Optimizer.step")]
    ends = sorted({at for moment in moments if (at := _window_of(windows, moment)) is not None})
    if not ends or len(ends) > 0.6 * len(windows):
        return windows
    edges = [ends[0] - (ends[1] - ends[0]) if len(ends) > 1 else -1, *ends]
    joined = [(max(first, -1) + 1, last) for first, last in pairwise(edges) if first >= -1]
    return [RecordedStep(windows[first].name, windows[first].begin, windows[last].end) for first, last in joined]


def _host_windows(trace: RecordedTrace, windows: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Translate windows on the CPU to spans on the GPU, through the launches made in them."""
    inside = grouped((_window_of(windows, work.call.start) if work.call is not None else None, work) for work in trace.work)
    launching = [(window, inside[at]) for at, window in enumerate(windows) if at in inside]
    if not launching:  # no launches: the CPU runs ahead, so its times say nothing about the GPU's
        return []
    window, first = launching[0][0], launching[0][1][0]
    begun = inside[0][0].start if 0 in inside else inf
    # Ends of work that was launched before the recording or the first window
    outside = (work for work in inside.get(None, ()) if work.start < begun)
    earlier = [work.end for work in outside if work.call is None or work.call.start < windows[0].begin]
    waited = (first.call is not None and first.start - first.call.end > QUEUED_US) or max(earlier, default=0.0) > window.begin
    lasts = [max(work.end for work in own) for _, own in launching]
    begins = [first.start if waited else min(window.begin, first.start)]
    begins += [max(window.begin, before) for (window, _), before in zip(launching[1:], lasts, strict=False)]
    ends = [max(last, window.end) for (window, _), last in zip(launching, lasts, strict=True)]
    steps = [RecordedStep(window.name, begin, end) for (window, _), begin, end in zip(launching, begins, ends, strict=True)]
    return _until_next(steps, ends[-1])


def _window_of(windows: Sequence[RecordedStep], moment: float) -> int | None:
    at = bisect_right(windows, moment, key=lambda window: window.begin) - 1
    return at if at >= 0 and moment <= windows[at].end else None


def _optimizer_marks(trace: RecordedTrace) -> list[RecordedStep]:
    """A step ends with `Optimizer.step`; work before the first one counts as a step if it is as much as in the others.

    Several optimizers may run one after the other, or one per parameter: only the last before more GEMMs ends a step.
    """
    spans = optimizer_spans(trace)
    if not spans:
        return []
    gemms = sorted((work.call or work).start for work in trace.work if _is_gemm(work))
    behind = [bisect_left(gemms, begin) - bisect_right(gemms, end) for (_, end), (begin, _) in pairwise(spans)]
    ends = [end for (_, end), count in zip(spans, [*behind, FEWEST], strict=True) if count >= FEWEST]
    first = min(call.start for call in trace.launches.values()) if trace.launches else trace.work[0].start
    return _whole_ones(trace.work, _host_windows(trace, _between([min(first, trace.work[0].start), *ends])))


def _optimizer_kernels(trace: RecordedTrace) -> list[RecordedStep]:
    """A sequence of optimizer kernels without a GEMM in between ends a step.

    Kernels that only apply something to many tensors are an optimizer's if other kernels train.
    """
    every = _recorded_work(trace)
    named = [bool(ADAM.search(work.name)) for work in every]
    if not any(named) and trace.phase.trains:
        named = [classify(work.name).kernel_class == "optimizer" for work in every]
    edges, last = [every[0].start], None
    for work, optimizes in zip(every, named, strict=True):
        if optimizes:
            last = work.end
        elif last is not None and _is_gemm(work):
            edges.append(last)
            last = None
    return _whole_ones(every, _between(edges if last is None else [*edges, last]))


def _whole_ones(every: Sequence[GpuWork], steps: list[RecordedStep]) -> list[RecordedStep]:
    """Drop a first step that was recorded only in part: it has fewer GEMMs than the next."""
    if len(steps) < 2:
        return steps
    first, second = (sum(map(_is_gemm, (work for work in every if step.begin <= work.start < step.end))) for step in steps[:2])
    return steps[1:] if first < 0.98 * second else steps


def _is_gemm(work: GpuWork) -> bool:
    return classify(work.name).kernel_class == "gemm"
