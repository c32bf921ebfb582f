"""Where results go: a path, or `-` for standard output."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from gemmscope.errors import UserError


def write(where: str, text: str) -> None:
    """Write a result; a file is announced on standard error."""
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    say(f"wrote {where}")


def say(text: str) -> None:
    """A word to the person, beside the result."""
    typer.echo(text, err=True)
