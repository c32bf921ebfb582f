"""The line between the parent and a measuring process.

The request goes to the process's standard input as one line of JSON; the end of that input is the sign to stop. Messages come
back over a pipe of their own, a line each, so that whatever frameworks print is in nobody's way.
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
    """A process that did not come to a good end: the task it was at, and what is known of the cause."""

    task: str
    why: str
    kind: str


class Link:
    """One measuring process. Close it, and none is left behind."""

    _leaving: ClassVar[list[subprocess.Popen[bytes]]] = []  # ended, and perhaps not gone yet

    def __init__(self, worker: str = "gemmscope.measure.worker") -> None:
        while self._leaving:  # its memory is needed
            self._leaving.pop().wait()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._reading, writing = os.pipe()
        self._process = subprocess.Popen(
            worker_command(worker, str(writing)),
            pass_fds=(writing,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the worker
        )
        os.close(writing)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: dict[str, Any]) -> None:
        """Hand it its task."""
        self._write(request)

    def _write(self, content: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone already: the end of its messages will say so
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def tell_to_stop(self) -> None:
        """The end of its standard input is the sign."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def messages(self, silence_s: float) -> Iterator[dict[str, Any] | None]:
        """What it says, as it arrives; None once nothing came for too long; ends when the process does."""
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
        """Ask, note every message, and tell it to stop once it is enough. None if it came to a good end, else how it died.

        `wanted`: what it should measure more of. Whoever can say that needs nothing but samples: once it is enough, it ends.
        """
        self.ask(request)
        at, greeted, said = "", False, ()
        for message in self.messages(silence_s):
            if message is None:
                return Death(at, f"nothing was heard from it for {silence_s:g} s", "hang")
            if message["type"] == "fatal":
                raise UserError(message["why"], "gemmscope doctor tells what this machine can measure")
            greeted = greeted or message["type"] == "hello"
            at = message["task"] if message["type"] == "begin" else at
            note(message)
            if message["type"] in ("samples", "round"):
                if enough():
                    if wanted is not None:
                        return None
                    self.tell_to_stop()
                elif wanted is not None and (now := tuple(wanted())) != said:
                    self._write(now)
                    said = now
            if message["type"] == "done":
                return None
        if not greeted:
            raise UserError(f"the measuring process did not start {self.last_words()}")
        return Death(at, f"the measuring process died {self.last_words()}", "crash")

    def last_words(self) -> str:
        """How it ended: the signal or exit code, and the last line of its error output."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        if code == -signal.SIGKILL:  # whoever did that left no words; the system does it where memory runs out
            return "(killed by signal 9)"
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"({ended})" + (f": {lines[-1][:200]}" if lines else "")

    def close(self) -> None:
        """End the process, however it is doing. Leaving a GPU takes it a moment, for which only the next one waits."""
        if not self._errors.closed:
            self._process.kill()
            self._leaving.append(self._process)
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            os.close(self._reading)
            self._errors.close()
