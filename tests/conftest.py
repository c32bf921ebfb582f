"""Set before anything imports torch or looks for files: what the machine at hand has must not change what tests see."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.same_cases import draw_the_same_cases

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and threads that spin would only wait for each other
os.environ["COLUMNS"] = "400"  # sentences are on one line; tests of narrow screens set their own width
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of the commands that tests start, only the first one compiles this package
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / f"no-calibration-{os.getpid()}")  # is not there
STATE = tempfile.TemporaryDirectory(prefix="gemmscope-tests-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = STATE.name  # journals: those of processes that test at the same time are separate

gc.set_threshold(100_000, 20, 20)  # torch and transformers are a million objects, which need not be visited again and again

# A shell that starts the tests in the background, and nohup, have signals ignored: the commands under test must get theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same cases in every run: a change fails tests, chance does not. `--hypothesis-profile=random` looks for new cases.
# A busy machine is slow: nothing is said about that.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **PATIENT)
settings.register_profile("random", **PATIENT)
settings.load_profile("same")
draw_the_same_cases()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported until now stays: it need not be visited when garbage is collected, as pytest does at the end."""
    gc.freeze()


def pytest_unconfigure() -> None:
    STATE.cleanup()
