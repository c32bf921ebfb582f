"""Where results go: files first, then the terminal. If a file cannot be written, the other outputs are still written."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from gemmscope import commands, writers
from gemmscope.errors import UserError, option, shown
from gemmscope.files import descriptor, same_file
from gemmscope.say import say as say  # for the commands

if TYPE_CHECKING:
    from gemmscope.results.base import Result

ENDINGS = {"csv": ".csv", "markdown": ".md", "html": ".html"}  # of the formats of options; that of a figure is its file's
OTHER_ENDINGS = {".json", ".txt", *writers.WRITERS} - {".html"}  # of files that are not pages


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
        """The files to write, the figure included; a `UserError` if its ending is not one that can be drawn."""
        if self.output is None:
            return super().targets()
        if not self.output.lower().endswith(writers.FIGURE_ENDINGS):
            given, endings = f"{option('output')} {shown(self.output)}", ", ".join(writers.FIGURE_ENDINGS)
            page = self.output.lower().endswith((".html", ".htm"))
            hint = "for a page: --json run.json, then gemmscope report run.json" if page else "for example -o bench.png"
            raise UserError(f"{given} is not a figure file: it must end in {endings}", hint)
        return {**super().targets(), "output": self.output}


@dataclass(frozen=True)
class PageOptions(FigureOptions):
    """The options for outputs with the HTML page, for results that are written while they are measured."""

    html: str | None = None

    def targets(self) -> dict[str, str]:
        """The files to write, the page included."""
        check_page("html", self.html)
        return {**super().targets(), **({"html": self.html} if self.html is not None else {})}


def typed_command() -> str:
    """The command line that is running, ready to be pasted into a shell."""
    return shlex.join(["gemmscope", *(argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:])])


def deliver(result: Result, outputs: OutputOptions) -> None:
    """Write the files that were requested and print the result, unless a file went to standard output.

    The run file comes first: it holds everything. Standard output comes last: its reader may be gone.
    """
    document = cache(lambda: commands.result.document(result))
    targets, keeper, failures = outputs.targets(), commands.result.Keeper(result), list[UserError]()
    for name, place in sorted(targets.items(), key=lambda target: (to_stdout(target[1]), target[0] != "json")):
        path, note = keeper.place(place, run_file=name == "json")
        if note:
            say(note)
        try:
            if path is None:
                continue
            if name == "json":
                write(path, result.to_json())
            elif name == "output" and result.sample_count == 0:
                say(f"nothing was measured: there is no figure to write to {path}")
            elif name == "output" and not document().charts():
                say(f"this result has no chart to draw, so {path} is not written")
            else:
                write(path, writers.content(ENDINGS.get(name) or Path(place).suffix.lower(), [document()]))
        except UserError as error:
            failures.append(error)
    try:
        if not any(map(to_stdout, targets.values())):
            writers.terminal.show(document(), detail=outputs.detail)
    finally:
        if failures:
            raise failures[0]


def to_stdout(where: str | Path) -> bool:
    """Whether an output goes to standard output."""
    return where == "-" or descriptor(where) == 1


def write(where: str | Path, content: str | bytes) -> None:
    """Write a result to a path, or to standard output for `-`; a file is announced on standard error."""
    if to_stdout(where) and isinstance(content, str):
        sys.stdout.write(content)
        return
    writers.save(where, content)
    say(f"wrote {where}")


def check_targets(named: Mapping[str, str], reads: Iterable[str] = ()) -> None:
    """Reject output paths that cannot be written, or that would overwrite an input file, before long work. Nothing is created."""
    if empty := [option(name) for name, where in named.items() if not where]:
        raise UserError(f"{empty[0]} is empty", "name a file, or - for standard output")
    if any(same_file(one, other) for one, other in combinations(named.values(), 2)):
        listed = ", ".join(map(option, named))
        raise UserError(f"two outputs go to the same place: {', '.join(named.values())}", f"give {listed} a path each")
    inputs = [path for path in reads if Path(path).is_file()]
    for name, where in named.items():
        if any(same_file(where, path) for path in inputs):
            raise UserError(f"{option(name)} {where} would overwrite an input file", "name another file")
        reason = "" if where == "-" else _why_not_writable(Path(where))
        if reason:
            raise UserError(f"{option(name)} {where} cannot be written: {reason}", "give a file in a folder that can be written")


def check_page(name: str, where: str | None) -> None:
    """Reject a file name with the ending of another format."""
    ending = Path(where or "").suffix.lower()
    if ending in OTHER_ENDINGS:
        hint = f"for example {option(name, Path(where or '').stem + '.html')}"
        raise UserError(f"{option(name)} {where}: the page is HTML, not {ending}", hint)


def _why_not_writable(path: Path) -> str:
    try:
        if descriptor(path) is not None:
            return ""
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "no permission"
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        return str(getattr(error, "strerror", None) or error)
