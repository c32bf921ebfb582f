"""`gemmscope doctor` on machines that have little."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest

from gemmscope.commands.doctor import Diagnosis
from gemmscope.gpu import environment
from gemmscope.gpu.health import Health
from gemmscope.recipe.recipes import recipes
from support.command import Run, run
from support.machines import NOTHING, machine
from support.nvml_driver import Driver

__all__ = ["run"]  # the fixture


def test_doctor_without_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.commands.doctor.environment", lambda: NOTHING)
    outcome = run("doctor")
    assert outcome.code == 0
    assert "driver: no NVIDIA driver found" in outcome.out
    assert outcome.out.startswith("This machine cannot measure on a GPU: it has no NVIDIA GPU, or no driver for it.")
    assert "cpu: torch is not installed" in outcome.out
    assert "On a machine with a GPU: " in outcome.out


def test_doctor_knows_what_a_gpu_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed framework, the answers come from the table of architectures."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.commands.doctor.environment", lambda: machine(processes=(4711,)))
    out = run("doctor").out
    assert out.startswith("This machine cannot measure on a GPU: torch is not installed.")
    assert re.search(r"transformer_engine, MXFP8: MXFP8 .* need compute capability 10.0", out)
    assert re.search(r"transformer_engine, .*FP8Block: transformer_engine is not installed", out)
    assert "in use by other processes (4711)" in out
    assert json.loads(run("doctor --json -").out)["environment"]["gpus"][0]["name"] == "NVIDIA H200"


class Leaving:
    """A GPU that reports these utilizations and processes, one after another."""

    def __init__(self, utilization: list[int], processes: list[list[int]]) -> None:
        self._utilization, self._processes = utilization, processes

    def utilization(self) -> int:
        return self._utilization.pop(0)

    def compute_processes(self) -> list[int]:
        return self._processes.pop(0)

    def uuid(self) -> str:
        return "GPU-1"


def test_what_has_just_ended_does_not_count_as_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after another run, its process may still be on the GPU, so the GPU is checked again."""
    monkeypatch.setattr("gemmscope.gpu.environment.RETRY_S", 0.0)
    leaving = Leaving([97, 40, 0], [[4711], [4711], []])
    busy = Leaving([5] * 9, [[4712]] * 9)
    assert environment._uses([leaving]) == [(0, ())]  # type: ignore[list-item]
    assert environment._uses([busy]) == [(5, (4712,))]  # type: ignore[list-item]


def test_words_that_are_no_text_do_no_harm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework may print anything before it crashes."""
    says = "import sys; sys.stderr.buffer.write(b'caf\\xe9 closed\\n'); sys.exit(3)"
    monkeypatch.setattr("gemmscope.process.worker_command", lambda *_: [sys.executable, "-c", says])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setattr("gemmscope.process.worker_environment", dict)
    outcome = run("doctor --json -")
    assert "exit code 3: caf\ufffd closed" in json.loads(outcome.out)["backends"]["torch"]["broken"]


HEALTHY: Health = {"uncorrected_errors": 0, "pcie_width": 16, "pcie_width_max": 16, "nvlinks": 18, "nvlinks_active": 18}


def problems(*healths: Health) -> list[str]:
    one = machine()
    gpus = tuple(replace(one.gpus[0], index=index) for index in range(len(healths)))
    return Diagnosis(replace(one, gpus=gpus), {"cpu": {}}, dict(enumerate(healths))).problems()


def test_the_answer_names_what_can_be_measured() -> None:
    """As on an H200: one sentence, then a table with a row per recipe, and each reason once."""
    missing = "compute capability 10.0 or higher required"
    works = {name: missing if name in ("MXFP8", "NVFP4") else "" for name in recipes()}
    diagnosis = Diagnosis(
        machine(), {"transformer_engine": {"why_not": works}, "torchao": {"broken": "torchao is not installed"}}
    )
    assert diagnosis.answer() == [
        "This machine can measure BF16, FP8Current, FP8Delayed and FP8Block with transformer_engine.",
        "No problems found.",
    ]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in diagnosis.table().rows}
    assert (rows["FP8Block"][:2], rows["MXFP8"][:2], rows["FP8Rowwise"][:2]) == (["yes", "-"], ["no", "no"], ["-", "no"])
    assert f"transformer_engine, MXFP8 and NVFP4: {missing}" in diagnosis.why_not()
    assert "torchao: torchao is not installed" in diagnosis.why_not()


def test_doctor_names_what_is_wrong_with_a_gpu() -> None:
    assert problems(HEALTHY, HEALTHY) == []
    sick: Health = {**HEALTHY, "uncorrected_errors": 2, "pcie_width": 8, "nvlinks_active": 17}
    assert problems(HEALTHY, sick) == [
        "GPU 1: 2 uncorrected memory errors since the driver was loaded (reset the GPU)",
        "GPU 1: PCIe x8 instead of x16 (check its slot and riser)",
        "GPU 1: 17 of 18 NVLinks are active (nvidia-smi nvlink --status shows which are not)",
    ]


def test_a_machine_in_which_all_gpus_have_fewer_links_is_built_so() -> None:
    fewer: Health = {**HEALTHY, "nvlinks_active": 12}
    assert problems(fewer, fewer) == []
    assert len(problems(fewer)) == 1


def test_doctor_asks_the_driver(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.commands.doctor.environment", machine)
    Driver(rows=(0, 2, 1, 0)).install(monkeypatch)
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    assert "GPU 0: a faulty memory row is pending remapping (reset the GPU)" in run("doctor").out
    assert json.loads(run("doctor --json -").out)["health"]["0"]["remap_pending"] == 1
