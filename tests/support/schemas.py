"""Writes the JSON Schemas of the run files: ``python tests/support/schemas.py docs/schema``."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gemmscope.results.base import SCHEMA_VERSION, Part, Result
from gemmscope.results.read import KINDS, result_type

FILES: dict[str, type[Result]] = {f"{kind}-{SCHEMA_VERSION}.json": result_type(kind) for kind in KINDS}


def schema_text(name: str) -> str:
    """The published JSON Schema of that file name."""
    schema = TypeAdapter(FILES[name]).json_schema(by_alias=True)
    parts = {part.__name__: part for part in _subclasses(Part)}
    for title, definition in (*schema["$defs"].items(), (FILES[name].__name__, schema)):
        if title in parts:
            _describe(definition, parts[title])
        definition["properties"].get("gemmscope_version", {}).pop("default", None)  # whatever is installed
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


def _describe(schema: dict[str, Any], part: type[Part]) -> None:
    """Add the docstrings of its fields. (Pydantic would read all sources for them whenever they are imported.)"""
    docstrings = {name: text for base in reversed(part.__mro__) for name, text in field_docstrings(base).items()}
    for name, field in part.model_fields.items():
        described = schema["properties"][field.alias or name]
        if name in docstrings:
            described.setdefault("description", docstrings[name])
        schema["properties"][field.alias or name] = dict(sorted(described.items()))


def _subclasses(base: type[Part]) -> list[type[Part]]:
    return [base, *(subclass for child in base.__subclasses__() for subclass in _subclasses(child))]


@cache
def field_docstrings(part: type) -> dict[str, str]:
    """The strings that stand below its fields."""
    if not issubclass(part, Part):
        return {}
    [tree] = ast.parse(inspect.getsource(part)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


if __name__ == "__main__":
    for name in FILES:
        Path(sys.argv[1], name).write_text(schema_text(name), encoding="utf-8")
