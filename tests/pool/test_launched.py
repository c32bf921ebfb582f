"""Processes that a launcher started: their rank, their GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmscope.errors import UserError
from gemmscope.gpu.environment import Environment
from gemmscope.pool.gpus import Launched, launched, own_gpu
from support.machines import NOTHING, machine

BATCH = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""What a batch script has before it calls srun."""
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (STEP, Launched("srun", 11, 16, 3)),
        (TORCHRUN, Launched("torchrun", 5, 8, 1, 4)),
        (STEP | TORCHRUN, Launched("torchrun", 5, 8, 1, 4)),
        (OPEN_MPI, Launched("mpirun", 2, 4, 0, 2)),
        (HYDRA, Launched("mpiexec", 3, 4, 1, 2)),
        (STEP | {"PMI_RANK": "11", "PMI_SIZE": "16"}, Launched("srun", 11, 16, 3)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launched("RANK and WORLD_SIZE", 1, 4)),
        ({"JOB_COMPLETION_INDEX": "7"}, Launched("an indexed Kubernetes Job", 7, None)),
        ({"JOB_COMPLETION_INDEX": "7", "WORLD_SIZE": "9"}, Launched("an indexed Kubernetes Job", 7, 9)),
    ],
)
def test_launchers(variables: dict[str, str], expected: Launched) -> None:
    assert launched(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"RANK": "0"},
        {"RANK": "first", "WORLD_SIZE": "8", "LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "²", "SLURM_NTASKS": "4"},
        {"ANYTHING": "9" * 5000},  # more digits than Python converts
        {"RANK": "9" * 5000, "WORLD_SIZE": "8", "LOCAL_RANK": "0"},
    ],
)
def test_a_process_by_itself(variables: dict[str, str]) -> None:
    assert launched(variables) is None


def test_the_environment_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched() == Launched("torchrun", 5, 8, 1, 4)


def test_a_rank_beyond_the_last() -> None:
    with pytest.raises(UserError, match="torchrun gives this process rank 8 of 8"):
        launched({**TORCHRUN, "RANK": "8"})


def node(gpus: int, visible: str | None = None) -> Environment:
    one = machine(visible=visible)
    return replace(one, node="node03", gpus=tuple(replace(one.gpus[0], index=i, uuid=f"GPU-{i}") for i in range(gpus)))


@pytest.mark.parametrize(
    ("process", "there", "index"),
    [
        (Launched("srun", 11, 16, 3), node(8), 3),
        (Launched("srun", 11, 16, 3), node(8, "5"), 5),  # srun --gpus-per-task=1
        (Launched("srun", 11, 16, 3), node(8, "GPU-6"), 6),
        (Launched("srun", 11, 16, 3), node(1, "0"), 0),  # other GPUs are hidden from the driver, too
        (Launched("torchrun", 5, 8, 1, 4), node(8, "4,5,6,7"), 5),
        (Launched("an indexed Kubernetes Job", 7, None), node(1), 0),
        (Launched("torchrun", 1, 8, 1, 2), node(8, "3,-1"), 3),
        (Launched("srun", 0, 2, 0), node(1), 0),  # a node of a job may have one
    ],
)
def test_own_gpu(process: Launched, there: Environment, index: int) -> None:
    assert own_gpu(process, there).index == index


@pytest.mark.parametrize(
    ("process", "there", "message", "hint"),
    [
        (
            Launched("srun", 3, 4, 3),
            node(2),
            "srun started at least 4 processes on node03, .* only 2 GPUs",
            "one process per GPU",
        ),
        (
            Launched("torchrun", 0, 8, 0, 8),
            node(1),
            "torchrun started at least 8 .* only 1 GPU\\n",
            "one process",
        ),
        (Launched("an indexed Kubernetes Job", 0, 4), node(8), "does not say which of the 8 GPUs of node03", "set LOCAL_RANK"),
        (Launched("srun", 0, 4, 0), node(8, ""), "no NVIDIA GPU on node03 .*CUDA_VISIBLE_DEVICES is ''", "cpu"),
        (Launched("srun", 0, 4, 0), NOTHING, "no NVIDIA GPU on", "cpu"),
    ],
)
def test_no_gpu_of_its_own(process: Launched, there: Environment, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as failure:
        own_gpu(process, there)
    assert hint in failure.value.hint
