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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from gemmscope.errors import UserError
from gemmscope.process import worker_command, worker_environment


@dataclass(frozen=True)
class Death:
    """The unexpected end of a process: the task it was working on, and what is known of the cause."""

    task: str
    why: str
    kind: str


class Link:
    """One measuring process. `close` ends it."""

    _ending: ClassVar[list[subprocess.Popen[bytes]]] = []  # killed, and perhaps still exiting

    def __init__(self, worker: str = "gemmscope.measure.worker") -> None:
        while self._ending:  # their memory is needed
            self._ending.pop().wait()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._reading, writing = os.pipe()
        self._process = subprocess.Popen(
            worker_command(worker, str(writing)),
            pass_fds=(writing,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the worker
        )
        os.close(writing)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, content: Any) -> None:
        """Send the request, or later orders."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has already ended, which the end of its messages will show
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def tell_to_stop(self) -> None:
        """Close its standard input, which tells it to stop."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def messages(self, silence_s: float) -> Iterator[dict[str, Any] | None]:
        """Its messages as they arrive; None if nothing came for `silence_s`; ends when the process ends."""
        pending = b""
        while True:
            readable, _, _ = select.select([self._reading], [], [], silence_s)
            if not readable:
                yield None
                return
            piece = os.read(self._reading, 1 << 16)
            if not piece:
                return
            *whole, pending = (pending + piece).split(b"\n")
            for line in whole:
                yield json.loads(line)

    def converse(
        self,
        request: dict[str, Any],
        *,
        silence_s: float,
        note: Callable[[dict[str, Any]], None],
        enough: Callable[[], bool],
        wanted: Callable[[], Sequence[Any]] | None = None,
    ) -> Death | None:
        """Send the request, pass every message to `note`, and stop once there is `enough`. None after a normal end.

        `wanted`: what to measure next, sent whenever it changes. With it only samples count, and this returns once they suffice.
        """
        self.send(request)
        at, greeted, sent = "", False, ()
        for message in self.messages(silence_s):
            if message is None:
                return Death(at, f"the measuring process sent nothing for {silence_s:g} s", "hang")
            if message["type"] == "fatal":
                raise UserError(message["why"], "gemmscope doctor shows what this machine can measure")
            greeted = greeted or message["type"] == "hello"
            at = message["task"] if message["type"] == "begin" else at
            note(message)
            if message["type"] in ("samples", "round"):
                if enough():
                    if wanted is not None:
                        return None
                    self.tell_to_stop()
                elif wanted is not None and (now := tuple(wanted())) != sent:
                    self.send(now)
                    sent = now
            if message["type"] == "done":
                return None
        if not greeted:
            raise UserError(f"the measuring process did not start {self.exit_reason()}")
        return Death(at, f"the measuring process died {self.exit_reason()}", "crash")

    def exit_reason(self) -> str:
        """How it ended: the signal or exit code, and the last line of its error output."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        if code == -signal.SIGKILL:  # no message follows; the system does this when memory runs out
            return "(killed by signal 9)"
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"({ended})" + (f": {lines[-1][:200]}" if lines else "")

    def close(self) -> None:
        """Kill the process. Releasing the GPU takes a moment, for which only the next one waits."""
        if not self._errors.closed:
            self._process.kill()
            self._ending.append(self._process)
            self.tell_to_stop()
            os.close(self._reading)
            self._errors.close()
