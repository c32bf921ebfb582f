"""The health of a GPU: memory errors, remapped memory, PCIe and NVLink state, and where it sits in its machine.

`FACTS` names every figure. A figure that the driver does not give is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gemmscope.gpu.nvml import Gpu

Health = dict[str, int | str]

FACTS = {
    "ecc": "error correction of the memory: on or off",
    "corrected_errors": "corrected memory errors since the driver was loaded",
    "uncorrected_errors": "uncorrected memory errors since the driver was loaded",
    "corrected_errors_lifetime": "corrected memory errors over the lifetime of the GPU",
    "uncorrected_errors_lifetime": "uncorrected memory errors over the lifetime of the GPU",
    "remapped_rows_corrected": "memory rows remapped because of corrected errors",
    "remapped_rows_uncorrected": "memory rows remapped because of uncorrected errors",
    "remap_pending": "1: a memory row will be remapped at the next reset of the GPU",
    "remap_failed": "1: a memory row could not be remapped",
    "retired_pages": "memory pages that are no longer used (GPUs before Ampere)",
    "retirement_pending": "1: more memory pages will be retired at the next reset of the GPU",
    "pcie_generation": "PCIe generation of the link now (an idle link drops to 1)",
    "pcie_generation_max": "PCIe generation that the GPU and the slot support",
    "pcie_width": "PCIe lanes now",
    "pcie_width_max": "PCIe lanes that the GPU and the slot support",
    "pcie_replays": "PCIe packets that were resent",
    "nvlinks": "NVLinks that the GPU has",
    "nvlinks_active": "NVLinks that are active",
    "nvlink_replays": "NVLink packets that were resent, over all links",
    "nvlink_recoveries": "recoveries of NVLinks, over all links",
    "nvlink_crc_errors": "NVLink CRC errors, over all links",
    "persistence_mode": "the driver stays loaded without a client: on or off",
    "mig": "division of the GPU into instances (MIG): on or off",
    "numa_node": "NUMA node that the GPU is attached to",
    "cpu_cores": "CPU cores near the GPU, such as 0-55,112-167",
}
"""The names of all figures, and what each one is. Run files, `fleet` and `doctor --json` use these names."""


def health_facts(gpu: Gpu) -> Health:
    """All figures that the driver gives. PCIe generation and width are those of this moment: ask under load."""
    recent, lifetime = gpu.ecc_errors(lifetime=False), gpu.ecc_errors(lifetime=True)
    rows, pages, pcie, nvlinks = gpu.remapped_rows(), gpu.retired_pages(), gpu.pcie_link(), gpu.nvlinks()
    values: dict[str, int | str | None] = {
        "ecc": _on_off(gpu.ecc_mode()),
        "corrected_errors": recent.corrected,
        "uncorrected_errors": recent.uncorrected,
        "corrected_errors_lifetime": lifetime.corrected,
        "uncorrected_errors_lifetime": lifetime.uncorrected,
        "remapped_rows_corrected": rows.corrected if rows else None,
        "remapped_rows_uncorrected": rows.uncorrected if rows else None,
        "remap_pending": int(rows.pending) if rows else None,
        "remap_failed": int(rows.failed) if rows else None,
        "retired_pages": pages[0] if pages else None,
        "retirement_pending": int(pages[1]) if pages and pages[1] is not None else None,
        "pcie_generation": pcie.generation,
        "pcie_generation_max": pcie.max_generation,
        "pcie_width": pcie.width,
        "pcie_width_max": pcie.max_width,
        "pcie_replays": gpu.pcie_replays(),
        "nvlinks": nvlinks.total if nvlinks else None,
        "nvlinks_active": nvlinks.active if nvlinks else None,
        "nvlink_replays": nvlinks.replays if nvlinks else None,
        "nvlink_recoveries": nvlinks.recoveries if nvlinks else None,
        "nvlink_crc_errors": nvlinks.crc_errors if nvlinks else None,
        "persistence_mode": _on_off(gpu.persistence_mode()),
        "mig": _on_off(gpu.mig_mode()),
        "numa_node": gpu.numa_node(),
        "cpu_cores": ranges(gpu.cpu_cores()) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


class HealthProblem(NamedTuple):
    """A problem of a GPU, in a short phrase, and what to do about it."""

    text: str
    remedy: str


def health_problems(health: Mapping[str, int | str], *, under_load: bool) -> list[HealthProblem]:
    """The problems of a GPU, the worst first. `under_load`: the figures were read while it computed; an idle PCIe link may be
    slower.

    >>> health_problems({"uncorrected_errors": 2, "pcie_width": 8, "pcie_width_max": 16}, under_load=False)[1].text
    'PCIe x8 instead of x16'
    """
    known = {name: value for name, value in health.items() if isinstance(value, int)}
    problems = []
    if errors := known.get("uncorrected_errors"):
        problems.append((f"{errors} uncorrected memory error{'s' * (errors != 1)} since the driver was loaded", "reset the GPU"))
    if known.get("remap_failed"):
        problems.append(("a faulty memory row could not be remapped", "replace the GPU"))
    if known.get("remap_pending"):
        problems.append(("a faulty memory row is pending remapping", "reset the GPU"))
    if known.get("retirement_pending"):
        problems.append(("faulty memory pages are pending retirement", "reset the GPU"))
    width, widest = known.get("pcie_width"), known.get("pcie_width_max")
    if width and widest and width < widest:
        problems.append((f"PCIe x{width} instead of x{widest}", "check its slot and riser"))
    generation, latest = known.get("pcie_generation"), known.get("pcie_generation_max")
    if under_load and generation and latest and generation < latest:
        problems.append((f"PCIe generation {generation} instead of {latest}", "check its slot, riser and BIOS settings"))
    active, links = known.get("nvlinks_active"), known.get("nvlinks")
    if active and links and active < links:  # none is active where no bridge or switch is attached
        problems.append((f"{active} of {links} NVLinks are active", "nvidia-smi nvlink --status shows which are not"))
    return [HealthProblem(*problem) for problem in problems]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as the ranges that `taskset` and /sys use.

    >>> ranges([0, 1, 2, 8, 10, 11]), ranges([])
    ('0-2,8,10-11', '')
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _on_off(state: bool | None) -> str | None:
    return None if state is None else "on" if state else "off"
