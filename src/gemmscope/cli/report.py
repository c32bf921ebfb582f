"""`gemmscope report`."""

from pathlib import Path

from gemmscope import commands, writers
from gemmscope.cli.options import takes
from gemmscope.cli.output import check_page, check_targets, say, to_stdout, write
from gemmscope.errors import UserError, option

DEFAULT = "report.html"


@takes()
def command(runs: list[str], output: str | None = None, markdown: str | None = None, figures: str | None = None) -> None:
    """Make one self-contained page from run files of any command."""
    if output is None and markdown is None and figures is None:
        output = DEFAULT
    targets = {name: place for name, place in (("output", output), ("markdown", markdown)) if place is not None}
    check_targets(targets, runs)
    check_page("output", output)
    if figures is not None and Path(figures).exists() and not Path(figures).is_dir():
        raise UserError(f"{option('figures')} {figures} is a file, not a folder", f"for example {option('figures', 'figures')}")
    documents, messages = commands.report.report(runs)
    if output is not None:
        write(output, writers.content(".html", documents, messages))
    if markdown is not None:
        write(markdown, writers.content(".md", documents, messages))
    if figures is not None:
        written = writers.figure.save_figures(documents, Path(figures))
        say(f"wrote {len(written)} figures into {figures}" if written else f"there is no chart to draw in {', '.join(runs)}")
    if not any(map(to_stdout, targets.values())):
        writers.terminal.show_texts(commands.report.answers(documents))
