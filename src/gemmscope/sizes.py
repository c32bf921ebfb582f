"""Numbers as people type them: 8k, 8_192, 1e12, 15.5T, 3%.

`k` of a size is 1024, because a sequence length of 8k is 8192. `k` of a token count is 1000, because 2T tokens are 2e12. Every
function raises a `ValueError` whose text is the message.
"""

import re
from fractions import Fraction

from gemmscope.errors import shown

NUMBER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?)([kmgbt]?)", re.ASCII | re.IGNORECASE)
BINARY = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MOST_DIGITS = 40
SIZES, TOKENS = "4096, 8k or 1M", "2T, 15.5T or 1e12"


def size(text: str) -> int:
    """A size, or a number of things. `k`, `M`, `G` and `T` are powers of 1024.

    >>> size("4096"), size("8k"), size("8_192"), size("1M"), size("1.5k"), size("1e3")
    (4096, 8192, 8192, 1048576, 1536, 1000)
    """
    value = _value(text, BINARY)
    if value is None or value.denominator != 1:
        raise ValueError(f"{shown(text)} is not a whole number such as {SIZES}")
    return value.numerator


def token_count(text: str) -> float:
    """The tokens of a training run. `k`, `M`, `B` and `T` are powers of 1000.

    >>> token_count("2T"), token_count("15.5T"), token_count("1e12"), token_count("300B")
    (2000000000000.0, 15500000000000.0, 1000000000000.0, 300000000000.0)
    """
    value = _value(text, DECIMAL)
    if value is None:
        raise ValueError(f"{shown(text)} is not a number of tokens such as {TOKENS}")
    return float(value)


def percentage(text: str) -> float:
    """`3%` or `0.03`. A plain 3 is rejected, because it would mean 300%.

    >>> percentage("3%"), percentage("0.01")
    (0.03, 0.01)
    """
    value = _value(text.strip().removesuffix("%"), {"": 1})
    if value is None or not 0 <= (value := value / (100 if text.strip().endswith("%") else 1)) < 1:
        raise ValueError(f"must be a percentage such as 3%, or a fraction such as 0.03, got {shown(text)}")
    return float(value)


def _value(text: str, units: dict[str, int]) -> Fraction | None:
    """The exact number; None if the text is not one."""
    match = NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        return None
    digits = match[1].replace("_", "")
    if len(digits) > MOST_DIGITS:  # Python refuses to read thousands of them
        return Fraction(10**MOST_DIGITS)
    return Fraction(digits) * units[match[2].lower()]
