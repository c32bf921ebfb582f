"""Finds the training steps on the GPU's timeline.

A step begins when the host has begun it *and* the GPU is done with the one before: so steps neither overlap nor leave anything
out, whether the host runs ahead or the GPU waits for it. Where no profiler marked the steps, they end where the optimizer does.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemmscope.errors import UserError
from gemmscope.explain.scopes import optimizer_spans
from gemmscope.explain.stream import HOW_TO_RECORD
from gemmscope.explain.trace import Operator, Trace, Work
from gemmscope.measure.kernels import classify

QUEUED_US = 100.0  # a kernel that starts this long after its launch waited for the GPU, not for the host
ADAM = re.compile(r"[Aa]dam|[Ss]gd|Lion|lion_|Muon|[Ll]amb(?!da)|[Oo]ptimizer")
SIMILAR = 1.25  # steps this many times longer than the median are not like the others
FEWEST = 3  # products between two optimizers, if a step lies between them
APART = 4.0  # of two, which may differ: the first was recorded without what precedes it


@dataclass(frozen=True)
class Step:
    """A stretch of the GPU's timeline, in microseconds."""

    name: str
    begin: float
    end: float

    @property
    def time(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Steps:
    """The steps, how they were found, and those that are alike enough to be averaged."""

    every: tuple[Step, ...]
    chosen: tuple[Step, ...]
    found_by: str


def find_steps(trace: Trace, count: int | None = None) -> Steps:
    """`count`: how many steps the whole trace holds, where the person says so."""
    if count is not None:
        begin, end = trace.work[0].start, max(work.end for work in trace.work)
        if end <= begin:
            raise UserError(f"{trace.path} holds no time: its GPU work begins and ends at once", HOW_TO_RECORD)
        long = (end - begin) / count
        made = [Step(f"step {number + 1}", begin + number * long, begin + (number + 1) * long) for number in range(count)]
        marked = len(_marked(trace))
        though = f", though the profiler marked {marked}" if marked not in (0, count) else ""
        return Steps(tuple(made), tuple(made), f"--steps: {count} in the whole trace{though}")
    for find, how in ((_marked, "the profiler's step marks"), (_optimizer_marks, "the optimizer's marks on the host")):
        made = find(trace)
        if made:
            return Steps(tuple(made), _alike(made), how)
    made = _optimizer_kernels(trace.work)
    if made:
        return Steps(tuple(made), _alike(made), "the optimizer's kernels")
    raise UserError(
        f"{trace.path} does not say where a training step begins: no ProfilerStep marks with launches, and no optimizer in it",
        f"say how many steps it holds with --steps, or {HOW_TO_RECORD}",
    )


def _alike(steps: Sequence[Step]) -> tuple[Step, ...]:
    """All but those that took much longer: a compilation or a checkpoint is not the training."""
    times = sorted(step.time for step in steps)
    longest = SIMILAR * times[len(times) // 2] if len(times) > 2 else APART * times[0]
    return tuple(step for step in steps if step.time <= longest)


def _marked(trace: Trace) -> list[Step]:
    """`ProfilerStep#N` on the host, if launches lead from there to the GPU; else its shadow on the GPU."""
    marks = {mark.name: mark for mark in reversed(trace.marks) if mark.name.startswith("ProfilerStep")}
    if marks and any(work.correlation in trace.launches for work in trace.work):
        return _host_windows(trace, _with_optimizer(trace, sorted(marks.values(), key=lambda mark: mark.start)))
    shadows = {mark.name: mark for mark in reversed(trace.gpu_marks) if mark.name.startswith("ProfilerStep")}
    ordered = sorted(shadows.values(), key=lambda mark: mark.start)
    if not ordered:
        return []
    ends = [*(mark.start for mark in ordered[1:]), max(work.end for work in trace.work)]  # a shadow leaves backward out
    return [Step(mark.name, mark.start, end) for mark, end in zip(ordered, ends, strict=True) if end > mark.start]


def _with_optimizer(trace: Trace, windows: list[Operator]) -> list[Operator]:
    """Where `prof.step()` was called for every micro-batch: windows joined so that each ends with its optimizer."""
    moments = [mark.start for mark in trace.marks if mark.name.startswith("Optimizer.step")]
    ends = sorted({at for moment in moments if (at := _window_of(windows, moment)) is not None})
    if not ends or len(ends) > 0.6 * len(windows):
        return windows
    edges = [ends[0] - (ends[1] - ends[0]) if len(ends) > 1 else -1, *ends]
    joined = [(max(first, -1) + 1, last) for first, last in pairwise(edges) if first >= -1]
    return [
        Operator(windows[first].name, windows[first].start, windows[last].end, windows[first].thread) for first, last in joined
    ]


def _host_windows(trace: Trace, windows: Sequence[Operator]) -> list[Step]:
    """From windows on the host to stretches on the GPU, through the launches made in them."""
    firsts: list[Work | None] = [None] * len(windows)
    lasts = [0.0] * len(windows)
    for work in trace.work:
        call = trace.launches.get(work.correlation)
        moment = call.start if call is not None else None
        at = _window_of(windows, moment) if moment is not None else None
        if at is None:
            continue
        firsts[at] = firsts[at] or work
        lasts[at] = max(lasts[at], work.end)
    if not any(firsts):  # nothing leads from the host to the GPU: a host that runs ahead says nothing of when the GPU begins
        return []
    made: list[Step] = []
    before: float | None = None
    for window, first, last in zip(windows, firsts, lasts, strict=True):
        if first is None:
            continue
        if before is None:
            call = trace.launches[first.correlation]
            begin = first.start if first.start - call.end > QUEUED_US else min(window.start, first.start)
        else:
            begin = max(window.start, before)
        made.append(Step(window.name, begin, max(last, window.end)))
        before = last
    ends = [later.begin for later in made[1:]] + [made[-1].end]
    return [Step(step.name, step.begin, end) for step, end in zip(made, ends, strict=True) if end > step.begin]


def _window_of(windows: Sequence[Operator], moment: float) -> int | None:
    at = bisect_right(windows, moment, key=lambda window: window.start) - 1
    return at if at >= 0 and moment <= windows[at].end else None


def _optimizer_marks(trace: Trace) -> list[Step]:
    """A step ends with `Optimizer.step`; what comes before the first one counts if it is as much work as the others.

    Several optimizers may step one after the other, or one for each parameter: only the last before more products ends a step.
    """
    spans = optimizer_spans(trace)
    if not spans:
        return []
    products = sorted(_launched(trace, work) for work in trace.work if classify(work.name).kernel_class == "gemm")
    behind = [bisect_left(products, begin) - bisect_right(products, end) for (_, end), (begin, _) in pairwise(spans)]
    ends = [end for (_, end), count in zip(spans, [*behind, FEWEST], strict=True) if count >= FEWEST]
    first = min(call.start for call in trace.launches.values()) if trace.launches else trace.work[0].start
    edges = [min(first, trace.work[0].start), *ends]
    windows = [Operator(f"step {number + 1}", edges[number], edges[number + 1], None) for number in range(len(ends))]
    return _whole_ones(trace.work, _host_windows(trace, windows))


def _launched(trace: Trace, work: Work) -> float:
    call = trace.launches.get(work.correlation)
    return call.start if call is not None else work.start


def _optimizer_kernels(every: Sequence[Work]) -> list[Step]:
    """A run of optimizer kernels without a product between them ends a step."""
    named = [bool(ADAM.search(work.name)) for work in every]
    if not any(named):
        named = [classify(work.name).kernel_class == "optimizer" for work in every]
    edges, last = [every[0].start], None
    for work, optimizes in zip(every, named, strict=True):
        if optimizes:
            last = work.end
        elif last is not None and classify(work.name).kernel_class == "gemm":
            edges.append(last)
            last = None
    if last is not None:
        edges.append(last)
    made = [Step(f"step {number + 1}", edges[number], edges[number + 1]) for number in range(len(edges) - 1)]
    return _whole_ones(every, made)


def _whole_ones(every: Sequence[Work], steps: list[Step]) -> list[Step]:
    """Without a first step that the recording cut: it has fewer products than those after it."""
    if len(steps) < 2:
        return steps
    first, second = (
        sum(classify(work.name).kernel_class == "gemm" for work in every if step.begin <= work.start < step.end)
        for step in steps[:2]
    )
    return steps[1:] if first < 0.98 * second else steps
