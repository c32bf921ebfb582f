"""Measuring from end to end on the CPU backend: the same path as on a GPU, and what happens when things go wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.engine.campaign import Campaign, _of_one_case, _of_one_recipe
from gemmscope.engine.journal import Journal
from gemmscope.bench.measurements import Measurements
from gemmscope.engine.rule import StoppingRule
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.results.bench import BenchSettings, Counts
from gemmscope.workload.cases import MODES, Case, Task, bare_gemms, cases_of, tasks_of
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Linear
from support.bench_results import MODEL, recorded_measurements

pytest.importorskip("torch", reason="measuring needs torch")

CASES = [Case("QKV Proj", 32, 32, 96, 2), Case("MLP Up", 32, 32, 128, 2)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "state" / "journal.sqlite3")
    yield opened
    opened.close()


def campaign(journal: Journal, recipes: list[str], on_message: Callable[..., None] = lambda *_: None, **rule: Any) -> Campaign:
    settings = BenchSettings("cpu", drop_ms=1, keep_ms=2, max_rounds=5, silence_s=60)
    limits = {"least_rounds": 2, "target": 0.5} | rule
    return Campaign(tasks_of(CASES, recipes, MODES, {}), settings, StoppingRule(**limits), journal, on_message=on_message)


def test_measures_everything(journal: Journal) -> None:
    results = campaign(journal, ["BF16"]).run()
    assert results.complete_rounds >= 2
    assert all(result.measured and result.facts["error"] < 0.01 for result in results.tasks.values())
    total = results.totals("BF16", "autocast")
    assert total is not None
    assert all(piece > 0 for burst in total for piece in burst)


def test_a_recipe_this_machine_cannot_run_is_named_not_counted(journal: Journal) -> None:
    results = campaign(journal, ["BF16", "FP8Current"]).run()
    assert results.speedup("FP8Current", "autocast") is None
    assert {result.failure for result in results.of("FP8Current", "autocast")} == {"the CPU runs only BF16 and FP32"}
    assert all(result.measured for result in results.of("BF16", "autocast"))


def test_later_rounds_measure_what_is_still_in_doubt(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of everything; then, of the one group that is wanted, until the rounds are over."""
    run = campaign(journal, ["BF16", "FP32"], target=0.0)
    run.settings = replace(run.settings, keep_ms=60)
    monkeypatch.setattr(run.results, "bursts_behind", lambda groups: [("FP32", "autocast")] if groups else [])
    results = run.run()
    counts = {group: len(results.of(*group)[0].rounds_ms) for group in [("BF16", "autocast"), ("FP32", "autocast")]}
    assert counts["FP32", "autocast"] == 5
    assert 2 <= counts["BF16", "autocast"] < 5
    assert results.complete_rounds == 5


def test_where_no_speedup_can_be_formed_times_decide(journal: Journal) -> None:
    """The other recipe failed: measuring ends when the baseline's own times are known, not at the time limit."""
    run = campaign(journal, ["BF16", "FP8Current"], target=0.9)
    run.settings = replace(run.settings, max_rounds=1000)
    run.run()
    assert run.rule.ended == finding("precision-reached", precision=0.9)
    assert journal.unfinished(run.fingerprint) is None


