"""A unit that only waits, as a site waits for its GPU, to measure the overhead of a pool."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gemmscope.gpu.environment import Environment
from gemmscope.progress import Reporter


@dataclass(frozen=True)
class Waiting:
    """Wait for the given seconds without using the CPU."""

    seconds: float

    def check_place(self, _: Environment) -> None:
        """Anywhere."""

    def run(self, _: Reporter) -> float:
        time.sleep(self.seconds)
        return self.seconds
