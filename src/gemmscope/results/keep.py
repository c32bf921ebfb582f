"""The files of a result, which are written here and nowhere else: a result never replaces a file that holds more.

A result without measurements replaces no file. An interrupted one does not replace a run file with more samples, nor other
files whose samples are not known: it goes beside them, as `NAME.interrupted.EXT`.
"""

import os
from collections.abc import Collection
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import NamedTuple

from gemmscope.files import is_special, replacing
from gemmscope.results.base import Result

BESIDE = ".interrupted"
"""In the name of a file that lies beside one that holds more."""


class WritePath(NamedTuple):
    """The path to write to, or None if the old file stays; `note` says why."""

    path: str | Path | None
    note: str = ""


class Keeper:
    """Decides where the files of one result go, and writes them. The decision for the run file also applies to the files after
    it. `own`: files that this command has begun itself, which are replaced."""

    def __init__(self, result: Result, own: Collection[str | Path] = ()) -> None:
        self._count, self._interrupted = result.sample_count, bool(getattr(result, "interrupted", False))
        self._keeps: bool | None = None
        self._own, self._placed = own, set[str | Path]()

    def place(self, path: str | Path, *, run_file: bool = False) -> WritePath:
        """The path to write to: `path`, or another one if the file there must stay."""
        written = WritePath(path) if path in self._own else self._decide(path, run_file=run_file)
        if written.path is not None:
            self._placed.add(written.path)
        return written

    def write(self, path: str | Path, content: str | bytes, hint: str = "") -> None:
        """Write a file to a path that `place` gave. `hint`: how to make it writable."""
        if path not in self._placed:
            raise ValueError(f"{path} was not decided on")
        with replacing(path, hint) as out:
            out.write(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))

    def _decide(self, path: str | Path, *, run_file: bool) -> WritePath:
        if self._count is None or path == "-" or is_special(path) or not _has_content(Path(path)):
            return WritePath(path)
        if self._count == 0:
            return WritePath(None, f"nothing was measured, so {path} is left unchanged")
        if not self._interrupted:
            return WritePath(path)
        if run_file:
            self._keeps = _samples(path) > self._count
        if self._keeps is False:
            return WritePath(path)
        why = "it has more samples than this interrupted run" if self._keeps else "this run was interrupted"
        return WritePath(_beside(Path(path)), f"{path} is left unchanged: {why}")


def write_run_file(result: Result, path: Path, hint: str = "") -> WritePath:
    """Write the run file of a result, to the path or beside a file that must stay. `hint`: how to make the path writable."""
    keeper = Keeper(result)
    written = keeper.place(path, run_file=True)
    if written.path is not None:
        keeper.write(written.path, result.to_json(), hint)
    return written


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0 and path.is_file()
    except (OSError, ValueError):
        return False


def _samples(path: str | Path) -> int:
    """The samples of a run file; 0 for anything else."""
    try:
        # loads the types of all kinds, which few commands need
        return import_module("gemmscope.results.read").read_result(path).sample_count or 0
    except Exception:  # whatever that file holds, it must not cost the new result
        return 0


def _beside(path: Path) -> Path:
    """The first free name for an interrupted result.

    >>> _beside(Path("no-such-folder/out.json")).name
    'out.interrupted.json'
    """
    names = (path.with_name(f"{path.stem}{BESIDE}{'' if n == 1 else f'-{n}'}{path.suffix}") for n in count(1))
    return next(name for name in names if not os.path.lexists(name))
