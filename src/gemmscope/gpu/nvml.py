"""The GPUs as their driver describes them, read with NVIDIA's own Python binding of NVML.

Every figure is optional: a machine without a driver, or a virtual one that hides some figures, gives None instead of a number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

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


# nvmlValueType_t: the member of the union `nvmlValue_t` that holds the value of a field.
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
MOST_NUMA_NODES = 64  # one word of the bit mask: the kernel's default limit of nodes


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
    except Exception:  # not supported, no permission, an old driver: a missing figure must not fail a measurement
        return None


class Nvml:
    """The initialized library. Make one with `open_nvml`."""

    def driver(self) -> str | None:
        return cast("str | None", _query("nvmlSystemGetDriverVersion"))

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
    """One GPU, as the driver reports it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def query(self, figure: str, *constants: str) -> Any:
        """The answer of `nvmlDeviceGet` and so on. `constants`: its arguments, as names without `NVML_`."""
        return self._query(f"nvmlDeviceGet{figure}", *(getattr(pynvml, f"NVML_{name}") for name in constants))

    def _query(self, function: str, *arguments: Any) -> Any:
        return _query(function, self._handle, *arguments)

    def _thousandths(self, function: str) -> float | None:
        """A figure that NVML gives in thousandths of the unit."""
        value = self._query(function)
        return value / 1000 if value is not None else None

    def uuid(self) -> str | None:
        """The same for the driver and for CUDA."""
        return cast("str | None", self._query("nvmlDeviceGetUUID"))

    def index(self) -> int | None:
        """The driver's number of this GPU. CUDA may number GPUs differently."""
        return cast("int | None", self._query("nvmlDeviceGetIndex"))

    def serial(self) -> str | None:
        """The serial number of the board."""
        return cast("str | None", self._query("nvmlDeviceGetSerial"))

    def pci_bus(self) -> str | None:
        """The address on the PCI bus: domain, bus, device and function."""
        info = self._query("nvmlDeviceGetPciInfo")
        if info is None:
            return None
        bus = info.busId
        return str(bus.decode(errors="replace") if isinstance(bus, bytes) else bus).lower() or None

    def power_limit_w(self) -> float | None:
        return self._thousandths("nvmlDeviceGetEnforcedPowerLimit")

    def max_sm_mhz(self) -> int | None:
        return cast("int | None", self._query("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM))

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

    def retired_pages(self) -> tuple[int, int] | tuple[None, None]:
        """Pages of the device memory that are no longer used (before Ampere), and whether more follow at the next reset."""
        causes = ("MULTIPLE_SINGLE_BIT_ECC_ERRORS", "DOUBLE_BIT_ECC_ERROR")
        pages = [self.query("RetiredPages", f"PAGE_RETIREMENT_CAUSE_{cause}") for cause in causes]
        return (None, None) if None in pages else (sum(map(len, pages)), self.query("RetiredPagesPendingStatus"))

    def nvlinks(self) -> int:
        """How many NVLinks the GPU has."""
        (total,) = self._fields([(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)])
        return total if total and total <= pynvml.NVML_NVLINK_MAX_LINKS else 0

    def active_nvlinks(self, links: int) -> int | None:
        """How many of them are active."""
        states = [self._query("nvmlDeviceGetNvLinkState", link) for link in range(links)]
        known = [state for state in states if state is not None]
        return sum(map(bool, known)) if known else None

    def over_nvlinks(self, field: str, links: int) -> int | None:
        """The sum of a counter over all NVLinks; None if no link has it."""
        number = getattr(pynvml, f"NVML_FI_DEV_{field}", None)  # an older binding does not have every field
        values = self._fields([(number, link) for link in range(links)]) if number is not None else []
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def _fields(self, fields: Sequence[tuple[int, int]]) -> list[int | None]:
        """The values of fields, each given by its number and its scope (an NVLink)."""
        values = self._query("nvmlDeviceGetFieldValues", list(fields))
        return [_value(field) for field in values] if values is not None else [None] * len(fields)

    def numa_node(self) -> int | None:
        """The NUMA node that the GPU is attached to. (`nvmlDeviceGetNumaNodeId` is something else: the node that a GPU itself is,
        on machines where GPUs are NUMA nodes.)"""
        mask = self._query("nvmlDeviceGetMemoryAffinity", MOST_NUMA_NODES // 64, pynvml.NVML_AFFINITY_SCOPE_NODE)
        nodes = _bits(mask) if mask is not None else []
        return nodes[0] if len(nodes) == 1 else None

    def cpu_cores(self) -> list[int]:
        """The CPU cores near this GPU, whether this process may use them or not; empty where the driver does not say."""
        mask_size = -(-(os.cpu_count() or 1) // 64)
        mask = self._query("nvmlDeviceGetCpuAffinity", mask_size)
        return _bits(mask) if mask is not None else []


def _value(field: Any) -> int | None:
    """The value of a field (nvmlFieldValue_t); None if the driver does not give it as an integer."""
    if field.nvmlReturn != pynvml.NVML_SUCCESS or not 0 < field.valueType < len(VALUE_MEMBERS):
        return None
    return int(getattr(field.value, VALUE_MEMBERS[field.valueType]))


def _bits(mask: Iterable[int]) -> list[int]:
    """The bits that are set in words of 64.

    >>> _bits([0b101, 0b1])
    [0, 2, 64]
    """
    return [64 * index + bit for index, word in enumerate(mask) for bit in range(64) if word >> bit & 1]


def open_nvml() -> Nvml | None:
    """The library, or None where there is no NVIDIA driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Nvml()
