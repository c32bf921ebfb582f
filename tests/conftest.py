"""Set before anything imports torch or looks for files: what the machine at hand has must not change what tests see."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and threads that spin would only wait for each other
os.environ["COLUMNS"] = "400"  # sentences are on one line; tests of narrow screens set their own width
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / f"no-calibration-{os.getpid()}")  # is not there

# A shell that starts the tests in the background, and nohup, have signals ignored: the commands under test must get theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
