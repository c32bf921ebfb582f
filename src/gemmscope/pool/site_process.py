"""The process of a site on this machine: lines in both directions without blocking, and an end that leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gemmscope.engine.pipes import PipeWriter, last_line, read_now
from gemmscope.pool.lines import SITE
from gemmscope.process import worker_command, worker_environment
from gemmscope.signals import blocked

MOST_PENDING = 64 << 20  # bytes of a line that has no end
ENDING_S = 5.0  # how long the end of a killed process is waited for: one whose GPU hangs may never end


class SiteEndedError(Exception):
    """The process has ended. The message says how."""


class SiteProcess:
    """One site. `environment` is added to that of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with blocked():  # it inherits that signals wait until it can handle them
                self._process = subprocess.Popen(
                    worker_command(SITE),
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env={**worker_environment(), **environment},
                    start_new_session=True,  # Ctrl-C reaches only this process, which then ends the site
                )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.writing, self.reading = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.reading, False)
        self._outgoing, self._pending = PipeWriter(self.writing), bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def sending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._outgoing)

    def send(self, line: bytes) -> None:
        """Send as much as it takes now; `flush` sends the rest."""
        self._outgoing.send(line)

    def flush(self) -> None:
        """Send more of what is left to send."""
        self._outgoing.flush()

    def lines(self) -> Iterator[bytes]:
        """The lines that have arrived. A `SiteEndedError` at their end."""
        while (piece := read_now(self.reading)) != b"":
            if piece is None:
                raise SiteEndedError(self._how())
            *whole, rest = piece.split(b"\n")
            if whole:
                yield bytes(self._pending + whole[0])
                self._pending.clear()
                yield from whole[1:]
            self._pending += rest
            if len(self._pending) > MOST_PENDING:
                raise SiteEndedError("its process sent a line that is too long")

    def ended(self) -> str | None:
        """How it has ended; None as long as it runs."""
        return None if self._process.poll() is None else self._how()

    def _how(self) -> str:
        """The signal or exit code, and the last line of its error output."""
        self.stop()
        try:
            code = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return "its process closed its output"
        if code == -signal.SIGKILL:  # no message follows; the system does this when memory runs out
            return "its process was killed (signal 9)"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process died ({how}){last_line(self._errors)}"

    def stop(self) -> None:
        """Kill it and all processes that it has started, those with process groups of their own included."""
        if self._process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGSTOP)  # so that it starts nothing more, and its children keep their numbers
        children = descendants(self._process.pid)
        for pid in (*children, self._process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and wait for its end."""
        self.stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started; none where the system does not tell."""
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                pids += [child, *descendants(child)]
    return pids
