"""What a fuzz target is, and the list of all of them: each `targets_*.py` in this folder has a list `TARGETS`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis.strategies import SearchStrategy

from gemmscope.cli.build import build
from gemmscope.errors import UserError

ALLOWED_EXITS = (None, 0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Target:
    """One reader or one command, and hostile inputs for it.

    `run` gets an input and an empty folder, calls the real code in this process, and returns all text that the user would see.
    It may raise `UserError`, or `SystemExit` with a documented code; every other exception is a defect.
    """

    name: str
    inputs: SearchStrategy[Any]
    run: Callable[[Any, Path], str]
    in_suite: int = 10
    """How many inputs the test suite tries; `benchmarks/fuzz.py` tries many more."""
    needs: tuple[str, ...] = ()
    """Modules that are slow to import: once, before its inputs run in processes of their own."""


def collect() -> dict[str, Target]:
    """Every target by its name."""
    targets: dict[str, Target] = {}
    for path in sorted(Path(__file__).parent.glob("targets_*.py")):
        for target in import_module(f"fuzz.{path.stem}").TARGETS:
            if target.name in targets:
                raise ValueError(f"two targets are named {target.name}")
            targets[target.name] = target
    return targets


@cache
def built(command: str) -> Any:
    """A command, built once: that takes longer than most inputs."""
    return build(command)


def command_line(arguments: Sequence[str], stdin: bytes = b"") -> str:
    """Run `gemmscope ARGUMENTS` in this process and return what it printed, in the encoding of a terminal.

    Exit code 2 is raised as a `UserError` with the same text, so that invalid inputs are counted apart.
    """
    from gemmscope.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors="surrogateescape")
    code: object = None
    streams = mock.patch.multiple(sys, argv=["gemmscope", *arguments], stdin=given, stdout=out, stderr=err)
    with streams, mock.patch("gemmscope.cli.build.build", built):
        try:
            main()
        except SystemExit as ending:
            code = ending.code
    text = ""
    for stream in (out, err):
        stream.flush()
        text += stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if code not in ALLOWED_EXITS:
        raise RuntimeError(f"exit code {code!r}: {text}")
    if code == 2:
        if not text.strip():
            raise RuntimeError("exit code 2 without a message")
        raise UserError(text)
    return text
