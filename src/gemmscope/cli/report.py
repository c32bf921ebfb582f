"""`gemmscope report`: run files as one page that can be mailed, printed and read on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemmscope.cli.output import check_targets, say, write
from gemmscope.errors import UserError

EXAMPLES = """\b
Examples:
  gemmscope report step.json -o report.html
  gemmscope report bench-h200.json bench-h100.json -o side-by-side.html
  gemmscope report step.json --markdown - --figures figures/
"""
DEFAULT = "report.html"


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files, as --json writes them; plain or gzipped.")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="PATH|-", help=f"The page. (default: {DEFAULT}, if nothing else is asked for)"),
    ] = None,
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the same as Markdown.")] = None,
    figures: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Draw every chart into this folder, as PNG and SVG.")
    ] = None,
) -> None:
    """Make one self-contained page of one or several runs: of shapes, bench, step, forecast and explain.

    The answer in one sentence; where the time goes; from the products' speedup to the step's; every row, sortable; evidence
    and warnings; how it was measured, and on what. The page needs no network. Several runs stand side by side if they are of
    one model.
    """
    from gemmscope.report.page.html import page
    from gemmscope.report.page.kinds import report_of

    if output is None and markdown is None and figures is None:
        output = DEFAULT
    _check(runs, output, markdown, figures)
    report = report_of(list(dict.fromkeys(runs)))
    if output is not None:
        write(output, page(report))
    if markdown is not None:
        from gemmscope.report.page import markdown as form

        write(markdown, form.markdown(report))
    if figures is not None:
        from gemmscope.report.page.figures import save_figures

        written = save_figures(report, Path(figures))
        say(f"wrote {len(written)} figures into {figures}" if written else f"no chart to draw in {', '.join(map(str, runs))}")
    if output != "-" and markdown != "-":
        for run in report.runs:
            label = report.label(run)
            typer.echo(f"{label}: {run.answer}" if label else run.answer)


def _check(runs: list[Path], output: str | None, markdown: str | None, figures: str | None) -> None:
    """What cannot be written is said first; no run file is ever written over."""
    targets = {"-o": output, "--markdown": markdown}
    named = {option: where for option, where in targets.items() if where is not None}
    check_targets(named)
    for option, where in named.items():
        if where != "-" and any(_same(Path(where), run) for run in runs):
            raise UserError(f"{option} {where} would write over the run file", f"for example {option} {DEFAULT}")
    if figures is not None and Path(figures).exists() and not Path(figures).is_dir():
        raise UserError(f"--figures {figures} is a file, not a folder", "for example --figures figures")


def _same(first: Path, second: Path) -> bool:
    try:
        return first.resolve() == second.resolve()
    except (OSError, ValueError):
        return False
