"""Measuring from end to end on the CPU backend: the same path as on a GPU, and what happens when things go wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemmscope.bench.campaign import LinearCampaign, _of_one_case, _of_one_recipe
from gemmscope.bench.measurements import Measurements
from gemmscope.bench.timing import bench_settings
from gemmscope.choices import MODES
from gemmscope.engine.campaign import LocalWorkers, WorkerEndedError
from gemmscope.engine.journal import Journal, RecordedRun
from gemmscope.engine.messages import Attempted, Begin, Done, Failed, Hello, Message, Noticed, Round, Sampled
from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.options.measuring import BenchOptions
from gemmscope.results.bench import BenchSettings, Counts
from gemmscope.signals import defer_signals
from gemmscope.workload.cases import Case, Task, bare_gemms, tasks_of
from support.campaigns import CASES, Scripted, interrupt, recorded, small_campaign
from support.workers import forked_workers

__all__ = ["forked_workers"]  # the fixture
pytest.importorskip("torch", reason="measuring needs torch")
pytestmark = pytest.mark.usefixtures("forked_workers")


# bursts arrive one by one, not all before the parent reads them
WITH_PAUSES = BenchSettings("cpu", drop_ms=1, keep_ms=2, max_rounds=5, silence_s=60, rest_ms=80)
UNHURRIED = replace(WITH_PAUSES, max_rounds=100)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[RecordedRun]:
    with recorded(tmp_path) as opened:
        yield opened


@pytest.mark.real_process
def test_measures_everything(recording: RecordedRun) -> None:
    results = small_campaign(recording, ["BF16"]).run()
    assert results.complete_rounds >= 2
    assert all(result.measured and result.facts["error"] < 0.01 for result in results.tasks.values())
    total = results.totals("BF16", "autocast")
    assert total is not None
    assert all(piece > 0 for burst in total for piece in burst)


def test_a_recipe_this_machine_cannot_run_is_named_not_counted(recording: RecordedRun) -> None:
    results = small_campaign(recording, ["BF16", "FP8Current"]).run()
    assert results.speedup("FP8Current", "autocast") is None
    assert {result.failure for result in results.of("FP8Current", "autocast")} == {"the CPU runs only BF16 and FP32"}
    assert all(result.measured for result in results.of("BF16", "autocast"))


def test_later_rounds_measure_what_is_not_precise_enough(recording: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of everything, then only the requested group until the last round.

    There are many rounds, because the request may take some rounds to reach the worker.
    """
    run = small_campaign(recording, ["BF16", "FP32"], target=0.0)
    run.settings = replace(run.settings, keep_ms=10, max_rounds=60)
    monkeypatch.setattr(run.results, "bursts_behind", lambda groups: [("FP32", "autocast")] if groups else [])
    results = run.run()
    counts = {group: len(results.of(*group)[0].rounds_ms) for group in [("BF16", "autocast"), ("FP32", "autocast")]}
    assert counts["FP32", "autocast"] == 60
    assert 2 <= counts["BF16", "autocast"] < 60
    assert results.complete_rounds == 60


def test_where_no_speedup_can_be_formed_times_decide(recording: RecordedRun) -> None:
    """If the other recipe failed, measuring ends when the baseline's own times are precise enough, not at the time limit."""
    run = small_campaign(recording, ["BF16", "FP8Current"], target=0.9)
    run.settings = replace(run.settings, max_rounds=1000)
    run.run()
    assert run.rule.ended == finding("precision-reached", precision=0.9)


