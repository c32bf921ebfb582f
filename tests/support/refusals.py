"""Checks of messages by the facts that they name: options, settings, values, files. Their sentences may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gemmscope.errors import UserError, in_python


def unnamed(text: str, *facts: object) -> list[str]:
    """The facts that a text does not name, as whole words; empty where it names all.

    >>> unnamed("--tp 16 is more than 8", "--tp 16", 8, 1)
    ['1']
    """
    return [fact for fact in map(str, facts) if not re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text)]


@contextmanager
def refused(*facts: object, error: type[Exception] = UserError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose message names these facts. A `UserError` also says what to do instead."""
    with pytest.raises(error) as caught:
        yield caught
    message = in_python(caught.value.message) if isinstance(caught.value, UserError) else str(caught.value)
    assert unnamed(message, *facts) == [], message


@contextmanager
def refused_with_hint(*facts: object, hint: tuple[object, ...]) -> Iterator[None]:
    """`refused`, where what to do instead names facts too."""
    with refused(*facts) as caught:
        yield
    assert isinstance(caught.value, UserError)
    assert unnamed(in_python(caught.value.hint), *hint) == [], caught.value.hint
