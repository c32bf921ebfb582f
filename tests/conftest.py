"""Set before anything imports torch: tests run side by side, and threads that spin would only wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
