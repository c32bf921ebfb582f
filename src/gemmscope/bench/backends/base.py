"""The interface of a backend, and what all of them share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemmscope.bench.backends.reference import OperandStore
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Task


@dataclass(frozen=True)
class BackendOptions:
    """Options of a run that all backends have."""

    cache_weights: bool = False  # weights are quantized once per step, and the timed micro-batch is not the first
    filter_layers: bool = True  # keep layers in BF16 that the framework's own filter excludes
    as_te_benchmark: bool = False  # linears run forward alone, on inputs that need no gradient


@dataclass(frozen=True)
class TimedStep:
    """One set of buffers: what is timed, its error, and the order of the passes where it is known."""

    step: Callable[[], Any]
    error: float
    order: tuple[str, ...] = ()


def one_after_another(sets: Sequence[TimedStep], note: str = "") -> Prepared:
    """A task that runs on each set of buffers in turn."""

    def run() -> None:
        for timed in sets:
            timed.step()

    return Prepared(run, len(sets), max(timed.error for timed in sets), note, sets[0].order)


class Backend:
    """Prepares tasks; the worker times them."""

    name: str

    def __init__(self, operands: OperandStore, options: BackendOptions) -> None:
        self._operands, self._options = operands, options

    def versions(self) -> Mapping[str, str]:
        """The versions of the packages that it uses."""
        return {"torch": torch.__version__}

    def why_not(self, recipe: Recipe) -> str:
        """Why this GPU or these versions cannot run the recipe; empty if they can."""
        raise NotImplementedError

    def why_not_task(self, task: Task) -> str:
        """Why it cannot measure this task in a recipe that it runs; empty if it can."""
        raise NotImplementedError

    def get_ready(self, tasks: Sequence[Task]) -> None:
        """Work that is done for all tasks at once before they are prepared one by one, such as compiling kernels in parallel."""

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:
        """Allocate, quantize where the mode requires it, check the result against float64, and return what will be timed."""
        raise NotImplementedError
