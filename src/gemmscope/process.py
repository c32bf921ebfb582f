"""Worker processes: Python processes with the same packages as this one. All are started, heard, and ended in the same way.

A worker runs a module of this package, leads a process group of its own, and ends with the process that started it. It reads
lines from its standard input and answers with lines on a pipe of its own (`messages_to_parent`), so that the output of frameworks
does not interfere; its error output goes to a file, for the reason of its end.

``python -m`` would put the working directory first on the import path, where a file named random.py or types.py would hide the
standard library's. (``python -P`` avoids that, but Python 3.10 does not have it.)
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from gemmscope.errors import UserError
from gemmscope.folders import cache_folder
from gemmscope.signals import blocked, leave_to_parent

PACKAGES_VARIABLE = "GEMMSCOPE_PACKAGES"
"""Folders with packages for workers where gemmscope is not installed (nodes of a cluster), last on their import path."""

START_WORKER = (
    "import os, sys; sys.path[:1] == [''] and sys.path.pop(0); "
    f"roots = [sys.argv.pop(1), *os.environ.get('{PACKAGES_VARIABLE}', '').split(os.pathsep)]; "
    "sys.path += [root for root in roots if root and root not in sys.path]; "
    "from gemmscope.process import _run_worker; _run_worker(int(sys.argv.pop(1)), int(sys.argv.pop(1)))"
)
"""For `python -c`, with the folder of this package, the numbers of the parent process and of the pipe to it, the module and its
arguments."""

POLL_S = 1.0  # how often to check whether a silent process has ended: a child of it may keep the pipe open
ENDING_S = 5.0  # how long the end of a process is waited for: one whose GPU hangs may never end
RELEASE_S = 20.0  # the same before another one is started
LONGEST_LINE = 64 << 20  # bytes
MOST_ERRORS = 1 << 16  # bytes of error output that are read, the last


@dataclass(frozen=True)
class Ending:
    """How a process ended: `code` as `subprocess` gives it, None if it did not end in time; the end of its error output."""

    code: int | None
    errors: str = ""

    @property
    def killed(self) -> bool:
        """By a signal that no process can handle; the system sends it when memory runs out."""
        return self.code == -signal.SIGKILL

    @property
    def how(self) -> str:
        """The signal or exit code.

        >>> Ending(-11).how, Ending(3).how
        ('signal 11', 'exit code 3')
        """
        return f"signal {-self.code}" if self.code is not None and self.code < 0 else f"exit code {self.code}"

    @property
    def last_line(self) -> str:
        """The last line of its error output that is not blank; empty if there is none."""
        return next((line.strip() for line in reversed(self.errors.splitlines()) if line.strip()), "")

    @property
    def detail(self) -> str:
        """The last line of its error output, after a colon; empty if there is none."""
        return f": {self.last_line[:200]}" if self.last_line else ""


class ProcessEndedError(Exception):
    """A process has ended, and everything that it sent was read."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class WorkerProcess:
    """One worker, used as a context manager or until `close`. An `OSError` if it cannot be started.

    `environment`: instead of that of workers. Nothing here waits, except `wait`, `ending` and `end`. Several threads may `send`.
    """

    _ending: ClassVar[list[subprocess.Popen[bytes]]] = []  # killed, and perhaps still exiting

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: str | None = None
    ) -> None:
        while self._ending:  # the memory that they use is needed
            with suppress(subprocess.TimeoutExpired):
                self._ending.pop().wait(RELEASE_S)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.reading, writing = os.pipe()
        try:
            with blocked():  # it inherits that signals wait until it can handle them
                self._process = subprocess.Popen(
                    worker_command(module, writing, *arguments),
                    bufsize=0,
                    pass_fds=(writing,),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=worker_environment() if environment is None else dict(environment),
                    cwd=folder,
                    start_new_session=True,  # Ctrl-C reaches only this process, which then ends the worker
                )
        except OSError:
            os.close(self.reading)
            self._errors.close()
            raise
        finally:
            os.close(writing)
        assert self._process.stdin is not None
        self._input, self._lock = self._process.stdin, threading.Lock()
        self._unsent, self._pending, self._stopping = bytearray(), bytearray(), False
        self.pid, self.writing = self._process.pid, self._input.fileno()
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, False)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    def send(self, content: bytes) -> None:
        """Send as much as its input accepts now; `flush` and `wait` send the rest."""
        with self._lock:
            self._unsent += content
        self.flush()

    def close_input(self) -> None:
        """Close its standard input, once everything is sent."""
        self._stopping = True
        self.flush()

    def flush(self) -> None:
        """Send more of what is left. If the reader is gone, that is dropped: the end of the other direction shows it."""
        with self._lock:
            try:
                while self._unsent and not self._input.closed:
                    del self._unsent[: os.write(self.writing, self._unsent)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                pass
            self._unsent.clear()
            if self._stopping:
                self._input.close()

    def wait(self, seconds: float, *others: Any) -> None:
        """Wait at most so long until it sends something, has ended, or one of the others can be read; send what is left."""
        sending = [self.writing] if self._unsent else []
        select.select([self.reading, *others], sending, [], 0 if self.over else max(0.0, min(seconds, POLL_S)))
        self.flush()

    def lines(self) -> list[bytes]:
        """The lines that have arrived. A `ProcessEndedError` at their end, a `ValueError` for a line without end."""
        over = self.over  # asked first: what it sent until then is read
        try:
            piece = os.read(self.reading, 1 << 20)
        except BlockingIOError:
            if over:  # a child of it keeps the pipe open
                raise ProcessEndedError(self.ending()) from None
            return []
        if not piece:
            raise ProcessEndedError(self.ending())
        first, *others = piece.split(b"\n")
        self._pending += first
        if len(self._pending) > LONGEST_LINE:
            raise ValueError("its process sent a line that is too long")
        if not others:
            return []
        whole, self._pending = bytes(self._pending), bytearray(others[-1])
        return [whole, *others[:-1]]

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP); False where the system does not tell."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
        except OSError:
            return False

    def ending(self) -> Ending:
        """How it ended, once its output has. One that does not end soon is killed."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(ENDING_S)
        if code is None:
            self.kill()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - MOST_ERRORS))
        return Ending(code, self._errors.read().decode(errors="replace"))

    def kill(self) -> None:
        """Kill it and all processes that it has started, those with process groups of their own included."""
        children: list[int] = []
        if not self.over:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP)  # so that it starts nothing more, and its children keep their numbers
            children = [*descendants(self.pid), self.pid]
        with suppress(OSError):  # nothing of it is left
            os.killpg(self.pid, signal.SIGKILL)
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it. Releasing the GPU takes a moment; only the next worker that is started waits for it."""
        if self._errors.closed:
            return
        self.kill()
        self._ending.append(self._process)
        self._input.close()
        os.close(self.reading)
        self._errors.close()

    def end(self, patience_s: float) -> None:
        """Close its standard input, so that it ends by itself; kill it if that takes too long."""
        try:
            self.close_input()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        finally:
            self.close()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started; none where the system does not tell."""
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                pids += [child, *descendants(child)]
    return pids


@dataclass(frozen=True)
class Answer:
    """The last line that a short-lived worker sent, and how it ended: without a code at its time limit. `cut`: it is too long."""

    text: str
    ending: Ending
    cut: bool = False

    @property
    def reason(self) -> str:
        """The last line of its error output, or its exit code."""
        return self.ending.last_line or ("it took too long" if self.ending.code is None else self.ending.how)


def run_worker(module: str, *arguments: str, time_limit_s: float = float("inf")) -> Answer:
    """Run a worker to its end. Its output is limited in size, and every process that it started ends with it.

    An exception meanwhile, such as `Interrupted`, ends it at once.
    """
    try:
        worker = WorkerProcess(module, *arguments)
    except OSError as error:
        raise UserError(f"a worker process cannot be started: {error.strerror or error}") from error
    until, text = time.monotonic() + time_limit_s, b""
    with worker:
        worker.close_input()
        try:
            while (left := until - time.monotonic()) > 0:
                worker.wait(left)
                text = [text, *worker.lines()][-1]
        except ProcessEndedError as ended:
            return Answer(text.decode(errors="replace"), ended.ending)
        except ValueError:
            return Answer("", Ending(None), cut=True)
    return Answer("", Ending(None))


def worker_command(module: str, messages: int, *arguments: str) -> list[str]:
    """The command line that runs a module of this package like ``python -m``, without the working directory on its path.
    `messages`: the number of the pipe to this process.

    >>> worker_command("gemmscope.model.hub", 3, "gpt2")[-3:]
    ['3', 'gemmscope.model.hub', 'gpt2']
    """
    root = Path(__file__).resolve().parent.parent  # the worker imports this package from the same place
    return [sys.executable, "-c", START_WORKER, str(root), str(os.getpid()), str(messages), module, *arguments]


def worker_environment() -> dict[str, str]:
    """The environment for a worker that imports torch: this process's own, with a folder for bytecode where there is none.

    Container images often forbid Python to write bytecode beside its sources (PYTHONDONTWRITEBYTECODE). Importing torch and
    Transformer Engine then compiles about three thousand modules every time, which took 12 s instead of 5 s on one machine.
    Workers write bytecode to the user's cache folder instead.
    """
    environment = dict(os.environ)
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin or sys.pycache_prefix:
        return environment
    compiled = Path(importlib.util.cache_from_source(torch.origin))
    writable = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    if not compiled.exists() and not writable:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(cache_folder() / "bytecode")
    return environment


@contextmanager
def without_jax() -> Iterator[None]:
    """Hide JAX while Transformer Engine for PyTorch is imported: it would import JAX too, half a second for nothing."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # importing it then fails as if it were not installed
    try:
        yield
    finally:
        sys.modules.pop("jax", None)


_messages = -1


def messages_to_parent() -> IO[str]:
    """For a worker: the pipe to the process that started it. Every message is a line."""
    return os.fdopen(_messages, "w", encoding="utf-8")


def _run_worker(parent: int, messages: int) -> None:
    global _messages
    import runpy

    end_with_parent(parent)
    leave_to_parent()
    _messages = messages
    os.set_inheritable(messages, False)  # noqa: FBT003
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with_parent(parent: int) -> None:
    """End this process within about a second after its parent, however and whenever the parent ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.getpgrp() == os.getpid():  # with a process group of its own: whatever it has started ends too
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def free_memory_bytes() -> int:
    """Free memory of this machine in bytes; unlimited on unknown systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            facts = dict(line.split(":", 1) for line in lines)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63
