"""What every measuring process asks: which GPU is this, what am I to measure now, and may I stop."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

import torch

from gemmscope.gpu.nvml import Gpu, open_nvml
from gemmscope.workload.cases import Task


def gpu_in_use() -> Gpu | None:
    """The driver's view of the GPU that torch uses; None where the driver cannot be asked."""
    nvml = open_nvml()
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return nvml.gpu_by_uuid(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}") or nvml.gpu(0)


def device_facts(gpu: Gpu | None, *, on_gpu: bool) -> dict[str, Any]:
    """What a result should say of the device."""
    if not on_gpu or not torch.cuda.is_available():
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


OUT_OF_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory")  # CUDA's words for it, cuBLAS's, and the CPU's
STICKY = ("CUDA error", "cudaError")  # whatever the process asks of the GPU after one of these fails too


def failure_kind(error: Exception, *, on_gpu: bool) -> str:
    """What it means for the rest: "out of memory" (there may be room for less), "CUDA fault" (this process is lost) or "error".

    >>> failure_kind(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), on_gpu=True)
    'out of memory'
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(words in text.lower() for words in OUT_OF_MEMORY):
        return "out of memory"
    return "CUDA fault" if on_gpu and any(words in text for words in STICKY) else "error"


class Orders:
    """What the parent says while we work, on standard input: a line of JSON names the groups it wants more of, what it wants most
    first; its end is the sign to stop."""

    def __init__(self) -> None:
        self._wanted: list[tuple[str, ...]] = []
        self._rest = b""

    def stop(self) -> bool:
        """Whether the parent has closed our standard input, or has gone. Takes note of what it said."""
        while select.select([sys.stdin], [], [], 0)[0]:
            piece = os.read(sys.stdin.fileno(), 1 << 16)
            if not piece:
                return True
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if lines:
                self._wanted = [tuple(group) for group in json.loads(lines[-1])]
        return False

    def first_wanted(self, groups: Sequence[list[Task]]) -> list[Task] | None:
        """Of these groups, the one that the parent wants most; None if it wants none of them. Until it says anything, all are
        wanted."""
        self.stop()
        if not self._wanted:
            return groups[0]
        wanted = [tasks for tasks in groups if tasks[0].group in self._wanted]
        return min(wanted, key=lambda tasks: self._wanted.index(tasks[0].group), default=None)
