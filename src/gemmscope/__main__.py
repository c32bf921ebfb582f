"""The program: `gemmscope` and `python -m gemmscope`. Prepares the process, then hands over to the command line."""

# `signal` imports a dozen modules, and Ctrl-C meanwhile would show a traceback
import _signal  # type: ignore[import-not-found]
import os


def _end(number: int, _: object) -> None:
    """What a signal does while modules are imported."""
    try:
        os.write(2, b"gemmscope: interrupted\n")
    finally:
        os._exit(128 + number)


if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
    _signal.signal(_signal.SIGINT, _end)

import sys
from contextlib import suppress

from gemmscope import signals


def run() -> None:
    """Run the command line in a process of its own, ready for signals before anything else is imported."""
    with signals.raised():
        code = _run()
        signals.ignore()
    signals.ignore()  # until the end: a signal in the last moment would show a traceback
    sys.exit(code)


def _run() -> int:
    try:
        _open_standard_streams()
        from gemmscope.cli.main import main

        main()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except signals.Interrupted as interruption:  # while modules were imported
        return _interrupted(interruption)
    except Exception as error:
        if (hidden := signals.behind(error)) is None:
            raise
        return _interrupted(hidden)
    return 0


def _interrupted(interruption: signals.Interrupted) -> int:
    with suppress(OSError):
        os.write(2, b"gemmscope: interrupted\n")
    return interruption.exit_code


def _open_standard_streams() -> None:
    """Where standard input, output or error is closed, the next file to be opened would take its place and be written to."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


if __name__ == "__main__":
    run()
