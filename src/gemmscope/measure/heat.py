"""Keeps the GPU busy while the process loads and prepares, so that measuring begins on a chip that is hot and power-limited.

Importing a framework and compiling its kernels takes seconds of one CPU core. In that time a second thread makes the operands,
loads the profiler's library and runs large products. While tasks are prepared, some are queued behind each. A chip that has idled
for a second takes two or three to come back to the clock that it holds in training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from gemmscope.measure.backends.reference import OperandStore
from gemmscope.measure.task import Case
from gemmscope.measure.timer import start_profiler

_SIZE, _PRODUCTS = 8192, 10
_LEAST_PIECE_MS = 5.0  # a guess, until the first piece has been timed


class Heater:
    """Large products, as a graph that can be run again and again on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._factor = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
            torch.mm(self._factor, self._factor)
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(_PRODUCTS):
                torch.mm(self._factor, self._factor)
        begin = time.perf_counter()
        self.queue(_LEAST_PIECE_MS, piece_ms=_LEAST_PIECE_MS)
        self.wait()
        self._piece_ms = (time.perf_counter() - begin) * 1000

    def queue(self, duration_ms: float, piece_ms: float | None = None) -> None:
        """Have the GPU heat for about so long, without waiting for it."""
        with torch.cuda.stream(self._stream):
            for _ in range(max(1, round(duration_ms / (piece_ms or self._piece_ms)))):
                self._graph.replay()

    def wait(self) -> None:
        self._stream.synchronize()

    def precede(self) -> None:
        """Whatever this thread launches next on the GPU comes after what is queued here."""
        torch.cuda.current_stream().wait_stream(self._stream)


@contextmanager
def heating(operands: OperandStore, cases: Sequence[Case], *, profile: bool) -> Iterator[None]:
    """While this lasts, a second thread makes the operands of all cases, loads the profiler, and then heats."""
    stop = threading.Event()

    def work() -> None:
        if profile:
            start_profiler()
        for case in cases:
            if stop.is_set():
                return
            with suppress(torch.OutOfMemoryError):  # it will be said when the case is prepared
                operands.get(case).prepare_references()
        heater = Heater()
        while not stop.is_set():
            heater.queue(50)
            heater.wait()

    thread = threading.Thread(target=work, name="heating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
