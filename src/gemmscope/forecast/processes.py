"""Compute a function for many items in several processes, and survive the death of any of them.

The processes ignore signals and end with this one, even if it is killed. The items of a process that died are computed again.
"""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from gemmscope import signals
from gemmscope.process import end_with_parent

Item = TypeVar("Item")
Output = TypeVar("Output")

MOST_CORES = 8
MOST_DEATHS = 3  # then this process computes the rest itself
AT_HAND = 2  # items per process: it starts the second while the first result is sent back


def processes_for(items: int, worth_sharing: int) -> int:
    """How many processes compute these items; 0 where starting them takes longer than it saves."""
    cores = min(os.cpu_count() or 1, MOST_CORES) if items >= worth_sharing else 1
    return cores if cores > 1 else 0


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For work that makes millions of tuples without cycles: garbage collection would take an eighth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def computed(
    function: Callable[[Item], Output], items: Sequence[Item], processes: int, pending: signals.DeferredSignals
) -> Iterator[Output]:
    """Yield the outputs in any order, until a signal arrives. With `processes` 0, this process computes them."""
    pool = _Pool(function, items, processes)
    try:
        while pending.first is None and (pool.start_processes() or pool.waiting):
            if pool.workers:
                yield from pool.received(wait([*pool.workers, pending.fileno()]))
            else:
                yield function(pool.waiting.popleft())
    finally:
        pool.end()


@dataclass
class _Worker(Generic[Item]):
    """One process and the items that it has."""

    process: BaseProcess
    items: deque[Item] = field(default_factory=deque)


class _Pool(Generic[Item, Output]):
    def __init__(self, function: Callable[[Item], Output], items: Sequence[Item], processes: int) -> None:
        self.waiting, self.workers = deque(items), dict[Connection, _Worker[Item]]()
        self._function, self._processes, self._deaths = function, processes, 0

    def start_processes(self) -> bool:
        """Start missing processes and give each its next items. Returns whether any process has items."""
        while self.waiting and len(self.workers) < self._processes and self._deaths < MOST_DEATHS:
            try:
                self._start()
            except (OSError, AssertionError):  # the system allows no further processes, or this process may not start any
                self._deaths = MOST_DEATHS
        for connection, worker in list(self.workers.items()):
            try:
                while self.waiting and len(worker.items) < AT_HAND:
                    connection.send(self.waiting[0])
                    worker.items.append(self.waiting.popleft())
            except OSError:
                self._remove_ended(connection)
        return any(worker.items for worker in self.workers.values())

    def received(self, ready: Sequence[Any]) -> Iterator[Output]:
        """Yield the outputs of the processes that are ready. An error in a process is raised here."""
        for connection in ready:
            if connection not in self.workers:
                continue
            try:
                output, error = connection.recv()
            except (EOFError, OSError):
                self._remove_ended(connection)
                continue
            if error is not None:
                raise error
            self.workers[connection].items.popleft()
            yield output

    def end(self) -> None:
        """End all processes."""
        for connection in list(self.workers):
            self._remove_ended(connection)

    def _start(self) -> None:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=_work, args=(self._function, there, os.getpid()), daemon=True)
        try:
            process.start()
        except BaseException:
            here.close()
            raise
        finally:
            there.close()  # so that this process notices when the other one ends
        self.workers[here] = _Worker(process)

    def _remove_ended(self, connection: Connection) -> None:
        """Remove a process, which may have ended by itself, and put its items back in the queue."""
        worker = self.workers.pop(connection)
        self.waiting.extendleft(reversed(worker.items))
        worker.process.kill()
        worker.process.join()
        connection.close()
        self._deaths += 1


def _work(function: Callable[[Any], Any], connection: Connection, parent: int) -> None:
    signals.ignore()  # signals reach the whole process group; the parent handles them
    end_with_parent(parent)
    try:
        while True:
            item = connection.recv()
            try:
                connection.send((function(item), None))
            except Exception as error:
                connection.send((None, error))
    except (EOFError, OSError):  # the parent has ended
        return
