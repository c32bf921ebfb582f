"""Where measurements run: GPUs of this machine, by `--gpus`, or of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gemmscope.errors import UserError, option, shown
from gemmscope.gpu.environment import Environment, GpuFacts, environment
from gemmscope.gpu.nvml import open_nvml
from gemmscope.gpu.visible import visible_gpu, visible_gpus
from gemmscope.pool.cores import allowed_cores, divide_cores
from gemmscope.pool.launched import Launched, own_gpu
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.ray import RayPool
from gemmscope.pool.units import Pool
from gemmscope.units import counted

MOST_PLACES = 256  # on one machine
VISIBLE = "CUDA_VISIBLE_DEVICES"


def open_pool(
    *,
    gpus: str | None = None,
    ray: str | None = None,
    on_cpu: bool = False,
    share_gpu: bool = False,
) -> Pool:
    """The pool that was asked for, to be entered. `gpus`: of this machine ("all", "0,1,5"); None: the GPU that a single
    measurement would use. `ray`: the address of a Ray cluster. `on_cpu`: the CPU instead, as one place."""
    if ray is not None:
        if gpus is not None:
            problem = f"{option('gpus', gpus)} names GPUs of this machine, but {option('ray', ray)} uses those of a cluster"
            raise UserError(problem, "use only one of them")
        return RayPool(ray, cpu=on_cpu, share_gpu=share_gpu)
    if on_cpu:
        if gpus is not None:
            raise _no_gpus(gpus)
        return LocalPool([LocalPlace()])
    machine = environment()
    chosen = local_gpus(gpus, machine)
    return LocalPool(pinned(chosen), share_gpu=share_gpu)


def pinned(gpus: Sequence[GpuFacts]) -> list[LocalPlace]:
    """The GPUs as places, each with the CPU cores near it."""
    numbers = list(dict.fromkeys(gpu.index for gpu in gpus))
    cores = dict(zip(numbers, divide_cores([near_cores(number) for number in numbers], allowed_cores()), strict=True))
    return [LocalPlace(gpu.index, gpu.uuid or "", cores[gpu.index]) for gpu in gpus]


def near_cores(number: int) -> list[int]:
    """The CPU cores near a GPU of this machine; none where the driver does not say."""
    nvml = open_nvml()
    gpu = nvml.gpu(number) if nvml is not None else None
    return gpu.cpu_cores() if gpu is not None else []


def local_gpus(text: str | None, machine: Environment) -> list[GpuFacts]:
    """The GPUs of this machine that were named: "all", or numbers as nvidia-smi shows them, separated by commas; None for the one
    that a single measurement uses. A number may be repeated: its places take turns. With CUDA_VISIBLE_DEVICES, only the GPUs
    that it shows."""
    every = text is not None and text.strip().lower() == "all"
    numbers = _numbers(text) if text is not None and not every else []
    visible = visible_gpus(machine)
    if not visible:
        hidden = f" ({VISIBLE} is {machine.visible_devices!r})" if machine.gpus else ""
        raise UserError(
            f"there is no NVIDIA GPU here to measure on{hidden}",
            f"{option('device', 'cpu')} tries out the command, but does not show how fast a GPU is",
        )
    if text is None:
        gpu = visible_gpu(machine)
        return [gpu] if gpu is not None else visible[:1]
    if every:
        return visible
    by_number = {gpu.index: gpu for gpu in visible}
    for number in numbers:
        if number not in by_number:
            there = ", ".join(map(str, by_number))
            exists = number < len(machine.gpus)
            problem = f"is hidden by {VISIBLE}={machine.visible_devices}" if exists else "does not exist"
            raise UserError(
                f"{option('gpus', text)}: GPU {number} {problem}", f"{counted(len(visible), 'GPU')} can be used: {there}"
            )
    return [by_number[number] for number in numbers]


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise UserError(
            f"{option('gpus')} must be all, or the numbers of GPUs, got {shown(text)}", f"for example {option('gpus', '0,1,5')}"
        )
    if len(parts) > MOST_PLACES:
        raise UserError(f"{option('gpus')} names {len(parts)} GPUs, more than {MOST_PLACES}", f"use {option('gpus', 'all')}")
    return [int(part) for part in parts]


@contextmanager
def gpu_of_rank(rank: Launched, *, on_cpu: bool) -> Iterator[GpuFacts | None]:
    """Measure on the GPU that one of many processes owns, within this process and those that it starts; None: on the CPU."""
    if on_cpu:
        yield None
        return
    gpu = own_gpu(rank, environment())
    with _only(gpu):
        yield gpu


def _no_gpus(text: str) -> UserError:
    return UserError(f"{option('gpus', text)} names GPUs, but {option('device', 'cpu')} uses none", "use only one of them")


@contextmanager
def one_gpu(text: str | None, *, on_cpu: bool = False) -> Iterator[None]:
    """Measure on the one GPU that was named, within this process and those that it starts; None: do not restrict GPUs."""
    if text is None:
        yield
        return
    if on_cpu:
        raise _no_gpus(text)
    chosen = local_gpus(text, environment())
    if len(chosen) > 1:
        raise UserError(
            f"{option('gpus', text)} names {len(chosen)} GPUs, but a single measurement uses one",
            f"use gemmscope fleet to measure every GPU, or {option('sweep')} to spread points over them",
        )
    with _only(chosen[0]):
        yield


@contextmanager
def _only(gpu: GpuFacts) -> Iterator[None]:
    """Hide all other GPUs."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = gpu.uuid or str(gpu.index)
    try:
        yield
    finally:
        del os.environ[VISIBLE]
        if before is not None:
            os.environ[VISIBLE] = before
