"""Runs a short-lived worker process to its end, whatever it does: its output is bounded, and nothing of it is left behind.

The worker leads a process group of its own, which is ended with it: a child that it leaves running is ended too, and is not
waited for, even where it keeps the output open.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from gemmscope.errors import UserError
from gemmscope.process import worker_command, worker_environment

MOST_OUTPUT = 64 * 2**20  # bytes of standard output that are kept, the first
MOST_ERRORS = 2**16  # bytes of standard error that are kept, the last
POLL_S = 0.05  # between two checks whether it has ended
DRAIN_S = 1.0  # how long to read on after it has ended: a process that left its group may still write
CHUNK = 2**16


@dataclass(frozen=True)
class Ended:
    """How a worker ended. `code` is None if it was ended at its time limit; `cut`: it wrote more than is kept."""

    code: int | None
    output: str
    errors: str
    cut: bool = False

    @property
    def reason(self) -> str:
        """The last line of its standard error, or its exit code."""
        lines = self.errors.strip().splitlines()
        return lines[-1] if lines else "it took too long" if self.code is None else f"exit code {self.code}"


def run_worker(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, time_limit_s: float = float("inf")
) -> Ended:
    """Run a module of this package in a process of its own; `environment` is added to that of workers.

    An exception meanwhile, such as `Interrupted`, ends it at once.
    """
    try:
        worker = subprocess.Popen(
            worker_command(module, *arguments),
            env={**worker_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a process group of its own; and Ctrl-C reaches this process alone
        )
    except OSError as error:
        raise UserError(f"a worker process cannot be started: {error.strerror or error}") from error
    with worker:
        try:
            return _collect(worker, time.monotonic() + time_limit_s)
        finally:
            if worker.returncode is None:
                _end_group(worker)


def _end_group(worker: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):  # nothing of it is left
        os.killpg(worker.pid, signal.SIGKILL)


def _collect(worker: subprocess.Popen[bytes], until: float) -> Ended:
    """Read both streams until the worker has ended, or until its time is over."""
    assert worker.stdout is not None
    assert worker.stderr is not None
    output, errors, written, ended = bytearray(), bytearray(), 0, False
    with selectors.DefaultSelector() as selector:
        for stream in (worker.stdout, worker.stderr):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < until:
            ready = selector.select(0 if ended else POLL_S)
            for key, _ in ready:
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is worker.stdout:
                    written += len(data)
                    output += data[: MOST_OUTPUT - len(output)]
                else:
                    errors = (errors + data)[-MOST_ERRORS:]
            if ended and not ready:  # what it wrote before it ended has been read
                break
            if not selector.get_map() and not ended:  # it closed its output
                time.sleep(POLL_S)
            if not ended and worker.poll() is not None:
                ended = True
                _end_group(worker)
                until = time.monotonic() + DRAIN_S
    texts = [bytes(data).decode("utf-8", "replace") for data in (output, errors)]
    return Ended(worker.returncode, texts[0], texts[1], cut=written > MOST_OUTPUT)
