"""The measuring process: the only one that imports torch and touches the GPU.

Started by `campaign.py` with the number of an open descriptor; the request is the first line of its input. It prepares every
task, profiles the kernels of each (in the state in which it will be measured), then runs rounds of bursts until its input
ends. It writes JSON messages to the descriptor, one per line, as things happen, so that the parent has every result before
anything can go wrong. `begin` names the current task, so that a crash can be attributed.

The GPU is kept busy while the process loads and prepares, so that measuring begins on a hot, power-limited GPU. Importing a
framework and compiling its kernels takes seconds on one CPU core. Meanwhile a second thread makes the operands, loads the
profiler's library and runs large GEMMs.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from typing import IO, Any

import torch

from gemmscope.bench.backends.base import Backend, BackendOptions, OperandStore
from gemmscope.engine.kernels import KernelRun
from gemmscope.engine.messages import Done, Failed, Hello, Kernels, Ready, Sum
from gemmscope.engine.timer import Amount, Burst, CpuTimer, CudaTimer, Runnable, Timer, start_profiler
from gemmscope.engine.worker import BurstGroup, MeasuringProcess, plan_rounds, versions_of
from gemmscope.errors import in_a_line
from gemmscope.grouping import grouped
from gemmscope.recipe.frameworks import measuring_classes
from gemmscope.recipe.recipes import recipe
from gemmscope.workload.cases import LEAST_BYTES_IN_FLIGHT_OVER_L2, Case, Task
from gemmscope.workload.ops import PASSES

MOST_COPIES = 8
RUNS_FOR_NSIGHT = 3
HEAT_BEFORE_KERNELS_MS = 30
WARM_UP_MS = 1200


_SIZE, _GEMMS = 8192, 40  # one run keeps the GPU busy for about 60 ms, and does not block the interpreter


class Heater:
    """Large GEMMs as a CUDA graph that is replayed on a separate stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._matrix = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
            torch.mm(self._matrix, self._matrix)
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(_GEMMS):
                torch.mm(self._matrix, self._matrix)

    def run(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()


@contextmanager
def heating(operands: OperandStore, cases: Sequence[Case], *, profile: bool) -> Iterator[None]:
    """In this context, a second thread makes the operands of all cases, loads the profiler, and then heats the GPU."""
    stop = threading.Event()

    def work() -> None:
        if profile:
            start_profiler()
        for case in cases:
            if stop.is_set():
                return
            with suppress(torch.OutOfMemoryError):  # reported when the case is prepared
                _ = operands.get(case).references  # computed ahead of time
        heater = Heater()
        while not stop.is_set():
            heater.run()

    thread = threading.Thread(target=work, name="heating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def heat_for(seconds: float) -> None:
    """Heat the GPU for this many seconds."""
    begin = time.perf_counter()
    heater = Heater() if seconds > 0 else None
    while heater is not None and time.perf_counter() - begin < seconds:
        heater.run()


class Worker(MeasuringProcess):
    """One campaign: prepares the requested tasks and measures them until stopped."""

    def __init__(self, request: dict[str, Any], out: IO[str]) -> None:
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
            make = self.load(measuring_classes("bench"))
            if make is None:
                return
            backend: Backend = make(
                self.operands,
                BackendOptions(
                    **{one.name: self.request[one.name] for one in fields(BackendOptions) if one.name in self.request}
                ),
            )
            self.say(Hello(versions_of(self.request["backend"]), self.device_facts()))
            self.begin(self.tasks[0].key, "compiling")
            possible = [task for task in self.tasks if not self._why_not(backend, task)]
            backend.get_ready(possible)
        for task in self.tasks:
            self._prepare(backend, task)
        if self.request["for_nsight"]:
            self._run_for_nsight()
        else:
            self._profile()
            self._measure()
        self.say(Done())

    @staticmethod
    def _why_not(backend: Backend, task: Task) -> str:
        return backend.why_not(recipe(task.recipe)) or backend.why_not_task(task)

    def _prepare(self, backend: Backend, task: Task) -> None:
        self.begin(task.key, "preparing")
        reason, too_large = self._why_not(backend, task), self._too_large(task)
        if reason or too_large:
            self.say(Failed(task.key, reason or too_large, "unsupported" if reason else "too large"))
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
            told = {"cache_weights": self.request["cache_weights"], "order": list(prepared.order)}
            self.say(Ready(task.key, facts | {name: value for name, value in told.items() if value}))

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

    def _groups(self) -> list[BurstGroup]:
        """The tasks to measure, grouped by recipe and mode; and by op where the GPU rests between bursts."""
        measured = [task for task in self.tasks if task.key in self.ready and task.key not in self.sums]
        apart = grouped(((task.group, task.case.op if self.request["rest_ms"] else ""), task.key) for task in measured)
        return [BurstGroup(group, keys) for (group, _), keys in apart.items()]

    def _runnables(self, group: BurstGroup) -> list[Runnable]:
        return [self.ready[key] for key in group.tasks]

    def _profile(self) -> None:
        """Record the kernels of each group, in the state into which the group brings the GPU."""
        groups = self._groups()
        if not groups:
            return
        self.begin(groups[0].tasks[0], "profiling")
        try:
            recorded = self.timer.kernels([self._runnables(group) for group in groups], HEAT_BEFORE_KERNELS_MS)
        except Exception as error:
            self.warn("kernels-not-recorded", reason=in_a_line(error))
            return
        keys = [key for group in groups for key in group.tasks]
        kernels = dict(zip(keys, (runs for group in recorded for runs in group), strict=True))
        for key, runs in kernels.items():
            self.say(Kernels(key, [(run.name, round(run.duration_us, 3), run.stream) for run in runs]))
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
            self.say(Sum(key, parts))

    def _measure(self) -> None:
        """Bring the GPU to its steady state, then run rounds."""
        groups, counts = self._groups(), self.request["counts"]
        if self.on_gpu and counts:
            self.begin(self.tasks[0].key, "heating")
            heat_for(counts["gpu_warmup"])
        elif self.on_gpu and not self.request["rest_ms"]:
            self._warm_up(groups)
        self.rounds(groups)

    def _warm_up(self, groups: Sequence[BurstGroup]) -> None:
        """Bursts that do not count: the power control needs a few seconds of this workload to settle. They also show how long a
        cycle takes on a hot GPU, except the last one, which still runs while the first counted burst is launched."""
        share_ms = WARM_UP_MS / max(len(groups), 1)
        plan = [group for _, group in plan_rounds(groups, 1, self.request["seed"] + 1)]
        bursts = [self.timer.launch(self._runnables(group), Amount(0, share_ms)) for group in plan]
        for group, burst in list(zip(plan, bursts, strict=True))[:-1]:
            self.begin(group.tasks[0], "measuring")
            burst.times_ms()

    def launch(self, group: BurstGroup, number: int) -> Burst:
        """A burst of the timer."""
        return self.timer.launch(self._runnables(group), self._amount(number))

    def _amount(self, number: int) -> Amount:
        counts = self.request["counts"]
        if not counts:
            return Amount(self.request["drop_ms"], self.request["keep_ms"])
        rounds = self.request["max_rounds"]
        return Amount(counts["num_warmup"], (counts["num_iters"] + number) // rounds, in_cycles=True)

    def completed(self, times_ms: dict[str, list[float]]) -> dict[str, list[float]]:
        """The samples of a burst, and those of linears that are the sum of their GEMMs."""
        for whole, parts in self.sums.items():
            if parts[0] in times_ms:
                times_ms[whole] = [sum(run) for run in zip(*(times_ms[part] for part in parts), strict=True)]
        return times_ms

    def _run_for_nsight(self) -> None:
        """Run every task a few times in an NVTX range with its name, between the calls that start and stop Nsight Systems."""
        with torch.cuda.profiler.profile() if self.on_gpu else nullcontext():
            for key, runnable in self.ready.items():
                with torch.cuda.nvtx.range(key) if self.on_gpu else nullcontext():
                    for _ in range(RUNS_FOR_NSIGHT):
                        runnable.prepared.run()
                if self.on_gpu:
                    torch.cuda.synchronize()


if __name__ == "__main__":
    Worker.serve()
