"""A real campaign on the CPU with a fault at every message: nothing that was journaled is lost or counted twice.

The fault happens to the real command line at its n-th message; then the same command runs with --resume. In the end every sample
of the journal is in the result exactly once, no process and no file is left, and exit codes are those of the documentation.
`benchmarks/kills.py` does the same a thousand times, at random times and with processes that are started as users start them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gemmscope.engine.journal import VERSION
from support.faulty import FAULTS, SIGNALS, journaled
from support.processes import MARKER, left_running

pytest.importorskip("torch", reason="measuring needs torch")

COMMANDS = {  # a burst has several runs: where the clock ticks every 10 ns, two bursts of one run each can be equal
    "bench": "bench --shapes 16 --device cpu --num-iters 60 --num-warmup 0 --recipes bf16 --pre-quantize",
    "step": (
        "step --hidden-size 32 --intermediate-size 64 --num-attention-heads 2 --num-hidden-layers 2 --vocab-size 64 "
        "--micro-batch-size 1 --sequence-length 16 --device cpu --recipes bf16 --precision 0.99 --time-limit 1"
    ),
}
NEVER = 10**6
CODES = {"parent": -9, **SIGNALS, "closed stdout": 141, "full disk": 2}


class Ended(NamedTuple):
    code: int
    err: str
    result: dict[str, Any] | None
    journaled: list[tuple[float, ...]]
    messages: int

    @property
    def bursts(self) -> Counter[tuple[float, ...]]:
        assert self.result is not None
        measured = self.result.get("tasks") or self.result.get("variants") or []
        return Counter(tuple(burst) for task in measured for burst in task["rounds_ms"])


Case = Callable[..., Ended]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    marker = f"faults-{os.getpid()}"
    server = subprocess.Popen(
        [sys.executable, "-m", "support.faulty"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARKER: marker, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def call(folder: Path, line: str, kind: str = "none", at: int = NEVER) -> Ended:
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        wanted = {"arguments": [*line.split(), "--json", str(folder / "run.json")], "folder": str(folder), "kind": kind, "at": at}
        server.stdin.write(json.dumps(wanted) + "\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        code = int(server.stdout.readline())  # type: ignore[union-attr]
        left = left_running(marker, apart_from=[server.pid])
        path = folder / "run.json"
        journal = folder / "gemmscope" / f"journal-{VERSION}.sqlite3"
        try:
            kept = journaled(journal)
        except sqlite3.Error:  # damaged on purpose
            kept = []
        result = json.loads(path.read_text()) if path.exists() else None
        assert not left
        assert not [file for file in folder.rglob("*") if file.is_file() and file.suffix in (".tmp", ".part")]
        assert not list((folder / "tmp").iterdir())
        count = folder / "messages"
        return Ended(code, (folder / "stderr").read_text(), result, kept, int(count.read_text()) if count.exists() else 0)

    yield call
    server.communicate(timeout=300)
    assert left_running(marker) == []


@pytest.fixture(scope="module")
def messages(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[int]]:
    """The numbers of the messages of a command that runs undisturbed."""

    @cache
    def numbers(command: str) -> list[int]:
        ended = case(tmp_path_factory.mktemp("undisturbed"), COMMANDS[command])
        assert (ended.code, ended.journaled) == (0, []), ended.err
        assert ended.messages > 10
        return list(range(ended.messages))

    return numbers


@pytest.mark.parametrize(
    ("command", "kind"), [*(("bench", kind) for kind in FAULTS), *(("step", kind) for kind in ("parent", "SIGTERM"))]
)
def test_a_fault_at_every_message(
    case: Case, messages: Callable[[str], list[int]], tmp_path: Path, command: str, kind: str
) -> None:
    """The parent is killed at every eighth message of bench. Other faults, and those of step, are tried at fewer messages."""
    often = {"bench": 1, "step": 10}[command] * {"parent": 8, "SIGTERM": 11}.get(kind, 15)
    around_writing = -2 + len(kind) % 2
    for at in [NEVER] if kind == "closed stdout" else [*messages(command)[len(kind) % often :: often], around_writing]:
        folder = tmp_path / f"{at}"
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        ended = case(folder, COMMANDS[command], kind, at)
        if at != NEVER and not (folder / "hit").exists():  # this run had fewer rounds
            assert at > 10
            continue
        where = f"{kind} at message {at}: {ended.code} {ended.err}"
        delivered = kind not in ("parent", "full disk") or at == -1
        assert ended.code == CODES.get(kind, 0) or (kind == "full disk" and at == -1), where
        assert "Traceback" not in ended.err, where
        assert ended.code == -9 or "gemmscope: " in ended.err or ended.code in (0, 141), where
        if not delivered:
            assert ended.result == {}, where  # the old file stays
        elif ended.journaled:  # measured samples are always written; without any, the old file stays
            assert not Counter(ended.journaled) - ended.bursts, where
        again = case(folder, f"{COMMANDS[command]} --resume")
        if kind == "damaged journal":
            assert again.code == 0 or "journal" in again.err, where
            continue
        assert (again.code, again.journaled) == (0, []), f"{where}\nresumed: {again.err}"
        for burst, count in Counter(ended.journaled).items():
            assert again.bursts[burst] == count, where
