"""Settings made before anything imports torch or looks for files, so that tests do not depend on this machine."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.same_cases import draw_the_same_cases

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel, where spinning threads would only slow each other down
os.environ["COLUMNS"] = "400"  # sentences are on one line; tests of narrow screens set their own width
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # only the first command that the tests start compiles this package
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / f"no-calibration-{os.getpid()}")  # does not exist
STATE = tempfile.TemporaryDirectory(prefix="gemmscope-tests-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = STATE.name  # journals: one folder for each process that runs tests

gc.set_threshold(100_000, 20, 20)  # fewer visits to the million objects of torch and transformers

# A shell that starts the tests in the background, and nohup, ignore these signals: the commands under test must get them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same cases in every run: a change fails tests, chance does not. `--hypothesis-profile=random` looks for new cases.
# No deadline: a busy machine is slow.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **PATIENT)
settings.register_profile("random", **PATIENT)
settings.load_profile("same")
draw_the_same_cases()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude everything imported so far from garbage collection, which pytest runs at the end."""
    gc.freeze()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        raise pytest.UsageError("a module that tests import takes Ctrl-C: it would end the process that runs the tests")


def pytest_unconfigure() -> None:
    STATE.cleanup()
