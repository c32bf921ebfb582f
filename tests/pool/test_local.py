"""Sites on this machine, as they are: what they answer, what kills them, and what is left of them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmscope.folders import temporary_folder
from gemmscope.pool.gpus import allowed_cores
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.place_messages import PlaceSetup
from gemmscope.pool.pool import Event, Outcomes, Unit, UnitProgress
from gemmscope.pool.schedule import Limits, Schedule
from gemmscope.process import PACKAGES_VARIABLE, WorkerProcess, descendants
from gemmscope.progress import PoolProgress, Reporter
from support.pools import Script, tiny_bench
from support.processes import MARKER, alive, left_running, state, wait_until

TESTS = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No process, no temporary folder and no open file remains of a pool."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv(MARKER, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(PACKAGES_VARIABLE, str(TESTS))  # units of these tests are defined there
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = open_files()
    yield
    assert left_running(str(tmp_path)) == []
    assert list(temporary.iterdir()) == []
    assert not open_files() - before


def open_files() -> set[tuple[str, str]]:
    """Number and target of what this process has open. Other tests may have left files, which vanish at any time."""
    files = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):
            files.add((number, os.readlink(f"/proc/self/fd/{number}")))  # noqa: PTH115
    return files


def pids(pool: LocalPool) -> dict[str, int]:
    """The process of each place's place worker, by the place's key."""
    return {key: slot.process.pid for key, slot in pool._slots.items() if slot.process is not None}


def run(pool: LocalPool, units: Sequence[Unit], **options: Any) -> Outcomes:
    seen: Counter[str] = Counter()
    with pool:
        outcomes = Schedule(pool, units, on_outcome=lambda unit, *_: seen.update([unit.key]), **options).run()
    assert seen == Counter(list(outcomes.done))
    return outcomes


def test_what_sites_answer(tmp_path: Path) -> None:
    core = min(allowed_cores())
    units = [
        Unit("small", Script("answer", {"a": [1.5, None, "µ"]})),
        Unit("large", Script("answer", "x" * 3_000_000)),
        Unit("folder", Script("folder")),
        Unit("where", Script("visible")),
        Unit("wrong", Script("wrong")),
        Unit("bug", Script("bug")),
        Unit("not plain", Script("answer", {1, 2})),
        Unit("dies", Script("die_first", str(tmp_path / "died"))),
    ]
    outcomes = run(LocalPool([LocalPlace(cores=(core,)), LocalPlace(cores=(core,))], restart_s=0.0), units)
    done = {key: outcome for key, (_, outcome) in outcomes.done.items()}
    assert done.pop("folder").startswith(str(tmp_path / "tmp"))  # journals of units are not in the user's folder
    assert done == {
        "small": {"a": [1.5, None, "µ"]},
        "large": "x" * 3_000_000,
        "where": [None, [core]],
        "dies": "the second time",
    }
    assert outcomes.failed["wrong"][1:] == ("8192 does not fit", "use less", False, True)
    assert outcomes.failed["bug"].why == "KeyError: 'a bug'"
    assert outcomes.failed["not plain"].why == "TypeError: Object of type set is not JSON serializable"
    assert [loss.why for loss in outcomes.lost] == ["its process was killed (signal 9)"]
    assert outcomes.repeated == 1
    facts = next(iter(outcomes.places.values())).facts
    assert facts["gemmscope"]
    assert facts["cores"] == len(allowed_cores())


def test_a_site_that_dies_again_and_again_is_given_up() -> None:
    outcomes = run(LocalPool([LocalPlace()], restart_s=0.0), [Unit("a", Script("exit")), Unit("b", Script("answer"))])
    died = "its process died (exit code 3): out of luck"
    assert outcomes.failed["a"].why == f"lost 3 times; the last reason: {died}"
    assert outcomes.failed["b"].why == "no GPU is left that can measure it"
    assert [(loss.why, loss.again) for loss in outcomes.lost] == [(died, True), (died, True), (died, False)]


def test_a_place_that_cannot_measure_is_refused_and_the_rest_measured() -> None:
    """No GPU is there, or what a unit needs; the units are measured elsewhere."""
    pool = LocalPool([LocalPlace(7, "GPU-no-such"), LocalPlace()])
    outcomes = run(pool, [Unit("a", Script("answer", 1)), Unit("b", Script("refuse"))])
    assert [outcome for _, outcome in outcomes.done.values()] == [1]
    on_cpu, on_gpu = sorted(outcomes.refused, key=lambda refusal: refusal.name.rpartition(" ")[2] == "7")
    assert on_gpu.name.endswith("GPU 7")
    assert "there is no NVIDIA GPU here" in on_gpu.why
    assert (on_cpu.why, on_cpu.hint) == ("no torch here", "install it")
    assert outcomes.failed["b"].why == "no GPU is left that can measure it"


def test_a_site_that_does_not_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.process.worker_command", lambda *_: ["sleep", "60"])
    outcomes = run(LocalPool([LocalPlace()], start_s=0.0), [Unit("a", Script("answer"))])
    assert [refusal.why for refusal in outcomes.refused] == ["its process did not respond for 0 s: the GPU driver may hang"]
    assert outcomes.failed["a"].why == "no GPU is left that can measure it"


def test_a_process_that_cannot_be_started_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.process.worker_command", lambda *_: ["/no/such/program"])
    outcomes = run(LocalPool([LocalPlace()], restart_s=0.0), [Unit("a", Script("answer"))])
    assert [refusal.why for refusal in outcomes.refused] == ["its process cannot be started: No such file or directory"]


def test_a_silent_site_is_ended_and_its_unit_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time flies while it is stopped, which must not look as if this process had been held up."""
    monkeypatch.setattr("gemmscope.pool.schedule.PAUSE_S", math.inf)
    pool, passed = LocalPool([LocalPlace()], alive_s=0.1, restart_s=0.0), [0.0]

    def clock() -> float:
        passed[0] += 600.0 if any(state(pid) == "T" for pid in pids(pool).values()) else 0.0
        return time.monotonic() + passed[0]

    unit = Unit("a", Script("stop_first", str(tmp_path / "stopped")))
    outcomes = run(pool, [unit], limits=Limits(silence_s=3600.0), clock=clock)
    assert outcomes.done["a"].outcome == "the second time"
    assert [loss.why for loss in outcomes.lost] == ["no sign of life for 3600 s"]


