"""Measured sweeps: which points there are, what becomes of their outcomes, and what comes out of a driver that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import gemmscope
from gemmscope.commands.sweep import continues
from gemmscope.document import document
from gemmscope.document.sweep import _begins
from gemmscope.document.sweep_tables import sweep_summary
from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.pool.pool import (
    Event,
    Outcomes,
    Place,
    PlaceFound,
    PlaceRefused,
    PoolEnded,
    Unit,
    UnitDone,
    UnitFailed,
    UnitOutcome,
)
from gemmscope.results.sweep import MeasuredPoint, SweepPoint, SweepResult, break_evens
from gemmscope.sweep import run as sweep_stream
from gemmscope.sweep.assembly import point_key
from gemmscope.sweep.point import bench_point, step_point
from gemmscope.workload.cases import bare_gemms
from gemmscope.writers import terminal
from support.bench_results import recorded_measurements
from support.command import Run, run
from support.commands import bench_sweep, step_sweep
from support.processes import MARKER, left_running, wait_until
from support.run_files import bench_result, put, recorded_bench
from support.step_files import recorded_step
from support.sweep_files import PLACES, assembled, linears_at, measured_gemm, measured_line, measured_plane

__all__ = ["run"]  # the fixture
SIZES = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 24}
TINY = "--hidden-size 32 --intermediate-size 64 --num-attention-heads 4 --num-hidden-layers 1 --device cpu --autocast-only"

COUNTS = "--num-iters 2 --num-warmup 0 --gpu-warmup 0"


@pytest.fixture(autouse=True)
def own_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Recorded:
    """A pool whose places answer with points made of recorded kernels; those in `fails` cannot be measured, and there is no
    memory for those in `unfit`."""

    def __init__(
        self, fails: tuple[str, ...] = (), refused: bool = False, ends_at: str = "", unfit: tuple[str, ...] = ()
    ) -> None:
        self.fails, self.unfit, self.units, self.waiting, self.ends_at = fails, unfit, list[Unit](), list[Event](), ends_at
        refusal = PlaceRefused("node01 GPU 0", "PyTorch is not installed there", "install it")
        self.waiting += [refusal] if refused else [PlaceFound(place) for place in PLACES]

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def expected(self) -> int:
        return 0

    def events(self, wait_s: float) -> Iterable[Event]:
        events, self.waiting = self.waiting, []
        return events

    def assign(self, place: str, unit: Unit) -> None:
        self.units.append(unit)
        if unit.key == self.ends_at:
            self.waiting.append(PoolEnded("the connection to the Ray cluster was lost"))
            return
        if unit.key in self.fails:
            self.waiting.append(UnitFailed(place, unit.key, "its inputs differ", "use others"))
            return
        if unit.key in self.unfit:
            self.waiting.append(UnitFailed(place, unit.key, "it does not fit", "use less", unfit=True))
            return
        job = unit.content.job
        outcome = linears_at(job.run.micro_batch_size, job.run.sequence_length)
        self.waiting.append(UnitDone(place, unit.key, json.loads(json.dumps(outcome))))

    def abandon(self, place: str) -> None:
        raise AssertionError


def swept(monkeypatch: pytest.MonkeyPatch, pool: Any, axes: dict[str, list[int]], **options: Any) -> SweepResult:
    monkeypatch.setattr("gemmscope.sweep.run.open_pool", lambda **_: pool)
    return bench_sweep(SIZES, {"micro_batch_size": 1, "sequence_length": 2048}, axes, device="cpu", **options)


def test_every_point_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Recorded(fails=("micro_batch_size=4 tp=2",))
    result = swept(monkeypatch, pool, {"micro_batch_size": [4, 1, 2, 2], "tp": [2, 3]})
    assert sorted(unit.key for unit in pool.units) == [f"micro_batch_size={size} tp=2" for size in (1, 2, 4)]
    assert [sweep.mode for sweep in result.sweeps] == ["autocast", "pre-quantized"]
    for sweep in result.sweeps:
        assert [tuple(point.values.values()) for point in sweep.points] == [(1, 2), (1, 3), (2, 2), (2, 3), (4, 2), (4, 3)]
        assert [bool(point.times_ms) for point in sweep.points] == [True, False, True, False, False, False]
        assert {point.why_not for point in sweep.points if point.values["tp"] == 3} == {
            "tp=3 does not divide num_attention_heads = 32"
        }
        assert [point.failure for point in sweep.points if point.failure] == ["its inputs differ"]
    assert (result.wanted, result.sample_count, result.interrupted) == (3, 2, False)
    assert {"sweep-point-not-measured", "sweep-point-not-possible", "sweep-several-gpus"} <= {
        finding.code for finding in result.findings
    }
    assert sum(gpu.points for gpu in result.gpus) == 2


def test_one_of_many_processes_does_not_measure_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs that are named, or Ray, one process drives them all."""
    axes = {"micro_batch_size": [1, 2]}
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")  # perhaps the only one
    assert swept(monkeypatch, Recorded(), axes).sample_count == 2
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun started 8 processes, and each of them would measure every point") as error:
        swept(monkeypatch, Recorded(), axes)
    assert "gpus='all'" in str(error.value)
    assert swept(monkeypatch, Recorded(), axes, ray="auto").sample_count == 2


