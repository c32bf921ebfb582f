"""The metadata of a trace may contain anything, such as environment variables. None of it may reach an output."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gemmscope.explain.record_trace import slim_file
from support.command import Run, run
from support.traces import steady

__all__ = ["run"]  # the fixture

SECRET = "hunter2-is-a-secret"
HEAD = {
    "env": {"AWS_SECRET_ACCESS_KEY": SECRET},
    "WANDB_API_KEY": SECRET,
    "traceName": f"/home/{SECRET}/trace.json",
    "host_name": SECRET,
    "baseTimeNanoseconds": 1751410836000000000,
}


def write(path: Path) -> Path:
    builder = steady()
    builder.events += [
        {"ph": "M", "name": "environment", "pid": 1, "tid": 0, "args": {"HF_TOKEN": SECRET}},
        {"ph": "i", "name": "Record Window End", "ts": 1e6, "s": "g"},
    ]
    return builder.write(path, **HEAD)


def test_no_output_repeats_metadata(run: Run, tmp_path: Path) -> None:
    trace, out = write(tmp_path / "t.json"), tmp_path / "out"
    out.mkdir()
    files = f"--json {out}/e.json --csv {out}/e.csv --markdown {out}/e.md --perfetto {out}/p.json"
    outcome = run(f"explain {trace} --detail {files}")
    assert outcome.code == 0, outcome.err
    assert run(f"report {out}/e.json -o {out}/e.html").code == 0
    written = {path.name: path.read_text() for path in out.iterdir()}
    assert len(written) == 5
    for name, text in {**written, "out": outcome.out, "err": outcome.err}.items():
        assert SECRET not in text, name
        assert "WANDB_API_KEY" not in text, name
    assert json.loads(written["p.json"])["deviceProperties"] == [{"name": "NVIDIA H200"}]


def test_the_recorder_drops_metadata(tmp_path: Path) -> None:
    slim_file(write(tmp_path / "t.json"), tmp_path / "slim.json.gz", {"recorded_with": "trace_me"})
    assert SECRET not in gzip.decompress((tmp_path / "slim.json.gz").read_bytes()).decode()


@pytest.mark.parametrize("inside", [{}, {"traceEvents": 3}])
def test_errors_do_not_repeat_metadata(inside: dict[str, object], run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({**HEAD, **inside}))
    outcome = run(f"explain {tmp_path}/t.json")
    assert outcome.code == 2
    assert "has no traceEvents" in outcome.err
    assert SECRET not in outcome.err
    assert "WANDB_API_KEY" not in outcome.err
