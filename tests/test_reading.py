"""Opening what the user names: files, pipes and standard input are read within limits, everything else is one message."""

from __future__ import annotations

import gzip
import io
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from gemmscope import reading
from gemmscope.errors import UserError
from gemmscope.reading import InputFile, parse_json, read_bytes, read_text

LIMIT = 1000


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NO_WRITER_SECONDS", 0.1)
    monkeypatch.setattr(reading, "SILENT_SECONDS", 0.3)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def writer(path: Path, *pieces: bytes, pause: float = 0.05) -> threading.Thread:
    """Writes pieces into a named pipe, slowly."""

    def write() -> None:
        with path.open("wb", buffering=0) as out:
            for piece in pieces:
                time.sleep(pause)
                out.write(piece)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/dev/zero", "is a device, not a file"),
        ("/dev/urandom", "is a device, not a file"),
        ("/", "is a folder, not a file"),
        ("/nowhere/at/all", "No such file"),
        ("zero\0byte", "cannot be read"),
        ("x" * 5000, "too long"),
        ("\ud800", "cannot be read"),
    ],
)
def test_what_is_no_file_is_one_message(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_bytes(name, LIMIT, "name a file")
    assert error.value.hint == "name a file"
    assert len(str(error.value)) < 300
    assert error.value.message.isprintable()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path, LIMIT) == "abc"
    assert read_bytes(os.devnull, LIMIT) == b""
    with pytest.raises(UserError, match="more than 5 bytes"):
        read_bytes(path, 5)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="byte 0 is not UTF-8"):
        read_text(path, LIMIT)


def test_a_pipe_without_a_writer(fifo: Path, impatient: None) -> None:
    with pytest.raises(UserError, match="nothing is written to"):
        read_bytes(fifo, LIMIT)


def test_a_pipe_that_sends_nothing(fifo: Path, impatient: None) -> None:
    keeper = os.open(fifo, os.O_RDWR)
    try:
        with pytest.raises(UserError, match="sent nothing"):
            read_bytes(fifo, LIMIT)
    finally:
        os.close(keeper)


@pytest.mark.parametrize("content", [b"some text", gzip.compress(b"some text", mtime=0)])
def test_slow_pipes_are_read_to_their_end(content: bytes, fifo: Path) -> None:
    """Also where the first byte comes alone, which does not tell yet whether it is gzipped."""
    thread = writer(fifo, content[:1], content[1:5], content[5:])
    assert read_bytes(fifo, LIMIT, unpack=True) == b"some text"
    thread.join()


def test_an_endless_pipe_ends(fifo: Path) -> None:
    stop = threading.Event()

    def pour() -> None:
        with fifo.open("wb", buffering=0) as out:
            try:
                while not stop.is_set():
                    out.write(b"x" * 4096)
            except BrokenPipeError:
                pass

    thread = threading.Thread(target=pour, daemon=True)
    thread.start()
    with pytest.raises(UserError, match="more than 1,000 bytes"):
        read_bytes(fifo, LIMIT)
    stop.set()
    thread.join()


def test_open_files_of_this_process(tmp_path: Path) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"through a socket")
        left.shutdown(socket.SHUT_WR)
        assert read_bytes(f"/dev/fd/{right.fileno()}", LIMIT) == b"through a socket"
    (tmp_path / "file").write_bytes(b"again")
    with (tmp_path / "file").open("rb") as stream:
        assert [read_bytes(f"/dev/fd/{stream.fileno()}", LIMIT) for _ in range(2)] == [b"again", b"again"]


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"abc"))))
    assert read_bytes(name, LIMIT, unpack=True) == b"abc"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input cannot be read"):
        read_bytes(name, LIMIT)


def test_a_pipe_is_read_twice_if_it_is_kept(fifo: Path) -> None:
    thread = writer(fifo, b"only ", b"once")
    source = InputFile(fifo)
    source.keep()
    thread.join()
    for _ in range(2):
        with source.open() as stream:
            assert stream.read() == b"only once"
    assert str(source) == str(fifo)


def test_gzip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.gz"
    packed = gzip.compress(b"x" * LIMIT, mtime=0)
    path.write_bytes(gzip.compress(gzip.compress(packed)))
    assert read_bytes(path, LIMIT, unpack=True) == b"x" * LIMIT
    path.write_bytes(packed[:-6])
    with pytest.raises(UserError, match="gzip data is not complete"):
        read_bytes(path, LIMIT, unpack=True)
    monkeypatch.setattr(reading, "HARMLESS_UNPACKED", 10_000)
    path.write_bytes(gzip.compress(gzip.compress(b"x" * 10_000_000)))
    with pytest.raises(UserError, match="times its size"):
        read_bytes(path, 10**9, unpack=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.json is empty"),
        (" \n", "x.json is empty"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5000, "not valid JSON"),
        ("[" + "[]," * 1_100_000 + "0]", "more than 1,000,000 lists"),
        ("\x1b[31m", "not valid JSON"),
    ],
)
def test_json_that_is_not_read(text: str, message: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(UserError, match=message) as error:
            parse_json(data, "x.json")
        assert str(error.value).isprintable()


def test_too_little_memory_is_one_message() -> None:
    with pytest.raises(UserError, match="not enough memory to read x"), reading.enough_memory("x"):
        raise MemoryError
