"""Set before anything imports torch or looks for files: what the machine at hand has must not change what tests see."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and threads that spin would only wait for each other
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / f"no-calibration-{os.getpid()}")  # is not there
