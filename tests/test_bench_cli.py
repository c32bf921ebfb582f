"""`gemmscope bench` and `gemmscope doctor` as people type them, on a machine without a GPU."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.gpu.environment import Environment, GpuFacts
from gemmscope.gpu.nvml import Reading
from gemmscope.measure.results import Results
from gemmscope.measure.task import MODES, Case, tasks_of
from gemmscope.report.bench import BenchReport
from gemmscope.report.formats import markdown
from gemmscope.report.plot import save_plot
from gemmscope.store.benchfile import BenchFile
from test_cli import Run, run

__all__ = ["run"]  # the fixture

SIZES = "--hidden-size 32 --intermediate-size 64 --num-attention-heads 2 --num-hidden-layers 2"
SMALL = f"{SIZES} --micro-batch-size 1 --sequence-length 32"


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def machine(**gpu: object) -> Environment:
    reading = Reading(1980, 100.0, 40, ())
    facts = {
        "memory_bytes": 2**37,
        "memory_used_bytes": 0,
        "power_limit_w": 700.0,
        "max_sm_mhz": 1980,
        "utilization": 0,
        "processes": (),
    }
    found = GpuFacts(0, "NVIDIA H200", (9, 0), now=reading, **(facts | gpu))  # type: ignore[arg-type]
    return Environment("Linux", "3.12", 16, {}, "580", (found,), None)


NOTHING = Environment("Linux", "3.12", 16, {}, None, (), None)


def test_bench_on_the_cpu(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    outcome = run(f"bench {SMALL} --device cpu --longest 1 --json {tmp_path}/run.json --markdown {tmp_path}/run.md")
    assert outcome.code == 0
    assert "Pre-quantized: the products alone" in outcome.out
    file = BenchFile.model_validate_json((tmp_path / "run.json").read_text())
    assert {row.op for row in file.rows} == {"QKV Proj", "Attn Out", "MLP Up", "MLP Down"}
    assert all(task.rounds_ms for task in file.tasks)
    assert "| QKV Proj |" in (tmp_path / "run.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{SMALL}", "there is no NVIDIA GPU here"),
        (f"{SMALL} --device tpu", "--device 'tpu' is not known"),
        (f"{SMALL} --device cpu --recipes fp9", "there is no recipe 'fp9'"),
        (f"{SMALL} --device cpu --pre-quantize --autocast-only", "leave nothing to measure"),
        ("--device cpu", "no model is named"),
    ],
)
def test_bad_input(run: Run, options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: NOTHING)
    outcome = run(f"bench {options}")
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize(
    ("busy", "message"), [({"processes": (4711,)}, "in use by processes 4711"), ({"utilization": 60}, "keeps it 60% busy")]
)
def test_a_busy_gpu_is_refused(run: Run, busy: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: machine(**busy))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    outcome = run(f"bench {SMALL}")
    assert outcome.code == 2
    assert message in outcome.err
    assert "--share-gpu" in outcome.err


def test_doctor_without_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: NOTHING)
    outcome = run("doctor")
    assert outcome.code == 0
    assert "driver: no NVIDIA driver found" in outcome.out
    assert re.search(r"BF16 +cpu +no +torch is not installed", outcome.out)
    assert "to measure: " in outcome.out


def test_doctor_knows_what_a_gpu_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a framework to ask, the table of architectures answers."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: machine(processes=(4711,)))
    out = run("doctor").out
    assert re.search(r"MXFP8 +transformer_engine +no +MXFP8 products need compute capability 10.0", out)
    assert re.search(r"FP8Block +transformer_engine +no +transformer_engine is not installed", out)
    assert "in use by other processes (4711)" in out
    assert json.loads(run("doctor --json -").out)["environment"]["gpus"][0]["name"] == "NVIDIA H200"


# --- the report, from kernels recorded on an H200 ---------------------------------------------------------------------

RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "data" / "h200_linear_kernels.json.gz").read_bytes()))["runs"]
QKV = Case("QKV Proj", 15872, 4096, 12288, 24)
RECIPES = ["BF16", "FP8Current", "FP8Delayed", "FP8Block"]


def recorded_results(kernels_of: dict[str, str] | None = None) -> Results:
    """A campaign whose kernels are the recorded ones, timed as they ran there; `kernels_of` swaps a recipe's for another's."""
    tasks = tasks_of([QKV], RECIPES, MODES, {"FP8Delayed": "FP8Current"})
    results = Results(tasks)
    results.take({"type": "hello", "device": {"name": "NVIDIA H200"}, "versions": {}})
    for task in tasks:
        source = (kernels_of or {}).get(task.recipe, task.recipe)
        label = f"QKV {source} graph" if task.mode == "autocast" else f"Up pre {source} {task.pass_name}"
        kernels = RECORDED[label]
        time_ms = sum(kernel[1] for kernel in kernels) / 1000
        host_ms = 9.0 if task.recipe == "FP8Block" else 1.0
        results.take({"type": "ready", "task": task.key, "error": 0.04, "host_ms": host_ms, "copies": 1})
        results.take({"type": "kernels", "task": task.key, "kernels": kernels})
        for number in range(4):
            state = {"sm_mhz": 1400, "power_w": 690.0, "temperature_c": 60, "throttle": ["SW power cap"]}
            results.take({"type": "samples", "times_ms": {task.key: [time_ms * (1 + number / 1000)]}, "state": state})
    return results


def test_report_of_a_correct_run_raises_no_alarm() -> None:
    report = BenchReport(recorded_results(), RECIPES, list(MODES))
    text = markdown(report.tables(), ["x"], report.sentences())
    assert "FALLBACK" not in text
    assert "FP8Delayed is the same kernel as FP8Current" in text
    assert "HOST-BOUND: 1 of the linears" in text
    assert "held back by SW power cap" in text
    cell = report.cell(QKV, "FP8Current", "autocast")
    assert cell is not None
    assert sum(cell.pass_ms.values()) == pytest.approx(cell.total.value)
    assert 0.05 < sum(cell.quantize_ms.values()) / cell.total.value < 0.2
    assert report.columns("pre-quantized") == ["BF16", "FP8Current", "FP8Block"]


@pytest.mark.filterwarnings("ignore")
def test_plot(tmp_path: Path) -> None:
    """Every recipe has its bar, quantizing is drawn apart, and bars add up to the times measured."""
    report = BenchReport(recorded_results(), RECIPES, list(MODES))
    save_plot(report, "QKV Proj on NVIDIA H200", str(tmp_path / "bench.svg"))
    drawn = (tmp_path / "bench.svg").read_text()
    assert drawn.count("<path") > 20
    cell = report.cell(QKV, "FP8Block", "autocast")
    assert cell is not None
    assert sum(cell.product_ms().values()) + sum(cell.quantize_ms.values()) == pytest.approx(cell.total.value)
    with pytest.raises(UserError, match="cannot be written"):
        save_plot(report, "x", str(tmp_path / "bench.nonsense"))


def test_report_of_a_fallback() -> None:
    """FP8 asked for, BF16 kernels seen: said loudly, and no speedup is formed."""
    report = BenchReport(recorded_results({"FP8Current": "BF16"}), RECIPES, list(MODES))
    text = markdown(report.tables(), ["x"], report.sentences())
    assert "FALLBACK: QKV Proj in FP8Current, autocast: fprop: ran bf16 x bf16, asked for e4m3 x e4m3" in text
    assert report.falls_back("FP8Current", "autocast")


def test_what_failed_is_a_dash_and_a_sentence_never_a_zero() -> None:
    results = recorded_results()
    key = next(task.key for task in tasks_of([QKV], ["FP8Block"], ["autocast"], {}))
    results.take({"type": "failed", "task": key, "why": "OutOfMemoryError: too large", "kind": "out of memory"})
    report = BenchReport(results, RECIPES, list(MODES))
    table = report.tables()[0]
    column = table.columns.index("FP8Block")
    assert {row[column] for row in table.rows} == {"-"}
    assert "not measured: FP8Block, QKV Proj: OutOfMemoryError: too large" in report.sentences()
    assert results.speedup("FP8Block", "autocast") is None


def test_ctrl_c_shows_what_was_measured(tmp_path: Path) -> None:
    """Interrupted in the middle: a valid run file, exit code 130, no process left behind."""
    pytest.importorskip("torch", reason="measuring needs torch")
    command = [sys.executable, "-m", "gemmscope", "bench", *SMALL.split(), "--device", "cpu", "--precision", "0.000001"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen([*command, "--json", str(tmp_path / "run.json")], env=environment, stdout=subprocess.PIPE)
    journal = tmp_path / "gemmscope" / "journal.sqlite3"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _rounds_in(journal) < 2:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    file = BenchFile.model_validate_json((tmp_path / "run.json").read_text())
    assert file.rounds >= 2
    assert "interrupted" in file.ended


def _rounds_in(journal: Path) -> int:
    if not journal.exists():
        return 0
    with closing(sqlite3.connect(journal)) as database:
        try:
            messages = database.execute("SELECT content FROM message").fetchall()
        except sqlite3.Error:
            return 0
    return sum('"type": "round"' in content for (content,) in messages)
