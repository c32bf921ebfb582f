"""Lines for the person, on standard error beside the result. Saying something never fails, and never sends control characters."""

import io
import os
import sys
from contextlib import suppress

from gemmscope.text import printable

RED, PLAIN = "\x1b[31m", "\x1b[0m"


def say(text: str) -> None:
    """One line, or several. Where standard error is closed, full or gone, nothing happens."""
    _write(printable(text))


def complain(message: str, hint: str = "") -> None:
    """The message, in red on a terminal, and what to do about it."""
    _write(printable(f"gemmscope: {message}"), red=True)
    if hint:
        say(f"  {hint}")


class SafeStandardError(io.TextIOBase):
    """Standard error for progress: where the terminal has gone, nothing happens."""

    def __init__(self) -> None:
        self._stream = sys.stderr  # rich puts something else in its place while it shows progress

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _write(text: str, *, red: bool = False) -> None:
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        colored = red and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write(f"{RED}{text}{PLAIN}\n" if colored else f"{text}\n")
        sys.stderr.flush()
