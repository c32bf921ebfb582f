"""`run_fleet` on a pool whose places answer at once: every GPU is measured or listed with the reason, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gemmscope as gs
from gemmscope.commands import fleet as fleet_command
from gemmscope.commands.fleet import TOLERANCE, gather_fleet, mark_of, run_own_gpu, unhealthy, write_from_gpu
from gemmscope.engine.journal import open_journal
from gemmscope.errors import UserError, option
from gemmscope.fleet.measured import file_name
from gemmscope.fleet.quote import read_fleet, with_spread
from gemmscope.fleet.summaries import RunSummary
from gemmscope.job.load import ModelRun, load_model, model_run
from gemmscope.options.declare import options_of
from gemmscope.options.measuring import BenchOptions, FleetOptions
from gemmscope.options.values import percentage
from gemmscope.pool.gpus import Launched
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.pool.pool import Event, Place, PlaceFound, PlaceRefused, Unit, UnitDone, UnitFailed
from gemmscope.results import keep
from gemmscope.results.fleet import FleetResult
from gemmscope.results.read import read_result
from gemmscope.run_context import RunContext
from support.commands import run_fleet
from support.fleets import run_of
from support.run_files import recorded_bench
from support.step_files import recorded_step
from support.sweep_files import measured_line

SHAPES = [(64, 64, 64)]


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class InstantPool:
    """Places that answer at once. `fails`: by number of the place, why it cannot measure; `refuses`: why it is no place."""

    def __init__(
        self,
        count: int = 8,
        slow: Mapping[int, float] = {},
        fails: Mapping[int, str] = {},
        refuses: Mapping[int, str] = {},
        interrupt_after: int | None = None,
    ) -> None:
        self.places = [Place(f"node GPU-{number}", "node", number, f"GPU-{number:08}") for number in range(count)]
        self.slow, self.fails, self.interrupt_after = slow, fails, interrupt_after
        self.assigned: list[Unit] = []
        self._coming = True
        self._events: list[Event] = [
            PlaceRefused(place.name, refuses[number], f"wait, or add {option('share_gpu')}")
            if number in refuses
            else PlaceFound(place)
            for number, place in enumerate(self.places)
        ]

    def __enter__(self) -> InstantPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def expected(self) -> int:
        return int(self._coming)

    def events(self, _: float) -> Iterable[Event]:
        events, self._events, self._coming = self._events, [], False
        return events

    def assign(self, place: str, unit: Unit) -> None:
        number = int(place.rpartition("-")[2])
        self.assigned.append(unit)
        if self.interrupt_after is not None and len(self.assigned) > self.interrupt_after:
            if len(self.assigned) == self.interrupt_after + 1:
                os.kill(os.getpid(), signal.SIGINT)
            return
        if number in self.fails:
            self._events.append(UnitFailed(place, unit.key, self.fails[number]))
            return
        noise = 1 + 0.002 * ((len(self.assigned) * 7) % 5 - 2)
        factor = (1 + self.slow.get(number, 0.0)) * noise
        summary = run_of(number, {"BF16": factor, "FP8Current": factor, "FP8Block": factor}).summary
        assert isinstance(summary, RunSummary)
        self._events.append(UnitDone(place, unit.key, summary.model_dump(mode="json")))

    def abandon(self, place: str) -> None:
        raise AssertionError(place)


def measure(monkeypatch: pytest.MonkeyPatch, pool: InstantPool, **options: Any) -> FleetResult:
    monkeypatch.setattr(fleet_command, "open_pool", lambda **_: pool)
    return run_fleet(shapes=SHAPES, **options)


def test_every_gpu_is_measured_and_the_slow_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = InstantPool(slow={3: 0.08})
    result = measure(monkeypatch, pool, repeat=2)
    assert len(result.measured) == 8
    assert {gpu.repeats for gpu in result.gpus} == {2}
    assert [outlier.where for outlier in result.outliers] == ["node GPU 3"]
    assert unhealthy(result) == ["node GPU 3"]
    content = pool.assigned[0].content
    assert isinstance(content, MeasureUnit)
    assert isinstance(content.options, BenchOptions)
    assert content.options.shapes == SHAPES


def test_a_fast_gpu_is_named_and_not_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(monkeypatch, InstantPool(slow={3: -0.08}))
    assert [outlier.side for outlier in result.outliers] == ["fast"]
    assert not unhealthy(result)


def test_gpus_that_fail_or_refuse_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(monkeypatch, InstantPool(fails={2: "out of memory"}, refuses={5: "the GPU is in use"}))
    assert {gpu.place: gpu.failure for gpu in result.gpus if gpu.failure} == {
        "node GPU 2": "out of memory",
        "node GPU 5": "the GPU is in use (wait, or add --share-gpu)",
    }
    assert len(result.measured) == 6
    assert set(unhealthy(result)) == {"node GPU 2", "node GPU 5"}


def test_a_gpu_that_was_lost_after_its_first_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measured counts; that it was lost is said, and a health check fails."""

    class Losing(InstantPool):
        def assign(self, place: str, unit: Unit) -> None:
            if unit.key == "node GPU-3 bench 2":
                self._events.append(UnitFailed(place, unit.key, "lost"))
            else:
                super().assign(place, unit)

    result = measure(monkeypatch, Losing(), repeat=2)
    assert [gpu.repeats for gpu in result.measured] == [2, 2, 2, 1, 2, 2, 2, 2]
    shown = " ".join(str(result).split())
    assert "each measured 1 to 2 times: the median counts" in shown
    assert "Measured less often than requested: node GPU 3 (lost)." in shown
    assert unhealthy(result) == ["node GPU 3"]


