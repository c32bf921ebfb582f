"""Starts the worker processes: a Python of their own that sees what this one has installed, and goes when this one goes.

``python -m`` would put the working directory first on the import path, where a file named random.py or types.py stands in front
of the standard library's. (``python -P`` does not, but Python 3.10 has no such option.)
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemmscope.folders import cache_folder

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


def worker_environment() -> dict[str, str]:
    """The environment for a worker that imports torch: this one's, with a place for compiled modules where there is none.

    Container images often forbid Python to write bytecode beside its sources (PYTHONDONTWRITEBYTECODE). Importing torch and
    Transformer Engine then compiles some three thousand modules every time: 12 s instead of 5 s on the machine where this was
    found. Workers keep theirs under the user's cache folder.
    """
    environment = dict(os.environ)
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin or sys.pycache_prefix:
        return environment
    compiled = Path(importlib.util.cache_from_source(found.origin))
    writable = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    if not compiled.exists() and not writable:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(cache_folder() / "bytecode")
    return environment


@contextmanager
def without_jax() -> Iterator[None]:
    """Transformer Engine for PyTorch imports JAX too, where it is installed: half a second, for nothing. Here there is none."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # so that importing it fails as if it were not there
    try:
        yield
    finally:
        sys.modules.pop("jax", None)


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
