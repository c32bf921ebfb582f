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

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As shells report it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


class Held:
    """The signals that arrived while they were held: `first` is the number of the first, None as long as there is none."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.answered = False  # whoever holds them has ended because of it
        self._count = 0
        self._reading, self._writing = os.pipe()

    def note(self, number: int) -> None:
        """Called by the signal handler."""
        self._count += 1
        if self.first is None:
            self.first = number
            os.write(self._writing, b"!")
        if self._count >= MOST_PATIENT:
            raise _interruption(self.first)

    def interruption(self) -> BaseException:
        """What to raise where the signal leaves nothing to return."""
        assert self.first is not None
        return _interruption(self.first)

    def fileno(self) -> int:
        """Becomes readable when a signal arrives: `select` waits for it beside other things."""
        return self._reading

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


_held: Held | None = None
_installed = False


def _interruption(number: int) -> BaseException:
    return Interrupted(number) if _installed else KeyboardInterrupt()


def _handle(number: int, _: FrameType | None) -> None:
    if _held is None:
        raise _interruption(number)
    _held.note(number)


def install() -> None:
    """For the command line: from now on these signals raise `Interrupted`. What is ignored stays so (nohup, background jobs)."""
    global _installed
    _installed = True
    for number in ENDING:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)


def ignore() -> None:
    """For a process that has nothing left to do but end, or whose parent decides when it ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def held() -> Iterator[Held]:
    """Note signals instead of raising them. At the end, a signal that nobody has `answered` is raised.

    In a process that has not called `install`, Ctrl-C alone is held; outside of the main thread nothing is. Inside another `held`
    it is the same one.
    """
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
    try:
        yield mine
    finally:
        if replaced:
            signal.signal(signal.SIGINT, before)
        if ours:
            _held = None
        mine.close()
    if mine.first is not None and not mine.answered:
        raise _interruption(mine.first)
