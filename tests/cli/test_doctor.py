"""`gemmscope doctor` on machines that have little."""

from __future__ import annotations

import json
import re
import sys

import pytest

from support.machines import NOTHING, machine
from test_cli import Run, run

__all__ = ["run"]  # the fixture


def test_doctor_without_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: NOTHING)
    outcome = run("doctor")
    assert outcome.code == 0
    assert "driver: no NVIDIA driver found" in outcome.out
    assert re.search(r"BF16 +cpu +no +torch is not installed", outcome.out)
    assert "to measure: " in outcome.out


def test_doctor_knows_what_a_gpu_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a framework to ask, the table of architectures answers."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: machine(processes=(4711,)))
    out = run("doctor").out
    assert re.search(r"MXFP8 +transformer_engine +no +MXFP8 products need compute capability 10.0", out)
    assert re.search(r"FP8Block +transformer_engine +no +transformer_engine is not installed", out)
    assert "in use by other processes (4711)" in out
    assert json.loads(run("doctor --json -").out)["environment"]["gpus"][0]["name"] == "NVIDIA H200"


def test_words_that_are_no_text_do_no_harm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework may print what it likes before it dies."""
    says = "import sys; sys.stderr.buffer.write(b'caf\\xe9 closed\\n'); sys.exit(3)"
    monkeypatch.setattr("gemmscope.process.worker_command", lambda *_: [sys.executable, "-c", says])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setattr("gemmscope.process.worker_environment", lambda: None)
    outcome = run("doctor --json -")
    assert "exit code 3: caf\ufffd closed" in json.loads(outcome.out)["backends"]["torch"]["broken"]
