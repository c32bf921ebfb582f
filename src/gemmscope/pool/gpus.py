"""Where measurements run: GPUs of this machine, by `--gpus`, or of a cluster; and which GPU is that of this process, where a
launcher started several: srun, torchrun, mpirun, or an indexed Kubernetes Job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gemmscope.errors import UserError, option, shown
from gemmscope.gpu.environment import Environment, GpuFacts, environment
from gemmscope.gpu.nvml import open_nvml
from gemmscope.gpu.visible import some_gpus
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.pool import Pool
from gemmscope.pool.ray import RayPool
from gemmscope.toml import load_data
from gemmscope.units import counted

LONGEST = 10  # digits of the number of a process


@dataclass(frozen=True)
class Launched:
    """One of several processes of a job. None: the launcher does not say.

    `local_rank` counts the processes on this node, `world` those of the whole job.
    """

    by: str
    rank: int
    world: int | None
    local_rank: int | None = None
    local_world: int | None = None


def launched(variables: Mapping[str, str] | None = None) -> Launched | None:
    """How this process was started; None if it was not started by a launcher, or as the only process."""
    given = os.environ if variables is None else variables
    numbers = {name: int(text) for name, text in given.items() if text.isascii() and text.isdigit() and len(text) < LONGEST}
    launchers = load_data("gemmscope.pool", "launchers.toml")["launcher"]
    by = next((by for by in launchers if all(name in numbers for name in (by["rank"], *by["needed"]))), None)
    world = next((numbers[name] for name in by["world"] if numbers.get(name)), None) if by is not None else None
    if by is None or world == 1:
        return None
    if world is not None and numbers[by["rank"]] >= world:
        raise UserError(f"{by['name']} gives this process rank {numbers[by['rank']]} of {world}", "ranks count from 0")
    return Launched(by["name"], numbers[by["rank"]], world, numbers.get(by["local_rank"]), numbers.get(by["local_world"]))


def own_gpu(process: Launched, machine: Environment) -> GpuFacts:
    """The GPU that this process measures: the only one that CUDA_VISIBLE_DEVICES shows it, else the one whose place in the list
    of GPUs is its local rank."""
    visible = some_gpus(machine, f"on {machine.node}")
    local = process.local_rank
    if len(visible) == 1 and (machine.visible_devices is not None or local is None):
        return visible[0]
    if local is None:
        raise UserError(
            f"{process.by} does not say which of the {len(visible)} GPUs of {machine.node} this process should measure",
            f"add {option('gpus', 'all')} to measure all of them, or set LOCAL_RANK",
        )
    most = max(local + 1, process.local_world or 0)
    if most > len(visible):
        raise UserError(
            f"{process.by} started at least {most} processes on {machine.node}, but they see only {counted(len(visible), 'GPU')}",
            "start one process per GPU",
        )
    return visible[local]


TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def allowed_cores() -> frozenset[int]:
    """The CPU cores that this process may use; empty where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def thread_siblings(core: int) -> frozenset[int]:
    """The hardware threads of the same physical core."""
    with suppress(OSError, ValueError):
        return frozenset(parse_cores(Path(TOPOLOGY.format(core)).read_text()))
    return frozenset({core})


def parse_cores(text: str) -> list[int]:
    """A list of cores as Linux writes it.

    >>> parse_cores("0-2,64")
    [0, 1, 2, 64]
    """
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)]


def divide_cores(
    near: Sequence[Collection[int]],
    allowed: Collection[int],
    siblings: Callable[[int], Collection[int]] = thread_siblings,
) -> list[tuple[int, ...]]:
    """The cores of each GPU, from those near it (none: not known) and those that this process may use.

    GPUs that are near the same cores divide them: each gets neighbors, and both threads of a physical core go to one GPU. Where
    there are fewer physical cores than GPUs, they use all of them together.

    >>> divide_cores([{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}], range(6), lambda core: {core})
    [(0, 1), (2, 3), (4, 5)]
    """
    sets = [frozenset(cores) & frozenset(allowed) or frozenset(allowed) for cores in near]
    result: list[tuple[int, ...]] = [()] * len(sets)
    for group in set(sets):
        gpus = [index for index, cores in enumerate(sets) if cores == group]
        physical = sorted({tuple(sorted(frozenset(siblings(core)) & group | {core})) for core in group})
        for position, index in enumerate(gpus):
            begin, end = position * len(physical) // len(gpus), (position + 1) * len(physical) // len(gpus)
            own = physical[begin:end] if len(physical) >= len(gpus) else physical
            result[index] = tuple(sorted({core for threads in own for core in threads}))
    return result


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
    return LocalPool(pinned(local_gpus(gpus, environment())), share_gpu=share_gpu)


def pinned(gpus: Sequence[GpuFacts]) -> list[LocalPlace]:
    """The GPUs as places, each with the CPU cores near it."""
    cores = shares_of_cores(list(dict.fromkeys(gpu.index for gpu in gpus)))
    return [LocalPlace(gpu.index, gpu.uuid or "", cores[gpu.index]) for gpu in gpus]


def shares_of_cores(gpus: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The CPU cores of every GPU of this machine that is used, by its number: those near it, divided among them."""
    nvml = open_nvml()
    handles = [nvml.gpu(number) if nvml is not None else None for number in gpus]
    near = [handle.cpu_cores() if handle is not None else [] for handle in handles]
    return dict(zip(gpus, divide_cores(near, allowed_cores()), strict=True))


def local_gpus(text: str | None, machine: Environment) -> list[GpuFacts]:
    """The GPUs of this machine that were named: "all", or numbers as nvidia-smi shows them, separated by commas; None for the one
    that a single measurement uses. A number may be repeated: its places take turns. With CUDA_VISIBLE_DEVICES, only the GPUs
    that it shows."""
    every = text is not None and text.strip().lower() == "all"
    numbers = _numbers(text) if text is not None and not every else []
    visible = some_gpus(machine)
    if text is None:
        return visible[:1]
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
