"""The one exception that means "the input is wrong": shown as a message, never as a traceback, exit code 2."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from gemmscope.text import printable


class UserError(Exception):
    """What was given and why it is invalid (`message`), and what to type instead (`hint`).

    Arguments are named with `option`, so that the command line says `--tp 2` where Python says `tp=2`.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = printable(message, keep=""), printable(hint, keep="")  # both may quote files
        super().__init__(self.message)

    def name_keywords(self, names: Mapping[str, str]) -> None:
        """Name arguments as a function of Python does that has other names for some of them."""
        self.message, self.hint = (
            _OPTION.sub(lambda match: option(names.get(match[1], match[1]), match[2]), text) for text in (self.message, self.hint)
        )

    def __str__(self) -> str:
        return in_python(f"{self.message}\n{self.hint}" if self.hint else self.message)


class DoesNotFitError(UserError):
    """What was asked for needs more memory than the GPU has."""


class MissingFactError(UserError):
    """A table of facts that ships with the package lacks one, such as a GPU's links: `file` is what to add `key` to."""

    def __init__(self, file: str, key: str) -> None:
        self.file, self.key = file, key
        super().__init__(f"a fact is missing: {file} has no {key}", f"add {key} to src/gemmscope/{file} (see CONTRIBUTING.md)")
        self.args = file, key  # what another process makes it from again


def option(name: str, value: object = None) -> str:
    """An argument inside a message, spelled later for the command line or for Python.

    >>> in_shell(option("micro_batch_size", 4)), in_python(option("micro_batch_size", 4)), in_shell(option("tp"))
    ('--micro-batch-size 4', 'micro_batch_size=4', '--tp')
    """
    return f"‹{name}›" if value is None else f"‹{name}={value}›"


_OPTION = re.compile("‹([^‹›=]+)(?:=([^‹›]*))?›")
_NUMBER = re.compile(r"[+-]?[0-9][0-9_.]*(?:e[+-]?[0-9]+)?|N|True|False|None")


def in_shell(text: str) -> str:
    """The text with its arguments as options of the command line."""
    return _OPTION.sub(lambda match: f"--{match[1].replace('_', '-')}" + (f" {match[2]}" if match[2] else ""), text)


def in_python(text: str) -> str:
    """The text with its arguments as Python spells them: values that are no numbers are quoted.

    >>> in_python(f"add {option('gpu', 'b300,h200')}, {option('tp', 2)} or {option('dp', 'N')}")
    "add gpu='b300,h200', tp=2 or dp=N"
    """
    return _OPTION.sub(lambda match: match[1] + (f"={_literal(match[2])}" if match[2] else ""), text)


def _literal(value: str) -> str:
    return value if _NUMBER.fullmatch(value) else repr(value)


MOST_COMPARED, LONGEST_COMPARED = 1000, 100  # names, and characters of each: comparing takes long, and files may have millions


def closest(given: str, known: Iterable[str], how_many: int = 3, *, cutoff: float = 0.5) -> list[str]:
    """The known names that are most similar to `given`, the best first.

    >>> closest("lama", ["llama", "gpt2"])
    ['llama']
    """
    names = [name for name in islice(known, MOST_COMPARED) if len(name) <= LONGEST_COMPARED]
    return difflib.get_close_matches(given[:LONGEST_COMPARED], names, n=how_many, cutoff=cutoff)


def did_you_mean(given: str, known: Iterable[str], how_many: int = 3) -> str:
    """The start of a hint: the known names that are most similar to `given`; empty where none is.

    >>> did_you_mean("lama", ["llama", "gpt2"]), did_you_mean("xyz", ["llama"])
    ('did you mean llama? ', '')
    """
    similar = closest(given, known, how_many)
    return f"did you mean {' or '.join(similar)}? " if similar else ""


def reject(*checks: tuple[object, str, str]) -> None:
    """A `UserError` for the first of these that is wrong: its message, and what to do instead.

    >>> reject((0, "no", ""), (2 > 1, "two is more than one", "give less"))
    Traceback (most recent call last):
    gemmscope.errors.UserError: two is more than one
    give less
    """
    for wrong, message, hint in checks:
        if wrong:
            raise UserError(message, hint)


def no_option(function: str, name: str, known: Sequence[str]) -> UserError:
    """The error for a keyword that a function of the Python API does not have: it lists those that it has."""
    return UserError(f"{function} has no option {name}", f"{did_you_mean(name, known, 1)}options: {', '.join(known)}")


LONGEST_SHOWN = 60
"""The most characters of a value that a message quotes."""

MOST_ITEMS_SHOWN = 8
"""The most items of a list or mapping that a message quotes."""

COLLECTIONS = (list, tuple, set, frozenset, dict)


def shown(value: object) -> str:
    """A value as a message quotes it: on one line, in ASCII, and never too long.

    A collection is written out only if it is short and contains no other collection: a few lines of YAML can describe nested
    lists that would be endless when written out.

    >>> shown("8 B"), shown([1, 2]), len(shown("x" * 1000))
    ("'8 B'", '[1, 2]', 60)
    >>> shown([[1], 2]), shown({"a": {"b": 1}})
    ('a list of 2', 'a mapping of 1')
    """
    if isinstance(value, COLLECTIONS) and not _is_short_and_flat(value):
        return f"a {'mapping' if isinstance(value, dict) else type(value).__name__} of {len(value)}"
    try:
        quoted = ascii(value)
    except (ValueError, RecursionError):  # a number with thousands of digits, thousands of levels
        return f"({type(value).__name__}, too large to show)"
    return quoted if len(quoted) <= LONGEST_SHOWN else quoted[: LONGEST_SHOWN - 1] + "…"


def _is_short_and_flat(collection: Collection[object]) -> bool:
    if len(collection) > MOST_ITEMS_SHOWN:
        return False
    items = [*collection, *(collection.values() if isinstance(collection, dict) else ())]
    return not any(isinstance(item, COLLECTIONS) for item in items)


def in_a_line(error: BaseException) -> str:
    """An exception of foreign code as one line.

    >>> in_a_line(ValueError("no\\nstack")), in_a_line(KeyError())
    ('ValueError: no', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
