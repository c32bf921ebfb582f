"""The GPUs of `specs.toml` as objects, and the names by which people choose one."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter

from gemmscope.errors import UserError, shown
from gemmscope.toml import complete, load_data


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. `tflops` are dense rates by format (bf16, fp8, fp4); the other fields carry their unit in their name.

    `sustained_tflops` are the rates that its power limit allows, where that is known to be far less; `usual_share` is what large
    GEMMs reach of `tflops` in training. `network`, `nvlink_domain` and `host_gbps` are those of its usual system,
    and `collectives_of` is the GPU whose measured collectives are taken.
    """

    name: str
    device: str
    title: str
    capability: Annotated[tuple[int, int], BeforeValidator(lambda text: text.split("."))]
    sms: int
    memory_gb: float
    memory_mib: int
    bandwidth_tbps: float
    tflops: Mapping[str, float]
    usual_share: float
    network: str
    nvlink_domain: int
    host_gbps: float
    collectives_of: str
    source: str
    disagreements: str = ""
    sustained_tflops: Mapping[str, float] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The compute capability as text.

        >>> gpu("b300").architecture
        '10.3'
        """
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def memory_bytes(self) -> float:
        """The memory as the driver reports it.

        >>> round(gpu("h100").memory_bytes / 1e9, 1)
        85.5
        """
        return float(self.memory_mib * 2**20)


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """All GPUs by name."""
    table, read = load_data("gemmscope.gpu", "specs.toml"), TypeAdapter(GpuSpec).validate_python
    own = {name: {"name": name, "collectives_of": facts.get("collectives_of", name)} for name, facts in table.items()}
    return {name: read(complete(GpuSpec, facts, **own[name])) for name, facts in table.items()}


def gpu(name: str) -> GpuSpec:
    """The GPU of that name; case, spaces, underscores and a leading "nvidia" do not matter.

    >>> gpu("B200").sms, gpu("rtx_pro_6000").name
    (148, 'rtx-pro-6000')
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    if wanted not in gpus():
        raise UserError(f"unknown GPU {shown(name)}", f"known GPUs, the closest name first: {', '.join(by_likeness(wanted))}")
    return gpus()[wanted]


def spec_of(device: str) -> GpuSpec | None:
    """The GPU that the driver, or a trace, gives this name; None if it is not in the table.

    >>> [spec.name for name in ("NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3") if (spec := spec_of(name))]
    ['gb200', 'h200-nvl', 'h100']
    >>> spec_of("NVIDIA H100 PCIe")
    """
    return next((spec for spec in gpus().values() if re.search(spec.device, device)), None)


def by_likeness(name: str) -> list[str]:
    """All names, the one most similar to `name` first.

    >>> by_likeness("b3000")[0], by_likeness("rtx5090")[0]
    ('b300', 'rtx-5090')
    """
    return sorted(gpus(), key=lambda known: -difflib.SequenceMatcher(None, name, known).ratio())
