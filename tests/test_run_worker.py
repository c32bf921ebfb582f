"""Worker processes: the parent always gets an answer in time, and no process is left running."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gemmscope import process
from gemmscope.errors import UserError
from gemmscope.process import Ending, ProcessEndedError, WorkerProcess, run_worker
from support.processes import alive, wait_until

SEND = """
import os, sys
messages = os.fdopen(int(sys.argv[1]), "w")
def send(text):
    messages.write(text)
    messages.flush()
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The "module" of a worker is a piece of Python."""

    def command(code: str, messages: int, *arguments: str) -> list[str]:
        return [sys.executable, "-c", SEND + code, str(messages), *arguments]

    monkeypatch.setattr(process, "worker_command", command)
    monkeypatch.setattr(process, "worker_environment", lambda: dict(os.environ))


pytestmark = pytest.mark.usefixtures("worker")


def received(worker: WorkerProcess, count: int) -> list[bytes]:
    lines: list[bytes] = []
    while len(lines) < count:
        worker.wait(60.0)
        lines += worker.lines()
    return lines


def ending_of(worker: WorkerProcess) -> Ending:
    while True:
        worker.wait(60.0)
        try:
            worker.lines()
        except ProcessEndedError as end:
            return end.ending


def test_answer_errors_and_code() -> None:
    answer = run_worker("send(f'first\\n{sys.argv[2]}\\n'); sys.stderr.write('a\\nwhy\\n \\n'); sys.exit(3)", "answer")
    assert answer.text == "answer"
    assert answer.ending == Ending(3, "a\nwhy\n \n")
    assert answer.reason == answer.ending.last_line == "why"


def test_what_is_no_text_is_replaced() -> None:
    assert run_worker("os.write(int(sys.argv[1]), b'caf\\xe9\\n')").text == "caf\ufffd"


def test_standard_input_is_empty() -> None:
    assert run_worker("send(f'{len(sys.stdin.read())}\\n')").text == "0"


def test_prints_are_not_messages() -> None:
    assert run_worker("print('hello'); send('answer\\n'); print('hello')").text == "answer"


def test_only_so_much_output_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LONGEST_LINE", 1000)
    monkeypatch.setattr(process, "MOST_ERRORS", 1000)
    assert run_worker("send('x' * 300_000 + '\\n')").cut
    ended = run_worker("sys.stderr.write('y' * 300_000 + ' end')").ending
    assert len(ended.errors) == 1000
    assert ended.errors.endswith(" end")


def test_what_a_full_pipe_does_not_take_follows_later() -> None:
    content = os.urandom(1 << 20).hex().encode() + b"\n"
    with WorkerProcess("send('ready\\n'); time = __import__('time'); time.sleep(0.05); send(sys.stdin.readline())") as echo:
        echo.send(content)
        assert echo.sending
        assert received(echo, 2) == [b"ready", content.rstrip()]
        assert not echo.sending


def test_nothing_is_left_for_who_does_not_read_any_more() -> None:
    with WorkerProcess("os.close(0); send('closed\\n'); sys.exit()") as worker:
        received(worker, 1)
        worker.send(b"nobody reads this\n")
        assert ending_of(worker).code == 0
        worker.flush()
        assert not worker.sending


def test_how_it_ended() -> None:
    with WorkerProcess("os.kill(os.getpid(), 9)") as worker:
        assert ending_of(worker).killed
    with WorkerProcess("sys.stdin.read(); send('over\\n')") as worker:
        worker.close_input()
        assert received(worker, 1) == [b"over"]
        assert ending_of(worker).how == "exit code 0"


def test_one_that_closes_its_output_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENDING_S", 0.1)
    with WorkerProcess("messages.close(); import time; time.sleep(3600)") as worker:
        assert ending_of(worker).code is None
        assert wait_until(lambda: worker.over)


LEAVES_A_CHILD = """
import os, sys, time
if os.fork() == 0:
    {in_child}
    open(sys.argv[2], "w").write(str(os.getpid()))
    while True:
        {again}
while not os.path.exists(sys.argv[2]) or not open(sys.argv[2]).read():
    time.sleep(0.01)
send("done\\n")
"""


@pytest.mark.parametrize("again", ["time.sleep(1)", "os.write(1, b'x' * 100)"], ids=["waits", "writes"])
def test_a_child_that_it_leaves_is_ended_and_not_waited_for(tmp_path: Path, again: str) -> None:
    note = tmp_path / "pid"
    began = time.monotonic()
    answer = run_worker(LEAVES_A_CHILD.format(in_child="pass", again=again), str(note), time_limit_s=600)
    assert (answer.text, answer.ending.code) == ("done", 0)
    assert time.monotonic() - began < 300
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_a_child_that_left_the_group_is_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    answer = run_worker(LEAVES_A_CHILD.format(in_child="os.setsid()", again="time.sleep(1)"), str(note), time_limit_s=600)
    assert (answer.text, answer.ending.code) == ("done", 0)
    os.kill(int(note.read_text()), 9)


def test_the_time_limit_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs fast as soon as the worker is started."""
    note = tmp_path / "pid"
    code = "import time; open(sys.argv[2], 'w').write(str(os.getpid())); os.close(1); os.close(2); time.sleep(7200)"
    clock, passed = time.monotonic, [0.0]

    def flying() -> float:
        passed[0] += 600.0 if note.exists() and note.read_text() else 0.0
        return clock() + passed[0]

    monkeypatch.setattr("time.monotonic", flying)
    answer = run_worker(code, str(note), time_limit_s=3600)
    assert answer.ending.code is None
    assert answer.reason == "it took too long"
    monkeypatch.setattr("time.monotonic", clock)
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_an_interruption_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    wait = WorkerProcess.wait

    def interrupted(self: WorkerProcess, seconds: float) -> None:
        wait(self, min(seconds, 0.01))
        if note.exists() and note.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(WorkerProcess, "wait", interrupted)
    code = "import time; open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(3600)"
    with pytest.raises(KeyboardInterrupt):
        run_worker(code, str(note))
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_no_further_process() -> None:
    with pytest.raises(UserError, match="a worker process cannot be started: Argument list too long"):
        run_worker("", "x" * 2**22)
