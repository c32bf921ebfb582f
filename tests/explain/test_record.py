"""`trace_me` in a user's training: problems are reported at entry, and it never raises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmscope.explain.record_trace import trace_me
from gemmscope.explain.recorded_trace import read_trace
from support.traces import steady


class Profiler:
    """A stand-in for torch's profiler, which writes a small trace. `fails` names the method that raises."""

    fails = ""

    def __init__(self, **settings: Any) -> None:
        self.on_trace_ready = settings["on_trace_ready"]
        self.plan: Any = settings["schedule"]
        self.passed = 0
        self._may_fail("__init__")

    def _may_fail(self, method: str) -> None:
        if method == self.fails:
            raise RuntimeError(f"{method} does not work")

    def __enter__(self) -> None:
        self._may_fail("__enter__")

    def __exit__(self, *_: object) -> None:
        self._may_fail("__exit__")

    def step(self) -> None:
        self._may_fail("step")
        self.passed += 1
        if self.passed == self.plan["wait"] + self.plan["warmup"] + self.plan["active"] and self.on_trace_ready is not None:
            self.on_trace_ready(self)

    def export_chrome_trace(self, path: str) -> None:
        self._may_fail("export_chrome_trace")
        Path(path).write_text(json.dumps({"traceEvents": steady().events}))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for torch with a GPU, with what `trace_me` uses."""
    state = SimpleNamespace(gpu=True)
    module, profiler, cuda = ModuleType("torch"), ModuleType("torch.profiler"), ModuleType("torch.cuda")
    cuda.is_available = lambda: state.gpu  # type: ignore[attr-defined]
    activity = SimpleNamespace(CPU="cpu", CUDA="cuda")
    values = {
        "ProfilerActivity": activity,
        "profile": Profiler,
        "schedule": dict,
        "supported_activities": lambda: {"cpu", "cuda"} if state.gpu else {"cpu"},
    }
    for name, value in values.items():
        setattr(profiler, name, value)
    autograd = ModuleType("torch.autograd")
    calls = dict.fromkeys(("_prepare_profiler", "_enable_profiler", "_disable_profiler"), lambda *_: None)
    low_level = SimpleNamespace(**calls, KinetoStepTracker=SimpleNamespace(_step_dict={}), profile=Profiler)
    autograd.profiler, autograd._profiler_enabled = low_level, lambda: False  # type: ignore[attr-defined]
    module.cuda, module.profiler, module.__version__ = cuda, profiler, "2.9"  # type: ignore[attr-defined]
    for name, stand_in in (("torch", module), ("torch.profiler", profiler), ("torch.cuda", cuda), ("torch.autograd", autograd)):
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(Profiler, "fails", "")
    monkeypatch.delenv("RANK", raising=False)
    return state


def train(path: Path, steps: int = 6, **settings: Any) -> tuple[trace_me, int]:
    passed = 0
    with trace_me(path, **{"steps": 2, "after": 2, **settings}) as trace:
        for _ in range(steps):
            passed += 1
            trace.step()
    return trace, passed


def test_it_records(torch: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, passed = train(tmp_path / "t.json.gz")
    assert (trace.recorded, passed) == (True, 6)
    assert (tmp_path / "t.json.gz").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_steps_before_the_recording_are_timed(torch: SimpleNamespace, tmp_path: Path) -> None:
    """Eight steps come before the one in which the profiler warms up: the last five are kept, and none without such steps."""
    for after, kept in ((10, 5), (4, 2), (0, 0)):
        train(tmp_path / "t.json.gz", steps=12, after=after)
        times = read_trace(tmp_path / "t.json.gz").facts["plain_steps_ms"]
        assert len(times) == kept
        assert all(time > 0 for time in times)


def test_a_missing_folder_is_said_at_entry(torch: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace_me(tmp_path / "no" / "t.json.gz", steps=1, after=1) as trace:
        assert f"the folder {tmp_path / 'no'} does not exist" in capsys.readouterr().err
        for _ in range(4):
            trace.step()
    assert not trace.recorded
    assert "cannot be written" in capsys.readouterr().err
    with trace_me(tmp_path / "late" / "t.json.gz", steps=1, after=1) as trace:
        (tmp_path / "late").mkdir()
        trace.step()
        trace.step()
    assert trace.recorded


def test_a_folder_in_place_of_the_file_is_said_at_entry(
    torch: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, passed = train(tmp_path)
    assert (trace.recorded, passed) == (False, 6)
    assert "is a folder, not a file" in capsys.readouterr().err


def test_a_run_without_a_gpu_is_said_at_entry(torch: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.gpu = False
    with trace_me(tmp_path / "t.json.gz"):
        assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["__init__", "__enter__", "step", "__exit__", "export_chrome_trace"])
def test_a_profiler_that_fails_does_not_end_the_training(
    method: str, torch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Profiler, "fails", method)
    trace, passed = train(tmp_path / "t.json.gz")
    assert passed == 6
    assert trace.recorded == (method == "__exit__")
    assert f"{method} does not work" in capsys.readouterr().err


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("RANK", raising=False)
    trace, passed = train(tmp_path / "t.json.gz")
    assert (trace.recorded, passed) == (False, 6)
    assert "the training goes on" in capsys.readouterr().err


def test_an_exception_of_the_training_is_its_own(torch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "fails", "__exit__")
    with pytest.raises(ZeroDivisionError), trace_me(tmp_path / "t.json.gz"):
        raise ZeroDivisionError


@pytest.mark.parametrize("rank", ["", "zero", "-1", "²"])
def test_a_rank_that_is_not_a_number(rank: str, torch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    trace, _ = train(tmp_path / "t.json.gz")
    assert trace.recorded
