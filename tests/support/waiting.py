"""A unit that waits, as a site waits for its GPU: for what a pool itself costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gemmscope.app.progress import Reporter
from gemmscope.gpu.environment import Environment


@dataclass(frozen=True)
class Waiting:
    """Takes so many seconds, and no CPU."""

    seconds: float

    def check_place(self, _: Environment) -> None:
        """Anywhere."""

    def run(self, _: Reporter) -> float:
        time.sleep(self.seconds)
        return self.seconds
