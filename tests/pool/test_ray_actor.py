"""The actor's class without Ray: it starts a real site from the bundle, passes lines on, and leaves nothing behind."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gemmscope.pool import ray_actor
from gemmscope.pool.place_messages import PLACE_WORKER, PlaceSetup, unit_line
from gemmscope.pool.pool import Unit
from gemmscope.pool.ray_actor import FOLDER, PlaceActor, remove_abandoned, remove_unused, unpack
from gemmscope.pool.ray_bridge import pack_code
from support.pools import Script
from support.processes import MARKER, alive, left_running, wait_until

TESTS = Path(__file__).resolve().parents[1]
DIGEST = "0123456789abcdef"


@pytest.fixture(scope="module")
def bundle() -> bytes:
    return pack_code()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The temporary folder of the node, in which nothing is left at the end, nor a process."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(MARKER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    yield folder
    assert left_running(str(tmp_path)) == []
    assert list(folder.iterdir()) == []


def start(bundle: bytes, module: str = PLACE_WORKER, **setup: Any) -> PlaceActor:
    begin = PlaceSetup(cpu=True, **setup).line().decode()
    return PlaceActor(bundle, DIGEST, module, begin)


def received(site: PlaceActor, enough: Callable[[list[dict[str, Any]]], bool], seconds: float = 120.0) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    while not enough(lines) and time.monotonic() < until:
        texts, ended = site.poll(1.0)
        lines += map(json.loads, texts)
        assert ended is None or texts, ended
    return lines


def ask(site: PlaceActor, unit: Unit) -> None:
    site.send(unit_line(unit).decode())


def test_it_uses_the_standard_library_alone() -> None:
    """It is sent to nodes on which there is no gemmscope until it has unpacked the bundle."""
    tree = ast.parse(Path(ray_actor.__file__).read_text())
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"ray"}


def test_a_site_from_the_bundle(bundle: bytes, temporary: Path) -> None:
    """Two actors of one node share what was unpacked; the last one removes it."""
    first, second = start(bundle, alive_s=0.2), start(bundle, alive_s=0.2)
    folder = temporary / f"{FOLDER}{os.getuid()}-{DIGEST}"
    try:
        assert received(first, lambda lines: any(line["type"] == "hello" for line in lines))
        ask(first, Unit("a", Script("answer", {"µ": [1, None]})))
        ask(first, Unit("b", Script("wrong")))
        lines = received(first, lambda lines: len([line for line in lines if line.get("unit")]) == 2)
        assert {"type": "outcome", "unit": "a", "outcome": {"µ": [1, None]}} in lines
        assert [line["why"] for line in lines if line["type"] == "failure"] == ["8192 does not fit"]
        assert received(second, lambda lines: any(line["type"] == "hello" for line in lines))
        signs: list[str] = []
        while not signs:
            time.sleep(0.5)  # for several signs of life, of which one is enough
            signs, _ = second.poll(0.0)
        assert [json.loads(line)["type"] for line in signs] == ["alive"]
    finally:
        first.stop()
        assert (folder / "complete").exists()
        second.stop()
        second.stop()  # twice is once
    assert not folder.exists()


def test_what_a_site_started_ends_with_it(bundle: bytes, temporary: Path, tmp_path: Path) -> None:
    site = start(bundle)
    try:
        assert received(site, lambda lines: any(line["type"] == "hello" for line in lines))
        number = tmp_path / "pid"
        ask(site, Unit("a", Script("sleep", str(number))))
        assert wait_until(lambda: number.exists() and number.read_text())
    finally:
        site.stop()
    assert wait_until(lambda: not alive(int(number.read_text())))
    assert site.poll(120.0)[1] == f"signal {signal.SIGKILL}"


def test_how_a_site_ended(bundle: bytes, temporary: Path) -> None:
    """One that dies, and one that never starts: the last line of its error output says why."""
    broken = start(bundle, "gemmscope.no_such_site")
    dying = start(bundle)
    try:
        assert broken.poll(120.0) == ([], "exit code 1: ImportError: No module named gemmscope.no_such_site")
        assert received(dying, lambda lines: any(line["type"] == "hello" for line in lines))
        ask(dying, Unit("a", Script("exit")))
        until = time.monotonic() + 120
        while (ended := dying.poll(1.0)[1]) is None and time.monotonic() < until:
            pass
        assert ended == "exit code 3: out of luck"
        ask(dying, Unit("b", Script("answer")))  # nobody is there to take it
    finally:
        broken.stop()
        dying.stop()


def test_the_environment_of_a_site(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray sets for its actors is not what is measured with."""
    for name in ("OMP_NUM_THREADS", "RAY_JOB_ID", "MY_OWN"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(ray_actor, "visible_gpus", lambda: ["5"])
    for started_with, kept in ((set[str](), False), ({"OMP_NUM_THREADS"}, True)):
        monkeypatch.setattr(ray_actor, "parent_environment", lambda names=started_with: names)
        own = ray_actor.worker_variables(temporary)
        assert ("OMP_NUM_THREADS" in own) == kept
    assert "RAY_JOB_ID" not in own
    assert (own["MY_OWN"], own["CUDA_VISIBLE_DEVICES"], own["CUDA_DEVICE_ORDER"]) == ("1", "5", "PCI_BUS_ID")
    assert own["PYTHONPATH"].split(os.pathsep) == [str(temporary / "code"), str(TESTS)]


def test_many_actors_unpack_and_remove_at_the_same_time(bundle: bytes, temporary: Path) -> None:
    small = make_small_zip()

    def use(_: int) -> bool:
        folder, lock = unpack(small, "0123456789abcdef")
        there = (folder / "code" / "a.py").read_text() == "a = 1\n" * 1000
        time.sleep(0.001)
        remove_unused(folder, lock)
        return there

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(300)))


def test_what_others_left_or_prepared(temporary: Path) -> None:
    """Code is run from the folder: one that others can write to is not used. Bundles that nobody uses any more are removed."""
    small, user = make_small_zip(), os.getuid()
    mine, abandoned = temporary / f"{FOLDER}{user}-{'a' * 16}", temporary / f"{FOLDER}{user}-{'b' * 16}"
    foreign = temporary / f"{FOLDER}{user}-notes"
    for folder in (mine, abandoned, foreign):
        folder.mkdir()
    mine.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        unpack(small, "a" * 16)
    assert not abandoned.exists()
    assert foreign.exists()
    mine.rmdir()
    mine.symlink_to(foreign)
    with pytest.raises(OSError):  # noqa: PT011
        unpack(small, "a" * 16)
    assert list(foreign.iterdir()) == []
    mine.unlink()
    foreign.rmdir()


def test_a_bundle_whose_actors_were_killed_is_removed_at_the_end(temporary: Path) -> None:
    """An actor has a few seconds to remove what it unpacked; on a busy machine that is not always enough."""
    folder, lock = unpack(make_small_zip(), "0123456789abcdef")
    remove_abandoned(temporary)
    assert folder.exists()  # its actor lives
    os.close(lock)
    remove_abandoned(temporary, "0123456789abcdef")
    assert folder.exists()
    remove_abandoned(temporary)
    assert not folder.exists()


def make_small_zip() -> bytes:
    import io
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("code/a.py", "a = 1\n" * 1000)
    return packed.getvalue()
