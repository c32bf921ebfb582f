"""What chips can do on paper: `specs.toml` as objects, and the names that people type for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from gemmscope.errors import UserError, shown
from gemmscope.toml import load_data


@dataclass(frozen=True)
class GpuSpec:
    """One chip. Rates are dense TFLOP/s by format (bf16, fp8, fp4); bandwidth is TB/s; the rest is in the unit of its name."""

    name: str
    device: str
    title: str
    capability: tuple[int, int]
    sms: int
    clock_mhz: float
    l2_mb: float
    memory_gb: float
    bandwidth_tbps: float
    power_w: float
    nvlink_gbps: float
    tflops: Mapping[str, float]
    source: str
    disagreements: str = ""

    @property
    def architecture(self) -> str:
        """The compute capability as one word.

        >>> gpu("b300").architecture
        '10.3'
        """
        return f"{self.capability[0]}.{self.capability[1]}"


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """All chips by the name that is typed."""
    made = {}
    for name, facts in load_data("gemmscope.gpu", "specs.toml").items():
        plain = {key: value for key, value in facts.items() if key not in ("capability", "measured")}
        major, minor = facts["capability"].split(".")
        made[name] = GpuSpec(name=name, capability=(int(major), int(minor)), **plain)
    return made


def gpu(name: str) -> GpuSpec:
    """The chip of that name, however it is spelled.

    >>> gpu("B200").sms, gpu("rtx_pro_6000").name
    (148, 'rtx-pro-6000')
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    if wanted not in gpus():
        raise UserError(
            f"there is no GPU {shown(name)} in the tables", f"known, nearest name first: {', '.join(by_likeness(wanted))}"
        )
    return gpus()[wanted]


def spec_of(device: str) -> GpuSpec | None:
    """The chip that the driver, or a trace, names so; None if it is in no table.

    >>> [found.name for each in ("NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3") if (found := spec_of(each))]
    ['gb200', 'h200-nvl', 'h100']
    >>> spec_of("NVIDIA H100 PCIe")
    """
    return next((spec for spec in gpus().values() if re.search(spec.device, device)), None)


def by_likeness(name: str) -> list[str]:
    """All names, the one most like `name` first.

    >>> by_likeness("b3000")[0], by_likeness("rtx5090")[0]
    ('b300', 'rtx-5090')
    """
    return sorted(gpus(), key=lambda known: -difflib.SequenceMatcher(None, name, known).ratio())
