"""Lines for the person, on standard error beside the result. Saying something never fails, and never sends control characters."""

import os
import sys
from contextlib import suppress

from gemmscope.text import printable

RED, PLAIN = "\x1b[31m", "\x1b[0m"


def say(text: str) -> None:
    """One line, or several. Where standard error is closed, full or gone, nothing happens."""
    _write(printable(text))


def complain(message: str, hint: str = "") -> None:
    """What is wrong, in red on a terminal, and what to do about it."""
    _write(printable(f"gemmscope: {message}"), red=True)
    if hint:
        say(f"  {hint}")


def _write(text: str, *, red: bool = False) -> None:
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        colored = red and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write(f"{RED}{text}{PLAIN}\n" if colored else f"{text}\n")
        sys.stderr.flush()
