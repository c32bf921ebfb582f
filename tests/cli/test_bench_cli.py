"""`gemmscope bench` and `gemmscope doctor` as people type them, on a machine without a GPU."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.bench_results import record
from gemmscope.cli.bench_options import TimingOptions, parse_shapes
from gemmscope.errors import UserError
from gemmscope.gpu.environment import Environment
from gemmscope.measure.campaign import Campaign, Counts
from gemmscope.measure.results import Results
from gemmscope.workload.cases import MODES
from gemmscope.store.benchfile import BenchFile
from gemmscope.store.journal import Journal
from support.machines import machine
from test_cli import Run, run

__all__ = ["run"]  # the fixture

SIZES = "--hidden-size 32 --intermediate-size 64 --num-attention-heads 2 --num-hidden-layers 2"
SMALL = f"{SIZES} --micro-batch-size 1 --sequence-length 32"
ON_CPU = f"{SMALL} --device cpu"
REFERENCE = (
    "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


Pretend = Callable[..., list[Campaign]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """As if this machine had that GPU and those packages; campaigns take recorded kernels, and are handed back as they ran."""
    real = importlib.util.find_spec

    def prepare(found: Environment | None = None, packages: str = "torch transformer_engine", **how: Any) -> list[Campaign]:
        known = {"torch", "transformer_engine", "torchao"}
        monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: found or machine())
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: (name in packages.split() or None) if name in known else real(name)
        )
        ran: list[Campaign] = []

        def campaign_run(self: Campaign, *, resume: bool = False) -> Results:
            number = self.journal.begin(self.fingerprint, list(self.command))
            ran.append(self)
            record(self.results, **how)
            self.journal.finish(number)
            return self.results

        monkeypatch.setattr(Campaign, "run", campaign_run)
        monkeypatch.setattr("gemmscope.measure.link.Link", nullcontext)  # no worker is started
        return ran

    return prepare


# --- on the CPU, for real ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_bench_on_the_cpu(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    files = {name: tmp_path / f"run.{name}" for name in ("json", "csv", "markdown", "png")}
    options = " ".join(f"--{name} {path}" if name != "png" else f"-o {path}" for name, path in files.items())
    outcome = run(f"bench {ON_CPU} --longest 1 --verify-dgrad {options}")
    assert outcome.code == 0
    assert "Pre-quantized: the products alone" in outcome.out
    assert "One layer" in outcome.out
    assert "computed, not measured" in outcome.out
    assert "dgrad is always measured" in outcome.out
    file = BenchFile.model_validate_json(files["json"].read_text())
    assert {row.op for row in file.rows} == {"QKV Proj", "Attn Out", "MLP Up", "MLP Down"}
    assert all(task.rounds_ms for task in file.tasks)
    assert (file.settings.backend, file.layers) == ("cpu", 2)
    assert "| QKV Proj |" in files["markdown"].read_text()
    assert len(list(csv.DictReader(io.StringIO(files["csv"].read_text())))) == 4 * 2 * 4 * 2
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert outcome.err.count("wrote ") == 4


def test_bare_shapes_on_the_cpu_with_fixed_counts(run: Run) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    outcome = run("bench --shapes 32,64x32x16 --device cpu --num-iters 10 --num-warmup 1 --gpu-warmup 0 --json -")
    assert outcome.code == 0
    file = BenchFile.model_validate_json(outcome.out)
    assert file.model is None
    assert file.ended.startswith("fixed counts: 10 runs of each, 1 to warm up")
    assert file.rounds == 5
    assert {row.op for row in file.rows} == {"32x32x32", "64x32x16"}
    assert {tuple(row.passes) for row in file.rows} == {("fprop",)}


def test_a_module_is_traced_and_measured(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    (tmp_path / "mine.py").write_text(
        "import torch\n\n"
        "def build():\n"
        "    class Mine(torch.nn.Module):\n"
        "        def __init__(self):\n"
        "            super().__init__()\n"
        "            self.emb = torch.nn.Embedding(64, 32)\n"
        "            self.up = torch.nn.Linear(32, 64)\n"
        "        def forward(self, ids):\n"
        "            return self.up(self.emb(ids))\n"
        "    return Mine(), (torch.zeros(1, 16, dtype=torch.long),)\n"
    )
    batch = "--micro-batch-size 1 --sequence-length 16 --num-iters 4 --num-warmup 0 --gpu-warmup 0"
    outcome = run(f"bench --module {tmp_path}/mine.py:build {batch} --device cpu --json -")
    assert outcome.code == 0, outcome.err
    file = BenchFile.model_validate_json(outcome.out)
    assert file.model is not None
    assert (file.model.name, file.model.layers) == ("Mine", "traced")
    assert {(row.op, row.tokens, row.inputs, row.outputs) for row in file.rows} == {("up", 16, 32, 64)}


def test_profile_runs_one_shape_and_times_nothing(run: Run) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    outcome = run("bench --device cpu --profile --profile-shape 32x16x8")
    assert outcome.code == 0
    line = "nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx -o gemmscope"
    assert f"{line} --capture-range-end=stop gemmscope bench --device cpu --profile --profile-shape 32x16x8" in outcome.err
    assert "4 of 4 tasks ran, each in an NVTX range of its name; nothing was timed" in outcome.err
    assert outcome.out == ""


def test_ctrl_c_shows_what_was_measured(tmp_path: Path) -> None:
    """Interrupted in the middle: a valid run file, exit code 130, no process left behind."""
    pytest.importorskip("torch", reason="measuring needs torch")
    command = [sys.executable, "-m", "gemmscope", "bench", *SMALL.split(), "--device", "cpu", "--precision", "0.000001"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [*command, "--json", str(tmp_path / "run.json")],
        env=environment,
        stdout=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests in the background ignores it
    )
    journal = tmp_path / "gemmscope" / "journal.sqlite3"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _rounds_in(journal) < 2:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
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


# --- which shapes, recipes and backend ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "--shapes", "--shapes default", "--shapes --pre-quantize"])
def test_the_ladder_is_measured_where_nothing_is_named(run: Run, options: str, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {options}")
    assert outcome.code == 0, outcome.err
    sides = [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert [case.op for case in ran[0].results.cases()] == [f"{side}x{side}x{side}" for side in sides]
    assert "16384x16384x16384" in outcome.out
    assert "Full model" not in outcome.out


def test_shapes_are_squares_and_triplets() -> None:
    assert parse_shapes("1024,8192x5120x10240") == [(1024, 1024, 1024), (8192, 5120, 10240)]
    assert parse_shapes(" 16X32X64 , ,7") == [(16, 32, 64), (7, 7, 7)]
    with pytest.raises(UserError, match="names no shape"):
        parse_shapes("")


def recipes_of(ran: list[Campaign]) -> list[str]:
    return ran[0].recipes


def test_recipes_are_those_that_the_gpu_runs(run: Run, pretend: Pretend) -> None:
    """Nothing is tried that cannot run here, and nothing is said of it."""
    ran = pretend()
    outcome = run(f"bench {REFERENCE}")
    assert outcome.code == 0, outcome.err
    assert recipes_of(ran) == ["BF16", "FP8Current", "FP8Delayed", "FP8Block"]
    assert "MXFP8" not in outcome.out
    assert "15872x4096x12288" in outcome.out


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("--no-fp8-current --no-fp8-delayed", ["BF16", "FP8Block"]),
        ("--no_fp8_block --no-fp8 --no-fp4", ["BF16", "FP8Current", "FP8Delayed"]),
        ("--recipes fp8current --no-fp8-block", ["BF16", "FP8Current"]),
        ("--recipes bf16", ["BF16"]),
    ],
)
def test_recipes_can_be_left_out(run: Run, options: str, left: list[str], pretend: Pretend) -> None:
    ran = pretend()
    assert run(f"bench {REFERENCE} {options}").code == 0
    assert recipes_of(ran) == left


def test_a_recipe_is_not_both_named_and_left_out(run: Run, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --recipes mxfp8,fp8current --no-fp8")
    assert outcome.code == 2
    assert "--recipes names MXFP8, and --no-fp8 leaves it out" in outcome.err
    assert not ran


def test_a_recipe_that_the_gpu_cannot_run_is_refused(run: Run, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --recipes nvfp4")
    assert outcome.code == 2
    assert "NVFP4 cannot be measured here: " in outcome.err
    assert "NVFP4 products need compute capability 10.0, and this NVIDIA H200 is 9.0" in outcome.err
    assert "recipes that can run here: BF16, FP8Current, FP8Delayed, FP8Block" in outcome.err
    assert ran == []


def test_blackwell_runs_more(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(machine(capability=(10, 0)))
    monkeypatch.setattr("bench_results.recorded_kernels", lambda task, recipe: [["nvjet_sm100_tst_x", 100.0, 7]] * 3)
    run(f"bench {REFERENCE} --recipes mxfp8,nvfp4 --pre-quantize")
    assert recipes_of(ran) == ["BF16", "MXFP8", "NVFP4"]


def test_an_old_gpu_has_not_even_the_baseline(run: Run, pretend: Pretend) -> None:
    pretend(machine(capability=(7, 0)))
    outcome = run(f"bench {REFERENCE}")
    assert outcome.code == 2
    assert "BF16 products need compute capability 8.0" in outcome.err


@pytest.mark.parametrize(
    ("packages", "options", "backend"),
    [
        ("torch transformer_engine torchao", "", "transformer_engine"),
        ("torch torchao", "", "torchao"),
        ("torch", "", "torch"),
        ("torch transformer_engine torchao", "--backend torchao", "torchao"),
        ("torch transformer_engine", "--backend transformer-engine", "transformer_engine"),
        ("torch transformer_engine torchao", "--recipes fp8block", "transformer_engine"),
    ],
)
def test_the_backend_that_is_installed(run: Run, packages: str, options: str, backend: str, pretend: Pretend) -> None:
    from gemmscope.recipe.recipes import recipe

    if backend not in recipe("BF16").backends:
        pytest.skip(f"no recipes for {backend} yet")
    ran = pretend(packages=packages)
    outcome = run(f"bench {REFERENCE} --recipes bf16 {options}" if "--recipes" not in options else f"bench {REFERENCE} {options}")
    assert outcome.code == 0, outcome.err
    assert ran[0].settings.backend == backend
    assert ran[0].modes == (["pre-quantized"] if backend == "torch" else list(MODES))
    assert ("the torch backend measures products alone" in outcome.out) == (backend == "torch")


@pytest.mark.parametrize(
    ("packages", "options", "message"),
    [
        ("", "", "measuring on cuda needs torch, which is not installed"),
        ("torch", "--recipes fp8delayed", "needs transformer_engine"),
        ("torch", "--backend torchao", "needs torchao, which is not installed"),
        ("torch", "--backend torch --autocast-only", "the torch backend has no autocast mode"),
        ("torch torchao", "--backend torchao --cache-weights", "--cache-weights is not possible with the torchao backend"),
        ("torch", "--backend torch --cache-weights", "--cache-weights is not possible with the torch backend"),
        ("torch transformer_engine", "--backend cpu --device cuda", "the cpu backend does not measure on cuda"),
    ],
)
def test_a_backend_that_is_not_there(run: Run, packages: str, options: str, message: str, pretend: Pretend) -> None:
    pretend(packages=packages)
    outcome = run(f"bench {REFERENCE} {options}")
    assert outcome.code == 2
    assert message in outcome.err


# --- how it is timed ------------------------------------------------------------------------------------------------------


def test_settings_reach_the_worker(run: Run, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --timing profiler --num_iters 50 --cache_weights --no-torchao-filter --recipes fp8current")
    assert outcome.code == 0, outcome.err
    settings = ran[0].settings
    assert settings.counts == Counts(num_warmup=10, num_iters=50, gpu_warmup=5.0)
    assert settings.max_rounds == settings.counts.rounds
    assert (settings.timing, settings.cache_weights, settings.filter_layers) == ("profiler", True, False)
    assert not ran[0].rule.done(ran[0].results, ran[0].recipes, ran[0].modes)  # counts decide, not doubt
    assert "rounds: fixed counts: 50 runs of each, 10 to warm up before those of every round, 5 s of heating first" in outcome.out
    assert "timed by the kernels' own timestamps" in outcome.out
    assert "quantizing W is left out, as it is done once per step" in outcome.out


def test_without_counts_doubt_decides() -> None:
    timing = TimingOptions(precision=0.02, longest=30)
    assert timing.counts() is None
    assert (timing.rule().target, timing.rule().longest_s) == (0.02, 30)
    assert timing.settings("cpu").max_rounds > 100_000  # nobody waits for so many


def test_the_cpu_is_not_heated(run: Run, pretend: Pretend) -> None:
    pretend()
    outcome = run(f"bench {ON_CPU} --num-iters 50 --recipes bf16")
    assert "4 rounds: fixed counts: 50 runs of each, 10 to warm up before those of every round\n" in outcome.out


def test_nothing_to_resume_is_said(run: Run, pretend: Pretend, tmp_path: Path) -> None:
    ran = pretend()
    words = "note: there is nothing to resume"
    assert words in run(f"bench {REFERENCE} --resume").err
    journal = Journal(tmp_path / "state" / "gemmscope" / "journal.sqlite3")
    journal.reopen(ran[0].fingerprint)
    journal.close()
    assert words not in run(f"bench {REFERENCE} --resume").err
    assert words in run(f"bench {REFERENCE} --resume --recipes fp8block").err


def test_profile_of_a_model(run: Run, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --profile --recipes fp8current --autocast-only")
    assert outcome.code == 0
    assert ran[0].settings.for_nsight
    assert "8 of 8 tasks ran" in outcome.err
    ran.clear()
    outcome = run("bench --profile --shapes 64 --recipes bf16 --csv -")
    assert [case.op for case in ran[0].results.cases()] == ["4096x4096x4096"]
    assert "--profile runs --profile-shape 4096 alone: --shapes is left aside" in outcome.err
    assert "--profile times nothing, so --csv gets nothing to write" in outcome.err


# --- what comes of it -----------------------------------------------------------------------------------------------------


def test_strict_exits_with_3(run: Run, pretend: Pretend) -> None:
    pretend(kernels_of={"FP8Current": "BF16"})
    assert run(f"bench {REFERENCE} --strict --recipes fp8block").code == 0
    outcome = run(f"bench {REFERENCE} --strict --recipes fp8current")
    assert outcome.code == 3
    assert "FALLBACK" in outcome.out


def test_nothing_measured_is_no_success(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()

    def fail(self: Campaign, *, resume: bool = False) -> Results:
        for key in self.results.tasks:
            self.results.take({"type": "failed", "task": key, "why": "OutOfMemoryError", "kind": "out of memory"})
        return self.results

    monkeypatch.setattr(Campaign, "run", fail)
    assert run(f"bench {REFERENCE} --profile").code == 1
    outcome = run(f"bench {REFERENCE}")
    assert outcome.code == 1
    assert "nothing could be measured" in outcome.out
    assert "not measured: BF16, QKV Proj, Attn Out, MLP Up, MLP Down: OutOfMemoryError" in outcome.out


def test_a_named_recipe_keeps_its_column(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend()
    measure = Campaign.run

    def run_and_fail(self: Campaign, *, resume: bool = False) -> Results:
        results = measure(self, resume=resume)
        for key, result in results.tasks.items():
            if result.task.recipe == "FP8Block":
                results.take({"type": "failed", "task": key, "why": "cublas says no", "kind": "error"})
        return results

    monkeypatch.setattr(Campaign, "run", run_and_fail)
    header = re.compile(r"Op +Pass +M x K x N +BF16 +FP8Block")
    assert header.search(run(f"bench {REFERENCE} --recipes fp8block").out)
    assert not header.search(run(f"bench {REFERENCE} --no-fp8-current --no-fp8-delayed").out)
    assert len(ran) == 2


def test_a_disk_that_fills_up_costs_no_measurement(
    run: Run, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are printed, the other files are written, and the campaign can be resumed."""
    ran = pretend()
    write_text = Path.write_text

    def full(self: Path, *arguments: Any, **named: Any) -> int:
        if self.suffix == ".json":
            raise OSError(28, "No space left on device")
        return write_text(self, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    outcome = run(f"bench {REFERENCE} --json {tmp_path}/run.json --csv {tmp_path}/run.csv")
    assert outcome.code == 2
    assert "Full model" in outcome.out
    assert "No space left on device" in outcome.err
    assert "nothing is lost: all samples are in the journal" in outcome.err
    assert "--resume" in outcome.err
    assert (tmp_path / "run.csv").exists()
    journal = Journal(tmp_path / "state" / "gemmscope" / "journal.sqlite3")
    assert journal.unfinished(ran[0].fingerprint) is not None
    journal.close()
