"""Where results go: files first, then the terminal. A file that cannot be written costs neither the others nor the terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gemmscope import app, writers
from gemmscope.errors import UserError, option, shown

if TYPE_CHECKING:
    from gemmscope.results.base import Result


@dataclass(frozen=True)
class OutputOptions:
    """Where a result goes."""

    json: str | None = None
    csv: str | None = None
    markdown: str | None = None
    detail: bool = False

    def targets(self) -> dict[str, str]:
        """The outputs that were requested: option → path."""
        places = {"json": self.json, "csv": self.csv, "markdown": self.markdown}
        return {name: place for name, place in places.items() if place is not None}


@dataclass(frozen=True)
class FigureOptions(OutputOptions):
    """Where a result with charts goes."""

    output: str | None = None

    def targets(self) -> dict[str, str]:
        """With the figure, whose ending must be one that can be drawn."""
        if self.output is None:
            return super().targets()
        if not self.output.lower().endswith(writers.FIGURE_ENDINGS):
            given, endings = f"{option('output')} {shown(self.output)}", ", ".join(writers.FIGURE_ENDINGS)
            raise UserError(f"{given} is not a figure file: it must end in {endings}", "for example -o bench.png")
        return {**super().targets(), "output": self.output}


def typed_command() -> str:
    """The command line that is running, ready to be pasted into a shell."""
    return shlex.join(["gemmscope", *(argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:])])


def deliver(result: Result, outputs: OutputOptions, if_lost: Callable[[], str] = lambda: "") -> None:
    """Write the files that were requested and print the result, unless a file went to standard output.

    `if_lost` is called when a file could not be written, and says how to get the result nevertheless.
    """
    document = app.result.document(result)
    texts: dict[str, Callable[[], str]] = {
        "json": result.to_json,
        "csv": lambda: writers.csv.csv_text(document),
        "markdown": lambda: writers.markdown.markdown([document]),
    }
    failures = []
    for name, place in outputs.targets().items():
        try:
            if name == "output":
                writers.figure.save_figure(document, place)
                say(f"wrote {place}")
            else:
                write(place, texts[name]())
        except UserError as error:
            failures.append(error)
    if "-" not in outputs.targets().values():
        writers.terminal.show(document, detail=outputs.detail)
    if failures:
        raise UserError(failures[0].message, if_lost() or failures[0].hint)


def write(where: str, text: str) -> None:
    """Write a result to a path, or to standard output for `-`; a file is announced on standard error."""
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8", errors="replace")  # names in run files may hold halves of characters
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    say(f"wrote {where}")


def check_targets(named: Mapping[str, str], reads: Iterable[str] = ()) -> None:
    """Reject output paths that cannot be written, or that would overwrite an input file, before long work. Nothing is created."""
    places = {name: os.path.realpath(where) if where != "-" else where for name, where in named.items()}
    if len(set(places.values())) < len(places):
        listed = ", ".join(map(option, named))
        raise UserError(f"two outputs go to the same place: {', '.join(named.values())}", f"give {listed} a path each")
    inputs = {os.path.realpath(path) for path in reads}
    for name, where in named.items():
        if places[name] in inputs:
            raise UserError(f"{option(name)} {where} would overwrite an input file", "name another file")
        reason = "" if where == "-" else _why_not_writable(Path(where))
        if reason:
            raise UserError(f"{option(name)} {where} cannot be written: {reason}", "name a file in a folder that can be written")


def _why_not_writable(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "no permission"
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        return str(getattr(error, "strerror", None) or error)


def say(text: str) -> None:
    """A line for the person, beside the result."""
    typer.echo(text, err=True)