def test_nothing_measured_is_a_result_too(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(monkeypatch, InstantPool(2, refuses={0: "no torch", 1: "no torch"}))
    assert not result.measured
    assert len(result.gpus) == 2
    assert result.origin == "shapes"
    assert "Nothing was measured" in str(result)


def test_what_was_measured_before_ctrl_c_counts_and_resume_measures_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(monkeypatch, InstantPool(interrupt_after=5))
    assert first.interrupted
    assert len(first.measured) == 5
    assert first.has("fleet-interrupted")
    rest = InstantPool()
    result = measure(monkeypatch, rest, resume=True)
    assert len(rest.assigned) == 3
    assert len(result.measured) == 8
    assert not result.interrupted


def test_gpus_that_were_not_measured_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(monkeypatch, InstantPool(fails={2: "its node died"}, refuses={5: "the GPU is in use"}))
    again = InstantPool()
    result = measure(monkeypatch, again, resume=True)
    assert [unit.key.split()[1] for unit in again.assigned] == ["GPU-2", "GPU-5"]
    assert len(result.measured) == 8
    another = InstantPool()  # it was complete: there is nothing to resume
    measure(monkeypatch, another, resume=True)
    assert len(another.assigned) == 8


def test_another_measurement_does_not_resume_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(monkeypatch, InstantPool(interrupt_after=5))
    pool = InstantPool()
    measure(monkeypatch, pool, resume=True, recipes=["fp8block"])
    assert len(pool.assigned) == 8


def test_run_files_are_written_where_the_unit_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pool = InstantPool(2)
    result = measure(monkeypatch, pool, folder=tmp_path / "runs", repeat=2)
    writers = [unit.content.deliver for unit in pool.assigned]
    assert len({writer.args for writer in writers}) == 4
    assert result.has("fleet-files-missing")  # nobody wrote them
    writers[0](recorded_bench("first"))
    assert Path(*writers[0].args).parent == tmp_path / "runs"
    assert Path(*writers[0].args).is_file()
    write_from_gpu(str(tmp_path / "nowhere" / "a.json"), recorded_bench("first"))  # costs no measurement


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeat": 0}, "repeat"),
        ({"folder": ""}, "folder is empty"),
        ({"tolerance": 1.5}, "tolerance"),
        ({"step": True}, "no training step"),
        ({"gpus": "0", "ray": "auto"}, "ray"),
        ({"shapes": [(0, 1, 1)]}, "not a shape"),
        ({"precision": -1}, "precision"),
        ({"recipes": ["nonsense"]}, "nonsense"),
        ({"hugging_face": True}, "training steps"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_fleet(**{"shapes": SHAPES, **arguments})


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="needs a model"):
        run_fleet(step=True)


# --- files of single GPUs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    for number, name in enumerate(("first", "again", "third", "fourth")):
        result = recorded_bench(name)
        own = result.model_copy(update={"device": {**result.device, "node": f"n{number}", "index": 0, "uuid": f"GPU-{number}"}})
        (folder / f"n{number}.json").write_text(own.to_json(), encoding="utf-8")
    return folder


def test_a_folder_is_gathered(folder: Path) -> None:
    result = gs.gather_fleet(folder)
    assert len(result.measured) == 4
    assert result.of == "bench"
    assert "gather_fleet" in result.command
    assert "NVIDIA H200" in str(result)


def test_nothing_to_gather_is_refused(tmp_path: Path) -> None:
    for paths in ([], [tmp_path], [tmp_path / "none.json"]):
        with pytest.raises(UserError):
            gather_fleet(paths)


def test_a_bench_quotes_the_fleet(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    gather_fleet([folder]).save(path)
    fleet = read_fleet(path, "bench")
    result = with_spread(recorded_bench("first"), fleet)
    assert result.has("fleet-another-gpu")
    quoted = next(finding.text for finding in result.findings if finding.code == "fleet-another-gpu")
    assert quoted in " ".join(str(result).split())


def test_a_fleet_that_does_not_fit_costs_no_measurement(folder: Path, tmp_path: Path) -> None:
    fleet = gather_fleet([folder])
    with pytest.raises(UserError, match="but this is step"):
        read_fleet(fleet, "step")
    with pytest.raises(UserError, match="must be a run file of gemmscope fleet"):
        read_fleet(recorded_step("llama8b"), "step")
    with pytest.raises(UserError, match="but is one of gemmscope bench or step with --sweep"):
        read_fleet(measured_line(), "bench")
    bench = recorded_bench("first")
    other = bench.model_copy(update={"device": {**bench.device, "name": "NVIDIA B200"}})
    result = with_spread(other, fleet)
    assert result.has("fleet-not-quoted")
    assert result.linears == other.linears


# --- one process for each GPU


def test_the_run_file_of_a_gpu_has_a_name_of_its_own() -> None:
    names = [file_name("n", 0, f"GPU-{uuid}0000-1") for uuid in ("aaaa", "bbbb")]
    names += [
        file_name("n", 1),
        file_name("n", None),
        file_name("n", None, rank=1),
        file_name("m", 1),
        file_name("n", 1, repeat=2),
    ]
    assert len(set(names)) == len(names)
    assert all(Path(name).name == name for name in (file_name("a/../b", 0), file_name("", None)))


def test_a_rank_measures_its_own_gpu_and_skips_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[BenchOptions, Path | None]] = []

    def run_bench(_: Any, options: BenchOptions, context: RunContext) -> Any:
        calls.append((options, context.state))
        assert context.deliver is not None
        context.deliver(recorded_bench("first"))
        return recorded_bench("first")

    monkeypatch.setattr(fleet_command, "run_bench", run_bench)
    rank = Launched("srun", 3, 8, 1, 2)
    options = FleetOptions(shapes=SHAPES, folder=str(tmp_path / "out"), device="cpu")
    resumed = options.but(resume=True)
    result, (file, _) = run_own_gpu(rank, None, options)
    assert result is not None
    assert isinstance(file, Path)
    assert file.is_file()
    assert file.name.endswith("-cpu-1.json")
    assert calls[0][1] is not None
    assert not calls[0][1].is_relative_to(tmp_path)  # a journal of its own
    again, same = run_own_gpu(rank, None, resumed)
    assert (again, same) == (None, (file, ""))
    assert len(calls) == 1
    for same in (resumed.but(folder=str(file.parent)), resumed.but(tolerance=0.1)):  # wherever, whatever is called an outlier
        run_own_gpu(rank, None, same)
    assert len(calls) == 1
    swapped = [options.but(num_iters=one, num_warmup=other) for one, other in ((10, 20), (20, 10))]
    run_own_gpu(rank, None, swapped[0])
    run_own_gpu(rank, None, swapped[1].but(resume=True))
    assert len(calls) == 3, "the run file of another measurement"
    run_own_gpu(rank, None, resumed)
    assert len(calls) == 4
    del calls[1:]
    file.write_text("{}")  # cut short by a full disk
    run_own_gpu(rank, None, resumed)
    assert len(calls) == 2


def test_what_is_measured_is_told_by_content(tmp_path: Path) -> None:
    """For the files of ranks, fleets, sweeps and steps: an edited file of the same name is another model, the same one
    elsewhere is not; and a module is its sources."""

    def job(path: Path, **settings: Any) -> ModelRun:
        named = {"module": f"{path}:build"} if path.suffix == ".py" else {"config": str(path)}
        return model_run(load_model(**named), **({"micro_batch_size": 1, "sequence_length": 64} | settings))

    def mark(of: ModelRun) -> str:
        return mark_of(of, FleetOptions(device="cpu"), "")

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    config, same = tmp_path / "a" / "config.json", tmp_path / "b" / "config.json"
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    for unknown in ({}, {"model_type": "bert", "vocab_size": 99}):  # the second is known by its config alone
        for file in (config, same):
            file.write_text(json.dumps(llama | unknown))
        before = mark(job(config))
        assert mark(job(same)) == before
        assert mark(job(config, micro_batch_size=64, sequence_length=1)) != before
        config.write_text(json.dumps(llama | unknown | {"intermediate_size": 256}))
        assert mark(job(config)) != before
    module = tmp_path / "net.py"
    module.write_text("import parts\n")
    before = mark(job(module))
    (tmp_path / "parts.py").write_text("SIZE = 64\n")
    assert (between := mark(job(module))) != before
    (tmp_path / "notes.txt").write_text("nothing")
    assert mark(job(module)) == between
    module.write_text("import parts  # edited\n")
    assert mark(job(module)) not in (before, between)


def test_an_interrupted_rank_replaces_no_run_file_that_holds_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = recorded_bench("first")
    fewer = [replace(task, rounds_ms=task.rounds_ms[:1], states=task.states[:1]) for task in whole.tasks]
    empty = [replace(task, rounds_ms=[], states=[]) for task in whole.tasks]
    delivered = [whole, *(whole.model_copy(update={"tasks": tuple(tasks), "interrupted": True}) for tasks in (fewer, empty))]

    def run_bench(_: Any, __: BenchOptions, context: RunContext) -> Any:
        assert context.deliver is not None
        context.deliver(delivered[0])
        return delivered.pop(0)

    monkeypatch.setattr(fleet_command, "run_bench", run_bench)
    options = FleetOptions(shapes=SHAPES, folder=str(tmp_path), device="cpu")
    written = [run_own_gpu(Launched("srun", 3, 8, 1, 2), None, options)[1] for _ in range(3)]
    file = Path(str(written[0].path))
    assert read_result(file).sample_count == whole.sample_count
    assert [place.path for place in written] == [file, file.with_name(f"{file.stem}.interrupted.json"), None]
    assert [bool(place.note) for place in written] == [False, True, True]
    assert len(gather_fleet([tmp_path]).measured) == 1  # what lies beside a fuller run is not another GPU


def test_a_rank_that_cannot_write_its_run_file_promises_no_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its journal is temporary: there is nothing to resume."""

    def full(*_: object) -> None:
        raise UserError("a.json cannot be written: No space left on device", "give another folder")

    def run_bench(_: Any, __: BenchOptions, context: RunContext) -> Any:
        assert context.deliver is not None
        deliver = context.deliver
        with closing(open_journal()) as journal, journal.recording("mark", "command", resume=False) as recording:
            recording.deliver(lambda: deliver(recorded_bench("first")), complete=True)
        return recorded_bench("first")

    monkeypatch.setattr(fleet_command, "run_bench", run_bench)
    monkeypatch.setattr(keep.Keeper, "write", full)
    with pytest.raises(UserError, match="No space left") as error:
        run_own_gpu(Launched("srun", 3, 8, 1, 2), None, FleetOptions(shapes=SHAPES, folder=str(tmp_path), device="cpu"))
    assert error.value.hint == "give another folder"


def test_help_names_the_tolerance_of_the_rule() -> None:
    assert percentage(options_of(FleetOptions)["tolerance"].option.default) == TOLERANCE
