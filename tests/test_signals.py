"""Signals where they could get lost."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from gemmscope.signals import Interrupted, defer_signals, raised


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_swallowed_ends_the_command_later(number: int) -> None:
    """An extension module may swallow the exception that a signal handler raises."""
    with raised():
        with suppress(BaseException):
            os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as ended, defer_signals() as signals:
            assert signals.first == number
        assert ended.value.number == number
    with raised(), defer_signals() as signals:  # a later command is not affected
        assert signals.first is None
