"""A whole training step captured as one CUDA graph: the CPU launches one graph instead of thousands of kernels.

Forward, backward and optimizer are captured together, in any recipe. All captured steps use the same memory: one runs at a time,
and nothing outlives a step.
"""

import gc
from typing import Any, Protocol

import torch

from gemmscope.step.mixer_kernels import MixerKernels

WARM_UP = 3  # steps: kernels are compiled and tuned, scales of delayed scaling are known


class Capturable(Protocol):
    """A step that can be captured. Its optimizer must be set to capturable."""

    optimizer: torch.optim.Optimizer

    @property
    def mixer_kernels(self) -> MixerKernels: ...

    def run(self) -> None: ...

    def loss(self) -> float: ...


class GraphMemory:
    """Memory that captured steps share. It must never be without a graph, so it has one of its own."""

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self.pool):
            self._tensor = torch.zeros(1, device="cuda")


class CapturedStep:
    """Captures a step when it is made; `run` replays it.

    After a failed capture, the process cannot be used any more: PyTorch's allocator and random generator still expect its end.
    """

    def __init__(self, step: Capturable, memory: GraphMemory) -> None:
        for group in step.optimizer.param_groups:
            group["capturable"] = True
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as the stream of a capture, it must not be the default one
            for _ in range(WARM_UP):
                step.run()
            self._loss = step.loss()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # the memory of launched steps: a captured one has its own
        self._step, self._graph, self.mixer_kernels = step, torch.cuda.CUDAGraph(), step.mixer_kernels
        try:
            with torch.cuda.graph(self._graph, pool=memory.pool, capture_error_mode="thread_local"):
                step.run()
        except Exception as error:
            raise _first(error) from error

    def run(self) -> None:
        """One step."""
        self._graph.replay()

    def loss(self) -> float:
        """The loss before it was captured."""
        return self._loss


def _first(error: BaseException) -> BaseException:
    """What went wrong first: that the capture could not be ended is only its consequence.

    >>> try:
    ...     try:
    ...         raise ValueError("synchronizes")
    ...     finally:
    ...         raise RuntimeError("capture failed")
    ... except RuntimeError as error:
    ...     _first(error)
    ValueError('synchronizes')
    """
    while error.__context__ is not None:
        error = error.__context__
    return error
