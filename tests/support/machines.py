"""Simulated machines: one with an H200 (or another GPU), one without a GPU."""

from __future__ import annotations

from gemmscope.gpu.environment import Environment, GpuFacts
from gemmscope.gpu.nvml import Reading


def machine(capability: tuple[int, int] = (9, 0), visible: str | None = None, **gpu: object) -> Environment:
    reading = Reading(1980, 100.0, 40, ())
    facts = {
        "memory_bytes": 2**37,
        "memory_used_bytes": 0,
        "power_limit_w": 700.0,
        "max_sm_mhz": 1980,
        "utilization": 0,
        "processes": (),
    }
    gpu_facts = GpuFacts(0, "NVIDIA H200", capability, now=reading, **(facts | gpu))  # type: ignore[arg-type]
    return Environment("Linux", "3.12", 16, {}, "580", (gpu_facts,), visible)


NOTHING = Environment("Linux", "3.12", 16, {}, None, (), None)
