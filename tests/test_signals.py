"""Signals where they could get lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


def test_a_signal_inside_of_an_extension_module_shows_no_traceback() -> None:
    """Pydantic makes an error of its own of whatever is raised while it builds a validator."""
    code = (
        "import os, signal, sys\nfrom gemmscope import __main__, signals\nfrom gemmscope.cli import main\n"
        "def built():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGHUP)\n"
        "    except BaseException as error:\n        raise ValueError(f'Error building: {error!r}')\n"
        "main.main = built\n__main__.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (129, "gemmscope: interrupted\n")
