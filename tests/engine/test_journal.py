"""The journal where things go wrong with it: one message each, and what it holds stays."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.engine.journal import Journal
from gemmscope.results.bench import BenchResult
from support.command import Run, run

__all__ = ["run"]  # the fixture

BENCH = "bench --shapes 32 --device cpu --num-iters 2 --num-warmup 0"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "gemmscope" / "journal.sqlite3"


def filled(path: Path) -> int:
    with closing(Journal(path)) as journal:
        number = journal.begin("x", [])
        for count in range(2000):
            journal.write(number, {"type": "round", "round": count})
        return number


@pytest.mark.parametrize("resume", ["", " --resume"])
def test_a_damaged_file_is_one_message(run: Run, path: Path, resume: str) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    filled(path)
    with path.open("r+b") as file:
        file.seek(4096)  # behind the page that says what tables there are
        file.write(os.urandom(path.stat().st_size - 4096))
    outcome = run(BENCH + resume)
    assert outcome.code == 2
    assert f"the journal {path} cannot be written: database disk image is malformed" in outcome.err
    assert "move it away" in outcome.err


def test_a_full_disk_is_said_and_measuring_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """What was written before stays; what comes after is in the tables and the run file, and said to be nowhere else."""
    pytest.importorskip("torch", reason="measuring needs torch")
    number = filled(path)
    opened = Journal.__init__

    def without_room(self: Journal, where: Path) -> None:
        opened(self, where)
        pages = self._database.execute("PRAGMA page_count").fetchone()[0]
        self._database.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(Journal, "__init__", without_room)
    with closing(Journal(path)) as journal:
        assert "cannot be written: database or disk is full" in journal.write(number, {"words": "x" * 100_000})
        assert not journal.write(number, {"words": "said once"})
        assert sum(1 for _ in journal.messages(number)) == 2000
    outcome = run("bench --shapes 32,48 --device cpu --num-iters 400 --num-warmup 0 --json -")
    assert outcome.code == 0, outcome.err
    result = BenchResult.model_validate_json(outcome.out)
    assert result.has("journal-incomplete")
    assert {cell.op for cell in result.linears.ops} == {"32x32x32", "48x48x48"}


def test_a_damaged_message_is_one_message(path: Path) -> None:
    number = filled(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE message SET content = '{' WHERE rowid = 7")
        database.commit()
    with closing(Journal(path)) as journal, pytest.raises(UserError, match="is damaged"):
        list(journal.messages(number))
