"""The journal: every message of a measuring process, written to disk before it is used.

SQLite in write-ahead mode, one file in the user's state folder. Whatever ends a run (Ctrl-C, a crash, a power cut), the
measurements up to then are here, and `--resume` continues from them.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError, option
from gemmscope.folders import state_folder

_SCHEMA = """
CREATE TABLE IF NOT EXISTS campaign (
    id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, started REAL NOT NULL, command TEXT NOT NULL, finished REAL
);
CREATE TABLE IF NOT EXISTS message (
    campaign INTEGER NOT NULL REFERENCES campaign(id), at REAL NOT NULL, content TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS message_of_campaign ON message (campaign);
"""
_HINT = "make room for it, or move it away if it is damaged; or set XDG_STATE_HOME to another folder that can be written"


def open_journal() -> Journal:
    """The journal of this user."""
    return Journal(state_folder() / "journal.sqlite3")


class Journal:
    """One open journal, writing one campaign at a time."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"the journal {path} cannot be written: {error}", _HINT) from error
        self.path, self._full = path, False

    def _run(self, statement: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        """One statement; a `UserError` if the disk is full, the file damaged, or another program holds it for too long."""
        try:
            return self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise UserError(f"the journal {self.path} cannot be written: {error}", _HINT) from error

    def begin(self, fingerprint: str, command: list[str]) -> int:
        """A new campaign; `fingerprint` is the same for runs that measure the same things."""
        cursor = self._run(
            "INSERT INTO campaign (fingerprint, started, command) VALUES (?, ?, ?)",
            (fingerprint, time.time(), json.dumps(command)),
        )
        return int(cursor.lastrowid or 0)

    def write(self, campaign: int, message: dict[str, Any]) -> str:
        """Write one message. If that fails, measuring continues without a journal, and the reason is returned, once."""
        if self._full:
            return ""
        try:
            self._run(
                "INSERT INTO message (campaign, at, content) VALUES (?, ?, ?)", (campaign, time.time(), json.dumps(message))
            )
        except UserError as error:
            self._full = True
            return error.message
        return ""

    def finish(self, campaign: int) -> None:
        """Mark a campaign as complete: there is nothing to resume."""
        if self._full:
            return
        self._run("UPDATE campaign SET finished = ? WHERE id = ?", (time.time(), campaign))

    def reopen(self, fingerprint: str) -> None:
        """Allow the newest campaign of this fingerprint to be resumed, although it was complete."""
        self._run(
            "UPDATE campaign SET finished = NULL WHERE id = (SELECT MAX(id) FROM campaign WHERE fingerprint = ?)", (fingerprint,)
        )

    def unfinished(self, fingerprint: str) -> int | None:
        """The newest campaign of this fingerprint that is not complete."""
        row = self._run(
            "SELECT id FROM campaign WHERE fingerprint = ? AND finished IS NULL ORDER BY id DESC LIMIT 1", (fingerprint,)
        ).fetchone()
        return int(row[0]) if row else None

    def messages(self, campaign: int) -> Iterator[dict[str, Any]]:
        """Every message of a campaign, in order."""
        rows = self._run("SELECT content FROM message WHERE campaign = ? ORDER BY rowid", (campaign,))
        try:
            for (content,) in rows:
                yield json.loads(content)
        except (sqlite3.Error, ValueError) as error:
            raise UserError(f"the journal {self.path} is damaged: {error}", f"start again without {option('resume')}") from error

    def close(self) -> None:
        self._database.close()
