"""The one exception that means "the input is wrong": shown as a message, never as a traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was given and what is wrong with it (`message`), and what to type instead (`hint`)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def closest(given: str, known: Iterable[str], how_many: int = 3) -> list[str]:
    """The known names most like `given`, best first.

    >>> closest("lama", ["llama", "gpt2"])
    ['llama']
    """
    return difflib.get_close_matches(given, list(known), n=how_many, cutoff=0.5)


LONGEST_SHOWN = 60
"""Characters of a value that a message quotes."""


def shown(value: object) -> str:
    """A value of a file as a message quotes it: on one line, in plain characters, and never too long.

    >>> shown("8 B"), shown([1, 2]), len(shown("x" * 1000))
    ("'8 B'", '[1, 2]', 60)
    """
    try:
        quoted = ascii(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, a table thousands deep
        return f"({type(value).__name__}, too large to show)"
    return quoted if len(quoted) <= LONGEST_SHOWN else quoted[: LONGEST_SHOWN - 1] + "…"
