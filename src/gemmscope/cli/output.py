"""Where results go: files first, then the terminal. If a file cannot be written, the other outputs are still written."""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from gemmscope import commands, writers
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.files import descriptor, is_special, same_file
from gemmscope.options.declare import Option, Options
from gemmscope.say import say

if TYPE_CHECKING:
    from gemmscope.results.base import Result
    from gemmscope.results.sweep import SweepResult

PATH = "PATH|-"
STREAMED = ("json", "html")
REFRESH_S = 10
ENDINGS = {"csv": ".csv", "markdown": ".md", "html": ".html"}  # of the formats of options; that of a figure is its file's
OTHER_ENDINGS = {".json", ".txt", *writers.WRITERS} - {".html"}  # of files that are not pages


class OutputOptions(Options):
    """Where a result goes."""

    GROUP: ClassVar[str] = "Output"

    detail: Annotated[bool, Option("Print every table and note, not only the summary.")] = False
    quiet: Annotated[bool, Option("Print only the answer, in a sentence.", flags=("--quiet", "-q"))] = False
    json: Annotated[str | None, Option("Write the result as a run file (JSON).", metavar=PATH)] = None
    csv: Annotated[str | None, Option("Write every table as CSV, with unrounded numbers.", metavar=PATH)] = None
    markdown: Annotated[str | None, Option("Write everything as Markdown.", metavar=PATH)] = None

    def targets(self) -> dict[str, str]:
        """The outputs that were requested: option → path."""
        return {
            name: place
            for name, place in {"json": self.json, "csv": self.csv, "markdown": self.markdown}.items()
            if place is not None
        }

    def context(self, reads: Iterable[str | None] = (), more: Mapping[str, str | None] = {}) -> "commands.RunContext":
        """What the command is run with, after a check of the outputs. `reads`: the files that it reads, None where there is none;
        `more`: other outputs, by their options."""
        targets = {**self.targets(), **{name: path for name, path in more.items() if path is not None}}
        check_targets(targets, [path for path in reads if path is not None])
        return commands.RunContext(typed_command(), commands.Console(), lambda result: deliver(result, self))


class FigureOptions(OutputOptions):
    """Where a result with charts goes."""

    output: Annotated[
        str | None, Option("Draw the main charts (.png, .svg or .pdf).", metavar="PATH", flags=("--output", "-o"))
    ] = None

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


class EmitOptions(Options):
    """Settings of a training framework instead of the summary."""

    GROUP: ClassVar[str] = "Output"

    emit: Annotated[
        str | None,
        Option(
            "Print only the settings of the recommendation for this framework, to paste.",
            choices=("megatron", "bridge", "torchtitan", "torchao", "transformer_engine"),
        ),
    ] = None


class SettingsOptions(FigureOptions, EmitOptions):
    """Where a result with settings to paste goes."""


class PageOptions(FigureOptions):
    """The options for outputs with the HTML page, for results that are written while they are measured."""

    html: Annotated[
        str | None, Option("Write an HTML page. With --sweep, the page is updated as points arrive.", metavar=PATH)
    ] = None

    def targets(self) -> dict[str, str]:
        """The files to write, the page included."""
        check_page("html", self.html)
        return {**super().targets(), **({"html": self.html} if self.html is not None else {})}


class StepOutputs(PageOptions, EmitOptions):
    """Where the result of a step goes."""


class FleetOutputs(PageOptions):
    """Where the result of a fleet goes."""

    html: Annotated[str | None, Option("Write an HTML page.", metavar=PATH)] = None


def typed_command() -> str:
    """The command line that is running, ready to be pasted into a shell."""
    return shlex.join(["gemmscope", *(argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:])])


