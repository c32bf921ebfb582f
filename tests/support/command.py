"""The command line inside the test process: exit code, standard output and standard error of one command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from gemmscope.cli.main import main


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[[str], Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line, without the program's name."""

    def call(line: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gemmscope", *line.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


@cache
def made_by(line: str) -> str:
    """The JSON that a command writes in a process of its own."""
    command = [sys.executable, "-m", "gemmscope", *line.split(), "--json", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
