"""The connection between the parent and a measuring process.

The request goes to the process's standard input as one line of JSON; the end of that input means stop. Messages come back over a
separate pipe, one line each, so that the output of frameworks does not interfere.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from gemmscope.engine.messages import Message, parse
from gemmscope.engine.pipes import PipeWriter, last_line, read_now
from gemmscope.errors import shown
from gemmscope.process import worker_command, worker_environment
from gemmscope.signals import DeferredSignals, blocked

POLL_S = 1.0  # how often to check whether a silent process has ended: a child of it may keep the pipe open


class WorkerEndedError(Exception):
    """The process ended or must be ended: what happened, details, and the kind of failure that this is for its task.

    `killed`: by SIGKILL, which comes from outside the process, so the task may not be the cause.
    """

    def __init__(self, kind: str, what: str, detail: str = "", *, killed: bool = False, hint: str = "") -> None:
        super().__init__(kind, what, detail)
        self.kind, self.why, self.detail, self.killed, self.hint = kind, f"{what} {detail}".strip(), detail, killed, hint


class Link(Protocol):
    """One measuring process, wherever it runs."""

    def send(self, content: Any) -> None:
        """Send the request, or later orders."""

    def tell_to_stop(self) -> None:
        """Ask it to stop."""

    def messages(self, silence_s: float, signals: DeferredSignals) -> Iterator[Message]:
        """Its messages as they arrive, until a signal arrives, including those sent by then.

        A `WorkerEndedError` if it ends, sends nothing for `silence_s`, or sends an invalid message."""

    def close(self) -> None:
        """End the worker."""


class Workers(Protocol):
    """Where measuring processes come from. Several GPUs, or those of a cluster, plug in here."""

    def start(self, module: str) -> Link:
        """Start a process that runs this module."""


class LocalWorkers:
    """Processes on this machine. One may be started early: it imports torch while others read the model."""

    def __init__(self) -> None:
        self._early: dict[str, LocalLink] = {}

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._early:
            self._early.popitem()[1].close()

    def start_early(self, module: str) -> None:
        """Start a process now, which the first `start` of this module returns."""
        self._early[module] = LocalLink(module)

    def start(self, module: str) -> LocalLink:
        return self._early.pop(module, None) or LocalLink(module)


class LocalLink:
    """A process on this machine, with a process group of its own, which ends with it."""

    _ending: ClassVar[list[subprocess.Popen[bytes]]] = []  # killed, and perhaps still exiting

    def __init__(self, module: str) -> None:
        while self._ending:  # their memory is needed
            self._ending.pop().wait()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._reading, writing = os.pipe()
        with blocked():
            self._process = subprocess.Popen(
                worker_command(module, str(writing)),
                bufsize=0,
                pass_fds=(writing,),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the worker
            )
        os.close(writing)
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self._outgoing, self._stopping = PipeWriter(self._input.fileno()), False
        os.set_blocking(self._reading, False)

    def send(self, content: Any) -> None:
        self._outgoing.send(json.dumps(content).encode() + b"\n")

    def tell_to_stop(self) -> None:
        """Close its standard input, once everything is sent."""
        self._stopping = True
        self._write()

    def messages(self, silence_s: float, signals: DeferredSignals) -> Iterator[Message]:
        pending, heard = b"", time.monotonic()
        while True:
            over = self._process.poll() is not None
            stopping = signals.first is not None  # in both cases, what it has sent so far is still read
            sending = [self._input.fileno()] if self._outgoing else []
            select.select([self._reading, signals.fileno()], sending, [], 0 if over else min(silence_s, POLL_S))
            self._write()
            piece = read_now(self._reading)
            if piece:
                heard = time.monotonic()
                *whole, pending = (pending + piece).split(b"\n")
                yield from map(_message, whole)
            if stopping:
                return
            if piece:
                continue
            if piece is None or over:
                reason = self._exit_reason()
                killed = self._process.returncode == -signal.SIGKILL
                raise WorkerEndedError("crash", "the measuring process died", reason, killed=killed)
            if time.monotonic() - heard >= silence_s:
                raise WorkerEndedError("hang", f"the measuring process sent nothing for {silence_s:g} s")

    def _write(self) -> None:
        """Send as much as the pipe takes now; the rest follows while messages are waited for."""
        self._outgoing.flush()
        if self._stopping and not self._outgoing and not self._input.closed:
            self._input.close()

    def _exit_reason(self) -> str:
        """How it ended: the signal or exit code, and the last line of its error output."""
        code = self._process.wait()
        if code == -signal.SIGKILL:  # no message follows; the system does this when memory runs out
            return "(killed by signal 9)"
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"({ended}){last_line(self._errors)}"

    def close(self) -> None:
        """Kill the process and those that it started. Releasing the GPU takes a moment; only the next process waits for it."""
        if not self._errors.closed:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ending.append(self._process)
            self._input.close()
            os.close(self._reading)
            self._errors.close()


def _message(text: bytes) -> Message:
    try:
        return parse(text)
    except ValueError as error:
        raise WorkerEndedError("error", f"the measuring process sent an invalid message: {shown(text)}") from error
