"""Timers. A timer makes a prepared task repeatable and times bursts of tasks: on the GPU with CUDA graphs and events.

A burst runs the tasks of a group one after another, over and over, as a training step runs its layers. The runs before the steady
state are dropped by their time, never by their value. Bursts are launched ahead: the next one is queued while the last one runs,
because a gap of a few milliseconds lets the GPU's clock jump (on an H200 that doubled the spread from burst to burst).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemmscope.engine.kernels import KernelRun

_MARKER = "spin_kernel"  # torch.cuda._sleep: separates the kernels of one task from the next


@dataclass(frozen=True)
class Prepared:
    """A task that is ready to run. `run` runs it `copies` times, on different sets of buffers; `error` is its relative error.

    `note` says what the framework did differently, such as "torchao's filter leaves this layer in BF16". `order` is the order of
    the passes where it is known and not the usual one: a compiler may put wgrad before dgrad.
    """

    run: Callable[[], object]
    copies: int
    error: float
    note: str = ""
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runnable:
    """A task that can be run repeatedly. `host_ms` is the CPU time to dispatch it once.

    `prepared` is kept because a graph stores the addresses of its tensors, not the tensors.
    """

    run: Callable[[], object]
    prepared: Prepared
    host_ms: float


@dataclass(frozen=True)
class Amount:
    """How much of a burst is dropped and how much counts, in milliseconds or in cycles through its tasks."""

    drop: float
    keep: float
    in_cycles: bool = False

    def cycles(self, cycle_ms: float) -> tuple[int, int]:
        """(dropped, kept) cycles, for tasks that take `cycle_ms` together.

        >>> Amount(70, 130).cycles(20.0)
        (4, 6)
        """
        if self.in_cycles:
            return int(self.drop), int(self.keep)
        return math.ceil(self.drop / cycle_ms), max(1, round(self.keep / cycle_ms)) if self.keep else 0


@dataclass(frozen=True)
class Burst:
    """A burst that was launched."""

    times_ms: Callable[[], list[list[float]]]
    """Waits for its end. Returns the milliseconds of each counted run of each task."""
    nearly_done: Callable[[], object] = lambda: None
    """Waits until the part that counts has begun, or later."""
    over: bool = False
    """Whether it was complete when the launch returned."""
    facts: Callable[[], dict[str, float]] = dict
    """What else is known of it, after `times_ms`."""


def done_burst(samples: list[list[float]]) -> Burst:
    """A burst that was complete when it was launched, with the milliseconds of each counted run of each task."""
    return Burst(lambda: samples, over=True)


class CpuTimer:
    """Times each run with perf_counter."""

    def ready(self, prepared: Prepared) -> Runnable:
        """Make a task repeatable."""
        prepared.run()
        return Runnable(prepared.run, prepared, host_ms=0.0)

    def launch(self, tasks: Sequence[Runnable], amount: Amount) -> Burst:
        """Start a burst, behind those that were launched before."""
        samples: list[list[float]] = [[] for _ in tasks]
        dropped, kept = amount.cycles(max(elapsed_ms(lambda: _run(tasks, 1)), 1e-3))
        for number in range(dropped + kept):
            for index, task in enumerate(tasks):
                time_ms = elapsed_ms(task.run)
                if number >= dropped:
                    samples[index].append(time_ms / task.prepared.copies)
        return done_burst(samples)

    def kernels(self, groups: Sequence[Sequence[Runnable]], drop_ms: float) -> list[list[list[KernelRun]]]:  # noqa: ARG002
        """The kernels of one run of each task of each group, in the state into which it brings the GPU; none on the CPU."""
        return [[[] for _ in tasks] for tasks in groups]


def cuda_burst(tasks: Sequence[Runnable], marks: list[list[Any]], learn: Callable[[float], None]) -> Burst:
    """A burst that may still be running: events before and after each task, cycle by cycle. `learn` is told how long a cycle
    took."""

    def times_ms() -> list[list[float]]:
        marks[-1][-1].synchronize()
        learn(marks[0][0].elapsed_time(marks[-1][-1]) / len(marks))
        return [
            [events[index].elapsed_time(events[index + 1]) / task.prepared.copies for events in marks]
            for index, task in enumerate(tasks)
        ]

    return Burst(times_ms, marks[len(marks) // 2][0].synchronize)


class CudaTimer:
    """CUDA graphs, so that launch time does not matter, and events around each replay (or the kernels' own timestamps)."""

    def __init__(self, *, by_kernels: bool = False) -> None:
        self._by_kernels = by_kernels
        self._cycles: dict[tuple[int, ...], float] = {}

    def ready(self, prepared: Prepared) -> Runnable:
        """Time the eager dispatch, then capture. (Preparing has run the task before, so everything is compiled and loaded.)"""
        torch.cuda.synchronize()
        host_ms = min(elapsed_ms(prepared.run) for _ in range(2)) / prepared.copies
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepared.run()
        graph.replay()
        torch.cuda.synchronize()
        return Runnable(graph.replay, prepared, host_ms)

    def launch(self, tasks: Sequence[Runnable], amount: Amount) -> Burst:
        dropped, kept = amount.cycles(self._cycle(tasks))
        if self._by_kernels:
            return done_burst(self._burst_by_kernels(tasks, dropped, kept))
        _run(tasks, dropped)
        marks: list[list[Any]] = []
        for _ in range(kept):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(tasks) + 1)]
            events[0].record()
            for task, after in zip(tasks, events[1:], strict=True):
                task.run()
                after.record()
            marks.append(events)
        return cuda_burst(tasks, marks, lambda cycle_ms: self._cycles.update({_ids(tasks): cycle_ms}))

    def _burst_by_kernels(self, tasks: Sequence[Runnable], dropped: int, kept: int) -> list[list[float]]:
        """The time in which any kernel of a run was active: gaps between kernels do not count."""

        def work() -> None:
            _run(tasks, dropped)
            for _ in range(kept):
                _run_marked(tasks)

        recorded = segments(work, kept * len(tasks))
        return [
            [busy_ms(recorded[number * len(tasks) + index]) / task.prepared.copies for number in range(kept)]
            for index, task in enumerate(tasks)
        ]

    def _cycle(self, tasks: Sequence[Runnable]) -> float:
        """The time of one cycle in ms, to plan bursts: from the last burst, or from one cycle if there was none."""
        group = _ids(tasks)
        if group not in self._cycles:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            _run(tasks, 1)
            after.record()
            torch.cuda.synchronize()
            self._cycles[group] = max(float(before.elapsed_time(after)), 1e-3)
        return self._cycles[group]

    def kernels(self, groups: Sequence[Sequence[Runnable]], drop_ms: float) -> list[list[list[KernelRun]]]:
        """One profiler session for all groups (starting one costs more than running it); each group warms up before it."""
        warm_up = [Amount(drop_ms, 0).cycles(self._cycle(tasks))[0] for tasks in groups]

        def work() -> None:
            for tasks, cycles in zip(groups, warm_up, strict=True):
                _run(tasks, cycles)
                _run_marked(tasks)
                torch.cuda._sleep(1)  # ends the last task

        recorded = iter(segments(work, sum(len(tasks) + 1 for tasks in groups)))
        kernels = []
        for tasks in groups:
            kernels.append([[kernel_run(event) for event in next(recorded)] for _ in tasks])
            next(recorded)  # the warm-up of the next group
        return kernels


