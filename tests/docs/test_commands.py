"""Every command in README and documentation runs, or is skipped with its reason and has options that exist."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import typer
from rich.cells import cell_len

from gemmscope.cli.main import app, main
from gemmscope.signals import raised
from support.doc_commands import commands, put_files, reason_not_to_run
from support.workers import forked_workers

__all__ = ["forked_workers"]  # the fixture

RUN = [command for command in commands() if not reason_not_to_run(command)]
PARSED = [command for command in commands() if reason_not_to_run(command) == "needs a GPU"]
# Exit codes that a documented command may end with: without a GPU, doctor and compare still answer.
FINE = {"compare": (0, 4)}
LISTS = ("--detail", "--list-presets", "--help", "-h", "-", "--version", "trace-me")  # longer on purpose, or for programs
WIDEST, MOST_LINES, MOST_LINES_OF_SEVERAL = 100, 30, 38


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documented")
    put_files(path)
    return path


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("command", RUN)
def test_documented_command_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(command)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("COLUMNS", str(WIDEST))
    with pytest.raises(SystemExit) as ended, raised():
        main()
    captured = capsys.readouterr()
    assert (ended.value.code or 0) in FINE.get(arguments[1], (0,)), captured.err
    assert captured.out or captured.err
    if not any(word in LISTS for word in arguments):
        lines = captured.out.splitlines()
        several = arguments[1] == "forecast" and "," in arguments[arguments.index("--gpu") + 1]
        longer = several or arguments[1:] == ["models"]  # the names of all models
        assert len(lines) <= (MOST_LINES_OF_SEVERAL if longer else MOST_LINES)
        assert max(map(cell_len, lines), default=0) <= WIDEST


@pytest.mark.parametrize("command", PARSED)
def test_options_of_commands_that_need_a_gpu_exist(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    group = typer.main.get_command(app)
    subcommand = group.get_command(None, name)  # type: ignore[attr-defined, arg-type]
    context = subcommand.make_context(name, arguments)
    assert context.command.name == name


def test_commands_are_found() -> None:
    """Each of these pages shows commands. A change of a page's format must not hide them from the tests."""
    shown = set(commands().values())
    assert {"README.md", "docs/tutorial.md", "docs/commands.md", "docs/how-to/ci.md", "docs/index.md"} <= shown
    assert len(RUN) > 20
    assert len(PARSED) > 5


def test_reasons() -> None:
    assert reason_not_to_run("gemmscope bench --shapes 4096") == "needs a GPU"
    assert not reason_not_to_run("gemmscope shapes --preset gpt2")
