"""One measurement as a unit of a pool: what is measured, and which part of its result is sent back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from gemmscope.bench.choose import choose
from gemmscope.gpu.environment import Environment
from gemmscope.job.load import ModelRun
from gemmscope.job.module_files import module_files, with_files
from gemmscope.options.measuring import BenchOptions, StepOptions
from gemmscope.progress import QUIET, Reporter
from gemmscope.run_context import RunContext

MEASURE = {"bench": "gemmscope.commands.bench:run_bench", "step": "gemmscope.commands.step:run_step"}
"""The functions that measure, imported where the unit runs: the pool itself knows no command."""


@dataclass(frozen=True)
class MeasureUnit:
    """A bench or a step on one GPU. Pickled on its way to the site that runs it."""

    options: BenchOptions | StepOptions
    job: ModelRun | None = None
    command: str = ""
    deliver: Callable[[Any], None] | None = None
    """Writes the result where it was measured."""
    reduce: str = ""
    """The function that makes small, plain data of the result: "module:function", imported where the unit runs."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Of the module that is measured (`--module`), by their names in its folder: for machines that do not have them."""

    @property
    def kind(self) -> Literal["bench", "step"]:
        return "step" if isinstance(self.options, StepOptions) else "bench"

    def for_other_machines(self) -> "MeasureUnit":
        """The same, with the files of its module."""
        return replace(self, files=module_files(self.job))

    def check_place(self, machine: Environment) -> None:
        """A `UserError` if this machine cannot measure it: a package or a recipe that it does not have, a GPU that others use."""
        cache_weights = isinstance(self.options, BenchOptions) and self.options.cache_weights
        choose(self.options, machine, cache_weights=cache_weights, framework=self.job.source.framework if self.job else "")

    def run(self, reporter: Reporter = QUIET, state: Path | None = None) -> Any:
        """Measure here. A `UserError` for what cannot be measured. `state`: the folder of the journal, if not the user's."""
        context = RunContext(self.command, reporter, self.deliver, state=state)
        measure, reduce = _function(MEASURE[self.kind]), _function(self.reduce)
        with with_files(self.job, self.files) as job:
            return reduce(measure(job, self.options, context))


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
