"""Ctrl-C, SIGTERM and SIGHUP, which Slurm and Kubernetes send before they kill: how they end a command.

A signal raises `Interrupted`, except inside `held()`: where samples arrive and where files are written it is only noted, so that
nothing is cut in half. Whoever holds signals looks at the note between two messages, and ends as planned.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
MOST_PATIENT = 3  # so many signals end even a process that holds them


class Interrupted(BaseException):
    """The user or the system asked this process to end. Raised in the command line; in Python, Ctrl-C is a KeyboardInterrupt."""

    def __init__(self, number: int, outcome: str = "") -> None:
        super().__init__(number, outcome)
        self.number, self.outcome = number, outcome

    @property
    def exit_code(self) -> int:
        """The exit code as shells report it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


class Held:
    """The signals that arrived while they were held: `first` is the number of the first, None as long as there is none."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.answered = False  # whoever holds them returns what it has: in Python, nothing is raised
        self.outcome = ""  # what the command line says beside "interrupted"
        self._count = 0
        self._reading, self._writing = os.pipe()

    def note(self, number: int) -> None:
        """Called by the signal handler."""
        self._count += 1
        if self.first is None:
            self.first = number
            os.write(self._writing, b"!")
        if self._count >= MOST_PATIENT:
            raise self.interruption()

    def interruption(self) -> BaseException:
        """The exception to raise if nothing can be returned."""
        return _interruption(self.first or signal.SIGINT, self.outcome)

    def fileno(self) -> int:
        """Becomes readable when a signal arrives: `select` waits for it beside other things."""
        return self._reading

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


_held: Held | None = None
_installed = False
_raised: int | None = None
"""The signal that ends this command. The exception may be lost: extension modules, and code that they call, swallow some."""


def _interruption(number: int, outcome: str = "") -> BaseException:
    return Interrupted(number, outcome) if _installed else KeyboardInterrupt()


def _handle(number: int, _: FrameType | None) -> None:
    global _raised
    if _held is None:
        _raised = number
        raise _interruption(number)
    _held.note(number)


@contextmanager
def raised() -> Iterator[None]:
    """For the command line: these signals raise `Interrupted`. What is ignored stays so (nohup, background jobs)."""
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


def ignore() -> None:
    """For a process that has nothing left to do but end, or whose parent decides when it ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """While a process is started: it inherits that these signals wait, until it can handle them (`leave_to_parent`)."""
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
def held() -> Iterator[Held]:
    """Note signals instead of raising them. At the end they are raised: in the command line always, for its exit code; in Python
    unless somebody has `answered`, where only Ctrl-C is held, and nothing outside of the main thread. Inside another `held` it is
    the same one."""
    global _held
    if _held is not None:
        yield _held
        return
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if ours else None
    replaced = before is signal.default_int_handler
    mine = Held()
    if ours:
        _held = mine
    if replaced:
        signal.signal(signal.SIGINT, _handle)
    if ours and _installed and _raised is not None:
        mine.note(_raised)
    try:
        yield mine
    except OSError as error:  # a terminal that was closed sends SIGHUP, and cannot be written to any more
        if mine.first is None or not _installed:
            raise
        raise mine.interruption() from error
    finally:
        if replaced:
            signal.signal(signal.SIGINT, before)
        if ours:
            _held = None
        mine.close()
    if mine.first is not None and (_installed or not mine.answered):
        raise mine.interruption()
