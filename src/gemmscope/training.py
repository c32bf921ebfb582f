"""What runs inside the user's own training process: facts about it, and the guard that keeps its errors out of the training."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec

from gemmscope.errors import UserError, in_a_line, no_option
from gemmscope.say import say

Arguments = ParamSpec("Arguments")

PACKAGES = ("transformer_engine", "torchao", "megatron-core", "torchtitan", "transformers", "accelerate")


def known_keywords(initialize: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """For the classes that a training script creates: a wrong keyword is one `UserError` that lists the right ones."""
    known = [name for name in signature(initialize).parameters if name != "self"]

    @wraps(initialize)
    def create(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        for name in keywords:
            if name not in known:
                raise no_option(initialize.__qualname__.partition(".")[0], name, known)
        initialize(*arguments, **keywords)

    return create


def own_rank() -> int:
    """The rank of this process in a distributed job, as torchrun and others set it; 0 without one."""
    text = os.environ.get("RANK", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def with_rank(path: Path, rank: int) -> Path:
    """The file of one rank.

    >>> with_rank(Path("step.json.gz"), 3).name
    'step.rank3.json.gz'
    """
    stem, dot, endings = path.name.partition(".")
    return path.with_name(f"{stem}.rank{rank}{dot}{endings}")


def why_not_writable(path: Path) -> str:
    """Why this file cannot be written now; empty if it can."""
    try:
        if path.is_dir():
            return f"{path} is a folder, not a file"
        if not path.parent.is_dir():
            return f"the folder {path.parent} does not exist"
    except OSError as error:  # the name is too long, or a parent folder is not readable
        return f"{path}: {error.strerror}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {path.parent} is not writable"


def package_versions() -> dict[str, str]:
    """The versions of the packages that matter to the training, of those that are installed."""
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


class Guard:
    """Runs the parts of an observer. The first exception, or the first reason to give up, ends the observation with one line; the
    training never sees it."""

    def __init__(self, outcome: str, end: Callable[[], None]) -> None:
        """`outcome`: what is missing then. `end`: removes everything from the training."""
        self.failed = False
        self._outcome, self._end = outcome, end

    def run(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call a function, unless the observation has failed."""
        if self.failed:
            return
        try:
            action(*arguments)
        except Exception as error:
            self.give_up(error.message if isinstance(error, UserError) else in_a_line(error))

    def give_up(self, reason: str) -> None:
        """End the observation."""
        if not self.failed:
            self.failed = True
            with suppress(Exception):
                self._end()
            say(f"gemmscope: {self._outcome}, the training goes on: {reason}")
