"""The health of a GPU, read with NVIDIA's binding from a pretended driver."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.gpu.health import health_facts, health_figures, health_problems, ranges
from gemmscope.gpu.nvml import Gpu, open_nvml
from support.nvml_driver import LINKS, Driver

FACTS = health_figures()
HEALTHY = {
    "ecc": "on",
    "corrected_errors": 3,
    "uncorrected_errors": 0,
    "corrected_errors_lifetime": 41,
    "uncorrected_errors_lifetime": 1,
    "remapped_rows_corrected": 0,
    "remapped_rows_uncorrected": 1,
    "remap_pending": 0,
    "remap_failed": 0,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replays": 0,
    "nvlinks": LINKS,
    "nvlinks_active": LINKS,
    "nvlink_replays": 2 * LINKS,
    "nvlink_recoveries": 0,
    "nvlink_crc_errors": LINKS,
    "persistence_mode": "on",
    "mig": "off",
    "numa_node": 1,
    "cpu_cores": "0-3,64-67",
}


def health(monkeypatch: pytest.MonkeyPatch, **driver: Any) -> dict[str, int | str]:
    Driver(**driver).install(monkeypatch)
    return health_facts(Gpu(pynvml.c_nvmlDevice_t()))


def test_all_figures_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    assert health(monkeypatch) == HEALTHY
    gpu = Gpu(pynvml.c_nvmlDevice_t())
    assert (gpu.index(), gpu.serial(), gpu.pci_bus()) == (5, "1650623004321", "00000000:ba:00.0")
    assert gpu.uuid() == "GPU-5c1f0a44-0c1f-7a55-93f1-6a4a7e0c1234"
    assert gpu.cpu_cores() == [0, 1, 2, 3, 64, 65, 66, 67]


def test_a_gpu_before_ampere_retires_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = health(monkeypatch, rows=None, pages=((0x1000, 0x2000), (0x3000,)))
    assert (facts["retired_pages"], facts["retirement_pending"]) == (3, 1)
    assert "remap_pending" not in facts
    assert set(facts) <= set(FACTS)


def test_blackwell_counts_recoveries_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of Hopper are not supported there."""
    fields = {pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: LINKS, pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS: 3}
    facts = health(monkeypatch, fields=fields)
    assert facts["nvlink_recoveries"] == 3 * LINKS
    assert not {"nvlink_replays", "nvlink_crc_errors"} & set(facts)


def test_a_gpu_without_nvlink_has_no_figures_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = health(monkeypatch, fields={})
    assert not [name for name in facts if name.startswith("nvlink")]
    assert facts["pcie_width"] == 16


def test_a_driver_that_supports_nothing_gives_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert health(monkeypatch, broken=["all"]) == {}
    gpu = Gpu(pynvml.c_nvmlDevice_t())
    assert (gpu.index(), gpu.serial(), gpu.pci_bus(), gpu.uuid(), gpu.cpu_cores()) == (None, None, None, None, [])


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        ("nvmlDeviceGetEccMode", {"ecc"}),
        ("nvmlDeviceGetTotalEccErrors", {name for name in FACTS if name.startswith(("corrected", "uncorrected"))}),
        ("nvmlDeviceGetRemappedRows", {name for name in FACTS if name.startswith("remap")}),
        ("nvmlDeviceGetCurrPcieLinkGeneration", {"pcie_generation"}),
        ("nvmlDeviceGetNvLinkState", {"nvlinks_active"}),
        ("nvmlDeviceGetFieldValues", {name for name in FACTS if name.startswith("nvlink")}),
        ("nvmlDeviceGetMigMode", {"mig"}),
        ("nvmlDeviceGetMemoryAffinity", {"numa_node"}),
        ("nvmlDeviceGetCpuAffinity", {"cpu_cores"}),
    ],
)
def test_each_figure_can_be_missing_alone(monkeypatch: pytest.MonkeyPatch, function: str, gone: set[str]) -> None:
    assert set(health(monkeypatch, broken=[function])) == set(HEALTHY) - gone


def test_a_driver_that_answers_nonsense_costs_only_those_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [name for name in health(monkeypatch, fields={pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: 99}) if "nvlink" in name]
    for kind in (pynvml.NVML_VALUE_TYPE_DOUBLE, 77):
        monkeypatch.setattr(pynvml, "NVML_VALUE_TYPE_UNSIGNED_LONG_LONG", kind)
        assert set(HEALTHY) - set(health(monkeypatch)) == {"nvlink_replays", "nvlink_recoveries", "nvlink_crc_errors"}


def test_a_gpu_between_two_numa_nodes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "numa_node" not in health(monkeypatch, node_mask=0b11)


def test_names_are_documented() -> None:
    assert set(HEALTHY) | {"retired_pages", "retirement_pending"} == set(FACTS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"uncorrected_errors": 1}, "1 uncorrected memory error since the driver was loaded"),
        ({"remap_failed": 1}, "a faulty memory row could not be remapped"),
        ({"remap_pending": 1}, "a faulty memory row is pending remapping"),
        ({"retirement_pending": 1}, "faulty memory pages are pending retirement"),
        ({"pcie_width": 8}, "PCIe x8 instead of x16"),
        ({"pcie_generation": 4}, "PCIe generation 4 instead of 5"),
        ({"nvlinks_active": 17}, "17 of 18 NVLinks are active"),
    ],
)
def test_problems(change: dict[str, int], problem: str) -> None:
    assert health_problems(HEALTHY, under_load=True) == []
    (only,) = health_problems(HEALTHY | change, under_load=True)
    assert only.text == problem
    assert only.remedy


def test_an_idle_link_is_no_problem() -> None:
    assert health_problems(HEALTHY | {"pcie_generation": 1}, under_load=False) == []


def test_no_nvlink_at_all_is_no_problem() -> None:
    """A PCIe card without a bridge has links, and none is active."""
    assert health_problems(HEALTHY | {"nvlinks_active": 0}, under_load=True) == []


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    parts = [part.split("-") for part in ranges(numbers).split(",") if part]
    assert sorted(numbers) == [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


@pytest.mark.gpu
@pytest.mark.skipif(open_nvml() is None, reason="no NVIDIA driver here")
def test_a_real_gpu_tells_its_health() -> None:
    nvml = open_nvml()
    assert nvml is not None
    gpu = nvml.gpu(0)
    assert gpu is not None
    facts = health_facts(gpu)
    assert set(facts) <= set(FACTS)
    assert {"pcie_width", "pcie_width_max", "cpu_cores"} <= set(facts)
