"""The GPUs as their driver describes them, read with NVIDIA's own Python binding of NVML.

Every figure is optional: a machine without a driver, or a virtual one that hides some figures, gives None instead of a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

# nvmlClocksEventReasons*: why the clock is below its maximum.
THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "SW power cap",
    0x8: "HW slowdown",
    0x10: "sync boost",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True)
class Reading:
    """The state of a GPU at one moment."""

    sm_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: tuple[str, ...]
    energy_j: float | None = None  # used since the driver was loaded


def _query(function: str, *arguments: Any) -> Any:
    """The answer of an NVML function; None if the driver or the GPU does not give it."""
    try:
        return getattr(pynvml, function)(*arguments)
    except Exception:  # not supported, no permission, a driver older than the binding: no figure is worth a failed measurement
        return None


class Nvml:
    """The initialized library. Make one with `open_nvml`."""

    def driver(self) -> str | None:
        version: str | None = _query("nvmlSystemGetDriverVersion")
        return version

    def count(self) -> int:
        return _query("nvmlDeviceGetCount") or 0

    def gpu(self, index: int) -> Gpu | None:
        handle = _query("nvmlDeviceGetHandleByIndex", index)
        return Gpu(handle) if handle is not None else None

    def gpu_by_uuid(self, uuid: str) -> Gpu | None:
        """The GPU with this UUID. CUDA may number GPUs differently from the driver, but the UUIDs are the same."""
        handle = _query("nvmlDeviceGetHandleByUUID", uuid)
        return Gpu(handle) if handle is not None else None


class Gpu:
    """One GPU."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def _query(self, function: str, *arguments: Any) -> Any:
        return _query(function, self._handle, *arguments)

    def _thousandths(self, function: str) -> float | None:
        """A figure that NVML gives in thousandths of the unit."""
        value = self._query(function)
        return value / 1000 if value is not None else None

    def name(self) -> str:
        return self._query("nvmlDeviceGetName") or "unknown GPU"

    def uuid(self) -> str | None:
        """The same for the driver and for CUDA."""
        uuid: str | None = self._query("nvmlDeviceGetUUID")
        return uuid

    def compute_capability(self) -> tuple[int, int] | None:
        capability = self._query("nvmlDeviceGetCudaComputeCapability")
        return (int(capability[0]), int(capability[1])) if capability is not None else None

    def power_limit_w(self) -> float | None:
        return self._thousandths("nvmlDeviceGetEnforcedPowerLimit")

    def max_sm_mhz(self) -> int | None:
        clock: int | None = self._query("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM)
        return clock

    def memory_bytes(self) -> tuple[int, int] | None:
        """(total, used)."""
        memory = self._query("nvmlDeviceGetMemoryInfo")
        return (int(memory.total), int(memory.used)) if memory is not None else None

    def utilization(self) -> int | None:
        """The percentage of the last sampling period in which a kernel ran."""
        rates = self._query("nvmlDeviceGetUtilizationRates")
        return int(rates.gpu) if rates is not None else None

    def compute_processes(self) -> list[int]:
        """Ids of processes that use this GPU (those of other containers may be hidden)."""
        return [int(process.pid) for process in self._query("nvmlDeviceGetComputeRunningProcesses") or []]

    def read(self) -> Reading:
        """Clock, power, temperature, energy and throttle reasons at this moment."""
        reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return Reading(
            sm_mhz=self._query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            power_w=self._thousandths("nvmlDeviceGetPowerUsage"),
            temperature_c=self._query("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            energy_j=self._thousandths("nvmlDeviceGetTotalEnergyConsumption"),
            throttle=tuple(reason for bit, reason in THROTTLE_REASONS.items() if reasons & bit),
        )


def open_nvml() -> Nvml | None:
    """The library, or None where there is no NVIDIA driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Nvml()
