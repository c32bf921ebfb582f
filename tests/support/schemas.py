"""Writes the JSON Schemas of the run files: ``python tests/support/schemas.py docs/schema``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import TypeAdapter

from gemmscope.results.base import SCHEMA_VERSION, Result
from gemmscope.results.read import KINDS

FILES: dict[str, type[Result]] = {f"{kind}-{SCHEMA_VERSION}.json": result for kind, result in KINDS.items()}


def schema_text(name: str) -> str:
    """The published JSON Schema of that file name."""
    schema = TypeAdapter(FILES[name]).json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


if __name__ == "__main__":
    for name in FILES:
        Path(sys.argv[1], name).write_text(schema_text(name), encoding="utf-8")
