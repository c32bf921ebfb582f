"""The measuring process: the only one that imports torch and touches the GPU.

Started by `campaign.py` with a request file and the number of an open descriptor. It prepares every task, then runs rounds of
bursts until its standard input ends, and writes one JSON message a line to the descriptor, as things happen: whatever was
measured is in the parent's hands before anything can go wrong. `begin` names the task at work, so that a crash has a name.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("NVTE_FRAMEWORK", "pytorch")  # Transformer Engine would import JAX too, where it is installed

_TIMELINE: dict[str, float] = {}
_BEGAN = time.perf_counter()


def _mark(what: str) -> None:
    """Note how long after its start the process got so far."""
    _TIMELINE[what] = round(time.perf_counter() - _BEGAN, 2)


import torch

_mark("torch imported")

from gemmscope.gpu.nvml import Gpu, open_nvml
from gemmscope.measure.backends.base import Backend
from gemmscope.measure.task import Mode, Task
from gemmscope.measure.timer import CpuTimer, CudaTimer, Runnable
from gemmscope.recipe.recipes import recipe

BACKENDS = {"transformer_engine": "TransformerEngineBackend", "cpu": "CpuBackend"}
LEAST_BYTES_IN_FLIGHT_OVER_L2 = 3
MOST_COPIES = 8
WARM_UP_ROUNDS = 2  # these bring the chip to its state, and are dropped


class Worker:
    """One campaign: the request's tasks, prepared and measured until stopped."""

    def __init__(self, request: dict[str, Any], out: Any) -> None:
        self.request, self.out = request, out
        self.tasks = [Task.from_json(task) for task in request["tasks"]]
        self.ready: dict[str, Runnable] = {}
        self.on_gpu = request["backend"] != "cpu"
        self.timer: CpuTimer | CudaTimer = CudaTimer() if self.on_gpu else CpuTimer()
        self.gpu = _gpu() if self.on_gpu else None

    def say(self, message_type: str, **content: Any) -> None:
        self.out.write(json.dumps({"type": message_type, **content}) + "\n")
        self.out.flush()

    def main(self) -> None:
        """Prepare, measure, profile."""
        try:
            backend = self._backend()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.say("fatal", why=f"the {self.request['backend']} backend does not load: {type(error).__name__}: {lines[0]}")
            return
        self.say("hello", versions=dict(backend.versions()), device=_device_facts(self.gpu), seconds=_TIMELINE.copy())
        for task in self.tasks:
            self._prepare(backend, task)
        self._rounds()
        self._profile()
        self.say("done")

    def _backend(self) -> Backend:
        with _heating() if self.on_gpu else nullcontext():  # importing a framework takes seconds in which the GPU gets warm
            module = importlib.import_module(f"gemmscope.measure.backends.{self.request['backend']}")
            backend: Backend = getattr(module, BACKENDS[self.request["backend"]])()
        _mark("backend loaded")
        return backend

    def _prepare(self, backend: Backend, task: Task) -> None:
        self.say("begin", task=task.key, what="preparing")
        asked = recipe(task.recipe)
        reason = backend.why_not(asked) or asked.misaligned(task.case.sizes())
        if reason:
            self.say("failed", task=task.key, why=reason, kind="unsupported")
            return
        try:
            self.ready[task.key] = self.timer.ready(backend.prepare(task, asked, self._copies(task)))
        except Exception as error:
            self._failed(task, error)
        else:
            made = self.ready[task.key]
            self.say("ready", task=task.key, error=made.prepared.error, host_ms=made.host_ms, copies=made.prepared.copies)

    def _copies(self, task: Task) -> int:
        """Enough sets of buffers that they do not fit into the cache, or the cache would be measured."""
        if not self.on_gpu:
            return 1
        case = task.case
        touched = 2 * (case.tokens * case.inputs + case.tokens * case.outputs + case.weights)
        cache = int(torch.cuda.get_device_properties(0).L2_cache_size)
        return max(1, min(MOST_COPIES, -(-LEAST_BYTES_IN_FLIGHT_OVER_L2 * cache // touched)))

    def _failed(self, task: Task, error: Exception) -> None:
        """One task's failure; a sticky CUDA error is the whole process's."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        kind = "out of memory" if out_of_memory else "error"
        sticky = self.on_gpu and not out_of_memory and ("CUDA error" in str(error) or "cudaError" in str(error))
        self.say("failed", task=task.key, why=f"{type(error).__name__}: {lines[0]}", kind="CUDA fault" if sticky else kind)
        if sticky:
            os._exit(70)
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _rounds(self) -> None:
        """A burst of every group in random order, round after round, until told to stop."""
        groups: dict[tuple[str, Mode], list[Task]] = {}
        for task in self.tasks:
            if task.key in self.ready:
                groups.setdefault(task.group, []).append(task)
        if not groups:
            return
        rng = random.Random(self.request.get("seed", 0))
        for round_number in range(-WARM_UP_ROUNDS, self.request["max_rounds"]):
            for group in rng.sample(list(groups), len(groups)):
                self._burst(round_number, groups[group])
            if round_number >= 0:
                self.say("round", round=round_number)
            if _told_to_stop():
                return

    def _burst(self, round_number: int, tasks: list[Task]) -> None:
        self.say("begin", task=tasks[0].key, what="measuring")
        runnables = [self.ready[task.key] for task in tasks]
        keep_ms = self.request["keep_ms"] if round_number >= 0 else 0
        samples = self.timer.burst(runnables, self.request["drop_ms"], keep_ms)
        state = asdict(self.gpu.read()) if self.gpu else {}
        if round_number < 0:
            return
        times = {task.key: burst for task, burst in zip(tasks, samples, strict=True)}
        self.say("samples", round=round_number, times_ms=times, state=state)

    def _profile(self) -> None:
        """Which kernels ran, in the state that was measured."""
        tasks = [task for task in self.tasks if task.key in self.ready]
        if not tasks or not self.on_gpu:
            return
        self.say("begin", task=tasks[0].key, what="profiling")
        self.timer.burst([self.ready[task.key] for task in tasks[: max(1, len(tasks) // 4)]], 0, 20)
        for task, runs in zip(tasks, self.timer.kernels([self.ready[task.key] for task in tasks]), strict=True):
            kernels = [[run.name, round(run.duration_us, 3), run.stream] for run in runs]
            self.say("kernels", task=task.key, kernels=kernels)


def _gpu() -> Gpu | None:
    nvml = open_nvml()
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return nvml.gpu_by_uuid(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}") or nvml.gpu(0)


def _device_facts(gpu: Gpu | None) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "CPU"}
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
    return facts | ({"power_limit_w": gpu.power_limit_w(), "max_sm_mhz": gpu.max_sm_mhz()} if gpu else {})


@contextmanager
def _heating() -> Iterator[None]:
    """Large products in the background, so that the chip is hot and at its power limit when measuring begins."""
    stop = threading.Event()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            torch.mm(a, a)

    def heat() -> None:
        while not stop.is_set():  # one call keeps the chip busy for a good while, and the interpreter free to import
            graph.replay()
            torch.cuda.synchronize()

    thread = threading.Thread(target=heat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _told_to_stop() -> bool:
    """Whether the parent has closed our standard input, or has gone."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable)


def main() -> None:
    """Read the request, say everything to the descriptor."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as out:
        Worker(request, out).main()


if __name__ == "__main__":
    main()
