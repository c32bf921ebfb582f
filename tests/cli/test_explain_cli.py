"""`gemmscope explain` and `trace-me` as people type them."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from gemmscope.explain.record_trace import trace_me
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.results.explain import ExplainResult
from gemmscope.results.read import read_result
from support.command import Run, run
from support.predictions import bench_run, step_run
from support.refusals import refused, unnamed
from support.traces import codes, events_of, fact, recorded, steady

__all__ = ["run"]  # the fixture


def explained(path: Path) -> ExplainResult:
    result = read_result(path, ("explain",))
    assert isinstance(result, ExplainResult)
    return result


def test_one_trace(run: Run, tmp_path: Path) -> None:
    places = f"--json {tmp_path}/e.json --csv {tmp_path}/e.csv --markdown {tmp_path}/e.md --perfetto {tmp_path}/e.json.gz"
    outcome = run(f"explain {recorded('unaligned_mlp')} {places}")
    assert outcome.code == 0, outcome.err
    result = explained(tmp_path / "e.json")
    assert result.verdict.text in outcome.out
    assert result.causes[0].code == "left-out"
    assert "14328" in (tmp_path / "e.md").read_text()
    assert sum(result.account.classes_ms.values()) == pytest.approx(result.account.step_ms)
    assert result.command.startswith("gemmscope explain ")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "e.csv").read_text())))
    classes = {row["Class"]: float(row["ms per step"]) for row in rows if row["table"] == "classes"}
    assert classes.pop("total") == pytest.approx(result.account.step_ms)
    assert classes == pytest.approx(result.account.classes_ms)
    assert "| GEMM BF16 |" in (tmp_path / "e.md").read_text()
    annotated = json.loads(gzip.decompress((tmp_path / "e.json.gz").read_bytes()))
    tracks = {event["tid"] for event in annotated["traceEvents"] if event.get("cat") == "gemmscope"}
    assert tracks == {"steps", f"1. {result.causes[0].title}"}
    again = run(f"explain {tmp_path}/e.json.gz")
    assert again.out.replace("e.json.gz", "unaligned_mlp.json.gz") == outcome.out


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
def test_twins(run: Run, line: str, tmp_path: Path) -> None:
    files = line.format(low=recorded("healthy_te_current"), high=recorded("healthy_te_bf16"))
    outcome = run(f"explain {files} --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    result = explained(tmp_path / "e.json")
    assert result.verdict.code == "step-as-expected"
    [comparison] = result.comparisons
    assert fact(comparison.findings, "twin-speedup", "speedup") == pytest.approx(1.37, abs=0.005)
    assert all(finding.text in outcome.out for finding in comparison.findings)


def test_the_short_view_fits_a_screen(run: Run) -> None:
    short, whole = run(f"explain {recorded('recompute')}").out, run(f"explain {recorded('recompute')} --detail").out
    assert len(short.splitlines()) <= 30 < len(whole.splitlines())
    assert "--detail: every table and note" in short
    assert "micro-batches" in whole


def test_steps_that_the_trace_counts_otherwise(run: Run, tmp_path: Path) -> None:
    for steps, differs in ((7, True), (2, False)):
        assert run(f"explain {recorded('recompute')} --steps {steps} --json {tmp_path}/e.json").code == 0
        result = explained(tmp_path / "e.json")
        assert (result.steps, result.has("step-count-differs")) == (steps, differs)


def test_ranks(run: Run, tmp_path: Path) -> None:
    for rank in range(3):
        info = {"distributedInfo": {"rank": rank, "world_size": 3}}
        steady(count=20 + 6 * (rank == 1)).write(tmp_path / f"r{rank}.json", **info)
    outcome = run("explain " + " ".join(f"{tmp_path}/r{rank}.json" for rank in range(3)) + f" --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    result = explained(tmp_path / "e.json")
    assert fact(result.findings, "ranks-unmatched", "rank") == fact(result.findings, "rank-explained", "rank") == result.rank == 1
    assert [rank.rank for rank in result.ranks] == [0, 1, 2]


BAD = {
    "different models": ("{long} --baseline {bf16}", "are not the same training"),
    "two of the same": ("{low} {low}", "neither ranks of one job nor BF16"),
    "run file as trace": ("{bench}", "is a run file, not a trace"),
    "trace as run file": ("{low} --against {bf16}", "is a profiler trace, not a run file"),
    "bench of another model": ("{low} --against {bench}", "is for a different model or batch"),
    "recipe without run file": ("{low} --recipe fp8current", "--against"),
    "no steps": ("{low} --steps 0", "at least one step"),
    "overwrites": ("{low} --perfetto {low}", "would overwrite"),
    "overwrites with JSON": ("{low} --json {low}", "would overwrite"),
    "missing": ("nowhere.json", "cannot be read"),
    "a run without a model": ("{low} --tp 2 --micro-batch-size 1", "--micro-batch-size, --tp: these options need a model"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name: str, run: Run, tmp_path: Path) -> None:
    line, message = BAD[name]
    bench = bench_run(tmp_path, tokens=1024)
    files = {
        "low": recorded("healthy_te_current"),
        "bf16": recorded("healthy_te_bf16"),
        "long": recorded("long_sequence"),
        "bench": bench,
    }
    outcome = run("explain " + line.format(**files))
    assert outcome.code == 2
    assert outcome.err.startswith("gemmscope: ")
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_against_a_model_without_gemms(run: Run, tmp_path: Path) -> None:
    source = "import torch\ndef build():\n    return torch.nn.LayerNorm(8), (torch.randn(2, 8),)\n"
    (tmp_path / "norm.py").write_text(source)
    outcome = run(f"explain {recorded('healthy_te_current')} --module {tmp_path}/norm.py:build --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    assert "model-flops-unknown" in codes(explained(tmp_path / "e.json").findings)


def test_against_the_model(run: Run, tmp_path: Path) -> None:
    sizes = "--hidden-size 4096 --intermediate-size 14336 --num-attention-heads 32 --num-key-value-heads 8 --num-hidden-layers 4"
    rest = "--vocab-size 16384 --gated-mlp --micro-batch-size 2 --sequence-length 4096"
    outcome = run(f"explain {recorded('healthy_te_current')} {sizes} {rest} --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    result = explained(tmp_path / "e.json")
    assert fact(result.findings, "model-flops-equal", "trace_tflop") == pytest.approx(46.18, abs=0.01)
    assert fact(result.findings, "model-flops-equal", "ratio") == pytest.approx(1, abs=1e-6)


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
    assert unnamed(capsys.readouterr().err, "3 steps", 7) == []


@pytest.mark.oracle
def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    passed = 0
    with trace_me(tmp_path / "no" / "t.json.gz", steps=1, after=1) as trace:
        for _ in range(4):
            trace.step()
            passed += 1
    assert (passed, trace.recorded) == (4, False)
    err = capsys.readouterr().err
    assert unnamed(err, "t.json.gz", os.strerror(errno.ENOENT)) == []
    assert "nothing was recorded" not in err


def test_trace_me_of_other_ranks_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with trace_me(tmp_path / "t.json.gz") as trace:
        trace.step()
    assert not list(tmp_path.iterdir())
    assert trace_me(tmp_path / "t.json.gz", ranks=(0, 3)).path.name == "t.rank3.json.gz"
    with refused("steps", 1, 1000, error=ValueError):
        trace_me(tmp_path / "t.json.gz", steps=0)


def test_a_copy_without_a_name_ending_is_read(tmp_path: Path) -> None:
    shutil.copy(recorded("healthy_te_bf16"), tmp_path / "trace")
    assert read_trace(tmp_path / "trace").gpu_name == "NVIDIA H200"


def test_help_teaches(run: Run) -> None:
    outcome = run("explain --help")
    assert re.search(r"gemmscope explain fp8.json.gz --baseline bf16.json.gz", outcome.out)


def test_a_folder_of_ranks(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        steady().write(tmp_path / f"host_{rank}.pt.trace.json.gz", distributedInfo={"rank": rank, "world_size": 2})
    outcome = run(f"explain {tmp_path} --json {tmp_path.parent}/ranks.json")
    assert outcome.code == 0, outcome.err
    assert "ranks-unmatched" in codes(explained(tmp_path.parent / "ranks.json").findings)
    (tmp_path / "empty").mkdir()
    assert "folder without traces" in run(f"explain {tmp_path}/empty").err


def test_against_a_prediction(run: Run, tmp_path: Path) -> None:
    outcome = run(f"explain {recorded('healthy_te_current')} --against {step_run(tmp_path)} --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    [comparison] = explained(tmp_path / "e.json").comparisons
    assert fact(comparison.findings, "prediction-error", "predicted_ms") == 58.0
    assert fact(comparison.findings, "prediction-error", "error") == pytest.approx(0.073, abs=0.001)
    assert fact(comparison.findings, "prediction-speedup", "speedup") == pytest.approx(1.29, abs=0.01)
    assert fact(comparison.findings, "prediction-speedup", "predicted") == pytest.approx(1.38, abs=0.01)
    assert sum(part.difference_ms or 0 for part in comparison.parts) == pytest.approx(62.25 - 58.0, abs=0.01)
    assert "predicted, FP8Delayed" in run(f"explain {recorded('healthy_te_delayed')} --against {step_run(tmp_path)} --detail").out
    chosen = run(f"explain {recorded('healthy_te_current')} --against {step_run(tmp_path)} --recipe fp8delayed --detail")
    assert "predicted, FP8Delayed" in chosen.out


@pytest.mark.parametrize(
    ("trace", "hidden", "more", "message"),
    [
        ("healthy_te_current", 5120, "", "hidden size 5120"),
        ("healthy_te_block", 4096, "", "no recipe that runs FP8 blocks"),
        ("healthy_te_current", 4096, "--recipe nvfp4", "has no recipe nvfp4"),
    ],
)
def test_predictions_of_something_else(trace: str, hidden: int, more: str, message: str, run: Run, tmp_path: Path) -> None:
    outcome = run(f"explain {recorded(trace)} --against {step_run(tmp_path, hidden)} {more}")
    assert outcome.code == 2
    assert message in outcome.err


def test_against_a_bench(run: Run, tmp_path: Path) -> None:
    """A bench of the four linears of the recorded model."""
    outcome = run(f"explain {recorded('healthy_te_current')} --against {bench_run(tmp_path)} --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    [comparison] = explained(tmp_path / "e.json").comparisons
    assert fact(comparison.findings, "linears-time", "bench_ms") == 34.0
    assert fact(comparison.findings, "linears-time", "recipe") == "FP8Current"
    assert fact(comparison.findings, "linears-gain", "speedup") == pytest.approx(58 / 34)
    assert fact(comparison.findings, "linears-gain", "saved_ms") == pytest.approx(24)
    assert [part.part for part in comparison.parts][:2] == ["GEMMs", "quantization"]


def test_a_bench_that_counts_as_transformer_engines_script(run: Run, tmp_path: Path) -> None:
    file = bench_run(tmp_path)
    raw = json.loads(file.read_text())
    raw["linears"]["as_te_benchmark"] = True
    file.write_text(json.dumps(raw))
    outcome = run(f"explain {recorded('healthy_te_current')} --against {file}")
    assert outcome.code == 2
    assert "which is not what training runs" in outcome.err


def test_a_file_packed_twice_is_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "twice.json.gz").write_bytes(gzip.compress(recorded("healthy_te_delayed").read_bytes()))
    outcome = run(f"explain {tmp_path}/twice.json.gz")
    assert outcome.code == 0
    assert "As expected" in outcome.out


def test_names_that_no_file_can_hold(run: Run, tmp_path: Path) -> None:
    """JSON allows lone surrogates. Every output is still written."""
    raw = events_of(recorded("healthy_te_delayed"))
    for event in raw["traceEvents"]:
        if event.get("cat") == "kernel":
            event["name"] = f"\ud800{event['name']}"
    raw["deviceProperties"] = [{"name": "\ud800"}]
    (tmp_path / "t.json").write_text(json.dumps(raw))
    places = " ".join(f"--{form} {tmp_path}/out.{form}" for form in ("json", "csv", "markdown", "perfetto"))
    outcome = run(f"explain {tmp_path}/t.json {places}")
    assert outcome.code == 0, outcome.err
    assert "?" in json.loads((tmp_path / "out.json").read_text())["gpu"]


@pytest.mark.parametrize("number", ["9" * 5000, "1e400", "1e300", "-1e300"])
def test_numbers_that_are_no_times(number: str, run: Run, tmp_path: Path) -> None:
    event = '{"ph": "X", "cat": "kernel", "name": "k", "ts": NUMBER, "dur": 1}'.replace("NUMBER", number)
    (tmp_path / "t.json").write_text(f'{{"traceEvents": [{event}]}}')
    outcome = run(f"explain {tmp_path}/t.json")
    assert outcome.code == 2
    assert outcome.err.startswith("gemmscope: ")


def test_a_pair_of_two_ranks_is_no_job(run: Run, tmp_path: Path) -> None:
    """A BF16 trace of rank 0 and an FP8 trace of rank 1 are two different runs, because their precisions differ."""
    for number, name in enumerate(("healthy_te_bf16", "healthy_te_current")):
        raw = events_of(recorded(name)) | {"distributedInfo": {"backend": "nccl", "rank": number, "world_size": 2}}
        (tmp_path / f"{number}.json").write_text(json.dumps(raw))
    outcome = run(f"explain {tmp_path}/0.json {tmp_path}/1.json --detail")
    assert outcome.code == 0, outcome.err
    assert "Comparison with the BF16 trace" in outcome.out
    assert "Exposed communication ms" not in outcome.out
