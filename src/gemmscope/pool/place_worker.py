"""The process at a place of a pool: takes units, measures each as a single-GPU command would, and sends its outcome back.

It reads lines of JSON from its standard input and sends lines to the pool (`pool/place_messages.py`). It never imports
torch: each unit has a measuring process of its own. A thread gives signs of life.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any

from gemmscope import __version__
from gemmscope.engine.campaign import NotStartedError
from gemmscope.errors import DoesNotFitError, UserError, in_a_line
from gemmscope.folders import temporary_folder
from gemmscope.gpu.environment import Environment, environment, node_name
from gemmscope.gpu.visible import usable_gpu
from gemmscope.pool.gpus import allowed_cores, shares_of_cores
from gemmscope.pool.place_messages import PlaceSetup, content_of
from gemmscope.process import messages_to_parent
from gemmscope.progress import ProgressLine, Reporter

if TYPE_CHECKING:
    from gemmscope.engine.campaign import OnMessage
    from gemmscope.engine.messages import Message
    from gemmscope.engine.store import ResultStore
    from gemmscope.pool.measure_unit import MeasureUnit

PATIENCE_S = 10.0  # how long a GPU that is in use is waited for: a process that was ended takes a moment to leave it
PROGRESS_S = 1.0  # at most one line of progress in this time


def main() -> None:
    """Serve until the input ends."""
    first = sys.stdin.readline()
    if not first:
        return  # not needed any more
    setup = PlaceSetup(**json.loads(first))
    cores = available_cores()
    with ExitStack() as stack:
        out = stack.enter_context(messages_to_parent())
        if setup.folder:
            folder = Path(setup.folder)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = stack.enter_context(temporary_folder())
        _PlaceWorker(setup, out, folder).serve(cores)


def available_cores() -> int:
    """CPU cores that processes here may use: those that the batch system or the container allows.

    >>> available_cores() >= 1
    True
    """
    count = len(allowed_cores()) or os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


class _PlaceWorker(Reporter):
    """One place worker. It is the reporter of what it measures."""

    def __init__(self, setup: PlaceSetup, out: IO[str], folder: Path) -> None:
        self._setup, self._out, self._folder = setup, out, folder
        self._lock, self._over = threading.Lock(), threading.Event()
        self._reported = 0.0

    def serve(self, cores: int) -> None:
        """Report what is available here, then measure the units that arrive."""
        living = threading.Thread(target=self._live, name="signs of life", daemon=True)
        living.start()
        try:
            self._serve(cores)
        finally:
            self._over.set()
            living.join()

    def _serve(self, cores: int) -> None:
        machine = environment()
        try:
            gpu = None if self._setup.cpu else usable_gpu(machine, share=True)  # another place may measure on it meanwhile
        except UserError as error:
            self._refuse(error)
            return
        near = shares_of_cores([one.index for one in machine.gpus])[gpu.index] if self._setup.near and gpu is not None else ()
        own_cores = self._setup.cores or near
        if own_cores:
            with suppress(OSError, AttributeError):  # cores that this process may not use, or a system that does not pin
                os.sched_setaffinity(0, own_cores)
        self._send(
            type="hello",
            node=machine.node,
            gpu=gpu.index if gpu else None,
            uuid=gpu.uuid or "" if gpu else "",
            facts={**asdict(replace(machine, gpus=(gpu,) if gpu else ())), "gemmscope": __version__, "cores": cores},
        )
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            if not self._measure(request["key"], request):
                return

    def _free_machine(self) -> Environment:
        """This machine as it is now; a `UserError` if others use the GPU of this place, and do not stop soon."""
        until = time.monotonic() + PATIENCE_S
        while True:
            machine = environment()
            if self._setup.cpu:
                return machine
            try:
                usable_gpu(machine, share=self._setup.share_gpu)
            except UserError:
                if time.monotonic() > until:
                    raise
                time.sleep(PROGRESS_S)
            else:
                return machine

    def _measure(self, key: str, request: dict[str, Any]) -> bool:
        """Measure a unit. False: nothing can be measured here."""
        usable = False
        try:
            unit: MeasureUnit = content_of(request)
            unit.check_place(self._free_machine())
            usable = True
            with TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
                outcome = unit.run(self, Path(folder))  # a journal of its own, which must not be on a disk that many nodes share
            self._send(type="outcome", unit=key, outcome=outcome)
        except UserError as error:
            if not usable or isinstance(error, NotStartedError):
                self._refuse(error)
                return False
            self._send(type="failure", unit=key, why=error.message, hint=error.hint, unfit=isinstance(error, DoesNotFitError))
        except Exception as error:
            self._send(type="failure", unit=key, why=in_a_line(error), hint="")
        return True

    # --- messages

    def say(self, text: str) -> None:
        self._send(type="progress", text=text)

    @contextmanager
    def measuring(self, campaign: Any) -> Iterator[OnMessage]:
        line = ProgressLine(campaign)

        def on_message(message: Message, results: ResultStore[Any]) -> None:
            text = line.text(message, results)
            if text and time.monotonic() - self._reported > PROGRESS_S:
                self._reported = time.monotonic()
                self.say(text)

        yield on_message

    def _refuse(self, error: UserError) -> None:
        self._send(type="refused", node=node_name(), why=error.message, hint=error.hint)

    def _live(self) -> None:
        while not self._over.wait(self._setup.alive_s):
            self._send(type="alive")

    def _send(self, **content: Any) -> None:
        with self._lock:
            try:
                self._out.write(json.dumps(content) + "\n")
                self._out.flush()
            except OSError:  # nobody reads any more: the measuring process ends with this one
                os._exit(1)


if __name__ == "__main__":
    main()
