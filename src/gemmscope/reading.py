"""Opens every file that the user names: a regular file, a pipe such as `<(zcat trace.json.gz)`, or standard input (`-`).

Whatever the name stands for, reading it ends soon and needs little memory. Devices and folders are rejected. A pipe that sends
nothing is given up after some seconds. Gzip data that unpacks to far more than real files do is rejected. Every failure is a
`UserError`, also one in the middle of a file.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import select
import stat
import sys
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from gemmscope.errors import UserError, shown
from gemmscope.toml import load_data

NO_WRITER_SECONDS = 5.0  # how long a named pipe may have no writer
SILENT_SECONDS = 15.0  # how long a pipe may send nothing
LIMITS = load_data("gemmscope", "reading.toml")
ANY = LIMITS["any"]
HARMLESS_UNPACKED = 16 << 20  # bytes: up to here, gzip data may unpack to any multiple of its size
LONGEST_NAME = 1000  # characters
LARGEST_NUMBER = 1e30  # more than FLOPs or bytes of any training
DEEPEST = 50  # levels of lists and objects in run files and recordings
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_OPEN_FILE = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")  # a shell's <(command)
_GZIP_MAGIC = b"\x1f\x8b"


def open_input(name: str | Path, hint: str, *, unpack: bool = False) -> io.BufferedReader:
    """Open what the user named, for reading bytes; with `unpack`, gzip data is decompressed, whatever the name.

    Use it in a `with` statement. Reading raises `UserError` and nothing else.
    """
    guard = _Guard(str(name), hint)
    stream: io.BufferedReader = io.BufferedReader(guard, 1 << 20)
    for _ in range(ANY["packed"] if unpack else 0):
        if stream.peek(2)[:2] == _GZIP_MAGIC:
            stream = io.BufferedReader(_Unpacked(stream, guard), 1 << 20)
    return stream


def read_bytes(name: str | Path, limit: int, hint: str = "", *, unpack: bool = False) -> bytes:
    """All bytes of a file, a pipe or standard input; a `UserError` if there are more than `limit`."""
    with open_input(name, hint, unpack=unpack) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{called(name)} is too large: it has more than {limit:,} bytes", hint)
    return data


def read_text(name: str | Path, limit: int, hint: str = "", *, unpack: bool = False) -> str:
    """The text of a file, a pipe or standard input, of at most `limit` bytes of UTF-8."""
    try:
        return read_bytes(name, limit, hint, unpack=unpack).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{called(name)} is not a text file (byte {error.start} is not UTF-8)", hint) from None


def read_part(name: str | Path, begin: int, size: int) -> bytearray:
    """Bytes of a regular file; a `UserError` if it has fewer. Not mapped: a mapped file that gets shorter ends a process."""
    with _Guard(str(name), "") as guard:
        return guard.part(begin, size)


def parse_json(data: bytes | str, name: str | Path, hint: str = "", *, most_containers: int = ANY["entries"]) -> Any:
    """The value of a JSON text of limited size; a `UserError` if it is invalid, or would need far more memory than its text."""
    if not data.strip():
        raise UserError(f"{called(name)} is empty", hint)
    containers = data.count("{") + data.count("[") if isinstance(data, str) else data.count(b"{") + data.count(b"[")
    if containers > most_containers:
        raise UserError(f"{called(name)} is too large: it has more than {most_containers:,} lists and objects", hint)
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
        del data
        value = json.loads(text)
        return without_surrogates(value) if _SURROGATE.search(text) else value
    except RecursionError:
        raise UserError(f"{called(name)} is not valid JSON: it is nested too deeply", hint) from None
    except ValueError as error:  # also a number with thousands of digits
        raise UserError(f"{called(name)} is not valid JSON: {ascii(str(error))[1:-1][:120]}", hint) from None


def without_surrogates(value: Any) -> Any:
    """The value with halves of characters replaced in all its texts, which no UTF-8 file can hold.

    >>> without_surrogates({"a" + chr(0xD800): ["é" + chr(0xDFFF), 1]})
    {'a?': ['é?', 1]}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return [without_surrogates(item) for item in value] if isinstance(value, list) else value


def check_numbers(value: Any, name: str | Path, hint: str = "", *, finite: bool = True, depth: int = 1) -> None:
    """A `UserError` for numbers and nesting that no file of gemmscope has; where not `finite`, NaN and infinity are numbers."""
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER and (finite or isinstance(value, int)):
        raise UserError(f"{called(name)} is damaged: {shown(value)} is not a valid number", hint)
    if depth > DEEPEST:
        raise UserError(f"{called(name)} is damaged: it is nested too deeply", hint)
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        check_numbers(item, name, hint, finite=finite, depth=depth + 1)


@contextmanager
def enough_memory(name: object) -> Iterator[None]:
    """Turn a lack of memory while a file is read and used into a `UserError`."""
    try:
        yield
    except MemoryError:
        raise UserError(f"there is not enough memory to read {name}", "use a smaller file, or more memory") from None


def called(name: str | Path) -> str:
    """The name of a file in messages; unusual names are quoted as in Python.

    >>> called("-"), called("run.json"), called("/dev/fd/63"), called("a" + chr(0)), called("")
    ('standard input', 'run.json', 'pipe 63', "'a\\\\x00'", "''")
    """
    text = str(name)
    if text in STANDARD_INPUT:
        return "standard input"
    if inherited := _OPEN_FILE.fullmatch(text):
        return f"pipe {inherited[1]}"
    return text if 0 < len(text) <= LONGEST_NAME and text.isprintable() else shown(text)


