"""`gemmscope trace-me`: the lines that record a good trace for `gemmscope explain`."""

from importlib.resources import files

import typer

from gemmscope.cli.options import takes
from gemmscope.errors import UserError, option, shown

KINDS = ("loop", "trainer", "plain")


@takes()
def command(kind: str = "loop") -> None:
    """Print the lines that record a trace from your own training loop."""
    if kind not in KINDS:
        raise UserError(
            f"{option('kind')} must be {', '.join(KINDS)}, got {shown(kind)}", f"for example {option('kind', 'loop')}"
        )
    lines = files("gemmscope.cli").joinpath(f"templates/trace_me_{kind}.txt").read_text(encoding="utf-8")
    typer.echo(f"{lines}\n# then: gemmscope explain step.json.gz")
