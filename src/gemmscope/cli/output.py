"""Where results go: a path, or `-` for standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import typer

from gemmscope.errors import UserError


def write(where: str, text: str) -> None:
    """Write a result; a file is announced on standard error."""
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8", errors="replace")  # names in run files may hold halves of characters
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    say(f"wrote {where}")


def check_targets(named: Mapping[str, str], reads: Iterable[str] = ()) -> None:
    """Before long work: a `UserError` if an option's result could not be written to where it says, or would be written over
    something that is read. Nothing is created."""
    places = {option: os.path.realpath(where) if where != "-" else where for option, where in named.items()}
    if len(set(places.values())) < len(places):
        raise UserError(f"two outputs to one place: {', '.join(named.values())}", f"give {', '.join(named)} each its own")
    read = {os.path.realpath(path) for path in reads}
    for option, where in named.items():
        if places[option] in read:
            raise UserError(f"{option} {where} would overwrite what is read", "name another file")
        reason = "" if where == "-" else _why_not_writable(Path(where))
        if reason:
            raise UserError(f"{option} {where} cannot be written: {reason}", "name a file in a folder that can be written")


def _why_not_writable(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "no permission"
    except (OSError, ValueError) as error:  # a name too long, a zero byte
        return str(getattr(error, "strerror", None) or error)


def interrupted(*, measured: bool) -> str:
    """What Ctrl-C left."""
    return "interrupted: what was measured stands below" if measured else "interrupted before anything was measured"


def say(text: str) -> None:
    """A word to the person, beside the result."""
    typer.echo(text, err=True)
