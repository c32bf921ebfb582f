"""Text that others wrote, made harmless: nothing in it controls a terminal, reorders a line, or is a formula in a spreadsheet.

Names of kernels, GPUs, ops and modules, versions and exceptions come from files and foreign code. They are data in results and
run files; on their way to a person they pass through here.
"""

import os
import re
import unicodedata
from functools import lru_cache

LONGEST_SIZE = 6  # digits
UNUSUAL = re.compile(r"[^ -~]")
FORMULA = re.compile(r"[=+\-@\t\r＝＋－＠]")
_ONE = r"[-+]?[.,]?[0-9][0-9.,]*(e[-+]?[0-9]+)?[x%]?"
NUMBER = re.compile(f"{_ONE}( to {_ONE})?", re.IGNORECASE)


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with everything invisible written out: control characters, direction marks, halves of characters.

    >>> printable("H200\\x1b[31m\\u202e"), printable("two\\nlines"), printable("two\\nlines", keep="")
    ('H200\\\\x1b[31m\\\\u202e', 'two\\nlines', 'two\\\\nlines')
    """
    if text.isascii() and text.isprintable():
        return text
    return UNUSUAL.sub(lambda match: match[0] if _is_visible(match[0]) or match[0] in keep else _escape(match[0]), text)


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def terminal_variables() -> dict[str, str]:
    """The environment for what writes to a terminal: it takes digits for a size, and fails at thousands of them."""
    return {name: value for name, value in os.environ.items() if len(value) < LONGEST_SIZE or not value.isdigit()}


def csv_cell(text: str) -> str:
    """The text as a cell of a CSV file: a spreadsheet shows it and does not evaluate it; numbers stay numbers.

    >>> csv_cell("=1+1"), csv_cell("-1.5"), csv_cell("+3.2%"), csv_cell("-")
    ("'=1+1", '-1.5', '+3.2%', '-')
    """
    shown = printable(text, keep="\n")
    return f"'{shown}" if FORMULA.match(shown) and shown != "-" and not NUMBER.fullmatch(shown) else shown


def visible_json(text: str) -> str:
    """JSON that says the same without any invisible character in it.

    >>> visible_json('"\\x9b1m é"')
    '"\\\\u009b1m é"'
    """
    return UNUSUAL.sub(lambda match: _json_character(match[0]), text)


@lru_cache(4096)
def _json_character(character: str) -> str:
    if character in "\n\t\r" or _is_visible(character):  # between values; inside strings they are written out already
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))
