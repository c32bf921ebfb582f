"""The run file's published schema is what the code writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gemmscope.store.runfile import ShapesFile
from gemmscope.store.schema import FILES, schema_text

SCHEMAS = Path(__file__).parent.parent.parent / "docs" / "schema"


@pytest.mark.parametrize("name", FILES)
def test_published_schemas_are_current(name: str) -> None:
    assert (SCHEMAS / name).read_text() == schema_text(name), "run: make schema"


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        ShapesFile.model_validate_json('{"surprise": 1}')
