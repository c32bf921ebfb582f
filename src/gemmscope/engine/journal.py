"""The journal: every message of a measuring process, written to disk before it is used.

SQLite in write-ahead mode, one file in the user's state folder. A *run* is one command; its *parts* are the campaigns that it
measures one after another. A run on many GPUs has *outcomes* instead, one for every unit of its work. A run is finished once its
results are written: whatever ends a command before that (Ctrl-C, a crash, a full disk, a power cut), `--resume` continues from
here. While a run is going on, its process holds a lock, which the system releases however the process ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gemmscope import __version__
from gemmscope.engine.messages import Message, line, parse
from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.folders import state_folder

VERSION = 3  # of the tables and messages: part of the file's name, so that another version keeps its own
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, started REAL NOT NULL, command TEXT NOT NULL, finished REAL
);
CREATE TABLE IF NOT EXISTS message (
    run INTEGER NOT NULL REFERENCES run(id), part TEXT NOT NULL, at REAL NOT NULL, content TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS message_of_run ON message (run, part);
CREATE TABLE IF NOT EXISTS outcome (
    run INTEGER NOT NULL REFERENCES run(id), unit TEXT NOT NULL, at REAL NOT NULL, content TEXT NOT NULL, PRIMARY KEY (run, unit)
);
"""
_UNFINISHED = """
SELECT id FROM run AS this WHERE fingerprint = ? AND finished IS NULL ORDER BY
EXISTS (SELECT 1 FROM message WHERE run = this.id) OR EXISTS (SELECT 1 FROM outcome WHERE run = this.id) DESC, id DESC
"""  # runs without messages or outcomes come last
_COLUMNS = {
    "run": ["id", "fingerprint", "started", "command", "finished"],
    "message": ["run", "part", "at", "content"],
    "outcome": ["run", "unit", "at", "content"],
}
_HINT = "make room for it, or move it away if it is damaged; or set XDG_STATE_HOME to another folder that can be written"
MOST_DAYS = 30
MADE = 1.7e9  # seconds since 1970: before this journal existed
MOST_BYTES = 512 << 20


