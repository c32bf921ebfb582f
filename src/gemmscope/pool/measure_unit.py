"""One measurement as a unit of a pool: what is measured, and which part of its result is sent back."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from gemmscope.bench.choose import DEFAULT_CHOICES, Choices, choose
from gemmscope.bench.timing import DEFAULT_TIMING, BenchTiming
from gemmscope.gpu.environment import Environment
from gemmscope.job.load import ModelRun
from gemmscope.job.module_files import module_files, with_files
from gemmscope.progress import QUIET, Reporter

MEASURE = {"bench": "gemmscope.commands.bench:run_bench", "step": "gemmscope.commands.step:run_step"}
"""The functions that measure, imported where the unit runs: the pool itself knows no command."""


@dataclass(frozen=True)
class MeasureUnit:
    """A bench or a step on one GPU. Pickled on its way to the site that runs it."""

    kind: Literal["bench", "step"]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `run_bench` or `run_step`, `job` included; without `reporter`, `deliver` and `resume`."""
    reduce: str = ""
    """The function that makes small, plain data of the result: "module:function", imported where the unit runs."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Of the module that is measured (`--module`), by their names in its folder: for machines that do not have them."""

    def for_other_machines(self) -> "MeasureUnit":
        """The same, with the files of its module."""
        return replace(self, files=module_files(self.arguments.get("job")))

    def check_place(self, machine: Environment) -> None:
        """A `UserError` if this machine cannot measure it: a package or a recipe that it does not have, a GPU that others use."""
        choices: Choices = self.arguments.get("choices", DEFAULT_CHOICES)
        timing: BenchTiming = self.arguments.get("timing", DEFAULT_TIMING)
        job: ModelRun | None = self.arguments.get("job")
        choose(choices, machine, cache_weights=timing.cache_weights, framework=job.source.framework if job else "")

    def run(self, reporter: Reporter = QUIET) -> Any:
        """Measure here. A `UserError` for what cannot be measured."""
        arguments = dict(self.arguments)
        measure, reduce = _function(MEASURE[self.kind]), _function(self.reduce)
        with with_files(arguments.pop("job", None), self.files) as job:
            return reduce(measure(job, **arguments, reporter=reporter))


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
