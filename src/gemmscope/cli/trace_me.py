"""`gemmscope trace-me`: the lines that record a good trace for `gemmscope explain`."""

from importlib.resources import files
from typing import Annotated

import typer

KINDS = ("loop", "trainer", "plain")


def known_kind(text: str) -> str:
    """One of the kinds."""
    if text not in KINDS:
        raise typer.BadParameter(f"must be {', '.join(KINDS)}, got {text!r}")
    return text


def command(
    kind: Annotated[
        str, typer.Option(parser=known_kind, metavar="KIND", help="loop (your own), trainer (Hugging Face), plain (torch alone).")
    ] = "loop",
) -> None:
    """Print the lines that record a trace from your own training loop.

    Put them around the loop: they wait until the run is warm, record a few steps with the shapes of all operators, and write one
    small gzipped file with the GPU clock. In a distributed job rank 0 writes; `ranks=(0, 1)` for more. To compare with BF16,
    record it the same way: gemmscope explain fp8.json.gz --baseline bf16.json.gz
    """
    lines = files("gemmscope.cli").joinpath(f"templates/trace_me_{kind}.txt").read_text(encoding="utf-8")
    typer.echo(f"{lines}\n# then: gemmscope explain step.json.gz")
