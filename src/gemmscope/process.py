"""Starts the worker processes: a Python of their own that sees what this one has installed, and goes when this one goes.

``python -m`` would put the working directory first on the import path, where a file named random.py or types.py stands in front
of the standard library's. (``python -P`` does not, but Python 3.10 has no such option.)
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

_START = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); root = sys.argv.pop(1); root in sys.path or sys.path.append(root); "
    "from gemmscope.process import _run_worker; _run_worker()"
)


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this package as ``python -m`` does, without the working directory on its path.

    >>> worker_command("gemmscope.model.hub", "gpt2")[-2:]
    ['gemmscope.model.hub', 'gpt2']
    """
    root = Path(__file__).resolve().parent.parent  # wherever this package was imported from, its worker finds it too
    return [sys.executable, "-c", _START, str(root), module, *arguments]


def _run_worker() -> None:
    import runpy

    end_with_parent()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with_parent() -> None:
    """From now on, end this process within a second or so after the one that started it, whatever that one died of."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