def deliver(result: "Result", outputs: OutputOptions) -> None:
    """Write the files that were requested and print the result, unless a file went to standard output.

    The run file comes first: it holds everything. Standard output comes last: its reader may be gone.
    """
    document = cache(lambda: commands.document(result))
    targets, keeper, failures = outputs.targets(), commands.Keeper(result), list[UserError]()
    for name, place in sorted(targets.items(), key=lambda target: (to_stdout(target[1]), target[0] != "json")):
        path, note = keeper.place(place, run_file=name == "json")
        if note:
            say(note)
        try:
            if path is None:
                continue
            if name == "json":
                write(path, result.to_json(), keeper.write)
            elif name == "output" and result.sample_count == 0:
                say(f"nothing was measured: there is no figure to write to {path}")
            elif name == "output" and not document().charts():
                say(f"this result has no chart to draw, so {path} is not written")
            else:
                write(path, writers.content(ENDINGS.get(name) or Path(place).suffix.lower(), [document()]), keeper.write)
        except UserError as error:
            failures.append(error)
    try:
        if not any(map(to_stdout, targets.values())):
            _show(document(), outputs)
    finally:
        if failures:
            raise failures[0]


def _show(document: Any, outputs: OutputOptions) -> None:
    """Print the settings that were asked for, the answer alone, or the document."""
    if (emit := getattr(outputs, "emit", None)) is not None:
        write("-", f"{document.settings_for(emit)}\n")
    elif outputs.quiet:
        writers.terminal.show_texts([document.answer])
    else:
        writers.terminal.show(document, detail=outputs.detail)


def to_stdout(where: str | Path) -> bool:
    """Whether an output goes to standard output."""
    return where == "-" or descriptor(where) == 1


def write(where: str | Path, content: str | bytes, save: Callable[[str | Path, str | bytes], None] = writers.save) -> None:
    """Write to a path, or to standard output for `-`; a file is announced on standard error. `save`: how the files of a result
    are written."""
    if to_stdout(where) and isinstance(content, str):
        sys.stdout.write(content)
        return
    save(where, content)
    say(f"wrote {where}")


def check_targets(named: Mapping[str, str], reads: Iterable[str] = ()) -> None:
    """Reject output paths that cannot be written, or that would overwrite an input file, before long work. Nothing is created."""
    empty = [option(name) for name, where in named.items() if not where]
    places, paths = ", ".join(named.values()), f"give {', '.join(map(option, named))} a path each"
    reject(
        (empty, f"{', '.join(empty[:1])} is empty", "name a file, or - for standard output"),
        (
            any(same_file(one, other) for one, other in combinations(filter(None, named.values()), 2)),
            f"two outputs go to the same place: {places}",
            paths,
        ),
    )
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


class StreamedFiles:
    """The run file and the page of an unfinished result, each replaced as a whole.

    A file that was there before stays until the end, unless it is an unfinished run itself: the points go beside it, as
    `NAME.partial.EXT`.
    """

    def __init__(self, outputs: OutputOptions) -> None:
        targets = outputs.targets()
        named = {name: targets[name] for name in STREAMED if name in targets}
        self._paths = {name: place for name, place in named.items() if not to_stdout(place) and not is_special(place)}
        self._beside: list[Path] = []
        self._failed = self._decided = False

    def write(self, result: "SweepResult") -> None:
        """Replace the files, once a point was measured. If that fails, measuring goes on: the journal has everything."""
        if self._failed or not self._paths or not result.sample_count:
            return
        try:
            self._decide(result)
            keeper = commands.Keeper(result, own=self._paths.values())
            for name, path in self._paths.items():
                keeper.place(path)
                keeper.write(
                    path,
                    result.to_json() if name == "json" else writers.html.page([commands.document(result)], refresh_s=REFRESH_S),
                )
        except UserError as error:
            self._failed = True
            say(f"note: {error.message}; the points are in the journal, and the measurement continues")

    def _decide(self, result: "SweepResult") -> None:
        """Decide where to write, once."""
        if self._decided:
            return
        self._decided, ours = True, False
        for name, place in list(self._paths.items()):
            path = Path(place)
            ours = commands.sweep.continues(result, path) if name == "json" else ours
            if not ours and path.exists() and path.stat().st_size:
                self._paths[name] = str(path.with_name(f"{path.stem}.partial{path.suffix}"))
                self._beside.append(Path(self._paths[name]))
                until = f"until then, points are written to {self._paths[name]}"
                say(f"note: {place} exists, and is replaced when the sweep is complete; {until}")

    def finish(self) -> None:
        """Remove the files that were written beside older ones: the result is written."""
        for path in self._beside:
            with suppress(OSError):
                path.unlink()