def test_what_the_worker_does_not_have_is_not_asked_for(recording: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker would skip all its groups in every round and measure nothing."""
    run = small_campaign(recording, ["BF16", "FP8Current"], target=0.0)
    monkeypatch.setattr(run.results, "bursts_behind", lambda _: [("FP8Current", "autocast")])
    results = run.run()
    assert {len(result.rounds_ms) for result in results.tasks.values() if not result.failure} == {5}


def test_a_rested_chip_measures_one_op_at_a_time(recording: RecordedRun) -> None:
    run = small_campaign(recording, ["BF16"])
    run.settings = replace(run.settings, rest_ms=5.0)
    results = run.run()
    bursts = [message for message in recording.messages(run.part) if isinstance(message, Sampled)]
    assert all(len({key.split(" / ")[0] for key in message.times_ms}) == 1 for message in bursts)
    assert all(result.measured for result in results.tasks.values())


@pytest.mark.real_process
def test_a_worker_that_is_killed_costs_nothing(recording: RecordedRun) -> None:
    """A worker killed while it measures is replaced by a new one, which continues."""
    killed: list[int] = []

    def kill(message: Message, _: Measurements) -> None:
        if isinstance(message, Begin) and message.what == "measuring" and not killed:
            child = next(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_worker(entry.name))
            killed.append(child)
            os.kill(child, signal.SIGKILL)

    slow = small_campaign(recording, ["BF16"], on_message=kill)
    slow.settings = replace(slow.settings, keep_ms=150, max_rounds=1000)  # it cannot finish before the signal arrives
    results = slow.run()
    assert len(killed) == 1
    assert all(result.measured for result in results.tasks.values())


@pytest.mark.parametrize(("killed", "workers"), [(True, 2 * 4 + 1), (False, 4 + 1)])
def test_workers_that_die_cost_the_tasks_they_die_at(recording: RecordedRun, killed: bool, workers: int) -> None:
    """Every worker dies at its first autocast task. A worker killed from outside gets a second try."""
    started: list[dict[str, Any]] = []

    def script(request: dict[str, Any]) -> Iterator[Message]:
        started.append(request)
        tasks = [Task.from_json(task) for task in request["tasks"]]
        yield Hello()
        doomed = [task.key for task in tasks if task.mode == "autocast"]
        if not doomed:
            yield Sampled({task.key: [1.0] for task in tasks})
            yield Done()
            return
        yield Begin(doomed[0], "measuring")
        raise WorkerEndedError("crash", "the measuring process died", "(signal 9)", killed=killed)

    results = small_campaign(recording, ["BF16", "FP32"], workers=Scripted(script)).run()
    assert len(started) == workers
    for result in results.tasks.values():
        assert result.failure_kind == ("crash" if result.task.mode == "autocast" else "")
        assert bool(result.rounds_ms) == (result.task.mode == "pre-quantized")


@pytest.mark.parametrize(("over", "blamed"), [(True, "FP32"), (False, "BF16")])
def test_a_burst_that_fails_when_it_is_launched_names_the_one_that_ran(
    monkeypatch: pytest.MonkeyPatch, *, over: bool, blamed: str
) -> None:
    """The failed burst itself if bursts run during their launch, otherwise the one before, which was still running on the GPU."""
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
    said: list[Message] = []
    worker = Worker(request, None)
    monkeypatch.setattr(Out, "over", over)
    monkeypatch.setattr(worker, "say", said.append)
    monkeypatch.setattr(worker.timer, "launch", launch)
    monkeypatch.setattr("gemmscope.engine.worker.plan_rounds", lambda groups, *_: ((0, group) for group in groups))
    monkeypatch.setattr("gemmscope.engine.worker.Orders", Unheard)
    worker.ready = {task.key: task.recipe for task in tasks}  # type: ignore[misc]
    with pytest.raises(RuntimeError):
        worker._measure()
    began = [message.task for message in said if isinstance(message, Begin)]
    assert began[-1] == Task(CASES[0], blamed, "autocast").key


class Unheard:
    """A parent that sends no orders."""

    first_wanted = staticmethod(lambda groups: groups[0])
    stop = staticmethod(lambda: False)


def _is_worker(pid: str) -> bool:
    try:
        arguments = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        parent = int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return b"gemmscope.bench.worker" in arguments and parent == os.getpid()


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C keeps the measured samples, and --resume continues from there."""

    def on_message(message: Message, _: Measurements) -> None:
        if message == Round(0):
            interrupt()

    with recorded(tmp_path) as recording:
        first = small_campaign(recording, ["BF16"], on_message=on_message, target=0.0, settings=UNHURRIED)
        first.run()
        assert first.interrupted
        assert 1 <= first.results.complete_rounds < 100
    with recorded(tmp_path, resume=True) as recording:
        assert recording.resumed
        results = small_campaign(recording, ["BF16"], target=1e6, settings=UNHURRIED).run()
    assert results.complete_rounds >= 2
    for key, result in results.tasks.items():  # the earlier samples unchanged, then the new ones
        before = first.results.tasks[key].rounds_ms
        assert result.rounds_ms[: len(before)] == before
        assert len(result.rounds_ms) >= 2


@pytest.mark.parametrize("decisions_take_s", [0.0, 1000.0])
def test_what_was_measured_before_the_results_were_written_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decisions_take_s: float
) -> None:
    """A process killed between the last sample and writing the files gives the same result without a new worker."""
    clock = chain([0.0], repeat(decisions_take_s))  # the first decision may take so long that no other one is made until the end
    monkeypatch.setattr("gemmscope.engine.campaign.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with recorded(tmp_path) as recording:
        before = small_campaign(recording, ["BF16"], target=1e6)  # reached on a busy machine too
        before.run()
    with recorded(tmp_path, resume=True) as recording:
        workers = Scripted(lambda _: pytest.fail("a worker was started"))
        after = small_campaign(recording, ["BF16"], workers=workers, target=1e6)
        after.run()
    assert [task.rounds_ms for task in after.results.tasks.values()] == [task.rounds_ms for task in before.results.tasks.values()]
    assert after.rule.ended == before.rule.ended


def test_resuming_elsewhere_is_refused(tmp_path: Path) -> None:
    """Another GPU's rounds are not averaged with this one's."""

    def on(gpu: str) -> Scripted:
        def script(_: dict[str, Any]) -> Iterator[Message]:
            yield Hello({"torch": "2.11"}, {"name": gpu})
            interrupt()
            yield Begin("", "preparing")

        return Scripted(script)

    for gpu in ("NVIDIA H100", "NVIDIA H100"):
        with recorded(tmp_path, resume=True) as recording:
            small_campaign(recording, ["BF16"], workers=on(gpu)).run()
    with (
        recorded(tmp_path, resume=True) as recording,
        pytest.raises(UserError, match="GPU was NVIDIA H100 and is NVIDIA H200"),
    ):
        small_campaign(recording, ["BF16"], workers=on("NVIDIA H200")).run()


def test_a_worker_that_does_not_start_again_costs_what_was_left(recording: RecordedRun) -> None:
    """The first one was killed; what it had measured is the result, and the rest says why it is missing."""
    starts: list[dict[str, Any]] = []

    def script(request: dict[str, Any]) -> Iterator[Message]:
        starts.append(request)
        if len(starts) == 1:
            yield Hello()
            yield Sampled({Task.from_json(request["tasks"][0]).key: [1.0]})
            yield Begin(Task.from_json(request["tasks"][1]).key, "measuring")

    results = small_campaign(recording, ["BF16"], workers=Scripted(script, "(exit code 1): no memory")).run()
    assert len(starts) == 2
    assert results.any_samples()
    assert {result.failure for result in results.tasks.values()} == {"the measuring process died (exit code 1): no memory"}


@pytest.mark.parametrize("noise", [b"not json", b"{}", b'{"type": "round"}', b"\xff\x00"])
def test_a_worker_that_sends_no_messages_is_ended(recording: RecordedRun, noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    line = noise + b"\n"
    monkeypatch.setattr("gemmscope.process.worker_command", lambda _, fd: _python(f"os.write({fd}, {line!r})"))
    with pytest.raises(UserError, match="sent an invalid message"):
        small_campaign(recording, ["BF16"]).run()


def test_a_worker_that_says_nothing_is_ended(recording: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.process.worker_command", lambda _, fd: _python("time.sleep(60)"))
    silent = small_campaign(recording, ["BF16"], settings=BenchSettings("cpu", silence_s=0.3))
    with pytest.raises(UserError, match=r"sent nothing for 0\.3 s"):
        silent.run()


@pytest.mark.parametrize(("stays", "says"), [(True, "continues from here"), (False, "measures this again")])
def test_what_resume_does_is_said(recording: RecordedRun, stays: bool, says: str) -> None:
    """The journal of a rank is gone with its process."""
    recording.journal.stays = stays
    campaign = small_campaign(recording, ["BF16"], settings=UNHURRIED)
    with defer_signals() as signals:  # one Ctrl-C: three would end even this process
        campaign.on_message = lambda *_: interrupt() if signals.first is None else None
        campaign.run()
        assert signals.outcome.endswith(says)
    assert campaign.interrupted


def test_a_worker_that_is_stopped_is_ended(recording: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it may be silent, as one is that measures fixed counts."""
    monkeypatch.setattr("gemmscope.engine.campaign.STOPPED_S", 0.2)
    monkeypatch.setattr("gemmscope.process.worker_command", lambda *_: _python("os.kill(os.getpid(), 19); time.sleep(3600)"))
    fixed = BenchOptions(device="cpu", num_iters=100)
    with pytest.raises(UserError, match=r"was stopped \(SIGSTOP\)"):
        small_campaign(recording, ["BF16"], settings=bench_settings(fixed, "cpu")).run()


def test_a_worker_that_leaves_a_child_with_its_pipe_is_seen_to_end(
    recording: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the worker is noticed although its child keeps the pipe open, and the child ends too."""
    code = "child = os.fork(); child or time.sleep(60); os._exit(3)"
    monkeypatch.setattr("gemmscope.process.worker_command", lambda _, fd: _python(code))
    with pytest.raises(UserError, match=r"did not start \(exit code 3\)"):
        small_campaign(recording, ["BF16"]).run()


def test_a_request_larger_than_the_pipe_reaches_a_worker_that_reads_late(
    recording: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies without reading the request is noticed as well."""
    late = "time.sleep(0.5); os._exit(len(sys.stdin.readline()) > 500_000)"
    for code, message in ((late, "exit code 1"), ("os._exit(4)", "exit code 4")):
        monkeypatch.setattr("gemmscope.process.worker_command", lambda _, fd, code=code: _python(code))
        tasks = tasks_of([Case(f"op {number} {'x' * 1000}", 32, 32, 32, 1) for number in range(200)], ["BF16"], MODES, {})
        with pytest.raises(UserError, match=message):
            small_campaign(recording, [], tasks=tasks).run()


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time; {code}"]


@pytest.mark.real_process
def test_a_backend_that_does_not_load_is_one_message(recording: RecordedRun) -> None:
    broken = small_campaign(recording, ["BF16"])
    broken.settings = BenchSettings("transformer_engine")
    with pytest.raises(UserError, match=r"does not load|did not start"):
        broken.run()


def test_what_ran_out_of_memory_gets_another_try_among_fewer(recording: RecordedRun) -> None:
    """First only its op, then only its recipe and the baseline. No combination is tried twice."""
    key = Task(CASES[0], "FP32", "autocast").key

    def script(request: dict[str, Any]) -> Iterator[Message]:
        keys = [Task.from_json(task).key for task in request["tasks"]]
        yield Hello()
        if len(keys) > 2 and key in keys:
            yield Failed(key, "too large", "out of memory")
        for number in range(3):
            yield Sampled({task_key: [1.0 + number / 1000] for task_key in keys})
            yield Round(number)
        yield Done()

    workers = Scripted(script)
    run = small_campaign(recording, ["BF16", "FP32"], workers=workers)
    results = run.run()
    asked = [[Task.from_json(task) for task in request["tasks"]] for request in workers.requests]
    assert [len(tasks) for tasks in asked] == [len(run.tasks), len(run.tasks) // 2, 2]
    assert {task.case for task in asked[1]} == {CASES[0]}
    assert [task.key for task in asked[2]] == [Task(CASES[0], "BF16", "autocast").key, key]
    assert results.tasks[key].measured
    assert results.tasks[key].rounds_ms[0] == [1.0]  # only of the last try
    assert len(results.tasks[key].rounds_ms) <= 3
    assert run._crowded_out(_of_one_case) == run._crowded_out(_of_one_recipe) == []


def test_fixed_counts(recording: RecordedRun) -> None:
    """Every task runs the requested number of times, spread over a few rounds."""
    counts = Counts(num_warmup=1, num_iters=13, gpu_warmup=0)
    fixed = small_campaign(recording, ["BF16"], target=0.0, longest_s=float("inf"))
    fixed.settings = replace(fixed.settings, counts=counts, max_rounds=counts.rounds)
    results = fixed.run()
    assert {sum(map(len, result.rounds_ms)) for result in results.tasks.values()} == {13}
    assert results.complete_rounds == 5


@pytest.mark.parametrize("after", [1, 3])
def test_fixed_counts_are_no_more_after_resuming(tmp_path: Path, after: int) -> None:
    """Samples measured before an interruption count, also those of an incomplete round."""
    counts, bursts = Counts(num_warmup=0, num_iters=13, gpu_warmup=0), []

    def on_message(message: Message, _: Measurements) -> None:
        if isinstance(message, Sampled):
            bursts.append(message)
            if len(bursts) == after:
                interrupt()

    def fixed(recording: RecordedRun, **more: Any) -> LinearCampaign:
        campaign = small_campaign(recording, ["BF16"], target=0.0, longest_s=float("inf"), settings=WITH_PAUSES, **more)
        campaign.settings = replace(campaign.settings, counts=counts, max_rounds=counts.rounds)
        return campaign

    with recorded(tmp_path) as recording:
        first = fixed(recording, on_message=on_message)
        first.run()
        assert first.interrupted  # most likely long before its last round
    with recorded(tmp_path, resume=True) as recording:
        results = fixed(recording).run()
    assert {sum(map(len, result.rounds_ms)) for result in results.tasks.values()} == {13}
    assert results.complete_rounds == 5


def test_a_bare_product_is_fprop_alone(recording: RecordedRun) -> None:
    tasks = tasks_of(bare_gemms([(32, 64, 16)]), ["BF16"], MODES, {})
    assert [task.pass_name for task in tasks] == ["", "fprop"]
    settings = BenchSettings("cpu", drop_ms=1, keep_ms=2, max_rounds=3)
    results = small_campaign(recording, [], tasks=tasks, settings=settings, target=0.9).run()
    assert all(result.measured for result in results.tasks.values())


def test_journal_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal.sqlite3")


def test_a_journal_of_other_tasks_is_one_message(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        campaign = small_campaign(recording, ["BF16"])
        recording.write(campaign.part, Attempted([task.key for task in campaign.tasks]))
        recording.write(campaign.part, Sampled({"another op": [1.0]}))
    for first in (Attempted(["another op"]), Noticed("no such finding", {})):
        with recorded(tmp_path, resume=True) as recording, pytest.raises(UserError, match="does not fit this measurement"):
            small_campaign(recording, ["BF16"]).run()
        with recorded(tmp_path) as recording:
            recording.write(campaign.part, first)


@pytest.mark.real_process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_every_process_of_a_job_is_left_to_the_parent(
    recording: RecordedRun, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A signal that reaches the worker during its start does not end it."""
    started = LocalWorkers.start

    def start(self: LocalWorkers, module: str) -> Any:
        link = started(self, module)
        os.kill(link.pid, number)
        return link

    monkeypatch.setattr(LocalWorkers, "start", start)
    assert all(result.measured for result in small_campaign(recording, ["BF16"]).run().tasks.values())
