"""Reads a Chrome trace one event at a time, however large the file is: plain or gzipped JSON, an object or a bare array.

The text is read in pieces. Each event is decoded as soon as it is complete, yielded and dropped; the rest of the file (the
`head`: device properties, ranks, versions) is kept. Memory use is limited by one piece and one event, not by the file.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError

PIECE = 4 << 20  # characters read at once
LONGEST_EVENT = 64 << 20  # characters: a longer event means invalid JSON
HOW_TO_RECORD = "record one with three lines in your training loop: gemmscope trace-me"
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
MOST_PACKED = 3  # times that a file may be gzipped: copying it may have compressed it again
_GZIP_MAGIC = b"\x1f\x8b"


class EventStream:
    """Iterate over it for the events; afterwards `head` holds everything else that the file says."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.head: dict[str, Any] = {}
        self.characters = 0
        self._text: io.TextIOBase | None = None
        self._buffer, self._at, self._ended = "", 0, False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with _opened(self.path) as text:
                self._text = text
                yield from self._whole()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{self.path} is truncated or damaged: its gzip data is not complete", "copy it again") from error
        except (OSError, ValueError) as error:  # the path may hold a zero byte
            reason = getattr(error, "strerror", None) or error
            hint = "name a trace file, as the PyTorch profiler writes it"
            raise UserError(f"{self.path} cannot be read: {reason}", hint) from error

    def _whole(self) -> Iterator[dict[str, Any]]:
        first = self._peek()
        if first not in "[{":
            raise UserError(f"{self.path} is not a trace: it does not begin like JSON", HOW_TO_RECORD)
        self._at += 1
        yield from self._events(may_stop=True) if first == "[" else self._members()

    def _members(self) -> Iterator[dict[str, Any]]:
        """Members of the outermost object: `traceEvents` is streamed, the rest kept."""
        found = False
        while self._peek(_BETWEEN) != "}":
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._invalid()
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                found = True
                self._at += 1
                yield from self._events(may_stop=False)
            else:
                self.head[key] = self._value()
        if not found:
            known = ", ".join(list(self.head)[:4]) or "nothing"
            raise UserError(f"{self.path} is JSON, but not a trace: it has no traceEvents (it has {known})", HOW_TO_RECORD)

    def _events(self, *, may_stop: bool) -> Iterator[dict[str, Any]]:
        """The elements of an array; Chrome allows a bare array to end without its bracket."""
        while True:
            self._at = _BETWEEN.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            try:
                value, self._at = self._decode(self._buffer, self._at)
            except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
                if self._buffer.startswith("]", self._at):
                    self._at += 1
                    return
                if not self._more():
                    if may_stop and self._at >= len(self._buffer):
                        return
                    raise self._invalid() from None
                continue
            if isinstance(value, dict):
                yield value

    def _value(self) -> Any:
        while True:
            at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            try:
                value, end = self._decode(self._buffer, at)
            except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
                end = len(self._buffer)
            if end < len(self._buffer):  # a number at the end of the buffer may continue
                self._at = end
                return value
            self._at = at
            if not self._more():
                raise self._invalid()

    def _peek(self, skipped: re.Pattern[str] = _SPACE) -> str:
        """The next character that is not space."""
        while True:
            self._at = skipped.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                raise self._invalid()

    def _more(self) -> bool:
        """Read another piece; False at the end of the file, or if the text so far is too long for an event."""
        if self._ended or len(self._buffer) - self._at > LONGEST_EVENT:
            return False
        assert self._text is not None
        piece = self._text.read(max(PIECE, len(self._buffer) - self._at))
        self.characters += len(piece)
        self._ended = not piece
        self._buffer, self._at = self._buffer[self._at :] + piece, 0
        return not self._ended

    def _invalid(self) -> UserError:
        place = self.characters - (len(self._buffer) - self._at)
        if not self.characters:
            return UserError(f"{self.path} is empty", HOW_TO_RECORD)
        if self._ended:
            return UserError(
                f"{self.path} is truncated or damaged: the JSON from character {place:,} to {self.characters:,} is not complete",
                "copy it again, or let the profiler finish writing before the job ends",
            )
        return UserError(f"{self.path} is not valid JSON from character {place:,} on", HOW_TO_RECORD)


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOBase]:
    """The text of a file, decompressed if it is gzipped, whatever its name."""
    with path.open("rb") as raw:
        reader: Any = raw
        for _ in range(MOST_PACKED):
            if reader.peek(2)[:2] == _GZIP_MAGIC:
                reader = io.BufferedReader(gzip.GzipFile(fileobj=reader, mode="rb"), 1 << 20)
        yield io.TextIOWrapper(reader, encoding="utf-8-sig", errors="replace")
