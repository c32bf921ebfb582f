"""A pretended NVIDIA driver below NVIDIA's own Python binding: it fills the C structures that the real library fills.

So the binding's calls, their arguments and the layout of its structures are those that run on a GPU; only the values are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

LINKS = 18


def _snake_case(name: str) -> str:
    """
    >>> _snake_case("NvLinkState")
    '_nv_link_state'
    """
    return "_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


@dataclass
class Driver:
    """One H200 in a machine with eight. `broken`: functions that answer NOT_SUPPORTED; "all": every one."""

    broken: Sequence[str] = ()
    numbers: dict[str, int] = field(
        default_factory=lambda: {
            "nvmlDeviceGetIndex": 5,
            "nvmlDeviceGetCount_v2": 1,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetPcieReplayCounter": 0,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }
    )
    ecc: tuple[int, int] = (1, 1)
    mig: tuple[int, int] = (0, 0)
    errors: dict[tuple[int, int], int] = field(default_factory=lambda: {(0, 0): 3, (1, 0): 0, (0, 1): 41, (1, 1): 1})
    """By kind (corrected, uncorrected) and counter (since the driver was loaded, lifetime)."""
    rows: tuple[int, int, int, int] | None = (0, 1, 0, 0)
    pages: tuple[Sequence[int], Sequence[int]] | None = None
    links_down: Sequence[int] = ()
    fields: dict[int, int] = field(
        default_factory=lambda: {
            pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: LINKS,
            pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY: 2,
            pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY: 0,
            pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC: 1,
        }
    )
    """Per link, except the number of links."""
    cores: Sequence[int] = (*range(4), *range(64, 68))
    node_mask: int = 0b10

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put this driver below the binding."""
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", self.function)
        monkeypatch.setattr("os.cpu_count", lambda: 128)

    def function(self, name: str) -> Callable[..., int]:
        if "all" in self.broken or name in self.broken:
            return lambda *_: int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if name in self.numbers:
            return lambda *arguments: self._number(arguments[-1], self.numbers[name])
        answer: Callable[..., int] | None = getattr(self, _snake_case(name.removeprefix("nvmlDeviceGet")), None)
        if answer is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return answer

    def _handle_by_index_v2(self, _index: Any, out: Any) -> int:
        return self._number(out, 1)

    @staticmethod
    def _number(out: Any, value: int) -> int:
        out._obj.value = value
        return int(pynvml.NVML_SUCCESS)

    def _uuid(self, _: Any, text: Any, size: Any) -> int:
        assert size.value > 20
        text.value = b"GPU-5c1f0a44-0c1f-7a55-93f1-6a4a7e0c1234"
        return int(pynvml.NVML_SUCCESS)

    def _serial(self, _: Any, text: Any, size: Any) -> int:
        assert size.value > 13
        text.value = b"1650623004321"
        return int(pynvml.NVML_SUCCESS)

    def _pci_info_v3(self, _: Any, out: Any) -> int:
        info = out._obj
        info.domain, info.bus, info.device, info.busId = 0, 0xBA, 0, b"00000000:BA:00.0"
        return int(pynvml.NVML_SUCCESS)

    def _ecc_mode(self, _: Any, now: Any, pending: Any) -> int:
        return self._number(now, self.ecc[0]) or self._number(pending, self.ecc[1])

    def _mig_mode(self, _: Any, now: Any, pending: Any) -> int:
        return self._number(now, self.mig[0]) or self._number(pending, self.mig[1])

    def _total_ecc_errors(self, _: Any, kind: Any, counter: Any, out: Any) -> int:
        return self._number(out, self.errors[kind.value, counter.value])

    def _remapped_rows(self, _: Any, *out: Any) -> int:
        if self.rows is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        for target, value in zip(out, self.rows, strict=True):
            self._number(target, value)
        return int(pynvml.NVML_SUCCESS)

    def _retired_pages(self, _: Any, cause: Any, count: Any, out: Any) -> int:
        if self.pages is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        addresses = self.pages[cause.value]
        room, count._obj.value = count._obj.value, len(addresses)
        if room < len(addresses):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for index, address in enumerate(addresses):
            out[index] = address
        return int(pynvml.NVML_SUCCESS)

    def _retired_pages_pending_status(self, _: Any, out: Any) -> int:
        return self._number(out, 1) if self.pages is not None else int(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _nv_link_state(self, _: Any, link: int, out: Any) -> int:
        if link >= self.fields.get(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._number(out, int(link not in self.links_down))

    def _field_values(self, _: Any, count: Any, out: Any) -> int:
        values = out._obj
        assert count.value == len(values)
        for value in values:
            supported = value.fieldId in self.fields and value.scopeId < LINKS
            value.nvmlReturn = pynvml.NVML_SUCCESS if supported else pynvml.NVML_ERROR_NOT_SUPPORTED
            if value.fieldId == pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT:
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
                value.value.ullVal = 0xDEAD_BEEF_0000_0000  # the rest of the union is not defined
                value.value.uiVal = self.fields.get(value.fieldId, 0)
            else:
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = self.fields.get(value.fieldId, 0)
        return int(pynvml.NVML_SUCCESS)

    def _cpu_affinity(self, _: Any, word_count: int, out: Any) -> int:
        for core in self.cores:
            assert core // 64 < word_count
            out._obj[core // 64] |= 1 << core % 64
        return int(pynvml.NVML_SUCCESS)

    def _memory_affinity(self, _: Any, word_count: int, out: Any, scope: Any) -> int:
        assert (word_count, scope.value) == (1, pynvml.NVML_AFFINITY_SCOPE_NODE)
        out._obj[0] = self.node_mask
        return int(pynvml.NVML_SUCCESS)
