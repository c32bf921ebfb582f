"""Building blocks of hostile inputs: invalid sizes, texts that harm a terminal, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 8, 64, 100, 1024, 2**20, 2**31, 2**63, 10**18, 10**40, -(10**40)]) | st.integers(
    -3, 300
)
FLOATS = st.floats() | st.sampled_from([0.5, 1e308, -1e308, 1e-320])
TEXTS = (
    st.sampled_from(["", " ", "1", "8", "1e309", "nan", "true", "None", "٣", "１２", "9" * 30, "9" * 5000, "x" * 3000, "‹tp=2›"])
    | st.sampled_from(
        ["\x1b[2J\x1b[31m", "\ud800", "\udcff", "\u202e", "[red]", "<b>", "=1+1", "a\nb", "\r", "\x00", "\x9b0m", "{}"]
    )
    | st.text(max_size=8)
)
SCALARS = st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(TEXTS, inside, max_size=3),
    max_leaves=8,
)
OUTPUTS = st.sampled_from([[], [], ["--detail"], ["--json", "-"], ["--csv", "-"], ["--markdown", "-"]])


def json_bytes(value: Any, *, as_utf8: bool = False) -> bytes:
    """JSON as a program would write it, including NaN and lone surrogates."""
    return json.dumps(value, ensure_ascii=not as_utf8).encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, files: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    """One of the files, cut, repeated, with pieces of its own format in places where they do not belong."""
    data = draw(st.sampled_from(files))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 0, 1, 2, 8, 40]))
        piece = draw(st.sampled_from([b"", *pieces]) | st.binary(max_size=3))
        times = draw(st.sampled_from([1, 1, 1, 2, 50]))
        data = data[:at] + piece * times + data[at + length :]
    return data


@st.composite
def altered(draw: st.DrawFn, mapping: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """A mapping with some values replaced, removed or added."""
    result = dict(mapping)
    for _ in range(draw(st.integers(0, 4))):
        key = draw(st.sampled_from([*mapping, *keys]) | TEXTS)
        if draw(st.integers(0, 4)) == 0:
            result.pop(key, None)
        else:
            result[key] = draw(VALUES)
    return result
