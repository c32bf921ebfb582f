"""Reads run files back, plain or gzipped. Whatever is wrong with one is said in one message."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gemmscope.errors import UserError, shown
from gemmscope.store.benchfile import BenchFile
from gemmscope.store.runfile import SCHEMA_VERSION
from gemmscope.store.stepfile import StepFile

KINDS: dict[str, type[BaseModel]] = {"bench": BenchFile, "step": StepFile}
LARGEST = 1 << 30  # bytes: no run file comes near


def read_run(path: str | Path) -> BenchFile | StepFile:
    """A run file of bench or step as it was written, or a `UserError`."""
    _, made = read_kind(path, KINDS)
    assert isinstance(made, (BenchFile, StepFile))
    return made


def read_kind(path: str | Path, kinds: Mapping[str, type[BaseModel]]) -> tuple[str, BaseModel]:
    """The kind of a run file and what it holds; `kinds`: those that will do, each with the class that its files must fit."""
    found = _json(Path(path))
    kind, version = found.get("kind"), found.get("schema_version")
    if "traceEvents" in found:
        raise UserError(f"{path} is a profiler trace, not a run file", f"gemmscope explain {path}")
    if not isinstance(kind, str) or kind not in kinds:
        given = f"of kind {shown(kind)}" if kind else "without a kind"
        *most, last = kinds
        listed = f"{', '.join(most)} or {last}"
        raise UserError(f"{path} is not a run file of {listed}: it is JSON {given}", "write one with --json PATH")
    if version != SCHEMA_VERSION:
        older = isinstance(version, int) and version < SCHEMA_VERSION
        hint = "measure again with this gemmscope" if older or version is None else "update gemmscope"
        raise UserError(f"{path} is of schema version {shown(version)}; this gemmscope reads version {SCHEMA_VERSION}", hint)
    try:
        return kind, kinds[kind].model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} is not a whole run file: {where}: {first['msg']}", "measure again with --json") from None


def looks_like_run(path: str | Path) -> bool:
    """Whether a file begins as a run file does: its first keys name a schema version and a kind."""
    try:
        with Path(path).open("rb") as raw:
            begin = raw.read(4096)
        if begin[:2] == b"\x1f\x8b":
            begin = zlib.decompressobj(31).decompress(begin, 4096)
    except (OSError, ValueError, zlib.error):
        return False
    return b'"schema_version"' in begin and b'"kind"' in begin and b"traceEvents" not in begin


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = _unpacked(raw)
        found = json.loads(raw)
    except (zlib.error, gzip.BadGzipFile, EOFError):
        raise UserError(f"{path} is cut short or damaged: its gzip data does not end well", "copy it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "name a run file, as --json writes it") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not valid JSON: {ascii(str(error))[1:-1][:120]}", "name a run file, as --json writes it"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is JSON, but not a run file", "write one with --json PATH")
    return found


def _unpacked(raw: bytes) -> bytes:
    """Whole, and no more than a run file can hold."""
    unpacking = zlib.decompressobj(31)
    found = unpacking.decompress(raw, LARGEST)
    if not unpacking.eof:
        raise zlib.error
    return found
