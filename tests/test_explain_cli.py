"""`gemmscope explain` and `trace-me` as people type them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from gemmscope.explain.record import trace_me
from gemmscope.explain.trace import read_trace
from gemmscope.store.explainfile import ExplainFile
from test_cli import Run, run
from traces import DATA, recorded, steady

__all__ = ["run"]  # the fixture


def test_one_trace(run: Run, tmp_path: Path) -> None:
    places = f"--json {tmp_path}/e.json --csv {tmp_path}/e.csv --markdown {tmp_path}/e.md --perfetto {tmp_path}/e.json.gz"
    outcome = run(f"explain {recorded('unaligned_mlp')} {places}")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("layers are left out of low precision")
    assert "14328" in outcome.out
    file = ExplainFile.model_validate_json((tmp_path / "e.json").read_text())
    assert file.causes[0].cause == "left_out"
    assert sum(file.classes_ms.values()) == pytest.approx(file.step_ms)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "e.csv").read_text())))
    assert sum(float(row["ms"]) for row in rows if row["kind"] == "class") == pytest.approx(file.step_ms)
    assert "| GEMM BF16 |" in (tmp_path / "e.md").read_text()
    annotated = json.loads(gzip.decompress((tmp_path / "e.json.gz").read_bytes()))
    tracks = {event["tid"] for event in annotated["traceEvents"] if event.get("cat") == "gemmscope"}
    assert tracks == {"steps", "1. layers are left out of low precision"}
    again = run(f"explain {tmp_path}/e.json.gz")
    assert again.out.splitlines()[0] == outcome.out.splitlines()[0]


def test_annotations_lie_where_the_step_is(run: Run, tmp_path: Path) -> None:
    assert run(f"explain {recorded('idle_loader')} --perfetto {tmp_path}/a.json").code == 0
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spans = [event for event in events if event.get("cat") == "gemmscope"]
    first, last = min(event["ts"] for event in kernels), max(event["ts"] + event["dur"] for event in kernels)
    assert all(first - 1e6 < event["ts"] < last + 1e6 for event in spans)
    idle = max((event for event in spans if event["tid"] != "steps"), key=lambda event: event["dur"])
    assert not any(idle["ts"] + 1 < event["ts"] < idle["ts"] + idle["dur"] - 1 for event in kernels)


@pytest.mark.parametrize("line", ["{low} --baseline {high}", "{high} {low}", "{low} {high}"])
def test_twins(run: Run, line: str) -> None:
    outcome = run("explain " + line.format(low=recorded("healthy_te_current"), high=recorded("healthy_te_bf16")))
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("as expected")
    assert "speedup of the step: 1.37x" in outcome.out


def test_ranks(run: Run, tmp_path: Path) -> None:
    for rank in range(3):
        info = {"distributedInfo": {"rank": rank, "world_size": 3}}
        steady(count=20 + 6 * (rank == 1)).write(tmp_path / f"r{rank}.json", **info)
    outcome = run("explain " + " ".join(f"{tmp_path}/r{rank}.json" for rank in range(3)))
    assert outcome.code == 0, outcome.err
    assert "uneven: rank 1" in outcome.out


BAD = {
    "different models": ("{long} --baseline {bf16}", "are not the same training"),
    "two of the same": ("{low} {low}", "neither ranks of one job nor BF16"),
    "run file as trace": ("{bench}", "is a run file, not a trace"),
    "trace as run file": ("{low} --against {bf16}", "is a profiler trace, not a run file"),
    "bench of another model": ("{low} --against {bench}", "is of another model or batch"),
    "recipe without run file": ("{low} --recipe fp8current", "--against"),
    "no steps": ("{low} --steps 0", "at least one step"),
    "overwrites": ("{low} --perfetto {low}", "would overwrite"),
    "missing": ("nowhere.json", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name: str, run: Run, tmp_path: Path) -> None:
    line, words = BAD[name]
    bench = tmp_path / "bench.json"
    bench.write_bytes(gzip.decompress((DATA / "h200_bench_first.json.gz").read_bytes()))
    files = {
        "low": recorded("healthy_te_current"),
        "bf16": recorded("healthy_te_bf16"),
        "long": recorded("long_sequence"),
        "bench": bench,
    }
    outcome = run("explain " + line.format(**files))
    assert outcome.code == 2
    assert outcome.err.startswith("gemmscope: ")
    assert words in outcome.err
    assert "Traceback" not in outcome.err


def test_against_the_model(run: Run) -> None:
    sizes = "--hidden-size 4096 --intermediate-size 14336 --num-attention-heads 32 --num-key-value-heads 8 --num-hidden-layers 4"
    rest = "--vocab-size 16384 --gated-mlp --micro-batch-size 2 --sequence-length 4096"
    outcome = run(f"explain {recorded('healthy_te_current')} {sizes} {rest}")
    assert outcome.code == 0, outcome.err
    assert "products take 46.18 TFLOP per step, 46.18 by its sizes: as the model says" in outcome.out


def test_trace_me_prints_lines_that_run(run: Run) -> None:
    for kind in ("loop", "trainer", "plain"):
        outcome = run(f"trace-me --kind {kind}")
        assert outcome.code == 0
        compile(outcome.out, kind, "exec")
    assert run("trace-me --kind magic").code == 2


@pytest.mark.oracle
def test_trace_me_records_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="recording needs torch")
    layer = torch.nn.Linear(8, 8)
    with trace_me(tmp_path / "t.json.gz", steps=2, after=2) as trace:
        for _ in range(6):
            layer(torch.ones(4, 8)).sum().backward()
            trace.step()
    assert trace.recorded
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    steps = [event["name"] for event in events["traceEvents"] if event["name"].startswith("ProfilerStep")]
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"]
    assert any(event.get("args", {}).get("Input Dims") for event in events["traceEvents"])
    assert "torch" in events["gemmscope"]["versions"]
    assert "wrote" in capsys.readouterr().err


@pytest.mark.oracle
def test_trace_me_says_when_nothing_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    with trace_me(tmp_path / "t.json.gz", steps=2, after=5) as trace:
        for _ in range(3):
            trace.step()
    assert not (tmp_path / "t.json.gz").exists()
    assert "nothing was recorded: 3 steps passed, 7 were needed" in capsys.readouterr().err


def test_trace_me_of_other_ranks_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with trace_me(tmp_path / "t.json.gz") as trace:
        trace.step()
    assert not list(tmp_path.iterdir())
    assert trace_me(tmp_path / "t.json.gz", ranks=(0, 3)).path.name == "t.rank3.json.gz"
    with pytest.raises(ValueError, match="at least one step"):
        trace_me(tmp_path / "t.json.gz", steps=0)


def test_a_copy_without_a_name_ending_is_read(tmp_path: Path) -> None:
    shutil.copy(recorded("healthy_te_bf16"), tmp_path / "trace")
    assert read_trace(tmp_path / "trace").gpu_name == "NVIDIA H200"


def test_help_teaches(run: Run) -> None:
    outcome = run("explain --help")
    assert re.search(r"gemmscope explain fp8.json.gz --baseline bf16.json.gz", outcome.out)
