"""Ctrl-C, SIGTERM and SIGHUP, which Slurm and Kubernetes send before they kill: how they end a command.

A signal raises `Interrupted`, except inside `defer_signals()`: where samples arrive and where files are written it is only
recorded, so that nothing is cut in half. The code that defers signals checks for one between two messages, and ends as planned.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
MOST_DEFERRED = 3  # this many signals end even a process that defers them


class Interrupted(BaseException):
    """The user or the system asked this process to end. Raised in the command line; in Python, Ctrl-C is a KeyboardInterrupt."""

    def __init__(self, number: int, outcome: str = "") -> None:
        super().__init__(number, outcome)
        self.number, self.outcome = number, outcome

    @property
    def exit_code(self) -> int:
        """The exit code as shells report it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


class DeferredSignals:
    """The signals that arrived while they were deferred. `first`: the number of the first one; None if there is none."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.answered = False  # the caller returns what it has so far: in Python, nothing is raised
        self.outcome = ""  # what the command line prints after "interrupted"
        self._count = 0
        self._reading, self._writing = os.pipe()

    def note(self, number: int) -> None:
        """Record a signal. Called by the signal handler."""
        self._count += 1
        if self.first is None:
            self.first = number
            os.write(self._writing, b"!")
        if self._count >= MOST_DEFERRED:
            raise self.interruption()

    def interruption(self) -> BaseException:
        """The exception to raise if nothing can be returned."""
        return _interruption(self.first or signal.SIGINT, self.outcome)

    def fileno(self) -> int:
        """A descriptor that becomes readable when a signal arrives, for `select`."""
        return self._reading

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


_deferred: DeferredSignals | None = None
_installed = False
_raised: int | None = None
"""The signal that ends this command. The exception may be lost: extension modules, and code that they call, swallow some."""


def _interruption(number: int, outcome: str = "") -> BaseException:
    return Interrupted(number, outcome) if _installed else KeyboardInterrupt()


def _handle(number: int, _: FrameType | None) -> None:
    global _raised
    if _deferred is None:
        _raised = number
        raise _interruption(number)
    _deferred.note(number)


@contextmanager
def raised() -> Iterator[None]:
    """For the command line: these signals raise `Interrupted`. Signals that are ignored stay ignored (nohup, background jobs)."""
    global _installed, _raised
    before = {number: signal.getsignal(number) for number in ENDING}
    _installed, _raised = True, None
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)
    try:
        yield
    finally:
        _installed = False
        for number, handler in before.items():
            signal.signal(number, handler)


def behind(error: BaseException) -> Interrupted | None:
    """The signal that an extension module, interrupted, made another exception of; None if there was none."""
    return Interrupted(_raised) if _raised is not None and "Interrupted" in str(error) else None


def ignore() -> None:
    """For a process that has nothing left to do but end, or whose parent decides when it ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """Block these signals while a process is started: it inherits the mask, until it can handle them (`leave_to_parent`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """For a process whose parent decides when it ends: batch systems send these signals to every process of a job."""
    for number in ENDING:
        signal.signal(number, lambda *_: None)  # a function, which processes that it starts do not inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextmanager
def defer_signals() -> Iterator[DeferredSignals]:
    """Record signals instead of raising them, and raise them at the end: always in the command line, for its exit code; in Python
    unless `answered` is set. In Python only Ctrl-C is deferred, and only in the main thread. Nested calls share one object."""
    global _deferred
    if _deferred is not None:
        yield _deferred
        return
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if ours else None
    replaced = before is signal.default_int_handler
    mine = DeferredSignals()
    if ours:
        _deferred = mine
    if replaced:
        signal.signal(signal.SIGINT, _handle)
    if ours and _installed and _raised is not None:
        mine.note(_raised)
    try:
        yield mine
    except OSError as error:  # a closed terminal sends SIGHUP and can no longer be written to
        if mine.first is None or not _installed:
            raise
        raise mine.interruption() from error
    finally:
        if replaced:
            signal.signal(signal.SIGINT, before)
        if ours:
            _deferred = None
        mine.close()
    if mine.first is not None and (_installed or not mine.answered):
        raise mine.interruption()