def test_whose_file_a_sweep_may_replace(tmp_path: Path) -> None:
    """An unfinished one of the same sweep."""
    cut = measured_line().model_copy(update={"interrupted": True})
    put(tmp_path, "cut.json", cut)
    assert continues(measured_line(), tmp_path / "cut.json")
    assert not continues(measured_line().model_copy(update={"origin": "another.json"}), tmp_path / "cut.json")
    put(tmp_path, "whole.json", measured_line())
    assert not continues(measured_line(), tmp_path / "whole.json")


def test_points_that_failed_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"micro_batch_size": [1, 2, 4]}
    swept(monkeypatch, Recorded(fails=("micro_batch_size=2",)), axes)
    again = Recorded()
    whole = swept(monkeypatch, again, axes, resume=True, precision=0.5)
    assert [unit.key for unit in again.units] == ["micro_batch_size=2"]
    assert whole.sample_count == 3
    another = Recorded()  # it was complete: there is nothing to resume
    swept(monkeypatch, another, axes, resume=True)
    assert len(another.units) == 3


def test_points_that_were_lost_with_their_gpus_have_an_exit_code(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    sizes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
    command = f"bench {sizes} --sequence-length 2048 --device cpu --sweep micro_batch_size=1,2,4"
    monkeypatch.setattr("gemmscope.sweep.run.open_pool", lambda **_: Recorded(ends_at="micro_batch_size=4"))
    lost = run(command)
    assert lost.code == 4
    assert "4 not measured, because GPUs were lost (the connection to the Ray cluster was lost)." in lost.out
    again = Recorded()
    monkeypatch.setattr("gemmscope.sweep.run.open_pool", lambda **_: again)
    assert run(f"{command} --resume").code == 0
    assert [unit.key for unit in again.units] == ["micro_batch_size=4"]


def test_a_stream_of_unfinished_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_stream, "LEAST_S", 0.0)
    seen: list[SweepResult] = []
    result = swept(monkeypatch, Recorded(), {"micro_batch_size": [1, 2, 4, 8]}, stream=seen.append)
    assert all(result.interrupted and result.has("sweep-incomplete") for result in seen)
    assert [result.sample_count for result in seen] == sorted(result.sample_count for result in seen)
    assert seen[0].sample_count < result.sample_count == 4
    assert not result.interrupted
    assert not result.has("sweep-incomplete")


def test_nothing_measured_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="PyTorch is not installed there"):
        swept(monkeypatch, Recorded(refused=True), {"micro_batch_size": [1, 2]})
    result = swept(monkeypatch, Recorded(fails=("tp=1",)), {"tp": [1]})
    assert result.sample_count == 0
    shown = terminal.text(document(result), detail=False)
    assert "No point of the sweep could be measured" in shown
    assert "1 not measured: its inputs differ." in shown


