"""Non-blocking pipes to other processes, and the end of a process's error output."""

from __future__ import annotations

import os
from typing import IO

MOST_ERRORS = 1 << 16  # bytes of error output that are read


class PipeWriter:
    """Sends data over a pipe: as much as it accepts now, and the rest at the next `flush`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._left = descriptor, bytearray()
        os.set_blocking(descriptor, False)

    def __bool__(self) -> bool:
        """Whether something is left to send."""
        return bool(self._left)

    def send(self, content: bytes) -> None:
        self._left += content
        self.flush()

    def flush(self) -> None:
        """Send more of what is left. If the reader is gone, the rest is dropped: the end of the other direction will show
        that."""
        try:
            while self._left:
                del self._left[: os.write(self._descriptor, self._left)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left.clear()


def read_now(descriptor: int) -> bytes | None:
    """What has arrived over a pipe that does not block; None at its end."""
    try:
        return os.read(descriptor, 1 << 20) or None
    except BlockingIOError:
        return b""


def last_part(errors: IO[bytes]) -> str:
    """The end of the error output of a process, which went to this file."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - MOST_ERRORS))
    return errors.read().decode(errors="replace")


def last_line(errors: IO[bytes]) -> str:
    """The last line of the error output that is not blank, after a colon; empty if there is none."""
    lines = [line.strip() for line in last_part(errors).splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""
