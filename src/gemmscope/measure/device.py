"""What every measuring process asks: which GPU is this, and may I stop."""

from __future__ import annotations

import select
import sys
from typing import Any

import torch

from gemmscope.gpu.nvml import Gpu, open_nvml


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


def told_to_stop() -> bool:
    """Whether the parent has closed our standard input, or has gone."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable)
