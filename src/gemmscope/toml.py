"""TOML, for files of the user's and for tables of facts that ship with the package.

Python has a TOML parser since 3.11; on 3.10 the `tomli` package is the same parser. Whatever a text contains, the
outcome here is a dictionary or a `UserError`: a parser's own exceptions (a syntax error, nesting too deep for its
recursion, a number too long to convert) never reach the caller.
"""

from __future__ import annotations

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
        document: dict[str, Any] = parser.loads(text.removeprefix("\ufeff"))  # editors on Windows write this mark first
    except RecursionError:
        raise UserError("the TOML is nested too deeply to be read", "remove brackets that are not needed") from None
    except Exception as error:  # beyond its own ValueError, any slip of the parser is still a text it cannot read
        reason = ascii(str(error))[1:-1][:200]
        raise UserError(f"this is not valid TOML: {reason}", "correct that line: a value is written key = value") from None
    return document


def load_data(package: str, name: str) -> dict[str, Any]:
    """A TOML file of facts that ships inside `package`.

    >>> sorted(load_data("gemmscope.model", "torchtitan_flavors.toml"))[:2]
    ['deepseek_v3', 'gpt_oss']
    """
    return parse_toml(files(package).joinpath(name).read_text(encoding="utf-8"))
