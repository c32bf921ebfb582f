"""Writes the JSON Schemas of the run files: ``python -m gemmscope.store.schema docs/schema``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from gemmscope.store.benchfile import BenchFile
from gemmscope.store.explainfile import ExplainFile
from gemmscope.store.forecastfile import ForecastFile
from gemmscope.store.runfile import ShapesFile
from gemmscope.store.stepfile import StepFile

FILES: dict[str, type[BaseModel]] = {
    "shapes-1.json": ShapesFile,
    "bench-1.json": BenchFile,
    "step-1.json": StepFile,
    "explain-1.json": ExplainFile,
    "forecast-1.json": ForecastFile,
}


def schema_text(name: str) -> str:
    """The published JSON Schema of that name."""
    schema = FILES[name].model_json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


if __name__ == "__main__":
    for name in FILES:
        Path(sys.argv[1], name).write_text(schema_text(name), encoding="utf-8")
