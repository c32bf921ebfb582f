"""What all measuring processes share: the request, messages to the parent, failures, the GPU in use, and the parent's orders."""

import importlib
import json
import os
import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from gemmscope.errors import in_a_line
from gemmscope.gpu.nvml import Gpu, open_nvml
from gemmscope.process import without_jax
from gemmscope.workload.cases import Task


def gpu_in_use() -> Gpu | None:
    """The GPU that torch uses, as the driver reports it; None where the driver cannot be asked."""
    nvml = open_nvml()
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return nvml.gpu_by_uuid(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}") or nvml.gpu(0)


OUT_OF_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory")  # in messages of CUDA, cuBLAS and the CPU allocator
STICKY = ("CUDA error", "cudaError")  # after one of these, every later GPU call of the process fails too


def failure_kind(error: Exception, *, on_gpu: bool) -> str:
    """The kind of failure: "out of memory" (less may fit), "CUDA fault" (the process cannot go on) or "error".

    >>> failure_kind(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), on_gpu=True)
    'out of memory'
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(phrase in text.lower() for phrase in OUT_OF_MEMORY):
        return "out of memory"
    return "CUDA fault" if on_gpu and any(phrase in text for phrase in STICKY) else "error"


class MeasuringProcess:
    """Takes one request and reports to the parent. Subclasses implement `main`."""

    def __init__(self, request: dict[str, Any], out: Any) -> None:
        self.request, self.out = request, out
        self.on_gpu = request["backend"] != "cpu"
        self.device = "cuda" if self.on_gpu else "cpu"
        self.gpu = gpu_in_use() if self.on_gpu else None

    @classmethod
    def serve(cls) -> None:
        """Read the request from standard input, send messages to the descriptor named on the command line."""
        line = sys.stdin.readline()
        if not line:
            return  # started ahead of time, and not needed
        with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as out:
            cls(json.loads(line), out).main()

    def main(self) -> None:
        """Measure what was requested."""
        raise NotImplementedError

    def say(self, message_type: str, **content: Any) -> None:
        """Send one message."""
        self.out.write(json.dumps({"type": message_type, **content}) + "\n")
        self.out.flush()

    def begin(self, task: str, what: str) -> None:
        """Name the current task, so that a crash can be attributed; also a sign of life."""
        self.say("begin", task=task, what=what)

    def warn(self, code: str, **facts: Any) -> None:
        """Report a finding of the measurement itself."""
        self.say("finding", code=code, facts=facts)

    def failed(self, task: str, error: Exception) -> None:
        """Report the failure of one task. After a sticky CUDA error the process cannot go on."""
        kind = failure_kind(error, on_gpu=self.on_gpu)
        self.say("failed", task=task, why=in_a_line(error), kind=kind)
        if kind == "CUDA fault":
            os._exit(70)

    def load(self, classes: Mapping[str, tuple[str, str]]) -> Any:
        """The class of the requested backend; None, after a message that says why, if it does not load."""
        module, class_name = classes[self.request["backend"]]
        try:
            with without_jax():
                return getattr(importlib.import_module(module), class_name)
        except Exception as error:
            self.say("fatal", why=f"the {self.request['backend']} backend does not load: {in_a_line(error)}")
            return None

    def device_facts(self) -> dict[str, Any]:
        """The description of the device in a result."""
        if not self.on_gpu or not torch.cuda.is_available():
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
        return facts | ({"power_limit_w": self.gpu.power_limit_w(), "max_sm_mhz": self.gpu.max_sm_mhz()} if self.gpu else {})

    def gpu_state(self) -> dict[str, Any]:
        """Clock, power and temperature at this moment; empty where the driver cannot be asked."""
        return asdict(self.gpu.read()) if self.gpu else {}

    def send_samples(self, number: int, times_ms: dict[str, list[float]], state: dict[str, Any], *, ends_round: bool) -> None:
        """The samples of one burst of round `number`."""
        self.say("samples", round=number, times_ms=times_ms, state=state)
        if ends_round:
            self.say("round", round=number)


class Orders:
    """The parent's orders on standard input: a line of JSON lists the groups to measure next, the most wanted first; the end of
    the input means stop."""

    def __init__(self) -> None:
        self._wanted: list[tuple[str, ...]] = []
        self._rest = b""

    def stop(self) -> bool:
        """Whether the parent has closed our standard input, or has ended. Reads its latest orders."""
        while select.select([sys.stdin], [], [], 0)[0]:
            piece = os.read(sys.stdin.fileno(), 1 << 16)
            if not piece:
                return True
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if lines:
                self._wanted = [tuple(group) for group in json.loads(lines[-1])]
        return False

    def first_wanted(self, groups: Sequence[list[Task]]) -> list[Task] | None:
        """The group that the parent wants most; None if it wants none of these. Without orders, all are wanted."""
        self.stop()
        if not self._wanted:
            return groups[0]
        wanted = [tasks for tasks in groups if tasks[0].group in self._wanted]
        return min(wanted, key=lambda tasks: self._wanted.index(tasks[0].group), default=None)
