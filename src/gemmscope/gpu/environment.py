"""The machine in a few facts, gathered without importing anything heavy: it is stamped into every result."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from gemmscope.gpu.nvml import Gpu, Reading, open_nvml

# What decides a result, under the names that the package index knows them by.
PACKAGES = (
    *("torch", "transformer_engine", "torchao", "transformers", "triton"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


LOOKS, LOOK_S = 4, 0.3  # how often, and how long after another, a busy GPU is looked at again


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


@dataclass(frozen=True)
class Environment:
    """The machine, its software, its GPUs. `driver` None: no NVIDIA driver was found."""

    system: str
    python: str
    cpus: int
    packages: dict[str, str]
    driver: str | None
    gpus: tuple[GpuFacts, ...]
    visible_devices: str | None


def environment() -> Environment:
    """Look at this machine."""
    nvml = open_nvml()
    found = [gpu for index in range(nvml.count()) if (gpu := nvml.gpu(index))] if nvml else []
    return Environment(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
        packages=installed(PACKAGES),
        driver=nvml.driver() if nvml else None,
        gpus=tuple(_facts(index, gpu, *use) for index, (gpu, use) in enumerate(zip(found, _in_use(found), strict=True))),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those packages that are installed, read from their metadata.

    >>> installed(("no-such-package",))
    {}
    """
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _facts(index: int, gpu: Gpu, utilization: int | None, processes: tuple[int, ...]) -> GpuFacts:
    memory = gpu.memory_bytes()
    return GpuFacts(
        index=index,
        name=gpu.name(),
        capability=gpu.compute_capability(),
        memory_bytes=memory[0] if memory else None,
        memory_used_bytes=memory[1] if memory else None,
        power_limit_w=gpu.power_limit_w(),
        max_sm_mhz=gpu.max_sm_mhz(),
        utilization=utilization,
        processes=processes,
        now=gpu.read(),
        uuid=gpu.uuid(),
    )


def _in_use(gpus: Sequence[Gpu]) -> list[tuple[int | None, tuple[int, ...]]]:
    """How busy each is, and with which processes. What has just ended is given a moment: the driver tells how busy a GPU was in
    the last second, and a process that was told to end needs one to leave it."""
    found = [_use(gpu) for gpu in gpus]
    for _ in range(LOOKS):
        if not any(utilization or processes for utilization, processes in found):
            break
        time.sleep(LOOK_S)
        found = [_calmer(before, _use(gpu)) for before, gpu in zip(found, gpus, strict=True)]
    return found


def _use(gpu: Gpu) -> tuple[int | None, tuple[int, ...]]:
    return gpu.utilization(), tuple(pid for pid in gpu.compute_processes() if pid != os.getpid())


def _calmer(
    before: tuple[int | None, tuple[int, ...]], now: tuple[int | None, tuple[int, ...]]
) -> tuple[int | None, tuple[int, ...]]:
    """The lowest utilization that was seen, and the processes of now."""
    seen = [each for each in (before[0], now[0]) if each is not None]
    return min(seen, default=None), now[1]


def python_command() -> str:
    """How to install into this very environment."""
    return f"{sys.executable} -m pip install"
