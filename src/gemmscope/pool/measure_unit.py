"""One measurement as a unit of a pool: what is measured, and which part of its result is sent back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from gemmscope.bench.choose import choose
from gemmscope.errors import UserError, option
from gemmscope.folders import temporary_folder
from gemmscope.gpu.environment import Environment
from gemmscope.job.load import ModelRun
from gemmscope.options.measuring import BenchOptions, StepOptions
from gemmscope.progress import QUIET, Reporter
from gemmscope.run_context import RunContext

KINDS = (".py", ".json", ".toml", ".yaml", ".yml", ".txt")
LARGEST_BYTES, MOST_FILES = 8 << 20, 2000
SKIPPED = ("__pycache__", "site-packages", "node_modules")


def module_files(job: ModelRun | None) -> Mapping[str, bytes]:
    """The file of the factory and what it may import or read: sources and settings in its folder and below. Empty without one."""
    return _files(job.source.module) if job is not None and job.source.module is not None else {}


@cache
def _files(reference: str) -> Mapping[str, bytes]:
    path = Path(reference.rpartition(":")[0])
    if not path.is_file():
        return {}  # reported when the module is run
    files, total = {path.name: path.read_bytes()}, 0
    for parent, folders, names in os.walk(path.parent):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED]
        for name in names:
            file = Path(parent, name)
            if file.suffix in KINDS and file.is_file():
                files[file.relative_to(path.parent).as_posix()] = content = file.read_bytes()
                total += len(content)
            if total > LARGEST_BYTES or len(files) > MOST_FILES:
                raise UserError(
                    f"{option('module', reference)} is in a folder with too many files to send them to other machines",
                    f"move it into its own folder; the limit is {LARGEST_BYTES >> 20} MB and {MOST_FILES} files",
                )
    return files


@contextmanager
def with_files(job: ModelRun | None, files: Mapping[str, bytes]) -> Iterator[ModelRun | None]:
    """The model with the files of its module: those at their own path if they are the same, else in a temporary folder."""
    if job is None or job.source.module is None or not files:
        yield job
        return
    text, _, factory = job.source.module.rpartition(":")
    path = Path(text)
    if path.is_file() and all(_same(path.parent / name, content) for name, content in files.items()):
        yield job
        return
    with temporary_folder() as folder:
        for name, content in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        yield replace(job, source=replace(job.source, module=f"{folder / path.name}:{factory}"))


def _same(file: Path, content: bytes) -> bool:
    return file.is_file() and file.read_bytes() == content


MEASURE = {"bench": "gemmscope.commands.bench:run_bench", "step": "gemmscope.commands.step:run_step"}
"""The functions that measure, imported where the unit runs: the pool itself knows no command."""


@dataclass(frozen=True)
class MeasureUnit:
    """A bench or a step on one GPU. Pickled on its way to the place worker that runs it."""

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

    def for_other_machines(self) -> MeasureUnit:
        """The same, with the files of its module."""
        return replace(self, files=module_files(self.job))

    def check_place(self, machine: Environment) -> None:
        """A `UserError` if this machine cannot measure it: a package or a recipe that it does not have, a GPU that others use."""
        choose(self.options, machine, framework=self.job.source.framework if self.job else "")

    def run(self, reporter: Reporter = QUIET, state: Path | None = None) -> Any:
        """Measure here. A `UserError` for what cannot be measured. `state`: the folder of the journal, if not the user's."""
        context = RunContext(self.command, reporter, self.deliver, state=state)
        measure, reduce = _function(MEASURE[self.kind]), _function(self.reduce)
        with with_files(self.job, self.files) as job:
            return reduce(measure(job, self.options, context))


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
