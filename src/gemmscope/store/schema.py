"""Prints the JSON Schema of the run file: ``python -m gemmscope.store.schema > docs/schema/shapes-1.json``."""

from __future__ import annotations

import json
import sys

from gemmscope.store.runfile import ShapesFile


def schema_text() -> str:
    """The published JSON Schema."""
    schema = ShapesFile.model_json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
