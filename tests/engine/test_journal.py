"""Problems with the journal: one message each, and its content is kept."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gemmscope.engine import journal as journals
from gemmscope.engine.journal import Journal, RecordedRun, open_journal
from gemmscope.engine.messages import Noticed
from gemmscope.errors import UserError
from gemmscope.results.bench import BenchResult
from support.command import Run, run
from support.workers import forked_workers

__all__ = ["forked_workers", "run"]  # the fixtures
pytestmark = pytest.mark.usefixtures("forked_workers")

BENCH = "bench --shapes 32 --device cpu --num-iters 2 --num-warmup 0"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with closing(open_journal()) as journal:
        return journal.path


@contextmanager
def recorded(path: Path, mark: str = "x", *, resume: bool = False) -> Iterator[RecordedRun]:
    with closing(Journal(path)) as journal, journal.recording(mark, "gemmscope bench", resume=resume) as recording:
        yield recording


MESSAGES = 100


def fill(recording: RecordedRun) -> None:
    """Some pages of the database."""
    for count in range(MESSAGES):
        recording.write("", Noticed("words", {"words": f"{count}" * 500}))


def filled(path: Path, mark: str = "x") -> int:
    with recorded(path, mark) as recording:
        fill(recording)
        return recording.number


def runs(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        return [number for (number,) in database.execute("SELECT id FROM run ORDER BY id")]


@pytest.mark.parametrize("resume", ["", " --resume"])
def test_a_damaged_file_is_one_message(run: Run, path: Path, resume: str) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    filled(path)
    with path.open("r+b") as file:
        file.seek(4096)  # behind the page that says what tables there are
        file.write(random.Random(0).randbytes(path.stat().st_size - 4096))
    outcome = run(BENCH + resume)
    assert outcome.code == 2
    assert f"the journal {path} cannot be written: database disk image is malformed" in outcome.err
    assert "move it away" in outcome.err


def test_a_full_disk_is_said_and_measuring_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Earlier entries are kept. Later samples are only in the tables and the run file, and a message says so."""
    pytest.importorskip("torch", reason="measuring needs torch")
    filled(path)
    opened = Journal.__init__

    def without_room(self: Journal, where: Path) -> None:
        opened(self, where)
        pages = self._database.execute("PRAGMA page_count").fetchone()[0]
        self._database.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(Journal, "__init__", without_room)
    with recorded(path, resume=True) as recording:
        assert "cannot be written: database or disk is full" in recording.write("", Noticed("words", {"words": "x" * 100_000}))
        assert not recording.write("", Noticed("words", {"words": "said once"}))
        assert len(recording.messages("")) == MESSAGES
    outcome = run("bench --shapes 32,48 --device cpu --num-iters 400 --num-warmup 0 --json -")
    assert outcome.code == 0, outcome.err
    result = BenchResult.model_validate_json(outcome.out)
    assert result.has("journal-incomplete")
    assert {cell.op for cell in result.linears.ops} == {"32x32x32", "48x48x48"}


