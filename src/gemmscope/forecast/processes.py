"""Compute a function for many items in several processes, and survive the death of any of them.

The processes ignore signals and end with this one, even if it is killed. The items of a process that died are computed again.
"""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

from gemmscope import signals
from gemmscope.process import end_with_parent

Item = TypeVar("Item")
Output = TypeVar("Output")

MOST_CORES = 8
MOST_TRIES = 3  # then this process computes the rest itself


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
    left = list(items)
    for _ in range(MOST_TRIES if processes else 0):
        yield from _by_processes(function, left, processes, pending)
    for item in left:
        if pending.first is not None:
            return
        yield function(item)


def _by_processes(
    function: Callable[[Item], Output], left: list[Item], processes: int, pending: signals.DeferredSignals
) -> Iterator[Output]:
    """Share what is left among processes, and remove what they have computed. An error in a process is raised here."""
    shares = dict[Connection, deque[Item]]()
    with ExitStack() as started:
        with suppress(OSError, AssertionError):  # the system allows no further processes, or this process may not start any
            for share in filter(None, [left[first::processes] for first in range(processes)]):
                shares[started.enter_context(_process(function, share))] = deque(share)
        while shares and pending.first is None:
            for connection in cast(list[Connection], wait([*shares, pending.fileno()])):
                if connection not in shares:
                    continue
                try:
                    output, error = connection.recv()
                except (EOFError, OSError):  # the process has ended
                    del shares[connection]
                    continue
                if error is not None:
                    raise error
                left.remove(shares[connection].popleft())
                yield output


@contextmanager
def _process(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Connection]:
    """A process that computes these items, and the connection that its outputs come from, in the order of the items."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_work, args=(function, items, there, os.getpid()), daemon=True)
    with here:
        with there:  # closed here, so that this process notices when the other one ends
            process.start()
        try:
            yield here
        finally:
            process.kill()
            process.join()


def _work(function: Callable[[Any], Any], items: Sequence[Any], connection: Connection, parent: int) -> None:
    signals.ignore()  # signals reach the whole process group; the parent handles them
    end_with_parent(parent)
    with suppress(OSError):  # the parent has ended
        for item in items:
            try:
                connection.send((function(item), None))
            except Exception as error:
                connection.send((None, error))