def fingerprint(*content: Any) -> str:
    """A key that is equal for measurements of the same things by the same version."""
    written = json.dumps([__version__, *content], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def open_journal(folder: Path | None = None) -> Journal:
    """The journal of this user, or the one in another folder."""
    journal = Journal((folder or state_folder()) / f"journal-{VERSION}.sqlite3")
    journal.stays = folder is None
    return journal


class Journal:
    """One open journal. Several processes may have it open at the same time. `stays`: it is there for the next command."""

    stays = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA auto_vacuum=INCREMENTAL")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_SCHEMA)
            shape = {table: [row[1] for row in self._database.execute(f"PRAGMA table_info({table})")] for table in _COLUMNS}
        except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: text that is not UTF-8
            raise UserError(f"the journal {path} cannot be written: {error}", _HINT) from error
        if shape != _COLUMNS:
            self.close()
            raise UserError(f"the journal {path} was not written by this version of gemmscope", "move it away")

    def ask(self, statement: str, *values: Any) -> list[Any]:
        """The rows of one statement; a `UserError` if the disk is full, the file is damaged, or another program locks it for too
        long."""
        try:
            return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, ValueError) as error:
            raise UserError(f"the journal {self.path} cannot be written: {error}", _HINT) from error

    @contextmanager
    def recording(self, mark: str, command: str, *, resume: bool = False) -> Iterator[RecordedRun]:
        """A new run, or with `resume` the newest unfinished run of this fingerprint that has messages and is not in progress
        elsewhere."""
        running = False
        for number in self.unfinished(mark) if resume else ():
            lock = self._lock(number)
            if lock is not None:
                break
            running = True
        else:
            self.ask("INSERT INTO run (fingerprint, started, command) VALUES (?, ?, ?)", mark, time.time(), command)
            [(number,)] = self.ask("SELECT last_insert_rowid()")
            lock = self._lock(number)
            resume = False
        try:
            self.prune()
            yield RecordedRun(self, number, resumed=resume, running_elsewhere=running)
        finally:
            self._release(number, lock)

    def unfinished(self, mark: str) -> list[int]:
        """The runs of this fingerprint that are not finished, the newest first."""
        rows = self.ask(_UNFINISHED, mark)
        return [int(number) for (number,) in rows]

    def prune(self) -> None:
        """Remove runs older than 30 days; and beyond 512 MB the oldest, finished ones first. Never one that is in progress."""
        now = time.time()
        self.ask("UPDATE run SET started = ? WHERE started < ?", now, MADE)  # by a clock that was not set: its age is not known
        oldest = now - MOST_DAYS * 86400
        for number, aged in self.ask("SELECT id, started < ? FROM run ORDER BY finished IS NULL, id", oldest):
            if (aged or self._bytes() > MOST_BYTES) and (lock := self._lock(number)) is not None:
                self.ask("DELETE FROM message WHERE run = ?", number)
                self.ask("DELETE FROM outcome WHERE run = ?", number)
                self.ask("DELETE FROM run WHERE id = ?", number)
                self._release(number, lock)
        with suppress(sqlite3.Error):  # another process is writing: the next run makes the file smaller
            self._database.executescript("PRAGMA incremental_vacuum")

    def _bytes(self) -> int:
        pages, free, size = (self.ask(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    def _lock_path(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.run-{number}.lock")

    def _lock(self, number: int) -> IO[bytes] | None:
        """The lock of a run; None while another process, or another thread of this one, holds it."""
        path = self._lock_path(number)
        try:
            file = path.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            still_there = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            raise UserError(f"the journal {self.path} cannot be written: {error}", _HINT) from error
        return file if still_there else self._lock(number)  # the previous owner of the lock has removed the file meanwhile

    def _release(self, number: int, lock: IO[bytes] | None) -> None:
        with suppress(OSError):
            self._lock_path(number).unlink()
        if lock is not None:
            lock.close()

    def close(self) -> None:
        self._database.close()


@dataclass
class RecordedRun:
    """One run in the journal. `resumed`: it was begun earlier. `running_elsewhere`: the same run is in progress in another
    process."""

    journal: Journal
    number: int
    resumed: bool = False
    running_elsewhere: bool = False
    incomplete: bool = field(default=False, init=False)  # a message could not be written

    def messages(self, part: str) -> list[Message]:
        """Every message of a part, in order."""
        try:
            rows = self.journal.ask("SELECT content FROM message WHERE run = ? AND part = ? ORDER BY rowid", self.number, part)
            return [parse(content) for (content,) in rows]
        except (ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def outcomes(self) -> dict[str, Any]:
        """What `write_outcome` has written, by the keys of the units, in order."""
        try:
            rows = self.journal.ask("SELECT unit, content FROM outcome WHERE run = ? ORDER BY rowid", self.number)
            return {str(unit): json.loads(content) for unit, content in rows}
        except (ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> UserError:
        reason = str(error).splitlines()[0]
        return UserError(f"the journal {self.journal.path} is damaged: {reason}", f"start again without {option('resume')}")

    def write(self, part: str, message: Message) -> str:
        """Write one message. If that fails, measuring continues without a journal, and the reason is returned, once."""
        return self._insert("INSERT INTO message VALUES (?, ?, ?, ?)", self.number, part, time.time(), line(message))

    def write_outcome(self, unit: str, data: Any) -> str:
        """Write the outcome of a unit, as plain data; of two, the first counts. If that fails, as `write`."""
        return self._insert("INSERT OR IGNORE INTO outcome VALUES (?, ?, ?, ?)", self.number, unit, time.time(), json.dumps(data))

    def _insert(self, statement: str, *values: Any) -> str:
        if self.incomplete:
            return ""
        try:
            self.journal.ask(statement, *values)
        except UserError as error:
            self.incomplete = True
            return error.message
        return ""

    def deliver(self, write: Callable[[], None], *, complete: bool) -> None:
        """Write the results. If that succeeds and they are `complete`, the run is finished: there is nothing to resume."""
        try:
            write()
        except UserError as error:
            if self.incomplete:
                raise
            same = "run the same command with ‹resume› and another path to write to"
            where = f"nothing is lost: all samples are in the journal {self.journal.path}; {same}"
            raise UserError(error.message, where) from error
        if complete:
            with suppress(UserError):  # the results are already written, so a full disk does not matter any more
                self.journal.ask("UPDATE run SET finished = ? WHERE id = ?", time.time(), self.number)


def not_resumed(recording: RecordedRun) -> Finding | None:
    """Why `resume` begins anew; None if it does not."""
    if recording.resumed:
        return None
    return finding("resume-runs-elsewhere" if recording.running_elsewhere else "nothing-to-resume")
