"""What the worker asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gemmscope.measure.task import Task
from gemmscope.recipe.recipes import Recipe


@dataclass(frozen=True)
class Prepared:
    """A task ready to run. `run` does it `copies` times over as many sets of buffers; `error` is its relative error."""

    run: Callable[[], None]
    copies: int
    error: float


class Backend(Protocol):
    """Support and preparation; timing is the worker's."""

    name: str

    def versions(self) -> Mapping[str, str]:
        """The packages that do the work, with their versions."""

    def why_not(self, recipe: Recipe) -> str:
        """Empty if this GPU and these versions run the recipe, else the reason."""

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:
        """Allocate, quantize where the mode says so, check the result against float64, and return what is to be timed."""
