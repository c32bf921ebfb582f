"""Reads a run file back, plain or gzipped. Whatever is wrong with one is said in one message."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gemmscope.errors import UserError, shown
from gemmscope.store.runfile import SCHEMA_VERSION

LARGEST = 1 << 28  # bytes: no run file comes near
GZIP = b"\x1f\x8b"


def load_run(path: Path, kinds: Mapping[str, type[BaseModel]]) -> tuple[str, BaseModel]:
    """Its kind and what it holds. `kinds`: kind → the class that a file of that kind must fit."""
    found = _json(path)
    kind, version = found.get("kind"), found.get("schema_version")
    if "traceEvents" in found:
        raise UserError(f"{path} is a profiler's trace, not a run file", "write a run file with --json PATH")
    if not isinstance(kind, str) or kind not in kinds:
        given = f"of kind {shown(kind)}" if kind else "without a kind"
        raise UserError(
            f"{path} is JSON {given}, and no run file that a report can show",
            f"kinds that it can: {', '.join(kinds)}; --json writes them",
        )
    if version != SCHEMA_VERSION:
        older = isinstance(version, int) and version < SCHEMA_VERSION
        hint = "run it again with this gemmscope" if older or version is None else "update gemmscope"
        raise UserError(f"{path} is of schema version {shown(version)}; this gemmscope reads version {SCHEMA_VERSION}", hint)
    try:
        return kind, kinds[kind].model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{path} is damaged, or no {kind} run file: {where}: {first['msg']}", "run it again with --json PATH"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        if raw[:2] == GZIP:
            raw = _unpacked(raw)
    except zlib.error:
        raise UserError(f"{path} is damaged, or cut short: its gzip data does not end well", "copy it again") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", "name a run file, as --json writes it"
        ) from None
    if len(raw) > LARGEST:
        raise UserError(f"{path} is too large for a run file", "name a run file, as --json writes it")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        why = ascii(str(error))[1:-1][:120]
        raise UserError(
            f"{path} is damaged, or no run file: it is not valid JSON ({why})", "name a run file, as --json writes it"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is JSON, but no run file", "name a run file, as --json writes it")
    return found


def _unpacked(raw: bytes) -> bytes:
    """Not more than a run file can hold, however small the file is."""
    unpacking = zlib.decompressobj(31)
    found = unpacking.decompress(raw, LARGEST + 1)
    if not unpacking.eof and len(found) <= LARGEST:
        raise zlib.error
    return found
