"""Sweeps ended by a signal: they keep the computed points, exit with the documented code and leave no process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gemmscope
from gemmscope.forecast import sweep
from gemmscope.progress import Console, Reporter
from gemmscope.results.forecast import ForecastResult
from support.commands import forecast_sweep
from support.processes import MARKER, left_running

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 2}
MODEL = " ".join(f"--{name} {value}" for name, value in SIZES.items())
LARGE = f"{MODEL} --micro-batch-size 1 --gpu b300,h200 --sweep sequence_length=512:32768:512 --sweep gradient_accumulation=1:64:1"
SMALL = f"{MODEL} --micro-batch-size 1 --gpu b300 --sweep sequence_length=64:32000:64"
RAN_AS = """
import os, signal, sys
from contextlib import contextmanager
from gemmscope.progress import Console

@contextmanager
def counting(self, what, total):
    yield lambda done: {action}

Console.counting = counting
from gemmscope.__main__ import run
run()
"""
POINTS = "os.killpg(0, signal.{signal}) if done < 400 else None"


def interrupted(line: str, action: str, marker: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process group. `action` runs whenever points were computed."""
    command = [sys.executable, "-c", RAN_AS.format(action=action), "forecast", *line.split()]
    environment = {**os.environ, MARKER: marker}
    return subprocess.run(
        command, env=environment, start_new_session=True, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("line", [LARGE, SMALL], ids=["several processes", "one process"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_delivers_what_was_computed(name: str, code: int, line: str, tmp_path: Path) -> None:
    files = [tmp_path / f"sweep.{ending}" for ending in ("json", "csv", "svg")]
    options = f" --json {files[0]} --csv {files[1]} -o {files[2]}"
    outcome = interrupted(line + options, POINTS.format(signal=name), str(tmp_path))
    assert outcome.returncode == code, outcome.stderr
    result = ForecastResult.model_validate_json(files[0].read_text())
    assert result.interrupted
    [swept] = result.sweeps
    [about] = [finding for finding in result.findings if finding.code == "sweep-interrupted"]
    assert about.facts["points"] == len(swept.points)
    assert 0 < len(swept.points) < int(str(about.facts["wanted"]))
    assert list(swept.points) == sorted(swept.points, key=lambda point: tuple(point.values.values()))
    assert swept.break_even == ()
    assert f"Interrupted after {len(swept.points)} of" in outcome.stdout
    assert all(path.stat().st_size for path in files)
    assert "Traceback" not in outcome.stderr
    assert left_running(str(tmp_path)) == []


def test_a_signal_before_the_first_point(tmp_path: Path) -> None:
    """Without a computed point, one line is printed and no file is written."""
    code = RAN_AS.replace("yield lambda done: {action}", "os.kill(os.getpid(), signal.SIGTERM); yield lambda done: None")
    command = [sys.executable, "-c", code, "forecast", *LARGE.split(), "--json", str(tmp_path / "sweep.json")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (143, "", "gemmscope: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_the_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    outcome = interrupted(LARGE, "os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path))
    assert outcome.returncode == -signal.SIGKILL
    assert left_running(str(tmp_path)) == []


def test_a_process_that_is_killed_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    class Killer(Reporter):
        @contextmanager
        def counting(self, what: str, total: int) -> Iterator[Any]:
            yield lambda done: None if killed else self.kill()

        def kill(self) -> None:
            killed.extend(child.pid for child in multiprocessing.active_children()[:1] if child.pid is not None)
            os.kill(killed[0], signal.SIGKILL)

    def swept(reporter: Reporter) -> ForecastResult:
        run, axes = {"micro_batch_size": 1, "sequence_length": 512}, {"gradient_accumulation": range(1, 201)}
        return forecast_sweep(SIZES, run, axes, ["b300"], reporter=reporter)

    calm = swept(Reporter())
    monkeypatch.setattr(sweep, "WORTH_SHARING", 100)
    monkeypatch.setattr(sweep, "AT_A_TIME", 20)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert swept(Killer()) == calm
    assert len(killed) == 1


def test_in_python_ctrl_c_returns_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def counting(self: Reporter, what: str, total: int) -> Iterator[Any]:
        yield lambda done: os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Console, "counting", counting)
    job = gemmscope.load(**SIZES).on(micro_batch_size=1, sequence_length=512)
    result = job.sweep("b300", "h200", gradient_accumulation=list(range(1, 1001)))
    assert result.interrupted
    assert 0 < len(result.sweeps[0].points) < 1000
    assert "Interrupted" in str(result)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_python_ctrl_c_before_the_first_point_is_a_keyboard_interrupt() -> None:
    class Early(Reporter):
        @contextmanager
        def counting(self, what: str, total: int) -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGINT)
            yield lambda done: None

    with pytest.raises(KeyboardInterrupt):
        forecast_sweep(SIZES, {"micro_batch_size": 1, "sequence_length": 512}, {"tp": [1, 2]}, ["b300"], reporter=Early())
