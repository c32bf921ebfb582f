"""Hands the points so far to whoever writes them, while a sweep is measured: soon after each outcome, and not too often."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gemmscope.progress import PoolProgress, Reporter

LEAST_S, SHARE = 3.0, 0.05  # least seconds between two writes, and the largest share of time for writing


class SweepStream(Reporter):
    """The reporter of a sweep, which also calls `write` when there is something new. `reporter`: what shows the progress."""

    def __init__(self, reporter: Reporter, write: Callable[[], None]) -> None:
        self._reporter, self._write = reporter, write
        self._pending, self._again = False, 0.0

    def on_outcome(self, *_: Any) -> None:
        """A point was measured."""
        self._pending = True
        self._flush()

    def say(self, text: str) -> None:
        self._reporter.say(text)

    @contextmanager
    def spreading(self, what: str) -> Iterator[Callable[[PoolProgress], None]]:
        """Show the progress as the reporter does, and write points that are not written yet."""
        with self._reporter.spreading(what) as show:

            def on_progress(state: PoolProgress) -> None:
                show(state)
                if state.done + state.failed < state.total:  # else the result itself follows at once
                    self._flush()

            yield on_progress

    def _flush(self) -> None:
        began = time.monotonic()
        if self._pending and began >= self._again:
            self._pending = False
            self._write()
            now = time.monotonic()
            self._again = now + max(LEAST_S, (now - began) / SHARE)
