"""Malicious traces: each ends in a diagnosis or one message, quickly and with little memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemmscope.commands.explain import explain, trace_files
from gemmscope.errors import UserError
from gemmscope.explain import recorded_trace, timeline, trace_file
from gemmscope.explain.diagnose import diagnose
from gemmscope.explain.record_trace import slim_file
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.trace_file import EventStream
from support.command import Run, run
from support.report_files import put
from support.traces import FP8, Builder, events_of, recorded, steady

__all__ = ["run"]  # the fixture


def gemmscope(shell_line: str) -> subprocess.CompletedProcess[str]:
    """A command line with pipes, where `gemmscope` is this package."""
    command = f'gemmscope() {{ {sys.executable} -m gemmscope "$@"; }}; {shell_line}'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "line",
    [
        "gemmscope explain <(zcat {trace})",
        "gemmscope explain <(cat {trace}) --perfetto {folder}/out.json.gz",
        "zcat {trace} | gemmscope explain /dev/stdin --perfetto {folder}/out.json.gz",
        "gemmscope explain - < {trace}",
        "mkfifo {folder}/fifo; cat {trace} > {folder}/fifo & gemmscope explain {folder}/fifo",
    ],
)
def test_reads_from_pipes(line: str, tmp_path: Path) -> None:
    outcome = gemmscope(line.format(trace=recorded("unaligned_mlp"), folder=tmp_path))
    assert outcome.returncode == 0, outcome.stderr
    assert "Some layers do not run in low precision" in outcome.stdout
    if "perfetto" in line:
        events = events_of(tmp_path / "out.json.gz")["traceEvents"]
        assert len(events) > len(events_of(recorded("unaligned_mlp"))["traceEvents"])


def test_a_pair_of_pipes() -> None:
    low, high = recorded("healthy_te_current"), recorded("healthy_te_bf16")
    outcome = gemmscope(f"gemmscope explain <(zcat {low}) --baseline <(zcat {high})")
    assert outcome.returncode == 0, outcome.stderr
    assert "Comparison with the BF16 trace" in outcome.stdout


@pytest.mark.parametrize("form", ["plain", "gzip"])
def test_a_run_file_is_no_trace(form: str, run: Run, tmp_path: Path) -> None:
    path = put(tmp_path, "run.json", "bench")
    if form == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    outcome = run(f"explain {path}")
    assert outcome.code == 2
    assert "is a run file, not a trace" in outcome.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": [' + '{"":0},' * 3000, "more than 0 MiB|not valid JSON"),
        ('{"x": "' + "a" * 30_000, "not valid JSON"),
        ('{"x": ' + "[" * 5000, "nested too deeply"),
        ('{"traceEvents": [' + '{"a":' * 5000, "nested too deeply"),
        ('{"traceEvents": [{"name": "' + "a" * 30_000, "not valid JSON"),
        ('{"traceEvents": [' + "1" * 30_000, "not valid JSON"),
        (" " * 30_000, "not valid JSON"),
        ('{"traceEvents": [' + " " * 30_000, "not valid JSON"),
        ("{" + ",".join(f'"k{number}": 0' for number in range(200)) + "}", "besides its events"),
        ("{" + '"k": 0,' * 200 + '"traceEvents": []}', "besides its events"),
        ("{" + f'"k": "{"a" * 900}",' * 10 + '"traceEvents": []}', "besides its events"),
        ('{"traceEvents": [' + "{}," * 500 + "{}]}", "more than 400 events"),
        ("[" + "0," * 500 + "0]", "more than 400 events"),
    ],
)
def test_limits_of_a_file(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"PIECE": 1000, "LONGEST_EVENT": 8000, "LONGEST_HEAD": 6000, "MOST_MEMBERS": 100, "MOST_EVENTS": 400}
    for name, limit in limits.items():
        monkeypatch.setattr(trace_file, name, limit)
    path = tmp_path / "t.json"
    path.write_text(text)
    source = EventStream(path)
    with pytest.raises(UserError, match=message):
        list(source)
    assert source.characters <= 31_000


def test_too_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_trace, "MOST_RECORDS", 9000)
    builder = Builder()
    for number in range(20_000):
        builder.kernel(FP8, number, 1.0)
    path = builder.write(tmp_path / "t.json")
    with pytest.raises(UserError, match="record fewer steps"):
        read_trace(path)


def test_too_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_trace, "MOST_NAMES", 1 << 16)
    builder = Builder()
    for number in range(12_000):
        builder.kernel(f"kernel_{number}", number, 1.0)
    path = builder.write(tmp_path / "t.json")
    with pytest.raises(UserError, match="different names"):
        read_trace(path)


@pytest.mark.parametrize("steps", [10_000_000, 10**30])
def test_more_steps_than_kernels(steps: int, run: Run) -> None:
    outcome = run(f"explain {recorded('syncs')} --steps {steps}")
    assert outcome.code == 2
    assert f"--steps {steps}: " in outcome.err


def test_kernels_through_very_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_SHARES", 1000)
    builder = Builder()
    for number in range(300):
        builder.kernel(FP8, number, 1000.0, stream=number)
    read = read_trace(builder.write(tmp_path / "t.json"))
    with pytest.raises(UserError, match="too many kernels run through several of its 100 steps"):
        diagnose(read, 100)


def changed(tmp_path: Path, **arguments: Any) -> Path:
    """A good trace with one argument changed in every kernel and launch."""
    builder = steady()
    for event in builder.events:
        if event.get("cat") == "kernel":
            event["args"] |= arguments
    return builder.write(tmp_path / "t.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "9" * 5000])
def test_numbers_that_are_no_ids(number: str, tmp_path: Path) -> None:
    text = changed(tmp_path, device="NUMBER", stream="NUMBER").read_text().replace('"NUMBER"', number)
    (tmp_path / "t.json").write_text(text)
    try:
        assert diagnose(read_trace(tmp_path / "t.json")).view.count == 3
    except UserError as error:
        assert "JSON" in error.message


@pytest.mark.parametrize(
    "dims", [[[10**400, 2], [2, 3]], [[-5, 2], [2, 3]], [[2] * 10_000, [2, 3]], [[0, 0], [0, 0]], [["x"], {}]]
)
def test_shapes_that_no_tensor_has(dims: list[Any], tmp_path: Path) -> None:
    builder = steady()
    for number, event in enumerate(list(builder.events)):
        if event.get("cat") == "kernel":
            event["args"]["External id"] = number + 1
            arguments = {"External id": number + 1, "Input Dims": dims, "Sequence number": 7}
            for name in ("aten::mm", "_Linear", "_GroupedLinear", "_LayerNormMLP"):
                builder.mark(name, event["ts"] - 900, 1, "cpu_op", args=arguments)
    diagnosis = diagnose(read_trace(builder.write(tmp_path / "t.json")))
    assert all(row.flops >= 0 for row in diagnosis.account.gemms)


def test_slimming_strange_ids(tmp_path: Path) -> None:
    path = changed(tmp_path, **{"External id": {"a": [1]}})
    slim_file(path, tmp_path / "slim.json.gz", {})
    assert diagnose(read_trace(tmp_path / "slim.json.gz")).view.count == 3


def test_long_names_are_cut(tmp_path: Path) -> None:
    builder = steady()
    builder.kernel("x" * 1_000_000, 1.0, 5.0)
    read = read_trace(builder.write(tmp_path / "t.json"))
    assert max(len(work.name) for work in read.work) == recorded_trace.LONGEST_NAME


def test_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        trace_files([tmp_path])
    with pytest.raises(UserError, match="too long"):
        explain(["x" * 5000])


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("gemmscope.commands.explain.diagnose", exhaust)
    with pytest.raises(UserError, match="not enough memory to read"):
        explain([recorded("syncs")])


def test_json_is_written_of_what_was_read(tmp_path: Path) -> None:
    """Lone surrogates in a file name reach neither the result nor the terminal."""
    path = tmp_path / "trace\udcff.json"
    steady().write(path)
    result = explain([path])
    json.dumps(result.to_json(), ensure_ascii=False).encode()
