"""The package's own sources, parsed once for all tests that look at them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "src" / "gemmscope"
WRITTEN = PACKAGE / "_version.py"  # by an installation
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if path != WRITTEN}
