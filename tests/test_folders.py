"""Temporary folders: removed at the end, and those of killed processes by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemmscope.folders import temporary_folder

KEEPS_ONE = """
import sys
from gemmscope.folders import temporary_folder
with temporary_folder() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_removed_at_the_end(parent: Path) -> None:
    with temporary_folder() as folder:
        (folder / "inside").write_text("x")
        assert folder.parent == parent
    assert not list(parent.iterdir())


def test_what_a_killed_process_left_is_removed_and_nothing_else(parent: Path) -> None:
    own = parent / "gemmscope-results"
    own.mkdir()
    (parent / "gemmscope-work-12345678").symlink_to(own)
    (own / "gemmscope-work-abcdefgh").write_text("a file")
    others = [
        subprocess.Popen(
            [sys.executable, "-c", KEEPS_ONE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(parent)},
        )
        for _ in range(2)
    ]  # fmt: skip
    killed, running = (Path(other.stdout.readline().strip()) for other in others if other.stdout is not None)
    (killed / "request.json").write_text("{}")
    others[0].kill()
    others[0].wait()
    assert killed.is_dir()
    with temporary_folder():
        assert not killed.exists()
        assert running.is_dir()
    others[1].communicate("")
    assert not running.exists()
    assert sorted(path.name for path in parent.iterdir()) == ["gemmscope-results", "gemmscope-work-12345678"]
    for other in others:
        other.stdin and other.stdin.close()
        other.stdout and other.stdout.close()


def test_without_locks_nothing_of_others_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.folders._lock", lambda *_, **__: None)
    (parent / "gemmscope-work-12345678").mkdir()
    with temporary_folder() as folder:
        assert folder.is_dir()
    assert [path.name for path in parent.iterdir()] == ["gemmscope-work-12345678"]