@pytest.mark.parametrize("content", ["{", "[]", "7", '{"type": "nothing"}', '{"type": "round"}', b"\xff\xfe", None])
def test_a_damaged_message_is_one_message(path: Path, content: object) -> None:
    filled(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA ignore_check_constraints = 1")
        database.execute("UPDATE message SET content = coalesce(?, 0) WHERE rowid = 7", (content,))
        database.commit()
    with recorded(path, resume=True) as recording, pytest.raises(UserError, match="is damaged"):
        recording.messages("")


@pytest.mark.parametrize("tables", ["run (id INTEGER PRIMARY KEY)", "message (a, b)", "run (id, fingerprint, started)"])
def test_a_journal_of_another_shape_is_one_message(tmp_path: Path, tables: str) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as database:
        database.execute(f"CREATE TABLE {tables}")
    with pytest.raises(UserError, match=r"was not written by this version|cannot be written"):
        Journal(tmp_path / "journal.sqlite3")


def test_a_finished_run_is_not_resumed(path: Path) -> None:
    with recorded(path) as first:
        first.deliver(lambda: None, complete=False)
    with recorded(path, resume=True) as again:
        assert again.resumed
        assert again.number == first.number
        again.deliver(lambda: None, complete=True)
    with recorded(path, resume=True) as other:
        assert not other.resumed
        assert other.number != first.number


def test_a_run_that_has_nothing_does_not_hide_an_earlier_one(path: Path) -> None:
    """The same command without --resume, ended at once or with an address at which nothing answers: the points stay."""
    with closing(Journal(path)) as journal:
        with journal.recording("mark", "first") as first:
            first.write_outcome("a", 1)
        with journal.recording("mark", "second"):
            pass
        with journal.recording("mark", "third", resume=True) as resumed:
            assert resumed.outcomes() == {"a": 1}
        with journal.recording("mark", "fourth") as fourth:
            fourth.write_outcome("b", 2)
        with journal.recording("mark", "fifth", resume=True) as resumed:
            assert resumed.outcomes() == {"b": 2}


def test_a_run_whose_results_cannot_be_written_can_be_resumed(path: Path) -> None:
    def full() -> None:
        raise UserError("no space left on device")

    with recorded(path) as recording, pytest.raises(UserError) as error:
        recording.deliver(full, complete=True)
    assert error.value.message == "no space left on device"
    assert "nothing is lost" in error.value.hint
    with recorded(path, resume=True) as again:
        assert again.resumed


def test_a_run_that_goes_on_in_another_process_is_not_joined(path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gemmscope.engine.journal import Journal\n"
        "with Journal(Path(sys.argv[1])).recording('x', ''): print('ready', flush=True); time.sleep(3600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        other.stdout.readline()
        with recorded(path, resume=True) as recording:
            assert not recording.resumed
            assert recording.running_elsewhere
    finally:
        other.kill()
        other.communicate()
    with recorded(path, resume=True) as recording:  # once it is dead, it can be resumed; the newest first
        assert recording.resumed
        assert not recording.running_elsewhere


def test_old_runs_are_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = filled(path, "old"), filled(path, "new")
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE run SET started = ? WHERE id = ?", (time.time() - 31 * 86400, old))
        database.commit()
    with recorded(path, "going on") as recording:
        assert runs(path) == [new, recording.number]


def test_a_run_that_began_at_a_clock_that_was_not_set_is_kept(path: Path) -> None:
    """Its age is not known: it counts from when another run finds it."""
    wrong, old = filled(path, "wrong"), filled(path, "old")
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE run SET started = 7.0 WHERE id = ?", (wrong,))
        database.execute("UPDATE run SET started = ? WHERE id = ?", (time.time() - 31 * 86400, old))
        database.commit()
    with recorded(path, "old", resume=True) as recording:  # nor is that one removed that is continued
        assert (recording.number, recording.resumed) == (old, True)
    with recorded(path, "another"):
        assert wrong in runs(path)
    with recorded(path, "wrong", resume=True) as recording:
        assert (recording.number, len(recording.messages(""))) == (wrong, MESSAGES)


def test_a_journal_that_is_too_large_loses_its_oldest_runs_and_becomes_smaller(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished ones first; one that is going on stays, whatever its size."""
    kept = filled(path, "unfinished")
    with recorded(path, "finished") as recording:
        fill(recording)
        recording.deliver(lambda: None, complete=True)
    size = path.stat().st_size
    monkeypatch.setattr(journals, "MOST_BYTES", size * 3 // 4)
    with recorded(path, "going on") as going_on:
        assert runs(path) == [kept, going_on.number]
        monkeypatch.setattr(journals, "MOST_BYTES", 0)
        going_on.journal.prune()
        assert runs(path) == [going_on.number]
    with closing(Journal(path)) as journal:
        journal.ask("PRAGMA wal_checkpoint(TRUNCATE)")
    assert path.stat().st_size < size / 2
    assert not list(path.parent.glob("*.lock"))


def test_outcomes_are_kept_once_and_removed_with_their_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(path) as recording:
        assert recording.write_outcome("a", {"x": [1.5, None]}) == ""
        assert recording.write_outcome("b", "µ") == ""
        assert recording.write_outcome("a", "a second time") == ""
        assert recording.outcomes() == {"a": {"x": [1.5, None]}, "b": "µ"}
    with recorded(path, "y") as other:
        assert other.outcomes() == {}
    with recorded(path, resume=True) as recording:
        assert list(recording.outcomes()) == ["a", "b"]
    monkeypatch.setattr(journals, "MOST_DAYS", -1)
    with closing(Journal(path)) as journal:
        journal.prune()
        assert journal.ask("SELECT * FROM outcome") == []


def test_a_damaged_outcome_is_one_message(path: Path) -> None:
    with recorded(path) as recording:
        recording.journal.ask("INSERT INTO outcome VALUES (?, 'a', 0, '{')", recording.number)
        with pytest.raises(UserError, match="is damaged"):
            recording.outcomes()
