"""Keeps the GPU busy while the process loads and prepares, so that measuring begins on a chip that is hot and power-limited.

Importing a framework and compiling its kernels takes seconds of one CPU core. In that time a second thread makes the operands,
loads the profiler's library and runs large GEMMs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from gemmscope.measure.backends.reference import OperandStore
from gemmscope.measure.timer import start_profiler
from gemmscope.workload.cases import Case

_SIZE, _GEMMS = 8192, 40  # one run keeps the chip busy for some 60 ms, and leaves the interpreter free


class Heater:
    """Large GEMMs, as a graph that can be run again and again on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._factor = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
            torch.mm(self._factor, self._factor)
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(_GEMMS):
                torch.mm(self._factor, self._factor)

    def run(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()


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
            heater.run()

    thread = threading.Thread(target=work, name="heating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def heat_for(seconds: float) -> None:
    """Nothing but heat, for so long."""
    begin = time.perf_counter()
    heater = Heater() if seconds > 0 else None
    while heater is not None and time.perf_counter() - begin < seconds:
        heater.run()