Timer = CpuTimer | CudaTimer


def _ids(tasks: Sequence[Runnable]) -> tuple[int, ...]:
    return tuple(id(task) for task in tasks)


def elapsed_ms(run: Callable[[], object]) -> float:
    """The CPU's time for one call, in milliseconds."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1000


def start_profiler() -> None:
    """Load the profiler's library, which takes most of a second the first time."""
    with _profiler():
        torch.cuda.synchronize()


def _profiler() -> Any:
    """Records only GPU activity. (torch.profiler.profile would also import the compiler, to record its settings.)"""
    return torch.autograd.profiler.profile(use_device="cuda", use_kineto=True, use_cpu=False)


def _run(tasks: Sequence[Runnable], cycles: int) -> None:
    for _ in range(cycles):
        for task in tasks:
            task.run()


def _run_marked(tasks: Sequence[Runnable]) -> None:
    for task in tasks:
        torch.cuda._sleep(1)
        task.run()


def segments(work: Callable[[], None], expected: int | None = None) -> list[list[Any]]:
    """Profile `work` and split its GPU events at the markers (`torch.cuda._sleep`): a list of events after each marker."""
    with _profiler() as session:
        work()
        torch.cuda.synchronize()
    events = [event for event in session.kineto_results.events() if str(event.device_type()).endswith("CUDA")]
    recorded: list[list[Any]] = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if _MARKER in event.name():
            recorded.append([])
        elif recorded:
            recorded[-1].append(event)
    if expected is not None and len(recorded) != expected:
        raise RuntimeError(f"the profiler recorded {len(recorded)} of {expected} runs")
    return recorded


def kernel_run(event: Any) -> KernelRun:
    """A profiler event as plain data."""
    return KernelRun(event.name(), event.duration_ns() / 1000, event.device_resource_id())


def busy_ms(events: Sequence[Any]) -> float:
    """The time in which at least one kernel ran; kernels on several streams overlap."""
    busy_ns, until = 0, 0
    for event in events:  # ordered by their start
        start, end = event.start_ns(), event.start_ns() + event.duration_ns()
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    return busy_ns / 1e6
