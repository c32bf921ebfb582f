"""Short-lived workers: the parent always gets an answer in time, and no process is left running."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gemmscope import child
from gemmscope.child import Ended, run_worker
from gemmscope.errors import UserError
from support.processes import alive, wait_until


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The "module" of a worker is a piece of Python."""
    monkeypatch.setattr(child, "worker_command", lambda code, *arguments: [sys.executable, "-c", code, *arguments])
    monkeypatch.setattr(child, "worker_environment", lambda: dict(os.environ))


pytestmark = pytest.mark.usefixtures("worker")


def test_output_errors_and_code() -> None:
    ended = run_worker("import sys; print(sys.argv[1]); sys.stderr.write('a\\nwhy\\n'); sys.exit(3)", "answer")
    assert ended == Ended(3, "answer\n", "a\nwhy\n")
    assert ended.reason == "why"


def test_what_is_no_text_is_replaced() -> None:
    assert run_worker("import os; os.write(1, b'caf\\xe9')").output == "caf\ufffd"


def test_standard_input_is_empty() -> None:
    assert run_worker("import sys; print(len(sys.stdin.read()))").output == "0\n"


def test_an_environment_of_its_own() -> None:
    assert run_worker("import os; print(os.environ['ONLY_HERE'])", environment={"ONLY_HERE": "yes"}).output == "yes\n"


def test_only_so_much_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MOST_OUTPUT", 1000)
    monkeypatch.setattr(child, "MOST_ERRORS", 1000)
    ended = run_worker("import sys; print('x' * 300_000); sys.stderr.write('y' * 300_000 + ' end')")
    assert (ended.code, len(ended.output), ended.cut) == (0, 1000, True)
    assert len(ended.errors) == 1000
    assert ended.errors.endswith(" end")


LEAVES_A_CHILD = """
import os, sys, time
if os.fork() == 0:
    {in_child}
    open(sys.argv[1], "w").write(str(os.getpid()))
    while True:
        {again}
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
print("done")
"""


@pytest.mark.parametrize("again", ["time.sleep(1)", "os.write(1, b'x' * 100)"], ids=["waits", "writes"])
def test_a_child_that_it_leaves_is_ended_and_not_waited_for(tmp_path: Path, again: str) -> None:
    note = tmp_path / "pid"
    began = time.monotonic()
    ended = run_worker(LEAVES_A_CHILD.format(in_child="pass", again=again), str(note), time_limit_s=600)
    assert ended.code == 0
    assert "done" in ended.output
    assert time.monotonic() - began < 300
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_a_child_that_left_the_group_is_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    ended = run_worker(LEAVES_A_CHILD.format(in_child="os.setsid()", again="os.write(1, b'x')"), str(note), time_limit_s=600)
    assert ended.code == 0
    assert "done" in ended.output
    os.kill(int(note.read_text()), 9)


def test_the_time_limit_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs fast as soon as the worker is started."""
    note = tmp_path / "pid"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); os.close(1); os.close(2); time.sleep(7200)"
    clock, passed = time.monotonic, [0.0]

    def flying() -> float:
        passed[0] += 600.0 if note.exists() and note.read_text() else 0.0
        return clock() + passed[0]

    monkeypatch.setattr("time.monotonic", flying)
    ended = run_worker(code, str(note), time_limit_s=3600)
    assert ended.code is None
    assert ended.reason == "it took too long"
    assert not alive(int(note.read_text()))


def test_an_interruption_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    looks = 0

    def poll_is_interrupted(_: object) -> None:
        nonlocal looks
        looks += 1
        if note.exists() and note.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.Popen.poll", poll_is_interrupted)
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(3600)"
    with pytest.raises(KeyboardInterrupt):
        run_worker(code, str(note))
    assert looks
    assert not alive(int(note.read_text()))


def test_no_further_process() -> None:
    with pytest.raises(UserError, match="a worker process cannot be started: Argument list too long"):
        run_worker("", "x" * 2**22)
