"""The measuring process: the only one that imports torch and touches the GPU.

Started by `link.py` with the number of an open descriptor; the request is the first line of its input. It prepares every task,
profiles the kernels of each (in the state in which it will be measured), then runs rounds of bursts until its input ends. It
writes JSON messages to the descriptor, one per line, as things happen, so that the parent has every result before anything can go
wrong. `begin` names the current task, so that a crash can be attributed.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

_TIMELINE: dict[str, float] = {}
_BEGAN = time.perf_counter()


def _mark(what: str) -> None:
    """Record how long after its start the process reached this point."""
    _TIMELINE[what] = round(time.perf_counter() - _BEGAN, 2)


import torch

_mark("torch imported")

from gemmscope.errors import in_a_line
from gemmscope.measure.backends import BACKENDS
from gemmscope.measure.backends.base import Backend, Options
from gemmscope.measure.backends.reference import OperandStore
from gemmscope.measure.device import MeasuringProcess, Orders
from gemmscope.measure.heat import heat_for, heating
from gemmscope.measure.kernels import KernelRun
from gemmscope.measure.timer import Amount, Burst, CpuTimer, CudaTimer, Runnable, Timer
from gemmscope.recipe.recipes import recipe
from gemmscope.workload.cases import LEAST_BYTES_IN_FLIGHT_OVER_L2, Task
from gemmscope.workload.ops import PASSES

MOST_COPIES = 8
RUNS_FOR_NSIGHT = 3
HEAT_BEFORE_KERNELS_MS = 30
WARM_UP_MS = 1200


class _LaunchedBurst(NamedTuple):
    number: int
    tasks: list[Task]
    burst: Burst


def _plan(
    groups: Sequence[list[Task]],
    rounds: int,
    seed: int,
    least: int = 1,
    first_wanted: Callable[[Sequence[list[Task]]], list[Task] | None] = lambda groups: groups[0],
) -> Iterator[tuple[int, list[Task]]]:
    """Every group once per round in random order: the round's number and the group. After `least` rounds only those that the
    parent wants, the most wanted first."""
    rng = random.Random(seed)
    for number in range(rounds):
        left = rng.sample(groups, len(groups))
        while left:
            tasks = left[0] if number < least else first_wanted(left)
            if tasks is None:
                break
            left.remove(tasks)
            yield number, tasks


class Worker(MeasuringProcess):
    """One campaign: prepares the requested tasks and measures them until stopped."""

    def __init__(self, request: dict[str, Any], out: Any) -> None:
        super().__init__(request, out)
        self.tasks = [Task.from_json(task) for task in request["tasks"]]
        self.ready: dict[str, Runnable] = {}
        self.sums: dict[str, list[str]] = {}  # tasks that are the sum of others, by key
        self.timer: Timer = CudaTimer(by_kernels=request["timing"] == "profiler") if self.on_gpu else CpuTimer()
        self.operands = OperandStore(self.device)

    def main(self) -> None:
        """Load, prepare, profile the kernels, measure."""
        cases = list(dict.fromkeys(task.case for task in self.tasks))
        profile = not self.request["for_nsight"]  # torch's own profiler does not work together with Nsight
        with heating(self.operands, cases, profile=profile) if self.on_gpu else nullcontext():
            make = self.load(BACKENDS)
            if make is None:
                return
            backend: Backend = make(self.operands, Options(self.request["cache_weights"], self.request["filter_layers"]))
            _mark("backend loaded")
            self.say("hello", versions=dict(backend.versions()), device=self.device_facts(), seconds=_TIMELINE)
            self.begin(self.tasks[0].key, "compiling")
            possible = [task for task in self.tasks if not self._why_not(backend, task)]
            backend.get_ready(possible)
        _mark("compiled")
        for task in self.tasks:
            self._prepare(backend, task)
        _mark("prepared")
        if self.request["for_nsight"]:
            self._run_for_nsight()
        else:
            self._profile()
            _mark("profiled")
            self._rounds()
        self.say("done", seconds=_TIMELINE)

    @staticmethod
    def _why_not(backend: Backend, task: Task) -> str:
        return backend.why_not(recipe(task.recipe)) or backend.why_not_task(task)

    def _prepare(self, backend: Backend, task: Task) -> None:
        self.begin(task.key, "preparing")
        reason, too_large = self._why_not(backend, task), self._too_large(task)
        if reason or too_large:
            self.say("failed", task=task.key, why=reason or too_large, kind="unsupported" if reason else "too large")
            return
        try:
            runnable = self.timer.ready(backend.prepare(task, recipe(task.recipe), self._copies(task)))
        except Exception as error:
            self.failed(task.key, error)
            if self.on_gpu:
                torch.cuda.empty_cache()
        else:
            self.ready[task.key] = runnable
            prepared = runnable.prepared
            facts = {"error": prepared.error, "host_ms": runnable.host_ms, "copies": prepared.copies, "note": prepared.note}
            if self.request["cache_weights"]:
                facts["cache_weights"] = True
            if prepared.order:
                facts["order"] = list(prepared.order)
            self.say("ready", task=task.key, **facts)

    def _too_large(self, task: Task) -> str:
        """Why the task cannot fit into memory; empty where it may."""
        if not self.on_gpu or task.mode != "autocast":
            return ""
        needed, memory = task.case.least_bytes, torch.cuda.get_device_properties(0).total_memory
        return f"it needs at least {needed / 1e9:.0f} GB, and this GPU has {memory / 1e9:.0f} GB" if needed > memory else ""

    def _copies(self, task: Task) -> int:
        """Enough sets of buffers to exceed the cache; otherwise the cache would be measured."""
        if not self.on_gpu:
            return 1
        wanted = LEAST_BYTES_IN_FLIGHT_OVER_L2 * int(torch.cuda.get_device_properties(0).L2_cache_size)
        return max(1, min(MOST_COPIES, -(-wanted // task.case.bytes_touched)))

    def _groups(self) -> list[list[Task]]:
        """The tasks to measure, grouped by recipe and mode; and by op where the GPU rests between bursts."""
        groups: dict[tuple[str, ...], list[Task]] = {}
        for task in self.tasks:
            if task.key in self.ready and task.key not in self.sums:
                groups.setdefault((*task.group, task.case.op if self.request["rest_ms"] else ""), []).append(task)
        return list(groups.values())

    def _runnables(self, tasks: Sequence[Task]) -> list[Runnable]:
        return [self.ready[task.key] for task in tasks]

    def _profile(self) -> None:
        """Record the kernels of each group, in the state into which the group brings the GPU."""
        groups = self._groups()
        if not groups:
            return
        self.begin(groups[0][0].key, "profiling")
        try:
            recorded = self.timer.kernels([self._runnables(tasks) for tasks in groups], HEAT_BEFORE_KERNELS_MS)
        except Exception as error:
            self.warn("kernels-not-recorded", reason=in_a_line(error))
            return
        tasks = [task for group in groups for task in group]
        runs_of_tasks = [runs for group in recorded for runs in group]
        kernels = {task.key: runs for task, runs in zip(tasks, runs_of_tasks, strict=True)}
        for key, runs in kernels.items():
            self.say("kernels", task=key, kernels=[[run.name, round(run.duration_us, 3), run.stream] for run in runs])
        self._find_sums(kernels)

    def _find_sums(self, kernels: dict[str, list[KernelRun]]) -> None:
        """A linear that runs exactly the kernels of its three GEMMs (as BF16 does) is their sum, and is not measured again.

        This applies to all linears of a recipe or to none: a burst of only some would bring the GPU into another state.
        """
        sums: dict[str, dict[str, list[str]]] = {}
        for task in self.tasks:
            parts = [Task(task.case, task.recipe, "pre-quantized", name).key for name in PASSES]
            once = task.mode == "autocast" and task.case.passes == PASSES and kernels.get(task.key)
            if not once or not all(kernels.get(key) for key in parts) or self.ready[task.key].prepared.copies != 1:
                continue
            names = Counter(run.name for run in kernels[task.key])
            if names == Counter(run.name for key in parts for run in kernels[key]):
                sums.setdefault(task.recipe, {})[task.key] = parts
        for name, linears in sums.items():
            every = [task for task in self.tasks if task.group == (name, "autocast") and task.key in self.ready]
            if len(linears) == len(every):
                self.sums |= linears
        for key, parts in self.sums.items():
            self.say("sum", task=key, of=parts)

    def _rounds(self) -> None:
        """Bursts of every group in random order, round after round, until told to stop; in later rounds only of the groups that
        the parent still wants. The GPU is never idle, unless it should rest before each burst."""
        groups, counts, orders = self._groups(), self.request["counts"], Orders()
        rest_s = self.request["rest_ms"] / 1000
        if self.on_gpu and counts:
            self.begin(self.tasks[0].key, "heating")
            heat_for(counts["gpu_warmup"])
        elif self.on_gpu and not rest_s:
            self._warm_up(groups)
        waiting: _LaunchedBurst | None = None
        rounds, seed = self.request["max_rounds"], self.request["seed"]
        for number, tasks in _plan(groups, rounds, seed, self.request["least_rounds"], orders.first_wanted):
            if orders.stop():
                return  # the last burst belongs to an incomplete round
            if number < self.request["had"].get(tasks[0].key, 0):
                continue
            if waiting is not None and rest_s:
                self._collect(waiting, ends_round=waiting.number != number)
                waiting = None
            time.sleep(rest_s)
            running = tasks if waiting is None or waiting.burst.over else waiting.tasks
            self.begin(running[0].key, "measuring")  # a fault shows while waiting for a burst, or when the next one is launched
            burst = self.timer.launch(self._runnables(tasks), self._amount(number))
            if waiting is not None:
                self._collect(waiting, ends_round=waiting.number != number)
            waiting = _LaunchedBurst(number, tasks, burst)
        if waiting is not None:
            self._collect(waiting, ends_round=True)

    def _warm_up(self, groups: Sequence[list[Task]]) -> None:
        """Bursts that do not count: the power control needs a few seconds of this workload to settle. They also show how long a
        cycle takes on a hot GPU, except the last one, which still runs while the first counted burst is launched."""
        share_ms = WARM_UP_MS / max(len(groups), 1)
        plan = [tasks for _, tasks in _plan(groups, 1, self.request["seed"] + 1)]
        bursts = [self.timer.launch(self._runnables(tasks), Amount(0, share_ms)) for tasks in plan]
        for tasks, burst in list(zip(plan, bursts, strict=True))[:-1]:
            self.begin(tasks[0].key, "measuring")
            burst.times_ms()

    def _amount(self, number: int) -> Amount:
        counts = self.request["counts"]
        if not counts:
            return Amount(self.request["drop_ms"], self.request["keep_ms"])
        rounds = self.request["max_rounds"]
        return Amount(counts["num_warmup"], (counts["num_iters"] + number) // rounds, in_cycles=True)

    def _collect(self, launched: _LaunchedBurst, *, ends_round: bool) -> None:
        self.begin(launched.tasks[0].key, "measuring")
        launched.burst.nearly_done()
        state = self.gpu_state()
        times = {task.key: samples for task, samples in zip(launched.tasks, launched.burst.times_ms(), strict=True)}
        for whole, parts in self.sums.items():
            if parts[0] in times:
                times[whole] = [sum(run) for run in zip(*(times[part] for part in parts), strict=True)]
        self.send_samples(launched.number, times, state, ends_round=ends_round)

    def _run_for_nsight(self) -> None:
        """Run every task a few times in an NVTX range with its name, between the calls that start and stop Nsight Systems."""
        if self.on_gpu:
            torch.cuda.cudart().cudaProfilerStart()
        for key, runnable in self.ready.items():
            with torch.cuda.nvtx.range(key) if self.on_gpu else nullcontext():
                for _ in range(RUNS_FOR_NSIGHT):
                    runnable.prepared.run()
            if self.on_gpu:
                torch.cuda.synchronize()
        if self.on_gpu:
            torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    Worker.serve()
