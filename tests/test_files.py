"""Files are replaced as a whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.files import descriptor, is_special, replacing, same_file, text_into, write_text
from gemmscope.signals import Interrupted

OLD = "old " * 1000


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "out.json"
    path.write_text(OLD)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_text(path, "new")
    write_text(path, "newer \ud800")
    assert path.read_text() == "newer ?"
    assert names(tmp_path) == ["out.json"]


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failure", [FULL, Interrupted(2), KeyboardInterrupt(), ValueError()])
def test_a_failure_in_the_middle_leaves_the_old_file(old: Path, failure: BaseException) -> None:
    expected = UserError if isinstance(failure, OSError) else type(failure)

    def fail() -> None:
        with replacing(old) as out:
            out.write(b"half of it")
            raise failure

    with pytest.raises(expected):
        fail()
    assert old.read_text() == OLD
    assert names(old.parent) == ["out.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_at_the_end_leaves_the_old_file(old: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path if call == "replace" else os, call, full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        write_text(old, "new")
    assert old.read_text() == OLD
    assert names(old.parent) == ["out.json"]


def test_a_file_system_without_fsync(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(number: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", without)
    write_text(old, "new")
    assert old.read_text() == "new"


def test_a_limit_on_the_size_of_files(old: Path) -> None:
    """The kernel refuses the second block, in the middle of the write."""
    resource = pytest.importorskip("resource")
    code = f"from gemmscope.files import write_text; write_text({str(old)!r}, 'x' * 100_000)"
    child = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be written: File too large" in child.stderr
    assert old.read_text() == OLD
    assert names(old.parent) == ["out.json"]


def test_a_real_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        (folder / "out.json").write_text(OLD)
        with pytest.raises(UserError, match="No space left on device"):
            write_text(folder / "out.json", "x" * 100_000)
        assert (folder / "out.json").read_text() == OLD
        assert names(folder) == ["out.json"]
    finally:
        subprocess.run(["umount", folder], check=True)


def test_what_a_killed_process_left_is_removed(old: Path) -> None:
    lost, fresh = old.with_name(".gemmscope-0123.tmp"), old.with_name(".gemmscope-4567.tmp")
    for path in (lost, fresh):
        path.write_text("half")
    os.utime(lost, (0, 0))
    write_text(old, "new")
    assert names(old.parent) == [fresh.name, "out.json"]  # another process may be writing this one


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o660, 0o755])
def test_permissions_stay(old: Path, mode: int) -> None:
    old.chmod(mode)
    write_text(old, "new")
    assert stat.S_IMODE(old.stat().st_mode) == mode


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_text(tmp_path / "out.json", "new")
    assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_stays_a_link(old: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for target in (old, tmp_path / "not-yet.json"):
        link = folder / f"link to {target.name}"
        link.symlink_to(os.path.relpath(target, folder))
        write_text(link, "new")
        assert link.is_symlink()
        assert target.read_text() == "new"


def test_a_long_name(tmp_path: Path) -> None:
    write_text(tmp_path / ("x" * 255), "new")
    assert names(tmp_path) == ["x" * 255]


def test_names_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), tmp_path / "no" / "folder", tmp_path, tmp_path / "a\0b", tmp_path / "\x1b[31m" / "b"):
        with pytest.raises(UserError, match="cannot be written") as raised:
            write_text(path, "new")
        assert "\x1b" not in str(raised.value)
    assert names(tmp_path) == []


def test_a_folder_that_is_not_ours(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written beside the file, but the file itself can be written."""
    opened = Path.open

    def refuse(self: Path, mode: str = "r", **named: Any) -> Any:
        if "x" in mode:
            raise OSError(errno.EACCES, "Permission denied")
        return opened(self, mode, **named)

    monkeypatch.setattr(Path, "open", refuse)
    write_text(old, "new")
    assert old.read_text() == "new"
    with pytest.raises(UserError, match="Permission denied"):
        write_text(old.with_name("new.json"), "new")


def test_a_file_that_cannot_be_renamed_over(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is mounted into a container."""

    def busy(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    write_text(old, "new")
    assert old.read_text() == "new"
    assert names(old.parent) == ["out.json"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space"):
        write_text(old, "newer" * 1000)
    assert old.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "new")
    reader.join(10)
    assert read == ["new"]
    assert is_special(pipe)
    assert names(tmp_path) == ["pipe"]


def test_devices_and_descriptors(tmp_path: Path) -> None:
    write_text("/dev/null", "new")
    assert not Path("/dev/null").is_file()
    with pytest.raises(UserError, match="No space"):
        write_text("/dev/full", "new")
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before ")
        log.flush()
        write_text(f"/dev/fd/{log.fileno()}", "new")
    assert (tmp_path / "log").read_text() == "before new"
    assert (descriptor("/dev/stderr"), descriptor("/proc/self/fd/7"), descriptor("/dev/null")) == (2, 7, None)


def test_same_file(old: Path, tmp_path: Path) -> None:
    hard, soft, other = tmp_path / "hard", tmp_path / "soft", tmp_path / "other"
    hard.hardlink_to(old)
    soft.symlink_to(old)
    other.write_text(OLD)
    assert same_file(old, hard)
    assert same_file(soft, hard)
    assert same_file(tmp_path / "new", f"{tmp_path}/./new")
    assert not same_file(old, other)
    assert not same_file(tmp_path / "new", tmp_path / "newer")
    assert not same_file("/dev/null", "/dev/null")
    assert same_file("-", "/dev/stdout")


@pytest.mark.parametrize("packed", [False, True])
def test_text_piece_by_piece(old: Path, packed: bool) -> None:
    with replacing(old) as raw, text_into(raw, packed=packed) as out:
        out.writelines(["né\n", "w"])
    assert (gzip.decompress(old.read_bytes()) if packed else old.read_bytes()).decode() == "né\nw"

    def fail() -> None:
        with replacing(old) as raw, text_into(raw, packed=packed) as out:
            out.write("half")
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        fail()
    assert (gzip.decompress(old.read_bytes()) if packed else old.read_bytes()).decode() == "né\nw"
    assert names(old.parent) == ["out.json"]
