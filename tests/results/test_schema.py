"""The published JSON Schemas are those of the result types."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gemmscope.results.shapes import ShapesResult
from support.schemas import FILES, schema_text

SCHEMAS = Path(__file__).parent.parent.parent / "docs" / "schema"


@pytest.mark.parametrize("name", FILES)
def test_published_schemas_are_current(name: str) -> None:
    assert (SCHEMAS / name).read_text() == schema_text(name), "run: make schema"


def test_no_schema_of_an_old_version_is_published() -> None:
    assert {path.name for path in SCHEMAS.iterdir()} == set(FILES)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        ShapesResult.model_validate_json('{"surprise": 1}')
