"""The machine, its software and its GPUs, described without importing anything heavy. Every measured result holds this."""

import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gemmscope.gpu.nvml import Gpu, Reading, open_nvml

# The packages that a result depends on, by their names on PyPI.
PACKAGES = (
    *("torch", "transformer_engine", "torchao", "transformers", "triton"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)

RETRIES, RETRY_S = 4, 0.3  # how often, and after which pause, a busy GPU is checked again


Use = tuple[int | None, tuple[int, ...]]
"""How a GPU is used: its utilization in percent, and the ids of the processes on it, this one excluded."""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as its driver describes it."""

    index: int
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    power_limit_w: float | None
    max_sm_mhz: int | None
    utilization: int | None
    processes: tuple[int, ...]
    now: Reading
    uuid: str | None = None
    pci_bus: str | None = None


@dataclass(frozen=True)
class Environment:
    """The machine, its software and its GPUs. `driver` is None where there is no NVIDIA driver."""

    system: str
    python: str
    cpus: int
    packages: dict[str, str]
    driver: str | None
    gpus: tuple[GpuFacts, ...]
    visible_devices: str | None
    node: str = ""


def environment() -> Environment:
    """The environment of this process."""
    nvml = open_nvml()
    gpus = [gpu for index in range(nvml.count()) if (gpu := nvml.gpu(index))] if nvml else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Environment(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
        packages=installed(PACKAGES),
        driver=nvml.driver() if nvml else None,
        gpus=tuple(_facts(index, gpu, *use) for index, (gpu, use) in enumerate(zip(gpus, _uses(gpus, visible), strict=True))),
        visible_devices=visible,
        node=node_name(),
    )


def node_name() -> str:
    """The name of this machine: the one that Slurm uses; in a container the variable NODE_NAME, if it is set; the host name."""
    name = os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or socket.gethostname() or "localhost"
    return name.encode("utf-8", "replace").decode()  # bytes that are not UTF-8 become question marks


@cache
def cpu_name() -> str:
    """The product name of the CPU, as Linux reports it; else the architecture."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(filter(None, names), platform.machine())
    except OSError:
        return platform.machine()


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those packages that are installed, read from their metadata.

    >>> installed(("no-such-package",))
    {}
    """
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _facts(index: int, gpu: Gpu, utilization: int | None, processes: tuple[int, ...]) -> GpuFacts:
    memory, capability = gpu.query("MemoryInfo"), gpu.query("CudaComputeCapability")
    return GpuFacts(
        index=index,
        name=gpu.query("Name") or "unknown GPU",
        capability=(int(capability[0]), int(capability[1])) if capability is not None else None,
        memory_bytes=int(memory.total) if memory is not None else None,
        memory_used_bytes=int(memory.used) if memory is not None else None,
        power_limit_w=gpu.power_limit_w(),
        max_sm_mhz=gpu.max_sm_mhz(),
        utilization=utilization,
        processes=processes,
        now=gpu.read(),
        uuid=gpu.uuid(),
        pci_bus=gpu.pci_bus(),
    )


def _uses(gpus: Sequence[Gpu], visible: str | None = None) -> list[Use]:
    """Utilization and processes of each GPU.

    A busy GPU is checked again, because both figures lag behind: utilization covers about the last second, and a process that was
    just told to end takes a moment to leave the GPU. Where CUDA_VISIBLE_DEVICES (`visible`) is the UUID of one GPU, only that
    one matters: others may be measured at the same time.
    """
    uses = [_use(gpu) for gpu in gpus]
    matters = [gpu.uuid() == visible for gpu in gpus]
    for _ in range(RETRIES):
        if not any(any(use) for use, counts in zip(uses, matters, strict=True) if counts or not any(matters)):
            break
        time.sleep(RETRY_S)
        uses = [_lower(before, _use(gpu)) for before, gpu in zip(uses, gpus, strict=True)]
    return uses


def _use(gpu: Gpu) -> Use:
    return gpu.utilization(), tuple(pid for pid in gpu.compute_processes() if pid != os.getpid())


def _lower(before: Use, now: Use) -> Use:
    """The lower utilization of the two, and the latest processes."""
    known = [utilization for utilization, _ in (before, now) if utilization is not None]
    return min(known, default=None), now[1]


def python_command() -> str:
    """The command that installs packages into this environment."""
    return f"{sys.executable} -m pip install"
