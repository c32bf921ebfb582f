"""Parses TOML: the user's files, and the tables of facts that ship with the package.

Python has a TOML parser since 3.11; on 3.10 the `tomli` package is the same parser. The result is always a dictionary or a
`UserError`: the parser's own exceptions (a syntax error, nesting too deep, a number too long) never reach the caller.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.resources import files
from typing import Any

from gemmscope.errors import MissingFactError, UserError


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    >>> parse_toml('[model]\\nname = "llama3"')
    {'model': {'name': 'llama3'}}
    """
    parser = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        document: dict[str, Any] = parser.loads(text.removeprefix("\ufeff"))  # Windows editors write this mark first
    except RecursionError:
        raise UserError("the TOML is nested too deeply", "remove nested brackets") from None
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # not only its own
        reason = ascii(str(error))[1:-1][:200]
        raise UserError(f"the TOML is not valid: {reason}", "correct that line; a setting is written as key = value") from None
    return document


class FactTable(dict[str, Any]):
    """A table of facts from the file `file`. A key that it lacks is a `MissingFactError`, which says what to add where.

    >>> FactTable({"h100": {"sms": 132}}, "gpu/specs.toml")["h100"]["memory_gb"]
    Traceback (most recent call last):
    gemmscope.errors.MissingFactError: a fact is missing: gpu/specs.toml has no h100.memory_gb
    add h100.memory_gb to src/gemmscope/gpu/specs.toml (see CONTRIBUTING.md)
    """

    def __init__(self, table: dict[str, Any], file: str, place: str = "") -> None:
        super().__init__({key: _with_place(value, file, _dotted(place, key)) for key, value in table.items()})
        self.file, self.place = file, place

    def __missing__(self, key: str) -> Any:
        raise MissingFactError(self.file, _dotted(self.place, key))


def _with_place(value: Any, file: str, place: str) -> Any:
    if isinstance(value, list):
        return [_with_place(item, file, f"{place}[{index}]") for index, item in enumerate(value)]
    return FactTable(value, file, place) if isinstance(value, dict) else value


def _dotted(place: str, key: str) -> str:
    """The key as TOML writes it after the table that contains it."""
    name = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{place}.{name}" if place else name


def load_data(package: str, name: str) -> FactTable:
    """A TOML file of facts that ships inside `package`.

    >>> sorted(load_data("gemmscope.model", "config_keys.toml"))
    ['aliases', 'language', 'resembles']
    """
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return FactTable(parse_toml(text), f"{package.replace('.', '/')}/{name}".removeprefix("gemmscope/"))


def complete(kind: type, facts: FactTable, **more: Any) -> dict[str, Any]:
    """The fields of a dataclass, from its table of facts and `more`. One that is missing and has no default is an error."""
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in more:
            facts[field.name]
    return {**facts, **more}


def inherited(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table with what it takes from the one that its `like` names.

    >>> inherited({"a": {"x": 1, "y": 2}, "b": {"like": "a", "y": 3}}, "b")
    {'x': 1, 'y': 3, 'like': 'a'}
    """
    own = tables[name]
    return {**(inherited(tables, own["like"]) if "like" in own else {}), **own}
