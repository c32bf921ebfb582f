"""A site on a simulated machine: what it reports about its GPU, and when it refuses to run."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmscope.engine.campaign import NotStartedError
from gemmscope.gpu.environment import Environment
from gemmscope.gpu.nvml import Nvml
from gemmscope.pool import place_worker as site
from gemmscope.pool.place_messages import PlaceSetup, event_of, unit_line
from gemmscope.pool.pool import Event, PlaceFound, PlaceRefused, Unit, UnitDone, UnitFailed
from support.machines import NOTHING, machine
from support.nvml_driver import Driver
from support.pools import Script, tiny_bench

H200 = "GPU-5c1f0a44"

Serve = Callable[..., list[Event]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Run a site in this process until its input ends. It sees the given machine states one after another."""

    def run(machines: list[Environment], *units: Unit, setup: PlaceSetup | None = None, patience_s: float = 300.0) -> list[Event]:
        seen = iter(machines)
        monkeypatch.setattr(site, "environment", lambda: next(seen))
        monkeypatch.setattr(site, "PATIENCE_S", patience_s)
        monkeypatch.setattr(site, "PROGRESS_S", 0.0)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(unit_line(unit).decode() for unit in units)))
        file = tmp_path / "out"
        with file.open("w") as out:
            site._PlaceWorker(setup or PlaceSetup(), out, tmp_path).serve(cores=8)
        events = [event_of("a", line, name="node GPU 0") for line in file.read_bytes().splitlines()]
        return [event for event in events if isinstance(event, (PlaceFound, PlaceRefused, UnitDone, UnitFailed))]

    return run


def free(**gpu: Any) -> Environment:
    return replace(machine(visible=H200, uuid=H200, **gpu), node="node03")


ANSWER = Unit("u", Script("answer", 1))


def test_it_says_where_it_is(serve: Serve) -> None:
    two = replace(free(), gpus=(replace(free().gpus[0], index=0, uuid="GPU-other"), replace(free().gpus[0], index=1)))
    [place, done] = serve([two, two], ANSWER)
    assert isinstance(place, PlaceFound)
    assert (place.place.node, place.place.gpu, place.place.uuid) == ("node03", 1, H200)
    assert [gpu["uuid"] for gpu in place.place.facts["gpus"]] == [H200]  # of this place only
    assert place.place.facts["cores"] == 8
    assert done == UnitDone("a", "u", 1)


def test_a_gpu_that_another_place_uses_now_is_waited_for(serve: Serve) -> None:
    """Places that share a GPU say hello while it is in use; the schedule lets them take turns."""
    busy = free(processes=(4711,))
    place, done = serve([busy, busy, free()], ANSWER)
    assert isinstance(place, PlaceFound)
    assert done == UnitDone("a", "u", 1)


def test_a_gpu_that_stays_in_use_is_refused(serve: Serve) -> None:
    _, refused = serve([free(processes=(4711,))] * 10_000, ANSWER, ANSWER, patience_s=0.0)
    assert isinstance(refused, PlaceRefused)
    assert "in use by process 4711" in refused.why
    assert (refused.name, refused.place) == ("node GPU 0", "a")


def test_a_gpu_in_use_may_be_shared(serve: Serve) -> None:
    assert serve([free(processes=(4711,))] * 2, ANSWER, setup=PlaceSetup(share_gpu=True))[1] == UnitDone("a", "u", 1)


@pytest.mark.parametrize("machine", [NOTHING, replace(free(), visible_devices="GPU-gone")])
def test_no_gpu(serve: Serve, machine: Environment) -> None:
    [refused] = serve([machine], ANSWER)
    assert isinstance(refused, PlaceRefused)
    assert "there is no NVIDIA GPU here to measure on" in refused.why


def test_a_machine_without_the_package_is_refused_and_fails_no_unit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.bench.choose.missing_package", lambda _: "torch")
    _, refused = serve([NOTHING] * 2, tiny_bench("u"), setup=PlaceSetup(cpu=True))
    assert isinstance(refused, PlaceRefused)
    assert refused.why == "measuring on cpu needs torch, which is not installed"


def test_a_measuring_process_that_does_not_start_is_the_fault_of_the_machine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotStartedError("the measuring process did not start", "gemmscope doctor")

    monkeypatch.setattr("gemmscope.commands.bench.run_bench", fail)
    _, refused = serve([NOTHING] * 2, tiny_bench("u"), setup=PlaceSetup(cpu=True))
    assert refused == PlaceRefused("node GPU 0", "the measuring process did not start", "gemmscope doctor", "a")


def test_what_a_unit_cannot_do_is_its_own_failure(serve: Serve) -> None:
    unit = tiny_bench("u").content
    impossible = Unit("u", replace(unit, options=unit.options.but(shapes=[(0, 1, 1)])))
    _, failed, done = serve([NOTHING] * 3, impossible, ANSWER, setup=PlaceSetup(cpu=True))
    assert isinstance(failed, UnitFailed)
    assert "every size must be at least 1" in failed.why
    assert done == UnitDone("a", "u", 1)


def test_journals_are_kept_apart(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/home/shared")
    _, done = serve([NOTHING] * 2, Unit("u", Script("folder")), setup=PlaceSetup(cpu=True))
    assert isinstance(done, UnitDone)
    assert done.outcome.startswith(str(tmp_path))
    assert os.environ["XDG_STATE_HOME"] == "/home/shared"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"type": "no such"}', '{"type": "outcome", "unit": "u"}', "\x00", "{" * 99])
def test_what_is_no_line_of_a_site(text: str) -> None:
    with pytest.raises(ValueError, match="not a line of a place worker"):
        event_of("a", text)


def test_setup_travels() -> None:
    setup = PlaceSetup(cpu=True, cores=[3, 4], near=True, folder="/tmp/x", alive_s=2.0)
    assert PlaceSetup(**json.loads(setup.line())) == setup


def test_a_site_pins_itself_to_its_share_of_the_cores_near_its_gpu(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says that both GPUs are near cores 0-3 and 64-67, of which this process may use six."""
    Driver().install(monkeypatch)
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr("gemmscope.pool.gpus.open_nvml", Nvml)
    monkeypatch.setattr("gemmscope.pool.gpus.allowed_cores", lambda: frozenset({0, 1, 2, 3, 64, 65, 100}))
    monkeypatch.setattr("gemmscope.pool.gpus.TOPOLOGY", "/nowhere/{}")
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: pinned.append(tuple(cores)))
    one = free().gpus[0]
    two = replace(free(), gpus=(replace(one, index=0, uuid="GPU-other"), replace(one, index=1)))
    serve([two], setup=PlaceSetup(near=True))
    serve([two], setup=PlaceSetup(near=True, cores=[7]))
    serve([two])
    assert pinned == [(3, 64, 65), (7,)]
