"""The files of a model (`--module file.py:factory`) that travel with a unit to machines that do not have them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from gemmscope.errors import UserError, option
from gemmscope.folders import temporary_folder
from gemmscope.job.load import ModelRun

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