def test_a_point_without_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the map and in words, as in the sweep of a forecast; also where nothing else was measured."""
    axes = {"micro_batch_size": [1, 2], "tp": [1, 2]}
    result = swept(monkeypatch, Recorded(unfit=("micro_batch_size=2 tp=1",)), axes)
    [_, _, point, _] = result.sweeps[0].points
    assert (point.values, point.failure, point.unfit) == (
        {"micro_batch_size": 2, "tp": 1}, "it does not fit", result.sweeps[0].recipes
    )  # fmt: skip
    shown = terminal.text(document(result), detail=True)
    assert "no fit" in shown
    assert "failed" not in shown
    assert "Does not fit at 2 x 1: it does not fit." in shown
    assert not result.has("sweep-out-of-memory")
    alone = swept(monkeypatch, Recorded(unfit=("tp=1",)), {"tp": [1]})
    assert (alone.sample_count, alone.sweeps[0].points[0].unfit) == (0, ("BF16",))


def test_files_of_a_sweep_of_which_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    """The run file says so, and is not that of an unfinished sweep."""
    monkeypatch.setattr(sweep_stream, "LEAST_S", 0.0)
    keys = tuple(f"micro_batch_size={size}" for size in (1, 2, 4))
    monkeypatch.setattr("gemmscope.sweep.run.open_pool", lambda **_: Recorded(unfit=keys))
    sizes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())
    files = f"--json {tmp_path}/out.json -o {tmp_path}/out.png"
    outcome = run(f"bench {sizes} --sequence-length 2048 --device cpu --sweep micro_batch_size=1,2,4 {files}")
    assert outcome.code == 1
    result = SweepResult.model_validate_json((tmp_path / "out.json").read_text())
    assert (result.interrupted, result.sample_count) == (False, 0)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"dp": [1, 2]}, "not a size that a sweep can vary"),
        ({"gradient_accumulation": [1, 2]}, "do not depend on gradient_accumulation"),
        ({"micro_batch_size": []}, "gives micro_batch_size no values"),
        ({"micro_batch_size": 4}, "needs a list of values"),
        ({"tp": [3, 5]}, "does not divide"),
        ({"micro_batch_size": list(range(1, 5002))}, "5001 points, more than 5000"),
    ],
)
def test_axes_that_are_wrong(axes: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=message):
        swept(monkeypatch, None, axes)


def test_a_point_says_what_its_bench_says() -> None:
    """By the one rule, also in the ratio of two recipes."""
    bench = recorded_bench("first")
    data = bench_point(bench)["modes"]["autocast"]
    winner = bench.linears.winners["autocast"]
    assert data["winner"] == winner.model_dump(mode="json")
    assert {name: Interval(**gain) for name, gain in data["speedups"].items()} == {
        name: bench.linears.speedup(name, "autocast") for name in bench.linears.recipes[1:]
    }
    total = bench.linears.total("BF16", "autocast")
    assert total is not None
    assert Interval(**data["times_ms"]["BF16"]) == total.total_ms
    fallback = bench_point(recorded_bench("fallback"))["modes"]
    assert any(mode["fallbacks"] for mode in fallback.values())
    assert all(name not in mode["speedups"] for mode in fallback.values() for name in mode["fallbacks"])


def test_two_recipes_with_one_time_are_too_close_to_call() -> None:
    def point(**how: Any) -> dict[str, Any]:
        measurements = recorded_measurements(bare_gemms([(4096, 4096, 4096)]), spread=0.01, **how)
        data: dict[str, Any] = bench_point(bench_result(measurements))["modes"]["pre-quantized"]
        return data

    times = {name: time["value"] for name, time in point()["times_ms"].items()}
    assert point()["winner"] == point()["winner"] | {"best": "FP8Current", "rivals": []}
    close = point(slower={"FP8Block": times["FP8Current"] / times["FP8Block"]})["winner"]
    assert {close["best"], *close["rivals"]} == {"FP8Current", "FP8Block"}


def test_a_gemm_has_a_winner_and_a_rate() -> None:
    [autocast, alone] = measured_gemm().sweeps
    assert autocast.what == "GEMM"
    for point in alone.points:
        assert point.winner is not None
        best = point.times_ms[point.winner.best].value
        assert point.tflops == pytest.approx(2 * point.values["m"] * 4096 * 14336 / best / 1e9)
        assert "FP8Block" not in point.winner.rivals  # 1.33x behind, beyond the interval of their ratio


def test_rows_of_several_modes_are_not_called_points() -> None:
    sweeps = measured_gemm().sweeps
    many = [sweep.model_copy(update={"points": sweep.points * 3}) for sweep in sweeps]
    summary = sweep_summary(many)
    assert summary is not None
    assert summary.note == "14 of 24 rows are shown."


def test_a_recipe_out_of_memory_is_not_ranked() -> None:
    [autocast, _] = measured_plane().sweeps
    [point] = [point for point in autocast.points if point.unfit]
    assert "FP8Block" not in point.speedups
    assert point.winner is not None
    without = linears_at(1, 2048)
    for data in without["modes"].values():
        data |= {"times_ms": {}, "speedups": {}, "winner": None, "unfit": ["BF16", "FP8Current"]}
    values = [{"micro_batch_size": 1}]
    result = assembled("bench", Outcomes(done={point_key(values[0]): UnitOutcome(PLACES[0], without)}), values)
    assert result.sweeps[0].points[0].failure == "BF16: out of memory"
    assert result.sample_count == 0
    assert "could be measured" in document(result).answer


def test_break_even_skips_points_without_times() -> None:
    faster = Interval(1.2, 1.1, 1.3)
    points = [
        MeasuredPoint(values={"tp": 1}, times_ms={}, failure="lost"),
        MeasuredPoint(values={"tp": 2}, speedups={"FP8": faster}),
        MeasuredPoint(values={"tp": 4}, failure="out of memory"),
    ]
    assert [point.since for point in break_evens(points, ["BF16", "FP8"])] == [2]


def test_a_recipe_that_is_faster_at_small_sizes_alone_is_not_faster_at_no_size() -> None:
    sweep = measured_line().sweeps[0]
    gains = {1: Interval(1.2, 1.1, 1.3), 2: Interval(0.9, 0.8, 1.1)}
    points = tuple(SweepPoint(values={"m": m}, speedups={"FP8Block": gain}) for m, gain in gains.items())
    own = sweep.model_copy(update={"sizes": ("m",), "points": points, "break_even": break_evens(points, ["FP8Block"])})
    assert _begins(own) == "FP8Block only at m 1"


def test_products_and_versions_that_differ_are_said() -> None:
    values = [{"micro_batch_size": size} for size in (1, 2)]
    places = [PLACES[0], Place("b", "node02", 0, "GPU-b")]
    outcomes = Outcomes()
    for point, place in zip(values, places, strict=True):
        outcomes.done[point_key(point)] = UnitOutcome(place, linears_at(**point, sequence_length=4096))
    other = outcomes.done["micro_batch_size=2"].outcome
    other["device"], other["versions"] = {"name": "NVIDIA H100"}, {**other["versions"], "driver": "550.1"}
    result = assembled("bench", outcomes, values)
    assert all(map(result.has, ("sweep-gpu-types-differ", "sweep-versions-differ", "sweep-several-gpus")))
    assert "NVIDIA H200, NVIDIA H100" in document(result).answer


@pytest.mark.parametrize("make", [measured_plane, measured_line, measured_gemm])
def test_a_measured_sweep_is_never_called_a_forecast(make: Any) -> None:
    shown = terminal.text(document(make()), detail=True)
    assert "FORECAST" not in shown
    assert "error bar" not in shown
    assert "95%" in shown


def test_compare_of_two_sweeps(run: Run, tmp_path: Path) -> None:
    first = measured_plane()
    sweeps = []
    for sweep in first.sweeps:
        points = [
            point.model_copy(update={"times_ms": {name: time.times(1.1) for name, time in point.times_ms.items()}})
            if point.values["micro_batch_size"] == 2
            else point
            for point in sweep.points
        ]
        sweeps.append(sweep.model_copy(update={"points": tuple(points)}))
    put(tmp_path, "a.json", first)
    put(tmp_path, "b.json", first.model_copy(update={"sweeps": tuple(sweeps)}))
    put(tmp_path, "line.json", measured_line())
    put(tmp_path, "bench.json", recorded_bench("first"))
    same = run(f"compare {tmp_path}/a.json {tmp_path}/a.json --fail-if-slower 3%")
    assert same.code == 0, same.err
    slower = run(f"compare {tmp_path}/a.json {tmp_path}/b.json --fail-if-slower 3%")
    assert slower.code == 1
    assert "2 x 1024 · BF16 · autocast" in slower.out
    assert "1 x 1024 · BF16 · autocast" not in slower.out.partition("slower")[0]
    assert run(f"compare {tmp_path}/a.json {tmp_path}/line.json").err.count("not sweeps of the same thing") == 1
    assert "compare results of the same kind" in run(f"compare {tmp_path}/a.json {tmp_path}/bench.json").err
    assert "micro_batch_size 1 · BF16" in run(f"compare {tmp_path}/line.json {tmp_path}/line.json").out


def test_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.sweep.run.open_pool", lambda **_: Recorded())
    job = gemmscope.load(**SIZES).on(sequence_length="2k", micro_batch_size=1)
    result = job.bench_sweep(micro_batch_size=["1", 2], device="cpu", precision=0.05)
    assert result.sample_count == 2
    assert result.precision == 0.05
    assert "bench_sweep(" in result.command
    assert list(result.to_frame("Every point of the sweep, autocast")["micro_batch_size"]) == [1, 2]
    with pytest.raises(UserError, match="dp"):
        job.bench_sweep(dp=[1, 2], device="cpu")


def test_a_driver_that_is_killed_loses_no_point(tmp_path: Path) -> None:
    """The real thing on the CPU, four points of which two are possible. SIGKILL after the first: the run file and the page are
    readable; the same command with --resume measures the other one, and every point is there once."""
    out, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    options = f"--sweep sequence_length=16,32 --sweep tp=1,3 --micro-batch-size 1 {COUNTS} --json {out} --html {page}"
    command = [sys.executable, "-m", "gemmscope", "bench", *TINY.split(), *options.split()]
    environment = {**os.environ, MARKER: str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_until(lambda: page.exists() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left_running(str(tmp_path)) == []
    cut = SweepResult.model_validate_json(out.read_text())
    assert (cut.interrupted, cut.sample_count, cut.has("sweep-incomplete")) == (True, 1, True)
    assert 'http-equiv="refresh"' in page.read_text()
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    whole = SweepResult.model_validate_json(out.read_text())
    assert (whole.interrupted, whole.sample_count) == (False, 2)
    [sweep] = whole.sweeps
    assert [tuple(point.values.values()) for point in sweep.points] == [(16, 1), (16, 3), (32, 1), (32, 3)]
    assert sweep.points[0].times_ms == cut.sweeps[0].points[0].times_ms  # not measured again
    assert 'http-equiv="refresh"' not in page.read_text()
    assert not list(tmp_path.glob("*.partial.*"))
    assert "Measured sweep over sequence_length and tp" in done.stdout


def test_steps_are_measured_in_the_recipes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a step do not try mixed plans, which a sweep does not show; and the limits are those of a sweep."""

    class Steps(Recorded):
        def assign(self, place: str, unit: Unit) -> None:
            self.units.append(unit)
            self.waiting.append(UnitDone(place, unit.key, json.loads(json.dumps(step_point(recorded_step("gpt1b"))))))

    pool = Steps()
    monkeypatch.setattr("gemmscope.sweep.run.open_pool", lambda **_: pool)
    run = {"micro_batch_size": 8, "sequence_length": 1024}
    result = step_sweep(SIZES, run, {"gradient_accumulation": [1, 2]}, device="cpu")
    [sweep] = result.sweeps
    recorded = recorded_step("gpt1b").step
    assert [point.winner for point in sweep.points] == [recorded.winner] * 2
    assert sweep.points[0].times_ms == {time.recipe: time.step_ms for time in recorded.recipes}
    options = pool.units[0].content.options
    assert (options.try_mixed, options.precision, options.time_limit) == (False, 0.02, 20.0)
    with pytest.raises(UserError, match="a training step includes quantization"):
        step_sweep(SIZES, run, {"tp": [1]}, device="cpu", modes=["pre-quantized"])
