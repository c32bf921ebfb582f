"""The run file's published schema is what the code writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gemmscope.store.runfile import ShapesFile
from gemmscope.store.schema import schema_text

SCHEMA = Path(__file__).parent.parent / "docs" / "schema" / "shapes-1.json"


def test_published_schema_is_current() -> None:
    assert SCHEMA.read_text() == schema_text(), "run: make schema"


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        ShapesFile.model_validate_json('{"surprise": 1}')
