"""Parses TOML: the user's files, and the tables of facts that ship with the package.

Python has a TOML parser since 3.11; on 3.10 the `tomli` package is the same parser. The result is always a dictionary or a
`UserError`: the parser's own exceptions (a syntax error, nesting too deep, a number too long) never reach the caller.
"""

import sys
from importlib import import_module
from importlib.resources import files
from typing import Any

from gemmscope.errors import UserError


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
    except Exception as error:  # besides its ValueError, any other failure of the parser also means invalid text
        reason = ascii(str(error))[1:-1][:200]
        raise UserError(f"the TOML is not valid: {reason}", "correct that line; a setting is written as key = value") from None
    return document


def load_data(package: str, name: str) -> dict[str, Any]:
    """A TOML file of facts that ships inside `package`.

    >>> sorted(load_data("gemmscope.model", "config_keys.toml"))
    ['aliases', 'language', 'resembles']
    """
    return parse_toml(files(package).joinpath(name).read_text(encoding="utf-8"))
