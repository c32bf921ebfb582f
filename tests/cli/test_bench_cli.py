"""`gemmscope bench` as people type it, on a machine without a GPU."""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from gemmscope.bench.campaign import LinearCampaign
from gemmscope.bench.measurements import Measurements
from gemmscope.bench.timing import bench_settings, counts_of, stopping_rule
from gemmscope.choices import MODES
from gemmscope.engine.journal import VERSION, open_journal
from gemmscope.engine.messages import Failed
from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.options.measuring import TimingOptions
from gemmscope.options.values import bare_shapes
from gemmscope.results.bench import BenchResult, Counts
from support.command import Run, run
from support.fake_gpu import ON_CPU, REFERENCE, SMALL, Pretend, own_state, pretend
from support.machines import machine
from support.processes import wait_until
from support.refusals import unnamed
from support.workers import forked_workers

__all__ = ["forked_workers", "own_state", "pretend", "run"]  # the fixtures
pytestmark = pytest.mark.usefixtures("forked_workers")

# --- on the CPU, for real ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.real_process
def test_bench_on_the_cpu(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    files = {name: tmp_path / f"run.{name}" for name in ("json", "csv", "markdown", "png")}
    options = " ".join(f"--{name} {path}" if name != "png" else f"-o {path}" for name, path in files.items())
    outcome = run(f"bench {ON_CPU} --longest 1 --verify-dgrad {options}")
    assert outcome.code == 0
    assert "Speedup of every linear over BF16, autocast" in outcome.out
    assert "--detail: every table and note" in outcome.out
    result = BenchResult.model_validate_json(files["json"].read_text())
    assert result.has("dgrad-always-measured")
    assert {cell.op for cell in result.linears.ops} == {"QKV Proj", "Attn Out", "MLP Up", "MLP Down"}
    assert all(task.rounds_ms for task in result.tasks)
    assert (result.settings.backend, result.linears.layers) == ("cpu", 2)
    assert {total.layer_ms is not None for total in result.linears.totals} == {True}
    assert "| QKV Proj |" in files["markdown"].read_text()
    lines = csv.DictReader(io.StringIO(files["csv"].read_text()))
    assert sum(line["Op"] == "QKV Proj" and line["table"] == "times_pre_quantized" for line in lines) == 4
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert outcome.err.count("wrote ") == 4


def test_bare_shapes_on_the_cpu_with_fixed_counts(run: Run) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    outcome = run("bench --shapes 32,64x32x16 --device cpu --num-iters 10 --num-warmup 1 --gpu-warmup 0 --json -")
    assert outcome.code == 0
    result = BenchResult.model_validate_json(outcome.out)
    assert result.model is None
    assert result.has("fixed-counts")
    assert result.rounds == 5
    assert {cell.op for cell in result.linears.ops} == {"32x32x32", "64x32x16"}
    assert {case.passes for case in result.linears.cases} == {("fprop",)}


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
    result = BenchResult.model_validate_json(outcome.out)
    assert result.model is not None
    assert result.model.name.startswith("Mine from ")
    assert result.model.layers == "traced"
    assert [(case.op, case.tokens, case.inputs, case.outputs) for case in result.linears.cases] == [("up", 16, 32, 64)]


def test_profile_runs_one_shape_and_times_nothing(run: Run) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    outcome = run("bench --device cpu --profile --profile-shape 32x16x8")
    assert outcome.code == 0
    line = "nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx -o gemmscope"
    assert f"{line} --capture-range-end=stop gemmscope bench --device cpu --profile --profile-shape 32x16x8" in outcome.err
    assert unnamed(outcome.err, "4 of 4 tasks") == []
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
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )
    journal = tmp_path / "gemmscope" / f"journal-{VERSION}.sqlite3"
    assert wait_until(lambda: _rounds_in(journal) >= 2)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    result = BenchResult.model_validate_json((tmp_path / "run.json").read_text())
    assert result.rounds >= 2
    assert result.interrupted
    assert result.has("interrupted")


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
    assert "16384" in outcome.out
    assert "All linears" not in outcome.out


def test_shapes_are_squares_and_triplets() -> None:
    assert bare_shapes("1024,8192x5120x10240") == [(1024, 1024, 1024), (8192, 5120, 10240)]
    assert bare_shapes(" 16X32X64 , ,7") == [(16, 32, 64), (7, 7, 7)]
    assert bare_shapes("default") == []
    with pytest.raises(UserError, match="--shapes is empty"):
        bare_shapes("")


def recipes_of(ran: list[LinearCampaign]) -> list[str]:
    return ran[0].recipes


def test_recipes_are_those_that_the_gpu_runs(run: Run, pretend: Pretend) -> None:
    """Recipes that cannot run here are neither tried nor mentioned."""
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --detail")
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
    assert unnamed(outcome.err, "--recipes", "MXFP8", "--no-fp8") == []
    assert not ran


