"""Hostile inputs for every reader and command: a value or a `UserError`, no control character, no hang, no memory explosion.

The same inputs each time, some dozens for each target; `benchmarks/fuzz.py` tries many more. The harness itself is tested on
targets that break each promise.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fuzz.harness import Summary, fuzz
from fuzz.targets import Target, collect
from fuzz.targets_commands import COMMANDS, INPUTS, OUTPUTS, VALUES, options_of_command
from fuzz.targets_configs import READER_INPUTS
from fuzz.targets_runs import EVERY, OF_KIND
from gemmscope.errors import UserError
from gemmscope.model.readers import READERS
from gemmscope.results.read import KINDS
from support.processes import wait_until
from support.results import RESULTS

TARGETS = collect()


class Server:
    """A process without pytest and its threads, which can be forked safely. Started when it is needed."""

    process: subprocess.Popen[bytes] | None = None

    def fuzz(self, target: Target) -> Summary:
        if self.process is None or self.process.poll() is not None:
            tests = str(Path(__file__).parent.parent)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
            command = [sys.executable, "-c", "from fuzz.harness import serve; serve()"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{target.name} {target.in_suite}\n".encode())
        self.process.stdin.flush()
        try:
            summary: Summary = pickle.load(self.process.stdout)
        except EOFError:
            pytest.fail(f"{target.name}: its inputs could not be drawn in time (exit code {self.process.wait()})")
        return summary

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate(timeout=300)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of processes as Linux has them")
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs(server: Server, name: str) -> None:
    summary = server.fuzz(TARGETS[name])
    assert not summary.defects, "\n\n".join(map(str, summary.defects[:5]))
    assert summary.inputs > 0
    assert summary.values + summary.user_errors == summary.inputs


def test_whatever_reads_files_has_a_strategy() -> None:
    """Who adds a format of models, a kind of result, or an option that takes a file, adds a strategy."""
    assert {reader.__name__.rpartition(".")[2] for reader in READERS} == set(READER_INPUTS)
    assert set(OF_KIND) == set(KINDS)
    assert {*EVERY} <= {*RESULTS}
    options = {(command, name): declared for command in COMMANDS for name, declared in options_of_command(command).items()}
    files = {key for key, declared in options.items() if key[1] not in OUTPUTS and declared.metavar in INPUTS}
    unknown = {
        (*key, declared.metavar)
        for key, declared in options.items()
        if key not in files and key[1] not in OUTPUTS and declared.metavar not in VALUES and not declared.choices
    }
    assert unknown == set(), "give their files a strategy in INPUTS, or list how their values are written in VALUES"
    assert {name for _, name in files} >= {
        "config",
        "module",
        "mix",
        "runs",
        "gemms",
        "recording",
        "checkpoint",
        "traces",
        "against",
    }
    assert {declared.metavar for declared in options.values()} >= {*INPUTS}


# --- the harness itself ------------------------------------------------------------------------------------------------------


def run_target(run: Callable[[int, Path], str], inputs: int = 3, time_limit_s: float = 10.0) -> Summary:
    return fuzz(Target("made", st.integers(0, 100), run), inputs, seed_number=1, time_limit_s=time_limit_s)


def problems(summary: Summary) -> list[str]:
    return [defect.problem for defect in summary.defects]


def refuse(value: int, folder: Path) -> str:
    raise UserError("no", "yes")


def explode(value: int, folder: Path) -> str:
    return str(len(bytearray(2**31)))


def test_values_and_user_errors_are_counted() -> None:
    assert (run_target(lambda value, folder: "fine\n").values, run_target(refuse).user_errors) == (3, 3)


def test_exceptions_exits_and_characters_are_defects() -> None:
    assert all(
        "ZeroDivisionError at test_fuzz.py" in problem for problem in problems(run_target(lambda value, folder: str(1 // 0)))
    )
    assert problems(run_target(lambda value, folder: sys.exit(130), 1)) == ["exit code 130"]
    assert run_target(lambda value, folder: sys.exit(2)).user_errors == 3
    for text, kind in (
        ("\x1b[2J", "control"),
        ("\x9b", "control"),
        ("\u202e", "override"),
        ("\ud800", "surrogate"),
        ("\r", "control"),
    ):
        assert kind in problems(run_target(lambda value, folder, text=text: text, 1))[0]  # type: ignore[misc]


def test_a_hang_a_crash_and_a_memory_explosion_are_blamed_on_their_input() -> None:
    hang = run_target(lambda value, folder: time.sleep(60) or "", 2, time_limit_s=0.3)
    assert problems(hang) == ["it took longer than 0.3 s"] * 2
    assert "test_fuzz.py" in hang.defects[0].detail  # where it hangs
    crash = run_target(lambda value, folder: os.abort(), 2)  # type: ignore[arg-type, return-value]
    assert problems(crash) == ["the process died of SIGABRT"] * 2
    assert all("MemoryError" in problem for problem in problems(run_target(explode)))


def test_nothing_is_left() -> None:
    seconds = f"{10**6 + os.getpid()}"

    def start(value: int, folder: Path) -> str:
        (folder / "file").touch()
        subprocess.Popen(["sleep", seconds])
        return ""

    run_target(start, 1)
    own = f"gemmscope-fuzz-{os.getpid()}-*"  # other processes of the suite fuzz at the same time
    assert list(Path(tempfile.gettempdir()).glob(own)) == []
    assert wait_until(lambda: f"sleep\0{seconds}\0".encode() not in running_commands())


def running_commands() -> list[bytes]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes())
    return lines
