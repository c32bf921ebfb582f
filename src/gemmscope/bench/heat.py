"""Keeps the GPU busy while the process loads and prepares, so that measuring begins on a hot, power-limited GPU.

Importing a framework and compiling its kernels takes seconds on one CPU core. Meanwhile a second thread makes the operands, loads
the profiler's library and runs large GEMMs.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from gemmscope.bench.backends.base import OperandStore
from gemmscope.engine.timer import start_profiler
from gemmscope.workload.cases import Case

_SIZE, _GEMMS = 8192, 40  # one run keeps the GPU busy for about 60 ms, and does not block the interpreter


class Heater:
    """Large GEMMs as a CUDA graph that is replayed on a separate stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._matrix = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
            torch.mm(self._matrix, self._matrix)
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(_GEMMS):
                torch.mm(self._matrix, self._matrix)

    def run(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()


@contextmanager
def heating(operands: OperandStore, cases: Sequence[Case], *, profile: bool) -> Iterator[None]:
    """In this context, a second thread makes the operands of all cases, loads the profiler, and then heats the GPU."""
    stop = threading.Event()

    def work() -> None:
        if profile:
            start_profiler()
        for case in cases:
            if stop.is_set():
                return
            with suppress(torch.OutOfMemoryError):  # reported when the case is prepared
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
    """Heat the GPU for this many seconds."""
    begin = time.perf_counter()
    heater = Heater() if seconds > 0 else None
    while heater is not None and time.perf_counter() - begin < seconds:
        heater.run()
