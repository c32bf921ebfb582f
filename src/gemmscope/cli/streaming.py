"""Files that are written during a measurement: they show the points so far, and keep them if the process is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gemmscope import commands, writers
from gemmscope.cli.output import OutputOptions, say, to_stdout
from gemmscope.errors import UserError
from gemmscope.files import is_special, write_text

if TYPE_CHECKING:
    from gemmscope.results.sweep import SweepResult

STREAMED = ("json", "html")
REFRESH_S = 10


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

    def write(self, result: SweepResult) -> None:
        """Replace the files, once a point was measured. If that fails, measuring goes on: the journal has everything."""
        if self._failed or not self._paths or not result.sample_count:
            return
        try:
            self._decide(result)
            for name, path in self._paths.items():
                write_text(path, result.to_json() if name == "json" else _page(result))
        except UserError as error:
            self._failed = True
            say(f"note: {error.message}; the points are in the journal, and the measurement continues")

    def _decide(self, result: SweepResult) -> None:
        """Decide where to write, once."""
        if self._decided:
            return
        self._decided, ours = True, False
        for name, place in list(self._paths.items()):
            path = Path(place)
            ours = commands.read.continues(result, path) if name == "json" else ours
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


def _page(result: SweepResult) -> str:
    return writers.html.page([commands.result.document(result)], refresh_s=REFRESH_S)
