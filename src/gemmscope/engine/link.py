"""The connection between the parent and a measuring process.

The request goes to the process as one line of JSON; the end of its input means stop. Messages come back, one line each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Protocol

from gemmscope.engine.messages import Message, parse
from gemmscope.errors import shown
from gemmscope.process import ProcessEndedError, WorkerProcess
from gemmscope.signals import DeferredSignals


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
    """A process on this machine."""

    def __init__(self, module: str) -> None:
        self._process = WorkerProcess(module)

    def tell_to_stop(self) -> None:
        self._process.close_input()

    def close(self) -> None:
        self._process.close()

    def send(self, content: Any) -> None:
        self._process.send(json.dumps(content).encode() + b"\n")

    def messages(self, silence_s: float, signals: DeferredSignals) -> Iterator[Message]:
        heard = time.monotonic()
        while True:
            stopping = signals.first is not None  # what it has sent so far is still read
            self._process.wait(silence_s, signals)
            try:
                lines = self._process.lines()
            except ProcessEndedError as end:
                ended = "killed by signal 9" if end.ending.killed else end.ending.how  # a killed process leaves no reason
                detail = f"({ended}){'' if end.ending.killed else end.ending.detail}"
                raise WorkerEndedError("crash", "the measuring process died", detail, killed=end.ending.killed) from end
            except ValueError as error:
                raise WorkerEndedError("error", str(error)) from error
            for line in lines:
                heard = time.monotonic()
                yield _message(line)
            if stopping:
                return
            if time.monotonic() - heard >= silence_s:
                raise WorkerEndedError("hang", f"the measuring process sent nothing for {silence_s:g} s")


def _message(text: bytes) -> Message:
    try:
        return parse(text)
    except ValueError as error:
        raise WorkerEndedError("error", f"the measuring process sent an invalid message: {shown(text)}") from error
