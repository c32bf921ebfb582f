"""`gemmscope doctor`."""

import typer

from gemmscope import app, writers
from gemmscope.cli.options import takes
from gemmscope.cli.output import check_targets, to_stdout, write
from gemmscope.text import printable


@takes()
def command(json: str | None = None) -> None:
    """Check what this machine can measure, and why not the rest."""
    check_targets({"json": json} if json is not None else {})
    diagnosis = app.doctor.diagnose()
    if json is not None:
        write(json, diagnosis.to_json())
        if to_stdout(json):
            return
    for line in diagnosis.lines():
        typer.echo(printable(line))
    writers.terminal.show_table(diagnosis.table())
    for line in diagnosis.advice():
        typer.echo(printable(line))
