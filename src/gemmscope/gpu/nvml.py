"""NVML, the driver's own library, through ctypes: it is there wherever the driver is, and needs no package.

Everything is optional: a machine without a driver, or a virtual one that hides some figures, gives None instead of a number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# nvmlClocksEventReasons*: why the clock is below its maximum.
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "SW power cap",
    0x8: "HW slowdown",
    0x10: "sync boost",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x100: "display clocks",
}
_SM_CLOCK, _GPU_TEMPERATURE = 1, 0


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        *(("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)),
        *(("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)),
    ]


@dataclass(frozen=True)
class Reading:
    """The state of a GPU at one moment."""

    sm_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: tuple[str, ...]
    energy_j: float | None = None  # that it has taken since the driver was loaded


class Nvml:
    """An open library. Make one with `open_nvml`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def _read(self, function: str, kind: Callable[[], Any], *arguments: Any) -> Any:
        """Call a getter whose last argument receives the value; None if it has no answer."""
        value = kind()
        call = getattr(self._library, function, None)
        if call is None or call(*arguments, ctypes.byref(value)) != 0:
            return None
        return value

    def _text(self, function: str, *arguments: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        call = getattr(self._library, function, None)
        if call is None or call(*arguments, buffer, ctypes.c_uint(len(buffer))) != 0:
            return None
        return buffer.value.decode(errors="replace")

    def driver(self) -> str | None:
        return self._text("nvmlSystemGetDriverVersion")

    def count(self) -> int:
        found = self._read("nvmlDeviceGetCount_v2", ctypes.c_uint)
        return found.value if found is not None else 0

    def gpu(self, index: int) -> Gpu | None:
        """The GPU of that number, as the driver counts them."""
        handle = self._read("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p, ctypes.c_uint(index))
        return Gpu(self, handle) if handle is not None else None

    def gpu_by_uuid(self, uuid: str) -> Gpu | None:
        """The GPU that CUDA names by this UUID (which need not be the driver's number)."""
        handle = self._read("nvmlDeviceGetHandleByUUID", ctypes.c_void_p, uuid.encode())
        return Gpu(self, handle) if handle is not None else None


class Gpu:
    """One GPU's figures."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def _number(self, function: str, *arguments: Any) -> int | None:
        value = self._nvml._read(function, ctypes.c_uint, self._handle, *arguments)
        return int(value.value) if value is not None else None

    def name(self) -> str:
        return self._nvml._text("nvmlDeviceGetName", self._handle) or "unknown GPU"

    def uuid(self) -> str | None:
        return self._nvml._text("nvmlDeviceGetUUID", self._handle)

    def compute_capability(self) -> tuple[int, int] | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        call = getattr(self._nvml._library, "nvmlDeviceGetCudaComputeCapability", None)
        if call is None or call(self._handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
            return None
        return major.value, minor.value

    def power_limit_w(self) -> float | None:
        milliwatts = self._number("nvmlDeviceGetEnforcedPowerLimit")
        return milliwatts / 1000 if milliwatts is not None else None

    def max_sm_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetMaxClockInfo", ctypes.c_int(_SM_CLOCK))

    def memory_bytes(self) -> tuple[int, int] | None:
        """(total, used)."""
        memory = self._nvml._read("nvmlDeviceGetMemoryInfo", _Memory, self._handle)
        return (int(memory.total), int(memory.used)) if memory is not None else None

    def utilization(self) -> int | None:
        """Percent of the last moments in which a kernel ran."""
        use = self._nvml._read("nvmlDeviceGetUtilizationRates", _Utilization, self._handle)
        return int(use.gpu) if use is not None else None

    def compute_processes(self) -> list[int]:
        """Process numbers that hold a context on this GPU (those of other containers may be hidden)."""
        count, processes = ctypes.c_uint(64), (_Process * 64)()
        call = getattr(self._nvml._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if call is None or call(self._handle, ctypes.byref(count), processes) != 0:
            return []
        return [int(process.pid) for process in processes[: count.value]]

    def read(self) -> Reading:
        """Clock, power, temperature and what holds the clock back, now."""
        reasons = self._nvml._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, self._handle)
        bits = int(reasons.value) if reasons is not None else 0
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        millijoules = self._nvml._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, self._handle)
        return Reading(
            sm_mhz=self._number("nvmlDeviceGetClockInfo", ctypes.c_int(_SM_CLOCK)),
            power_w=milliwatts / 1000 if milliwatts is not None else None,
            temperature_c=self._number("nvmlDeviceGetTemperature", ctypes.c_int(_GPU_TEMPERATURE)),
            energy_j=int(millijoules.value) / 1000 if millijoules is not None else None,
            throttle=tuple(words for bit, words in THROTTLE_REASONS.items() if bits & bit and words != "idle"),
        )


def open_nvml() -> Nvml | None:
    """The library, or None where there is no NVIDIA driver."""
    for name in ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return Nvml(library) if library.nvmlInit_v2() == 0 else None
    return None
