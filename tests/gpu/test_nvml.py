"""The driver's figures, with a pretended NVML: complete ones, hidden ones, no driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gemmscope.gpu import environment, nvml
from gemmscope.gpu.nvml import Gpu, Reading, open_nvml


class FakeNvml:
    """The functions of pynvml that gemmscope calls. Those named in `hidden` raise as they do on a virtual GPU."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, hidden: tuple[str, ...] = (), **answers: Any) -> None:
        self._hidden = hidden
        self._answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "580.95",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2**37, used=2**20, free=0),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x40,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetPowerUsage": 698_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTotalEnergyConsumption": 12_345_678,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name in self._hidden:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self._answers[name]

        return call

    def all_figures(self) -> tuple[str, ...]:
        return tuple(
            name for name in self._answers if not name.startswith(("nvmlInit", "nvmlDeviceGetHandle", "nvmlDeviceGetCount"))
        )


def fake(monkeypatch: pytest.MonkeyPatch, *hidden: str, **answers: Any) -> FakeNvml:
    library = FakeNvml(hidden, **answers)
    monkeypatch.setattr(nvml, "pynvml", library)
    return library


def the_gpu() -> Gpu:
    opened = open_nvml()
    assert opened is not None
    gpu = opened.gpu_by_uuid("GPU-1")
    assert gpu is not None
    return gpu


def test_figures_have_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    gpu = the_gpu()
    assert gpu.read() == Reading(1755, 698.5, 61, ("SW power cap", "HW thermal slowdown"), energy_j=12345.678)
    assert (gpu.uuid(), gpu.power_limit_w(), gpu.max_sm_mhz(), gpu.utilization()) == ("GPU-1", 700.0, 1980, 0)
    (facts,) = environment.environment().gpus
    assert (facts.name, facts.capability, facts.memory_bytes, facts.memory_used_bytes) == ("NVIDIA H200", (9, 0), 2**37, 2**20)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "nvmlInit")
    assert open_nvml() is None
    machine = environment.environment()
    assert machine.driver is None
    assert machine.gpus == ()


def test_hidden_figures_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, *FakeNvml().all_figures())
    gpu = the_gpu()
    assert gpu.read() == Reading(None, None, None, ())
    assert (gpu.uuid(), gpu.power_limit_w(), gpu.max_sm_mhz(), gpu.utilization()) == (None, None, None, None)
    (facts,) = environment.environment().gpus
    assert (facts.name, facts.capability, facts.memory_bytes, facts.memory_used_bytes) == ("unknown GPU", None, None, None)
    assert gpu.compute_processes() == []


@pytest.mark.parametrize("function", FakeNvml().all_figures())
def test_each_figure_can_be_hidden_alone(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    fake(monkeypatch, function)
    (gpu,) = environment.environment().gpus
    assert gpu.index == 0


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByIndex")
    opened = open_nvml()
    assert opened is not None
    assert opened.gpu_by_uuid("GPU-2") is None
    assert opened.gpu(7) is None
    assert environment.environment().gpus == ()


def test_other_processes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [SimpleNamespace(pid=4711), SimpleNamespace(pid=environment.os.getpid())]
    fake(monkeypatch, nvmlDeviceGetComputeRunningProcesses=processes)
    monkeypatch.setattr(environment, "RETRY_S", 0)
    assert environment.environment().gpus[0].processes == (4711,)


def test_a_gpu_that_was_busy_a_moment_ago_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run right after another finds the other's process still leaving the GPU."""
    monkeypatch.setattr(environment, "RETRY_S", 0)
    assert environment._uses([pretended_gpu([97, 40, 0], [[4711], [4711], []])]) == [(0, ())]
    assert environment._uses([pretended_gpu([5] * 9, [[4712]] * 9)]) == [(5, (4712,))]


def test_where_one_gpu_is_visible_others_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured at the same time: nothing is waited for."""
    monkeypatch.setattr(environment, "RETRY_S", 0)

    def machine() -> list[Any]:
        return [pretended_gpu([97, 0], [[4711], []], "GPU-a"), pretended_gpu([0, 0], [[], []], "GPU-b")]

    assert environment._uses(machine(), "GPU-b") == [(97, (4711,)), (0, ())]
    assert environment._uses(machine(), "GPU-a") == [(0, ()), (0, ())]
    assert environment._uses(machine(), "0,1") == [(0, ()), (0, ())]


def pretended_gpu(utilization: list[int], processes: list[list[int]], uuid: str = "") -> Any:
    return SimpleNamespace(utilization=lambda: utilization.pop(0), compute_processes=lambda: processes.pop(0), uuid=lambda: uuid)
