"""Which process of a job this one is, where a launcher started several: srun, torchrun, mpirun, or an indexed Kubernetes Job.

Each process then measures the GPU that its rank owns, and writes its own file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gemmscope.errors import UserError, option
from gemmscope.gpu.environment import Environment, GpuFacts
from gemmscope.gpu.visible import visible_gpus
from gemmscope.units import counted


class _Launcher(NamedTuple):
    """The variables that a launcher sets. Without those in `needed`, the process was not started by it."""

    name: str
    rank: str
    world: tuple[str, ...]
    local_rank: str = ""
    local_world: str = ""
    needed: tuple[str, ...] = ()


LAUNCHERS = (
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE", needed=("LOCAL_RANK",)),
    _Launcher(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        needed=("SLURM_STEP_ID",),  # the batch script itself has a rank, too, but is not a step
    ),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("RANK and WORLD_SIZE", "RANK", ("WORLD_SIZE",), needed=("WORLD_SIZE",)),  # PyTorchJob of Kubeflow
    _Launcher("an indexed Kubernetes Job", "JOB_COMPLETION_INDEX", ("WORLD_SIZE",)),
)
"""The innermost first: torchrun may be started by srun, and sets its own variables."""


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
    process = next(filter(None, (_launched_by(launcher, given) for launcher in LAUNCHERS)), None)
    if process is None or process.world == 1:
        return None
    if process.world is not None and process.rank >= process.world:
        raise UserError(f"{process.by} gives this process rank {process.rank} of {process.world}", "ranks count from 0")
    return process


def _launched_by(launcher: _Launcher, variables: Mapping[str, str]) -> Launched | None:
    numbers = {name: int(text) for name, text in variables.items() if text.isascii() and text.isdigit()}
    rank = numbers.get(launcher.rank)
    if rank is None or not all(name in numbers for name in launcher.needed):
        return None
    return Launched(
        by=launcher.name,
        rank=rank,
        world=next((numbers[name] for name in launcher.world if numbers.get(name)), None),
        local_rank=numbers.get(launcher.local_rank),
        local_world=numbers.get(launcher.local_world),
    )


def own_gpu(process: Launched, machine: Environment) -> GpuFacts:
    """The GPU that this process measures: the only one that CUDA_VISIBLE_DEVICES shows it, else the one whose place in the list
    of GPUs is its local rank."""
    visible = visible_gpus(machine)
    if not visible:
        hidden = f" (CUDA_VISIBLE_DEVICES is {machine.visible_devices!r})" if machine.gpus else ""
        raise UserError(
            f"there is no NVIDIA GPU on {machine.node} to measure on{hidden}",
            f"{option('device', 'cpu')} tries out the command, but does not show how fast a GPU is",
        )
    if len(visible) == 1 and machine.visible_devices is not None:
        return visible[0]
    local = process.local_rank
    if local is None:
        if len(visible) == 1:
            return visible[0]
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