class Watching(Reporter):
    """Calls a function whenever progress is reported."""

    def __init__(self, act: Callable[[PoolProgress], None]) -> None:
        self.act = act

    @contextmanager
    def spreading(self, what: str) -> Iterator[Callable[[PoolProgress], None]]:
        yield self.act


def test_ctrl_c_ends_everything_and_returns_what_is_finished(tmp_path: Path) -> None:
    file, sent = tmp_path / "child", []

    def interrupt(progress: PoolProgress) -> None:
        if progress.done and file.exists() and file.read_text() and not sent:
            sent.append(int(file.read_text()))
            assert alive(sent[0])
            os.kill(os.getpid(), signal.SIGINT)

    units = [Unit("quick", Script("answer", 1)), Unit("slow", Script("sleep", str(file))), Unit("later", Script("answer", 2))]
    outcomes = run(LocalPool([LocalPlace()]), units, reporter=Watching(interrupt))
    assert outcomes.interrupted
    assert set(outcomes.done) == {"quick"}
    assert not outcomes.failed
    assert wait_until(lambda: not alive(sent[0]))  # also what a site had started in a process group of its own


DRIVER = """
import sys
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.schedule import Schedule
from gemmscope.pool.pool import Unit
from support.pools import Script
with LocalPool([LocalPlace()]) as pool:
    Schedule(pool, [Unit("a", Script("sleep", sys.argv[1]))]).run()
"""


def test_everything_ends_with_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "child"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(file)], env=environment) as driver:
        assert wait_until(file.exists)
        driver.kill()
    [child] = map(int, wait_for_text(file).split())
    os.kill(child, signal.SIGKILL)  # not a worker of ours, which would watch its parent
    assert left_running(str(tmp_path)) == []
    with temporary_folder():  # the next command removes what the killed one left behind
        assert len(list((tmp_path / "tmp").iterdir())) == 1


def wait_for_text(file: Path) -> str:
    assert wait_until(lambda: file.read_text())
    return file.read_text()


class Killing(LocalPool):
    """Kills the site while it measures; and when the unit is measured again, the measuring process."""

    def __init__(self, places: Sequence[LocalPlace]) -> None:
        super().__init__(places, restart_s=0.0)
        self.killed: list[int] = []

    def events(self, wait_s: float) -> list[Event]:
        events = list(super().events(wait_s))
        for event in events:
            if isinstance(event, UnitProgress) and event.text.startswith("preparing") and len(self.killed) < 2:
                site = pids(self)[event.place]
                self.killed.append(descendants(site)[0] if self.killed else site)
                os.kill(self.killed[-1], signal.SIGKILL)
        return events


def test_a_real_measurement_survives_the_death_of_a_site_and_of_a_worker() -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    pool = Killing([LocalPlace()])
    outcomes = run(pool, [tiny_bench("a", side=256, iterations=400)])  # it must not be through before it is killed
    assert len(set(pool.killed)) == 2
    [(_, outcome)] = outcomes.done.values()
    assert outcome["rounds"] == 5
    assert outcome["tasks"] == ["256x256x256 / BF16 / autocast"]
    assert [loss.why for loss in outcomes.lost] == ["its process was killed (signal 9)"]  # the worker's death cost nothing


def test_a_site_sees_its_gpu_and_its_cores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str | None, PlaceSetup]] = []

    class Recorded(WorkerProcess):
        def __init__(self, module: str, environment: dict[str, str]) -> None:
            super().__init__(module, environment=environment)
            self.visible = environment.get("CUDA_VISIBLE_DEVICES")

        def send(self, line: bytes) -> None:
            started.append((self.visible, PlaceSetup(**json.loads(line))))

    monkeypatch.setattr("gemmscope.pool.local.WorkerProcess", Recorded)
    places = [LocalPlace(1, "GPU-b", (4, 5)), LocalPlace(0, "GPU-a"), LocalPlace(0, "GPU-a"), LocalPlace(3)]
    with LocalPool(places, share_gpu=True) as pool:
        keys = list(pids(pool))
        assert pool.expected() == 4
    assert [visible for visible, _ in started] == ["GPU-b", "GPU-a", "GPU-a", "3"]
    assert [replace(setup, folder="") for _, setup in started] == [
        PlaceSetup(share_gpu=True, cores=cores) for cores in ([4, 5], [], [], [])
    ]
    assert len({setup.folder for _, setup in started}) == 4
    assert [key.partition("/")[2] for key in keys] == ["GPU-b", "GPU-a", "GPU-a #2", "3"]
