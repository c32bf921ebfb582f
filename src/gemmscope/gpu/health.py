"""The health of a GPU: memory errors, remapped memory, PCIe and NVLink state, and where it sits in its machine.

`health.toml` names every figure, and the question that the driver answers. A figure that the driver does not give is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from gemmscope.gpu.nvml import Gpu
from gemmscope.toml import load_data

Health = dict[str, int | str]


@cache
def health_figures() -> Mapping[str, dict[str, Any]]:
    """The table of `health.toml`."""
    return load_data("gemmscope.gpu", "health.toml")


def health_facts(gpu: Gpu) -> Health:
    """All figures that the driver gives. PCIe generation and width are those of this moment: ask under load."""
    links, (pages, pending) = gpu.nvlinks(), gpu.retired_pages()
    computed = {
        "retired_pages": pages,
        "retirement_pending": pending,
        "nvlinks": links or None,
        "nvlinks_active": gpu.active_nvlinks(links),
        "numa_node": gpu.numa_node(),
        "cpu_cores": ranges(gpu.cpu_cores()) or None,
    }
    values = {name: computed[name] if name in computed else _ask(gpu, figure, links) for name, figure in health_figures().items()}
    return {name: value for name, value in values.items() if value is not None}


def _ask(gpu: Gpu, figure: Mapping[str, Any], links: int) -> int | str | None:
    """What the driver answers to the question of one figure."""
    if "counters" in figure:
        sums = (gpu.over_nvlinks(counter, links) for counter in figure["counters"])
        return next((total for total in sums if total is not None), None)
    answer = gpu.query(figure["query"], *figure.get("with", ()))
    if answer is None:
        return None
    value = int(answer[figure["item"]] if "item" in figure else answer)
    return value if "on_off" not in figure else "on" if value else "off"


class HealthProblem(NamedTuple):
    """A problem of a GPU, in a short phrase, and what to do about it."""

    text: str
    remedy: str


FLAGS = (
    ("remap_failed", "a faulty memory row could not be remapped", "replace the GPU"),
    ("remap_pending", "a faulty memory row is pending remapping", "reset the GPU"),
    ("retirement_pending", "faulty memory pages are pending retirement", "reset the GPU"),
)
LINKS = (
    ("pcie_width", "pcie_width_max", "PCIe x{} instead of x{}", "check its slot and riser"),
    ("pcie_generation", "pcie_generation_max", "PCIe generation {} instead of {}", "check its slot, riser and BIOS settings"),
    ("nvlinks_active", "nvlinks", "{} of {} NVLinks are active", "nvidia-smi nvlink --status shows which are not"),
)
"""What should be as much as the second figure. No NVLink is active where no bridge or switch is attached."""


def health_problems(health: Mapping[str, int | str], *, under_load: bool) -> list[HealthProblem]:
    """The problems of a GPU, the worst first. `under_load`: the figures were read while it computed; an idle PCIe link may be
    slower.

    >>> health_problems({"uncorrected_errors": 2, "pcie_width": 8, "pcie_width_max": 16}, under_load=False)[1].text
    'PCIe x8 instead of x16'
    """
    known = {name: value for name, value in health.items() if isinstance(value, int)}
    problems: list[tuple[str, str]] = []
    if errors := known.get("uncorrected_errors"):
        problems.append((f"{errors} uncorrected memory error{'s' * (errors != 1)} since the driver was loaded", "reset the GPU"))
    problems += [(text, remedy) for name, text, remedy in FLAGS if known.get(name)]
    for name, most, text, remedy in LINKS:
        if 0 < known.get(name, 0) < known.get(most, 0) and (under_load or name != "pcie_generation"):
            problems.append((text.format(known[name], known[most]), remedy))
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
