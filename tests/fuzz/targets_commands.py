"""Every option of every command that takes a file, with hostile files. The list comes from `options/`.

An option that is new needs a strategy in `INPUTS`, by how its value is written in `--help`, or a place in `OUTPUTS` if it names
something that is written; `test_fuzz.py` checks that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from fuzz import targets_configs, targets_fleets, targets_modules, targets_runs, targets_tensors, targets_traces
from fuzz.targets import Target, command_line
from gemmscope.cli import commands
from gemmscope.cli.build import shell_options
from gemmscope.cli.main import COMMANDS
from gemmscope.options.declare import Declared

Write = Callable[[Any, Path], Path | str]
MODEL = ["--preset", "gpt2", "--micro-batch-size", "1", "--sequence-length", "64"]


@dataclass(frozen=True)
class Files:
    """Hostile files of one kind, and how one is written into a folder; the result is what the command is given."""

    inputs: st.SearchStrategy[Any]
    write: Write


def write_as(name: str, value: bytes, folder: Path) -> Path:
    (folder / name).write_bytes(value)
    return folder / name


def write_run(value: dict[str, Any], folder: Path) -> Path:
    return write_as("run.json", targets_runs.damaged(value, targets_runs.recorded(value["result"])), folder)


def write_runs(value: dict[str, Any], folder: Path) -> Path:
    targets_fleets.write_folder(value, folder)
    return folder


def write_module(value: targets_modules.Module, folder: Path) -> str:
    return f"{write_as('mine.py', value.text, folder)}:{value.function}"


RUNS = Files(targets_runs.damages(), write_run)
CONFIGS = Files(targets_configs.CONFIGS, partial(write_as, "config"))
RECORDINGS = targets_tensors.recordings().map(targets_tensors.recording_bytes)
INPUTS: dict[str, Files] = {
    "PATH|ID": CONFIGS,
    "FILE.py:FUNCTION": Files(targets_modules.modules(), write_module),
    "RUNFILE": RUNS,
    "FOLDER|RUNFILE": Files(targets_fleets.folders(), write_runs),
    "FILE.csv|-": Files(targets_configs.gemm_lists().map(lambda case: case[1]), partial(write_as, "gemms.csv")),
    "RECORDING": Files(RECORDINGS, partial(write_as, "a.safetensors")),
    "RECORDING,...": Files(RECORDINGS, partial(write_as, "later.safetensors")),
    "TRACE": Files(targets_traces.damages().map(targets_traces.damaged), partial(write_as, "trace.json")),
    "PATH": Files(targets_tensors.checkpoints(), targets_tensors.write_checkpoint),
}
"""How a file is written in `--help` → hostile ones."""
OUTPUTS = {"perfetto", "folder", "json", "csv", "markdown", "output", "html", "figures"}
"""Options that name what is written."""
VALUES = {
    "", "N", "X", "NAME", "NAME,...", "N,...", "N,N,...", "NAME=A:B:STEP", "all|N,N,...", "N|all|N,N,...", "PERCENT", "SECONDS",
    "ADDRESS", "0|1|2|3", "N,MxKxN,...", "N|MxKxN", "first=N,last=N,NAME", "NAME|GB/S", "X|NAME=X,...", "NAME=N,N,...", "WORD",
    "RANK", "WATTS",
}  # fmt: skip
"""How values are written that are no files, besides lists of choices."""
BESIDE = {"forecast": ["--gpu", "h200"], "plan": ["--gpu", "h200", "--gpus", "4", "--global-batch", "8"]}
"""What a command needs besides."""


def options_of_command(command: str) -> dict[str, Declared]:
    return shell_options(getattr(commands, command.replace("-", "_")))


@cache
def file_options() -> dict[tuple[str, str], Declared]:
    """Every option of every command that takes a file: (command, its name)."""
    return {
        (command, name): declared
        for command in COMMANDS
        for name, declared in options_of_command(command).items()
        if name not in OUTPUTS and declared.metavar in INPUTS
    }


def arguments(command: str, name: str, declared: Declared, given: str, folder: Path) -> list[str]:
    """A command line with this file."""
    own = [given] if declared.option.argument else [declared.flags[0], given]
    if name in ("config", "module"):
        model = ["--sequence-length", "64", *([] if command == "plan" else ["--micro-batch-size", "1"])]
        if command == "numerics":  # synthetic tensors of large models take minutes, which is no matter of reading
            own += ["--checkpoint", str(write_as("model.safetensors", targets_tensors.whole_checkpoint(), folder))]
        trace = [str(targets_traces.recorded("healthy_te_bf16"))] if command == "explain" else []
        return [command, *trace, *BESIDE.get(command, ()), *own, *model]
    if name in ("baseline", "against"):
        return [command, str(targets_traces.recorded("healthy_te_current")), *own]
    if name in ("speed", "later"):
        (folder / "whole.safetensors").write_bytes(targets_tensors.recording_bytes(WHOLE))
        return [command, str(folder / "whole.safetensors"), *own, "--bound", "5%"]
    if name == "runs" and command == "report":
        own += ["-o", str(folder / "report.html")]
    if name == "files":
        own *= 2
    return [command, *BESIDE.get(command, ()), *own, *(MODEL if name in ("mix", "fleet", "measured") else [])]


WHOLE = {"facts": [], "renamed": None, "header": [], "form": "whole", "at": 0, "fill": None}


def run(key: tuple[str, str], value: Any, folder: Path) -> str:
    """The command with that file. Nothing is measured: there is no GPU."""
    command, name = key
    declared = file_options()[key]
    inside = folder / "given"
    inside.mkdir()
    line = arguments(command, name, declared, str(INPUTS[declared.metavar].write(value, inside)), folder)
    with (
        targets_configs.without_workers(),
        targets_modules.traced_inside() if name == "module" else mock.patch.dict(os.environ),
        targets_tensors.worker_inside() if command == "numerics" else mock.patch.dict(os.environ),
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"),
    ):
        return command_line([argument.replace("\0", "") for argument in line])


def needs(command: str, name: str) -> tuple[str, ...]:
    return (targets_modules.NEEDS if name == "module" else ()) + (targets_tensors.NEEDS if command == "numerics" else ())


TARGETS = [
    Target(
        f"{command} {declared.flags[0] if not declared.option.argument else declared.metavar}",
        INPUTS[declared.metavar].inputs,
        partial(run, (command, name)),
        in_suite=2,
        needs=needs(command, name),
    )
    for (command, name), declared in file_options().items()
]
