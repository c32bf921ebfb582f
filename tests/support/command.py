"""The command line as people type it: a fixture that runs a line and hands back exit code and output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gemmscope.cli.main import main
from gemmscope.signals import raised


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[[str], Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(line: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gemmscope", *line.split()])
        with pytest.raises(SystemExit) as ended, raised():
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call
