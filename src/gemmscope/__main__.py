"""The program: `gemmscope` and `python -m gemmscope`. Prepares the process, then hands over to the command line."""

import os
import sys
from contextlib import suppress

from gemmscope import signals


def run() -> None:
    """Run the command line in a process of its own, ready for signals before anything else is imported."""
    signals.install()
    code = 0
    try:
        _open_standard_streams()
        from gemmscope.cli.main import main

        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except signals.Interrupted as interruption:  # while modules were imported
        _write_error(b"gemmscope: interrupted\n")
        code = interruption.exit_code
    signals.ignore()  # a signal in the last moment would show a traceback
    sys.exit(code)


def _open_standard_streams() -> None:
    """Where standard input, output or error is closed, the next file to be opened would take its place and be written to."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _write_error(text: bytes) -> None:
    with suppress(OSError):
        os.write(2, text)


if __name__ == "__main__":
    run()
