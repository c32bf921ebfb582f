"""What the worker asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Task


@dataclass(frozen=True)
class Options:
    """What a run may ask of every backend alike."""

    cache_weights: bool = False  # weights are quantized once per step, and this is not the micro-batch that does it
    filter_layers: bool = True  # leave layers in BF16 that the framework's own filter would leave


@dataclass(frozen=True)
class Prepared:
    """A task ready to run. `run` does it `copies` times over as many sets of buffers; `error` is its relative error.

    `note` says what the framework did otherwise than asked, in words: "torchao's filter leaves this layer in BF16". `order` is
    that of the passes where it is not the usual one and could be found out: a compiler may put wgrad before dgrad.
    """

    run: Callable[[], None]
    copies: int
    error: float
    note: str = ""
    order: tuple[str, ...] = ()


class Backend(Protocol):
    """Support and preparation; timing is the worker's. Made with an `OperandStore` and `Options`."""

    name: str

    def versions(self) -> Mapping[str, str]:
        """The packages that do the work, with their versions."""

    def why_not(self, recipe: Recipe) -> str:
        """Empty if this GPU and these versions run the recipe, else the reason."""

    def why_not_task(self, task: Task) -> str:
        """Empty if it can measure this task in a recipe that it runs, else the reason."""

    def get_ready(self, tasks: Sequence[Task]) -> None:
        """Whatever can be done for all tasks at once before they are prepared one by one: compile kernels side by side."""

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:
        """Allocate, quantize where the mode says so, check the result against float64, and return what is to be timed."""
