"""Starts worker processes: Python processes with the same packages as this one, which end when this one ends. Also tells how
much memory is free for them.

``python -m`` would put the working directory first on the import path, where a file named random.py or types.py would hide the
standard library's. (``python -P`` avoids that, but Python 3.10 does not have it.)
"""

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemmscope.folders import cache_folder

PACKAGES_VARIABLE = "GEMMSCOPE_PACKAGES"
"""Folders with packages for workers where gemmscope is not installed (nodes of a cluster), last on their import path."""

START_WORKER = (
    "import os, sys; sys.path[:1] == [''] and sys.path.pop(0); "
    f"roots = [sys.argv.pop(1), *os.environ.get('{PACKAGES_VARIABLE}', '').split(os.pathsep)]; "
    "sys.path += [root for root in roots if root and root not in sys.path]; "
    "from gemmscope.process import _run_worker; _run_worker(int(sys.argv.pop(1)))"
)
"""For `python -c`, with the folder of this package, the number of the parent process, the module and its arguments."""


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this package like ``python -m``, without the working directory on its path.

    >>> worker_command("gemmscope.model.hub", "gpt2")[-2:]
    ['gemmscope.model.hub', 'gpt2']
    """
    root = Path(__file__).resolve().parent.parent  # the worker imports this package from the same place
    return [sys.executable, "-c", START_WORKER, str(root), str(os.getpid()), module, *arguments]


def worker_environment() -> dict[str, str]:
    """The environment for a worker that imports torch: this process's own, with a folder for bytecode where there is none.

    Container images often forbid Python to write bytecode beside its sources (PYTHONDONTWRITEBYTECODE). Importing torch and
    Transformer Engine then compiles about three thousand modules every time, which took 12 s instead of 5 s on one machine.
    Workers write bytecode to the user's cache folder instead.
    """
    environment = dict(os.environ)
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin or sys.pycache_prefix:
        return environment
    compiled = Path(importlib.util.cache_from_source(torch.origin))
    writable = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    if not compiled.exists() and not writable:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(cache_folder() / "bytecode")
    return environment


@contextmanager
def without_jax() -> Iterator[None]:
    """Hide JAX while Transformer Engine for PyTorch is imported: it would import JAX too, half a second for nothing."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # importing it then fails as if it were not installed
    try:
        yield
    finally:
        sys.modules.pop("jax", None)


def _run_worker(parent: int) -> None:
    import runpy

    end_with_parent(parent)
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with_parent(parent: int) -> None:
    """End this process within about a second after its parent, however and whenever the parent ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.getpgrp() == os.getpid():  # with a process group of its own: whatever it has started ends too
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def free_memory_bytes() -> int:
    """Free memory of this machine in bytes; unlimited on unknown systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            facts = dict(line.split(":", 1) for line in lines)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63
