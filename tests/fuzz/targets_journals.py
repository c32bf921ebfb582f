"""Journals that are damaged, of another shape, or hold something else than messages."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.targets import Target
from gemmscope.engine.journal import Journal
from gemmscope.engine.messages import Hello
from gemmscope.errors import UserError

RUNS = "run"
FINGERPRINT = "x"
NAMES = st.sampled_from(
    ["type", "samples", "times_ms", "rounds_ms", "hello", "ready", "failed", "task", "reason", "round", "a\x1b[2J"]
)
CELLS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
CONTENTS = (
    CELLS
    | JSON.map(json.dumps)
    | st.sampled_from(["{", "[" * 100_000, "1" * 5000, "1e999", "NaN", '"\\ud800"', "\x00", '{"type": "samples"}', "{}" * 2])
)
STATEMENTS = st.sampled_from(
    [
        f"DROP TABLE {RUNS}",
        "DROP TABLE message",
        f"ALTER TABLE {RUNS} RENAME COLUMN fingerprint TO other",
        "ALTER TABLE message RENAME COLUMN content TO other",
        "ALTER TABLE message ADD COLUMN further TEXT NOT NULL DEFAULT 'x'",
        "CREATE TRIGGER no BEFORE INSERT ON message BEGIN SELECT RAISE(ABORT, 'a\x1b[2J'); END",
        f"DELETE FROM {RUNS}",
        "PRAGMA user_version = 99",
        "PRAGMA journal_mode = DELETE",
        f"DROP TABLE message; CREATE VIEW message AS SELECT * FROM {RUNS}",
    ]
)


@st.composite
def journals(draw: st.DrawFn) -> dict[str, Any]:
    """How a journal is written, then damaged."""
    kind = draw(st.sampled_from(["cells", "shape", "bytes", "cut", "overwritten"]))
    return {
        "random": draw(st.binary(max_size=300) | st.binary(max_size=100).map(b"SQLite format 3\x00".__add__))
        if kind == "bytes"
        else None,
        "contents": draw(st.lists(CONTENTS, max_size=5)),
        "cells": draw(st.lists(CELLS, min_size=4, max_size=4)) if kind == "cells" else None,
        "statements": draw(st.lists(STATEMENTS, min_size=1, max_size=2)) if kind == "shape" else [],
        "cut": draw(st.integers(0, 20_000)) if kind == "cut" else None,
        "overwrite": draw(st.lists(st.tuples(st.integers(0, 20_000), st.binary(min_size=1, max_size=40)), min_size=1, max_size=6))
        if kind == "overwritten"
        else [],
    }


def write_journal(case: dict[str, Any], path: Path) -> None:
    """The file that an input describes."""
    if case["random"] is not None:
        path.write_bytes(case["random"])
        return
    with closing(Journal(path)) as journal, journal.recording(FINGERPRINT, "gemmscope") as recording:
        number = recording.number
        recording.write("", Hello())
    with closing(sqlite3.connect(path, isolation_level=None)) as database, suppress(sqlite3.Error, UnicodeEncodeError):
        columns = [row[1] for row in database.execute("PRAGMA table_info(message)")]
        for content in case["contents"]:
            values = {"run": number, "part": "", "at": 0.0, "content": content}
            row = [values.get(column) for column in columns]
            database.execute(f"INSERT INTO message VALUES ({', '.join('?' * len(row))})", row)
        if case["cells"] is not None:
            database.execute(f"UPDATE {RUNS} SET fingerprint = ?, started = ?, command = ?, finished = ?", case["cells"])
        for statement in case["statements"]:
            database.executescript(statement)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    for place, some in case["overwrite"]:
        place %= max(len(content), 1)
        content[place : place + len(some)] = some
    path.write_bytes(content[: case["cut"]] if case["cut"] is not None else content)


def read_journal(case: dict[str, Any], folder: Path) -> str:
    """Begin something new in it, then look for something to resume and read that: what `--resume` does."""
    path = folder / "journal.sqlite3"
    write_journal(case, path)
    with closing(Journal(path)) as journal:
        with suppress(UserError), journal.recording("y", "") as recording:
            recording.deliver(lambda: None, complete=True)
        with journal.recording(FINGERPRINT, "", resume=True) as recording:
            messages = recording.messages("")
            assert recording.resumed or not messages
            return recording.write("", Hello())


TARGETS = [Target("journal", journals(), read_journal)]