class InputFile:
    """A file that is opened more than once. What can be read only once, as a pipe, is copied first if `keep` is called."""

    def __init__(self, name: str | Path, hint: str = "") -> None:
        self.name = str(name)
        self._hint = hint
        self._copy: BinaryIO | None = None

    def __str__(self) -> str:
        return called(self.name)

    def keep(self) -> None:
        """Copy a pipe to a temporary file, which ends with this process."""
        if self._copy is not None or (self.name not in STANDARD_INPUT and Path(self.name).is_file()):
            return
        with open_input(self.name, self._hint) as stream:
            copy, size = cast(BinaryIO, tempfile.TemporaryFile()), 0  # noqa: SIM115 (it stays open)
            while piece := stream.read(1 << 20):
                size += len(piece)
                if size > ANY["kept"]:
                    raise UserError(f"{self} is too large: it has more than {ANY['kept'] >> 30} GiB", "write it to a file first")
                copy.write(piece)
        self._copy = copy
        weakref.finalize(self, copy.close)

    def open(self, *, unpack: bool = False) -> io.BufferedReader:
        """Open it as `open_input` does, from the beginning."""
        if self._copy is None:
            return open_input(self.name, self._hint, unpack=unpack)
        self._copy.seek(0)
        return open_input(f"/dev/fd/{self._copy.fileno()}", self._hint, unpack=unpack)


class _Guard(io.RawIOBase):
    """Reads what a name stands for. Waits for pipes, but not forever; every failure is a `UserError`."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint, self.size = called(name), hint, 0
        self._number = -1
        self._stream: BinaryIO | None = None
        try:
            self._number, self._stream = _opened_already(name)
            if self._stream is None:  # a device is not even opened: that alone may have an effect
                self._waits = self._check(Path(name).stat() if self._number < 0 else os.fstat(self._number))
                if self._number < 0:  # without waiting for the other side of a pipe
                    self._number = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:  # a name may be too long or hold a zero byte
            self.close()
            raise self._unreadable(error) from None

    def _check(self, status: os.stat_result) -> bool:
        """Whether reading may have to wait for someone. A `UserError` for what is neither a file nor a stream."""
        kind = status.st_mode
        if stat.S_ISREG(kind):
            return False
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            return True
        if stat.S_ISCHR(kind) and (
            (self._number >= 0 and os.isatty(self._number)) or status.st_rdev == Path(os.devnull).stat().st_rdev
        ):
            return False  # a person types without a time limit
        self.close()
        raise UserError(f"{self.name} is {'a folder' if stat.S_ISDIR(kind) else 'a device'}, not a file", self.hint)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(len(buffer))
            if len(data) == 1 and not self.size:  # two bytes tell whether it is gzipped
                data += self._read(len(buffer) - 1)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None
        buffer[: len(data)] = data
        self.size += len(data)
        return len(data)

    def part(self, begin: int, size: int) -> bytearray:
        """The bytes from `begin` on, whatever was read before."""
        part = bytearray(size)
        left = memoryview(part)
        try:
            while left and (count := os.preadv(self._number, [left], begin)):
                left, begin = left[count:], begin + count
        except OSError as error:
            raise self._unreadable(error) from None
        if left:
            raise UserError(f"{self.name} became shorter while it was read", "copy it again")
        return part

    def _read(self, size: int) -> bytes:
        if self._stream is not None:
            return self._stream.read(size) or b""
        if not self._waits:
            return os.read(self._number, size)
        poll = select.poll()
        poll.register(self._number, select.POLLIN)
        if not poll.poll(NO_WRITER_SECONDS * 1000):
            if not os.get_blocking(self._number):  # only a named pipe: it ends at once if nobody writes, else it would block
                with suppress(BlockingIOError):
                    if data := os.read(self._number, size):
                        return data
                    raise UserError(f"{self.name} is a pipe that nothing is written to", self.hint)
            if not poll.poll((SILENT_SECONDS - NO_WRITER_SECONDS) * 1000):
                raise UserError(f"{self.name} sent nothing for {SILENT_SECONDS:.0f} seconds", "write it to a file first")
        return os.read(self._number, size)

    def _unreadable(self, error: Exception) -> UserError:
        return UserError(f"{self.name} cannot be read: {getattr(error, 'strerror', None) or error}", self.hint)

    def close(self) -> None:
        if self._number >= 0 and not self.closed:
            os.close(self._number)
        super().close()


def _opened_already(name: str) -> tuple[int, BinaryIO | None]:
    """The number of an open file, -1 if it has none. A stream if Python code has replaced standard input.

    A socket that is open already cannot be opened by its name. A regular file can, and is then read from its beginning.
    """
    if name in STANDARD_INPUT:
        stream: BinaryIO | None = getattr(sys.stdin, "buffer", None)
        if stream is None:
            raise OSError("it is closed")
        try:
            return os.dup(stream.fileno()), None
        except io.UnsupportedOperation:
            return -1, stream
    inherited = _OPEN_FILE.fullmatch(name)
    if inherited and not stat.S_ISREG(os.fstat(int(inherited[1])).st_mode):
        return os.dup(int(inherited[1])), None
    return -1, None


class _Unpacked(io.RawIOBase):
    """Decompresses gzip data, but not to far more than any real file has."""

    def __init__(self, packed: io.BufferedReader, guard: _Guard) -> None:
        self._packed, self._guard, self._size = packed, guard, 0
        self._gzip = gzip.GzipFile(fileobj=packed, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._gzip.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            message = f"{self._guard.name} is truncated or damaged: its gzip data is not complete"
            raise UserError(message, "copy it again") from None
        self._size += len(data)
        if self._size > max(HARMLESS_UNPACKED, ANY["unpacked"] * self._guard.size):
            message = f"{self._guard.name} unpacks to more than {ANY['unpacked']} times its size: it is damaged or malicious"
            raise UserError(message, self._guard.hint)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._packed.close()
        super().close()