def test_a_recipe_that_the_gpu_cannot_run_is_refused(run: Run, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --recipes nvfp4")
    assert outcome.code == 2
    assert unnamed(outcome.err, "NVFP4", "10.0", "NVIDIA H200", "9.0", "BF16, FP8Current, FP8Delayed, FP8Block") == []
    assert ran == []


def test_blackwell_runs_more(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(machine(capability=(10, 0)))
    monkeypatch.setattr("support.bench_results.recorded_kernels", lambda task, recipe: [["nvjet_sm100_tst_x", 100.0, 7]] * 3)
    run(f"bench {REFERENCE} --recipes mxfp8,nvfp4 --pre-quantize")
    assert recipes_of(ran) == ["BF16", "MXFP8", "NVFP4"]


def test_an_old_gpu_has_not_even_the_baseline(run: Run, pretend: Pretend) -> None:
    pretend(machine(capability=(7, 0)))
    outcome = run(f"bench {REFERENCE}")
    assert outcome.code == 2
    assert unnamed(outcome.err, "8.0") == []


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
    named = options if "--recipes" in options else f"--recipes bf16 {options}"
    outcome = run(f"bench {REFERENCE} {named} --json -")
    assert outcome.code == 0, outcome.err
    assert ran[0].settings.backend == backend
    assert ran[0].modes == (["pre-quantized"] if backend == "torch" else list(MODES))
    assert BenchResult.model_validate_json(outcome.out).has("gemms-only-backend") == (backend == "torch")


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
    options = "--timing profiler --num_iters 50 --cache_weights --no-torchao-filter --recipes fp8current --detail"
    outcome = run(f"bench {REFERENCE} {options}")
    assert outcome.code == 0, outcome.err
    settings = ran[0].settings
    assert settings.counts == Counts(num_warmup=10, num_iters=50, gpu_warmup=5.0)
    assert settings.max_rounds == settings.counts.rounds
    assert (settings.timing, settings.cache_weights, settings.filter_layers) == ("profiler", True, False)
    assert not ran[0].rule.decides  # counts decide when to stop, not precision
    assert finding("fixed-counts-after-load", runs=50, warmup=10, seconds=5.0).text in outcome.out
    assert "timed by kernel timestamps" in outcome.out
    assert "Quantization of W is excluded, because it happens once per step" in outcome.out


def test_without_counts_precision_decides() -> None:
    timing = TimingOptions(precision=0.02, time_limit=30)
    assert counts_of(timing) is None
    assert (stopping_rule(timing).target, stopping_rule(timing).longest_s) == (0.02, 30)
    assert bench_settings(timing, "cpu").max_rounds > 100_000  # too many to wait for


def test_the_cpu_is_not_loaded_first(run: Run, pretend: Pretend) -> None:
    pretend()
    outcome = run(f"bench {ON_CPU} --num-iters 50 --recipes bf16 --json -")
    assert BenchResult.model_validate_json(outcome.out).has("fixed-counts")


def test_nothing_to_resume_is_said(run: Run, pretend: Pretend) -> None:
    pretend()
    said = finding("nothing-to-resume").text
    assert said in run(f"bench {REFERENCE} --resume").err
    with closing(open_journal()) as journal:
        journal.ask("UPDATE run SET finished = NULL")
    assert said not in run(f"bench {REFERENCE} --resume").err
    assert said in run(f"bench {REFERENCE} --resume --recipes fp8block").err


def test_profile_of_a_model(run: Run, pretend: Pretend) -> None:
    ran = pretend()
    outcome = run(f"bench {REFERENCE} --profile --recipes fp8current --autocast-only")
    assert outcome.code == 0
    assert ran[0].settings.for_nsight
    assert unnamed(outcome.err, "8 of 8 tasks") == []
    ran.clear()
    outcome = run("bench --profile --shapes 64 --recipes bf16 --csv -")
    assert [case.op for case in ran[0].results.cases()] == ["4096x4096x4096"]
    assert unnamed(outcome.err, "--profile", "--profile-shape 4096", "--shapes") == []
    assert unnamed(outcome.err, "--profile", "--csv") == []


# --- results -------------------------------------------------------------------------------------------------------------


def test_strict_exits_with_3(run: Run, pretend: Pretend) -> None:
    pretend(kernels_of={"FP8Current": "BF16"})
    assert run(f"bench {REFERENCE} --strict --recipes fp8block").code == 0
    outcome = run(f"bench {REFERENCE} --strict --recipes fp8current")
    assert outcome.code == 3
    assert "FALLBACK" in outcome.out


def test_nothing_measured_is_no_success(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend()

    def fail(self: LinearCampaign) -> Measurements:
        for key in self.results.tasks:
            self.results.take(Failed(key, "OutOfMemoryError", "out of memory"))
        return self.results

    monkeypatch.setattr(LinearCampaign, "run", fail)
    assert run(f"bench {REFERENCE} --profile").code == 1
    outcome = run(f"bench {REFERENCE}")
    assert outcome.code == 1
    assert finding("nothing-measured").text in outcome.out
    ops = ["QKV Proj", "Attn Out", "MLP Up", "MLP Down"]
    assert finding("not-measured", recipe="BF16", ops=ops, reason="OutOfMemoryError").text in outcome.out


def test_a_named_recipe_keeps_its_column(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend()
    measure = LinearCampaign.run

    def run_and_fail(self: LinearCampaign) -> Measurements:
        results = measure(self)
        for key, result in results.tasks.items():
            if result.task.recipe == "FP8Block":
                results.take(Failed(key, "cublas says no", "error"))
        return results

    monkeypatch.setattr(LinearCampaign, "run", run_and_fail)
    head = re.compile(r"^Op +BF16 ms +FP8Block$", flags=re.MULTILINE)
    assert head.search(run(f"bench {REFERENCE} --recipes fp8block").out)
    assert not head.search(run(f"bench {REFERENCE} --no-fp8-current --no-fp8-delayed").out)
    assert len(ran) == 2


def test_a_disk_that_fills_up_costs_no_measurement(
    run: Run, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are printed, the other files are written, and the campaign can be resumed."""
    ran = pretend()
    replace_file = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(28, "No space left on device")
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", full)
    outcome = run(f"bench {REFERENCE} --json {tmp_path}/run.json --csv {tmp_path}/run.csv")
    assert outcome.code == 2
    assert "All linears" in outcome.out
    assert unnamed(outcome.err, os.strerror(errno.ENOSPC), "journal") == []
    assert "--resume" in outcome.err
    assert (tmp_path / "run.csv").exists()
    with closing(open_journal()) as journal:
        assert journal.unfinished(ran[0].part)