def test_what_the_worker_does_not_have_is_not_asked_for(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would skip all it has, round after round, and end with nothing measured."""
    run = campaign(journal, ["BF16", "FP8Current"], target=0.0)
    monkeypatch.setattr(run.results, "bursts_behind", lambda _: [("FP8Current", "autocast")])
    results = run.run()
    assert {len(result.rounds_ms) for result in results.tasks.values() if not result.failure} == {5}


def test_a_rested_chip_measures_one_op_at_a_time(journal: Journal) -> None:
    run = campaign(journal, ["BF16"])
    run.settings = replace(run.settings, rest_ms=5.0)
    results = run.run()
    bursts = [message for message in journal.messages(1) if message["type"] == "samples"]
    assert all(len({key.split(" / ")[0] for key in message["times_ms"]}) == 1 for message in bursts)
    assert all(result.measured for result in results.tasks.values())


def test_a_dead_worker_costs_one_task(journal: Journal) -> None:
    """Killed while it measures: that task is recorded as failed, a new worker measures the rest."""
    killed: list[int] = []

    def kill(message: dict[str, Any], _: Measurements) -> None:
        if message["type"] == "begin" and message["what"] == "measuring" and not killed:
            child = next(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_worker(entry.name))
            killed.append(child)
            os.kill(child, signal.SIGKILL)

    slow = campaign(journal, ["BF16"], kill)
    slow.settings = replace(slow.settings, keep_ms=150, max_rounds=1000)  # it cannot be through before the signal arrives
    results = slow.run()
    failed = [result for result in results.tasks.values() if result.failure]
    assert len(killed) == len(failed) == 1
    assert failed[0].failure_kind == "crash"
    assert "signal 9" in failed[0].failure
    assert all(result.rounds_ms for result in results.tasks.values() if not result.failure)


@pytest.mark.parametrize(("over", "blamed"), [(True, "FP32"), (False, "BF16")])
def test_a_burst_that_fails_when_it_is_launched_names_the_one_that_ran(
    monkeypatch: pytest.MonkeyPatch, *, over: bool, blamed: str
) -> None:
    """Its own, if bursts run while they are launched; else the one before it, which was still running on the GPU."""
    from gemmscope.bench.worker import Worker

    class Out:
        over = True

        def nearly_done(self) -> None: ...

        def times_ms(self) -> list[list[float]]:
            return [[1.0]]

    def launch(tasks: list[Any], _: Any) -> Out:
        if tasks == ["FP32"]:
            raise RuntimeError("CUDA error")
        return Out()

    tasks = [Task(CASES[0], name, "autocast") for name in ("BF16", "FP32")]
    request = asdict(BenchSettings("cpu")) | {"tasks": [task.to_json() for task in tasks], "least_rounds": 2, "had": {}}
    said: list[dict[str, Any]] = []
    worker = Worker(request, None)
    monkeypatch.setattr(Out, "over", over)
    monkeypatch.setattr(worker, "say", lambda message_type, **content: said.append({"type": message_type, **content}))
    monkeypatch.setattr(worker.timer, "launch", launch)
    monkeypatch.setattr("gemmscope.bench.worker._plan", lambda groups, *_: ((0, group) for group in groups))
    monkeypatch.setattr("gemmscope.bench.worker.Orders", Unheard)
    worker.ready = {task.key: task.recipe for task in tasks}  # type: ignore[misc]
    with pytest.raises(RuntimeError):
        worker._rounds()
    assert (
        next(message["task"] for message in reversed(said) if message["type"] == "begin")
        == Task(CASES[0], blamed, "autocast").key
    )


class Unheard:
    """A parent that says nothing."""

    first_wanted = staticmethod(lambda groups: groups[0])
    stop = staticmethod(lambda: False)


def _is_worker(pid: str) -> bool:
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        parent = int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return b"gemmscope.bench.worker" in words and parent == os.getpid()


def test_interrupted_and_resumed(journal: Journal) -> None:
    """Ctrl-C leaves what was measured; --resume goes on from there."""

    def interrupt(message: dict[str, Any], _: Measurements) -> None:
        if message["type"] == "round":
            raise KeyboardInterrupt

    first = campaign(journal, ["BF16"], interrupt, target=0.0)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert first.results.complete_rounds == 1
    again = campaign(journal, ["BF16"])
    results = again.run(resume=True)
    assert results.complete_rounds >= 2
    assert len(next(iter(results.tasks.values())).rounds_ms) >= 2
    assert journal.unfinished(again.fingerprint) is None


def test_resuming_elsewhere_is_refused(journal: Journal) -> None:
    """Another GPU's rounds are not averaged with this one's."""
    run = campaign(journal, ["BF16"])
    number = journal.begin("x", [])
    run._note(number, {"type": "hello", "device": {"name": "NVIDIA H100"}, "versions": {"torch": "2.11"}})
    run._note(number, {"type": "hello", "device": {"name": "NVIDIA H100"}, "versions": {"torch": "2.11"}})
    with pytest.raises(UserError, match="GPU was NVIDIA H100 and is NVIDIA H200"):
        run._note(number, {"type": "hello", "device": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11"}})


def test_a_backend_that_does_not_load_is_one_message(journal: Journal) -> None:
    broken = campaign(journal, ["BF16"])
    broken.settings = BenchSettings("transformer_engine")
    with pytest.raises(UserError, match=r"does not load|did not start"):
        broken.run()


def test_what_ran_out_of_memory_gets_another_try_among_fewer(journal: Journal) -> None:
    """First its case alone, then its recipe beside the baseline; never what was tried already."""
    run = campaign(journal, ["BF16", "FP8Current"])
    key = Task(CASES[0], "FP8Current", "autocast").key
    run._note(journal.begin("x", []), {"type": "failed", "task": key, "why": "too large", "kind": "out of memory"})
    alone = run._crowded_out(_of_one_case)
    assert [{task.case for task in tasks} for tasks in alone] == [{CASES[0]}]
    assert {task.recipe for task in alone[0]} == {"BF16", "FP8Current"}
    assert [[task.key for task in tasks] for tasks in run._crowded_out(_of_one_recipe)] == [
        [Task(CASES[0], "BF16", "autocast").key, key]
    ]
    run.results.take({"type": "again", "tasks": [key]})
    assert not run.results.tasks[key].failure
    assert run._crowded_out(_of_one_case) == []


def test_fixed_counts(journal: Journal) -> None:
    """Every task runs as often as was asked for, spread over a few rounds."""
    counts = Counts(num_warmup=1, num_iters=13, gpu_warmup=0)
    fixed = campaign(journal, ["BF16"], target=0.0)
    fixed.settings = replace(fixed.settings, counts=counts, max_rounds=counts.rounds)
    results = fixed.run()
    assert {sum(map(len, result.rounds_ms)) for result in results.tasks.values()} == {13}
    assert results.complete_rounds == 5


@pytest.mark.parametrize("after", [1, 3])
def test_fixed_counts_are_no_more_after_resuming(journal: Journal, after: int) -> None:
    """What was measured before it was interrupted counts: in the middle of a round, too."""
    counts, bursts = Counts(num_warmup=0, num_iters=13, gpu_warmup=0), []

    def interrupt(message: dict[str, Any], _: Measurements) -> None:
        if message["type"] == "samples":
            bursts.append(message)
            if len(bursts) == after:
                raise KeyboardInterrupt

    def fixed(on_message: Callable[..., None] = lambda *_: None) -> Campaign:
        made = campaign(journal, ["BF16"], on_message, target=0.0)
        made.settings = replace(made.settings, counts=counts, max_rounds=counts.rounds)
        return made

    with pytest.raises(KeyboardInterrupt):
        fixed(interrupt).run()
    results = fixed().run(resume=True)
    assert {sum(map(len, result.rounds_ms)) for result in results.tasks.values()} == {13}
    assert results.complete_rounds == 5


def test_a_bare_product_is_fprop_alone(journal: Journal) -> None:
    tasks = tasks_of(bare_gemms([(32, 64, 16)]), ["BF16"], MODES, {})
    assert [task.pass_name for task in tasks] == ["", "fprop"]
    settings = BenchSettings("cpu", drop_ms=1, keep_ms=2, max_rounds=3)
    results = Campaign(tasks, settings, StoppingRule(target=0.9, least_rounds=2), journal).run()
    assert all(result.measured for result in results.tasks.values())


def test_journal_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal.sqlite3")


def test_tasks_cross_the_process_boundary() -> None:
    for task in tasks_of([Case("Expert Up", 8, 4, 4, 3, rows=(5, 3))], ["BF16"], MODES, {}):
        assert Task.from_json(task.to_json()) == task


def test_same_kernels_are_not_measured_twice() -> None:
    tasks = tasks_of(CASES, ["BF16", "FP8Current", "FP8Delayed"], MODES, {"FP8Delayed": "FP8Current"})
    assert not [task for task in tasks if (task.recipe, task.mode) == ("FP8Delayed", "pre-quantized")]
    assert [task for task in tasks if (task.recipe, task.mode) == ("FP8Delayed", "autocast")]


def test_cases_of_a_model() -> None:
    model = presets.load("mixtral-8x7b").model
    assert model is not None
    cases = cases_of(op for op in derive(model, RunSpec(1, 128)).ops if isinstance(op, Linear))
    experts = next(case for case in cases if case.op == "Expert Gate+Up")
    assert (experts.count, len(experts.rows), sum(experts.rows)) == (32, 8, 256)


@pytest.mark.parametrize(("target", "seconds", "code"), [(0.5, 1e9, "precision-reached"), (0.0, 0.0, "time-limit-reached")])
def test_stopping_rule(target: float, seconds: float, code: str) -> None:
    tasks = tasks_of(CASES[:1], ["BF16", "FP8Current"], ["autocast"], {})
    results = Measurements(tasks)
    rule = StoppingRule(target=target, least_rounds=3, longest_s=seconds, clock=lambda: 0.0)
    for number in range(3):
        assert not rule.done(results, ["BF16", "FP8Current"], ["autocast"])
        for task, time in zip(tasks, (2.0, 1.0), strict=True):
            results.take({"type": "samples", "times_ms": {task.key: [time + 0.01 * number]}, "state": {}})
        results.take({"type": "round", "round": number})
    assert rule.done(results, ["BF16", "FP8Current"], ["autocast"])
    assert rule.ended is not None
    assert rule.ended.code == code


def test_another_try_has_rounds_of_its_own() -> None:
    """Those of the first try are none of its: least rounds and time limit begin anew, and nothing is wanted yet."""
    results = recorded_measurements([MODEL[0]], spread=0.05)
    names, rule = ["BF16", "FP8Current"], StoppingRule(target=1e-6, least_rounds=2, longest_s=0.0)
    assert rule.done(results, names, MODES)
    assert rule.open
    rule.restart(results.complete_rounds)
    assert not rule.open
    for number in range(2):
        assert not rule.done(results, names, MODES)
        results.take({"type": "round", "round": number})
    assert rule.done(results, names, MODES)


def test_while_something_is_still_to_come_times_do_not_decide() -> None:
    results = recorded_measurements([MODEL[0]], spread=0.0001)
    low = results.of("FP8Current", "autocast")[0]
    low.rounds_ms, results.pieces[low.task.key] = [], []
    rule = StoppingRule(target=0.5)
    assert rule.widest(results, ["BF16", "FP8Current"], ["autocast"]) is None
    low.failure = "too large"
    widest = rule.widest(results, ["BF16", "FP8Current"], ["autocast"])
    assert widest is not None
    assert widest < 0.01


def test_another_try_looks_at_its_own_ops_only() -> None:
    """What the first try left wide would else keep the second going to its time limit."""
    wide, narrow = MODEL[0], MODEL[1]
    results = recorded_measurements([wide, narrow], spread=0.0001)
    for result in results.tasks.values():
        if result.task.case == wide:
            bursts = results.pieces[result.task.key]
            bursts[:] = [[piece * (1 + 0.2 * (index % 2)) for piece in burst] for index, burst in enumerate(bursts)]
    rule = StoppingRule()
    every, own = (rule.widest(results, ["BF16", "FP8Current"], MODES, cases) for cases in (None, [narrow]))
    assert every is not None
    assert own is not None
    assert own < every / 2
