"""Reads a Chrome trace one event at a time, however large the file is: plain or gzipped JSON, an object or a bare array.

The text is read in pieces. Each event is decoded as soon as it is complete, yielded and dropped. Of the rest of the file, only
the members in `HEAD` are kept: others may hold anything, environment variables included, and must not reach any output. Memory
use is limited by one piece and one event, not by the file. Files of other profilers are recognized, to say what they are and what
to record instead. It writes traces, too.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError, option
from gemmscope.files import replacing, text_into
from gemmscope.reading import LIMITS, InputFile
from gemmscope.toml import load_data

PIECE = 4 << 20  # characters read at once
LONGEST_EVENT, LONGEST_HEAD, MOST_EVENTS = (LIMITS["trace"][name] for name in ("event", "head", "entries"))
MOST_MEMBERS = 10_000  # of the outermost object
LONGEST_KEY = 100
HOW_TO_RECORD = "record one with three lines in your training loop: gemmscope trace-me"
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
HEAD = ("schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds", "gemmscope")
A_TRACE = "give a trace file written by the PyTorch profiler"


MOST_NAMES = 200  # of categories and processes that are checked
FOREIGN: list[dict[str, Any]] = load_data("gemmscope.explain", "foreign.toml")["file"]
OTHER_DEVICES = ("mtia_", "hpu_")  # categories of accelerators that are not GPUs


class EventStream:
    """Iterate over it for the events; afterwards `head` holds what else the file says about GPU, ranks and recording."""

    def __init__(self, source: str | Path | InputFile) -> None:
        self.source = source if isinstance(source, InputFile) else InputFile(source, A_TRACE)
        self.head: dict[str, Any] = {}
        self.characters = self._events_read = 0
        self._text: io.TextIOBase = io.StringIO()
        self._buffer, self._at, self._ended = "", 0, False
        self._decode: Any = vars(json.JSONDecoder(strict=False))["scan_once"]  # raw_decode without its wrapper

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.source.open(unpack=True) as stream:
            self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
            first = self._peek()
            if first not in "[{":
                reject_foreign(self.source, begin=self._buffer[:LONGEST_KEY], name=str(self.source))
                raise UserError(f"{self.source} is not a trace: it does not start like JSON", HOW_TO_RECORD)
            self._at += 1
            yield from self._events(may_stop=True) if first == "[" else self._members()

    def _members(self) -> Iterator[dict[str, Any]]:
        """Members of the outermost object: `traceEvents` is streamed, the rest kept."""
        has_events, members, size = False, 0, 0
        names: set[str] = set()
        while self._peek(_BETWEEN) != "}":
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._invalid()
            self._at += 1
            reject_foreign(self.source, member=key)
            if key == "traceEvents" and self._peek() == "[":
                has_events = True
                self._at += 1
                yield from self._events(may_stop=False)
                continue
            begin = self._place()
            value = self._value()
            members, size = members + 1, size + self._place() - begin
            if size > LONGEST_HEAD or members > MOST_MEMBERS:
                limits = f"{LONGEST_HEAD >> 20} MiB or {MOST_MEMBERS:,} members"
                raise UserError(f"{self.source} is not a trace: it has more than {limits} besides its events", HOW_TO_RECORD)
            names.add(key[:LONGEST_KEY])
            if key in HEAD:
                self.head[key] = value
            if not has_events and {"schema_version", "kind"} <= names:
                raise UserError(
                    f"{self.source} is a run file, not a trace",
                    f"gemmscope explain TRACE {option('against', self.source)}, if step or bench wrote it;"
                    f" gemmscope report {self.source} shows it",
                )
        if not has_events:
            raise UserError(f"{self.source} is JSON, but not a trace: it has no traceEvents", HOW_TO_RECORD)

    def _events(self, *, may_stop: bool) -> Iterator[dict[str, Any]]:
        """The elements of an array; Chrome allows a bare array to end without its bracket."""
        while self._peek(_BETWEEN, may_end=may_stop) not in ("]", ""):
            value = self._value()
            self._events_read += 1
            if self._events_read > MOST_EVENTS:
                raise UserError(f"{self.source} has more than {MOST_EVENTS:,} events", "record fewer steps")
            if isinstance(value, dict):
                yield value
        self._at += 1

    def _value(self) -> Any:
        """The next value."""
        begin = self._place()
        while True:
            at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            try:
                value, end = self._decode(self._buffer, at)
                if end < len(self._buffer) or isinstance(value, (dict, list, str)):  # a number at the end may continue
                    self._at = end
                    return value
            except RecursionError:
                raise UserError(f"{self.source} is not a trace: its JSON is nested too deeply", HOW_TO_RECORD) from None
            except (ValueError, StopIteration):  # incomplete, or a number of thousands of digits
                pass
            self._at = at
            if not self._more(begin):
                raise self._invalid()

    def _peek(self, skipped: re.Pattern[str] = _SPACE, *, may_end: bool = False) -> str:
        """The next character that is not space; "" at the end of the file, if it may end here."""
        begin = self._place()
        while True:
            self._at = skipped.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more(begin):
                if may_end:
                    return ""
                raise self._invalid()

    def _more(self, begin: int) -> bool:
        """Read another piece; False at the end of the file, or if the text from `begin` on is too long for an event."""
        if self._ended or self.characters - begin > LONGEST_EVENT:
            return False
        piece = self._text.read(max(PIECE, len(self._buffer) - self._at))
        self.characters += len(piece)
        self._ended = not piece
        self._buffer, self._at = self._buffer[self._at :] + piece, 0
        return not self._ended

    def _place(self) -> int:
        """How many characters of the file come before the one that is next."""
        return self.characters - (len(self._buffer) - self._at)

    def _invalid(self) -> UserError:
        place = self._place()
        if not self.characters:
            return UserError(f"{self.source} is empty", HOW_TO_RECORD)
        if self._ended:
            return UserError(
                f"{self.source} is truncated or damaged: its JSON from character {place:,} to {self.characters:,} is incomplete",
                "copy it again, or let the profiler finish writing before the job ends",
            )
        reason = f"or one value has more than {LONGEST_EVENT >> 20} MiB"
        return UserError(f"{self.source} is not valid JSON from character {place:,} on, {reason}", HOW_TO_RECORD)


def write_trace(target: Path, events: Iterable[dict[str, Any]], head: dict[str, Any], *, packed: bool) -> None:
    """Write a trace file as a whole or not at all. `head`: what it says besides the events, complete after the last of them."""
    with replacing(target) as raw, text_into(raw, packed=packed) as out:
        out.write('{"traceEvents":[')
        for number, event in enumerate(events):
            out.write((",\n" if number else "\n") + json.dumps(event, separators=(",", ":")))
        out.write("\n]")
        for key, value in head.items():
            out.write(f",\n{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}")
        out.write("}\n")


def reject_foreign(
    source: object, *, member: str = "", categories: Iterable[str] = (), processes: Iterable[str] = (), begin: str = "",
    name: str = "",
) -> None:  # fmt: skip
    """Raise a `UserError` if only another profiler writes this member of the outermost object, these categories of events,
    processes of these names, or a file that begins or is named like this."""
    kinds, names = tuple(categories), tuple(processes)
    for file in FOREIGN:
        by_category = "category" in file and any(kind.startswith(file["category"]) for kind in kinds)
        by_process = "process" in file and any(re.search(file["process"], process) for process in names)
        by_name = ("begin" in file and re.search(file["begin"], begin)) or ("named" in file and re.search(file["named"], name))
        if by_category or by_process or by_name or (member and file.get("member") == member):
            raise UserError(f"{source} is {file['is']}", file["instead"])
