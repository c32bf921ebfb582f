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
from gemmscope.store.benchfile import IntervalRecord
from gemmscope.store.explainfile import ExplainFile
from gemmscope.store.runfile import ModelRecord, RunRecord
from gemmscope.store.stepfile import LevelRecord, RecipeRecord, StepFile
from test_cli import Run, run
from support.traces import DATA, events_of, recorded, steady

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


def test_one_micro_batch_is_one(run: Run) -> None:
    assert ", 1 micro-batch; " in run(f"explain {recorded('healthy_te_current')}").out
    assert ", 4 micro-batches; " in run(f"explain {recorded('recast_weights')}").out


def test_steps_that_the_trace_counts_otherwise(run: Run) -> None:
    trace = recorded("recompute")
    assert "found by --steps: 7 in the whole trace, though the profiler marked 2" in run(f"explain {trace} --steps 7").out
    assert "found by --steps: 2 in the whole trace\n" in run(f"explain {trace} --steps 2").out


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
    "overwrites with JSON": ("{low} --json {low}", "would overwrite"),
    "missing": ("nowhere.json", "cannot be read"),
    "a run without a model": ("{low} --tp 2 --micro-batch-size 1", "--micro-batch-size, --tp says how a model is run"),
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


def test_a_folder_of_ranks(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        steady().write(tmp_path / f"host_{rank}.pt.trace.json.gz", distributedInfo={"rank": rank, "world_size": 2})
    outcome = run(f"explain {tmp_path}")
    assert outcome.code == 0, outcome.err
    assert "2 ranks compute equally long" in outcome.out
    (tmp_path / "empty").mkdir()
    assert "folder without traces" in run(f"explain {tmp_path}/empty").err


def step_run(tmp_path: Path, hidden: int = 4096) -> Path:
    """A run file of `step` that planned 58 ms for the recorded training: rows as the waterfall has them."""
    planned = {
        "products": 31.0,
        "quantization": 4.4,
        "attention": 9.2,
        "norms and activations": 5.0,
        "head and loss": 5.0,
        "optimizer": 3.4,
    }

    def recipe(name: str, step_ms: float, rows: dict[str, float]) -> RecipeRecord:
        return RecipeRecord(
            recipe=name, step_ms=IntervalRecord(value=step_ms, low=step_ms * 0.99, high=step_ms * 1.01), speedup=None,
            tokens_per_s=1.0, model_tflops=50e3 / step_ms, gpu_busy_ms=None, host_ms=None, host_bound=False, peak_bytes=None,
            named_share=1.0, verdict="",
            waterfall=[LevelRecord(row=row, baseline_ms=time, recipe_ms=time, speedup=1.0) for row, time in rows.items()],
        )  # fmt: skip

    run = RunRecord(
        micro_batch_size=2, sequence_length=4096, tp=1, sequence_parallel=False, cp=1, pp=1, pp_stage=0, ep=1, etp=1,
        imbalance=1.0, gradient_accumulation=1, recompute="none", vocab_multiple=1, separate_projections=False,
        sequence_parallel_linears=False,
    )  # fmt: skip
    model = ModelRecord(name="llama", model_type="", source="", hidden_size=hidden, num_hidden_layers=4, layers="4 x dense")
    file = StepFile(
        command=[], origin="", model=model, run=run, environment={}, device={}, versions={}, settings={}, depth=4,
        layers=4, ended="",
        recipes=[recipe("BF16", 80.0, {}), recipe("FP8Current", 58.0, planned), recipe("FP8Delayed", 56.0, planned)],
        recommendation=None, variants=[], notes=[],
    )  # fmt: skip
    path = tmp_path / f"step{hidden}.json"
    path.write_text(file.to_json())
    return path


def test_against_a_prediction(run: Run, tmp_path: Path) -> None:
    outcome = run(f"explain {recorded('healthy_te_current')} --against {step_run(tmp_path)} --json {tmp_path}/e.json")
    assert outcome.code == 0, outcome.err
    assert "predicted 58.0 ms for FP8Current, found 62.2 ms: +7.3%" in outcome.out
    assert "1.29x, 1.38x predicted" in outcome.out
    held = ExplainFile.model_validate_json((tmp_path / "e.json").read_text()).held[0]
    assert sum(row.found_ms - (row.expected_ms or 0) for row in held.rows) == pytest.approx(62.25 - 58.0, abs=0.01)
    assert "predicted, FP8Delayed" in run(f"explain {recorded('healthy_te_delayed')} --against {step_run(tmp_path)}").out
    chosen = run(f"explain {recorded('healthy_te_current')} --against {step_run(tmp_path)} --recipe fp8delayed")
    assert "predicted, FP8Delayed" in chosen.out


@pytest.mark.parametrize(
    ("trace", "hidden", "more", "words"),
    [
        ("healthy_te_current", 5120, "", "hidden size 5120"),
        ("healthy_te_block", 4096, "", "no recipe that runs FP8 blocks"),
        ("healthy_te_current", 4096, "--recipe nvfp4", "has no recipe nvfp4"),
    ],
)
def test_predictions_of_something_else(trace: str, hidden: int, more: str, words: str, run: Run, tmp_path: Path) -> None:
    outcome = run(f"explain {recorded(trace)} --against {step_run(tmp_path, hidden)} {more}")
    assert outcome.code == 2
    assert words in outcome.err


def test_against_a_bench(run: Run, tmp_path: Path) -> None:
    """A bench of the recorded model's four linears: the recorded run file with its sizes and times changed."""
    raw = json.loads(gzip.decompress((DATA / "h200_bench_first.json.gz").read_bytes()))
    sizes = {"QKV Proj": (4096, 6144), "Attn Out": (4096, 4096), "MLP Up": (4096, 28672), "MLP Down": (14336, 4096)}
    for row in raw["rows"]:
        row["tokens"], row["count"] = 8192, 4
        row["inputs"], row["outputs"] = sizes[row["op"]]
    for total in raw["totals"]:
        total["total_ms"] = {"value": 34.0 if total["recipe"] != "BF16" else 58.0, "low": None, "high": None}
        total["quantize_ms"] = 4.0
    (tmp_path / "bench.json").write_text(json.dumps(raw))
    outcome = run(f"explain {recorded('healthy_te_current')} --against {tmp_path}/bench.json")
    assert outcome.code == 0, outcome.err
    assert "34.0 ms measured by bench for FP8Current" in outcome.out
    assert "linears gain 1.71x: 24.0 ms" in outcome.out


def test_a_file_packed_twice_is_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "twice.json.gz").write_bytes(gzip.compress(recorded("healthy_te_delayed").read_bytes()))
    outcome = run(f"explain {tmp_path}/twice.json.gz")
    assert outcome.code == 0
    assert outcome.out.startswith("as expected")


def test_names_that_no_file_can_hold(run: Run, tmp_path: Path) -> None:
    """JSON allows halves of characters; every output is written all the same."""
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
    """BF16 of rank 0 beside FP8 of rank 1: two precisions, so two runs."""
    for number, name in enumerate(("healthy_te_bf16", "healthy_te_current")):
        raw = events_of(recorded(name)) | {"distributedInfo": {"backend": "nccl", "rank": number, "world_size": 2}}
        (tmp_path / f"{number}.json").write_text(json.dumps(raw))
    outcome = run(f"explain {tmp_path}/0.json {tmp_path}/1.json")
    assert outcome.code == 0, outcome.err
    assert "against the BF16 trace" in outcome.out
    assert "ranks compute" not in outcome.out
