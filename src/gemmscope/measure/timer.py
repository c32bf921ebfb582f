"""Clocks. A timer makes a prepared task repeatable and times bursts of tasks: on the GPU with CUDA graphs and events.

A burst runs the tasks of a group one after another, over and over, as a training step runs its layers. What precedes the steady
state is dropped by its time, never by its value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemmscope.measure.backends.base import Prepared
from gemmscope.measure.kernels import KernelRun

_MARKER = "spin_kernel"  # torch.cuda._sleep: parts the kernels of one task from the next


@dataclass(frozen=True)
class Runnable:
    """A task that can be run again and again. `host_ms` is what dispatching it once costs the CPU.

    `prepared` is kept because a graph holds the addresses of its tensors, not the tensors.
    """

    run: Callable[[], None]
    prepared: Prepared
    host_ms: float


class CpuTimer:
    """perf_counter around each run."""

    def ready(self, prepared: Prepared) -> Runnable:
        prepared.run()
        return Runnable(prepared.run, prepared, host_ms=0.0)

    def burst(self, tasks: Sequence[Runnable], drop_ms: float, keep_ms: float) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in tasks]
        started = time.perf_counter()
        while not samples[0] or time.perf_counter() - started < (drop_ms + keep_ms) / 1000:
            warming = time.perf_counter() - started < drop_ms / 1000
            for index, task in enumerate(tasks):
                begin = time.perf_counter()
                task.run()
                if not warming:
                    samples[index].append((time.perf_counter() - begin) * 1000 / task.prepared.copies)
        return samples

    def kernels(self, tasks: Sequence[Runnable]) -> list[list[KernelRun]]:
        """None to be seen."""
        return [[] for _ in tasks]


class CudaTimer:
    """CUDA graphs, so that the host's pace does not show, and events around each replay."""

    def __init__(self) -> None:
        self._cycles: dict[tuple[int, ...], float] = {}

    def ready(self, prepared: Prepared) -> Runnable:
        """Warm up, time the eager dispatch, capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                prepared.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        prepared.run()
        host_ms = (time.perf_counter() - begin) * 1000 / prepared.copies
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepared.run()
        graph.replay()
        torch.cuda.synchronize()
        return Runnable(graph.replay, prepared, host_ms)

    def burst(self, tasks: Sequence[Runnable], drop_ms: float, keep_ms: float) -> list[list[float]]:
        cycle_ms = self._cycle(tasks)
        for _ in range(math.ceil(drop_ms / cycle_ms)):
            for task in tasks:
                task.run()
        marks: list[list[Any]] = []
        for _ in range(max(1, math.ceil(keep_ms / cycle_ms))):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(tasks) + 1)]
            events[0].record()
            for task, after in zip(tasks, events[1:], strict=True):
                task.run()
                after.record()
            marks.append(events)
        torch.cuda.synchronize()
        return [
            [events[index].elapsed_time(events[index + 1]) / task.prepared.copies for events in marks]
            for index, task in enumerate(tasks)
        ]

    def _cycle(self, tasks: Sequence[Runnable]) -> float:
        """One cycle's time in ms, to plan bursts by; measured once for a group."""
        group = tuple(id(task) for task in tasks)
        if group not in self._cycles:
            self._cycles[group] = max(self._time_cycle(tasks), 1e-3)
        return self._cycles[group]

    def _time_cycle(self, tasks: Sequence[Runnable]) -> float:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for task in tasks:
            task.run()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after))

    def kernels(self, tasks: Sequence[Runnable]) -> list[list[KernelRun]]:
        """The kernels of one run of each task, from one profiler session (starting a session costs more than running it)."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as session:
            for task in tasks:
                torch.cuda._sleep(1)
                task.run()
            torch.cuda.synchronize()
        events = [event for event in session.profiler.kineto_results.events() if str(event.device_type()).endswith("CUDA")]
        found: list[list[KernelRun]] = []
        for event in sorted(events, key=lambda event: event.start_ns()):
            if _MARKER in event.name():
                found.append([])
            elif found:
                found[-1].append(KernelRun(event.name(), event.duration_ns() / 1000, event.device_resource_id()))
        if len(found) != len(tasks):
            raise RuntimeError(f"the profiler saw {len(found)} of {len(tasks)} tasks")
        return found
