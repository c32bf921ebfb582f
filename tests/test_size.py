"""The size of the package: what is added is paid for by what is deleted."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.sources import TREES

MOST_STATEMENTS = 32_000
MOST_FILES = 340


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement but imports, docstrings and other bare strings: blank lines, long lines and comments count for nothing."""
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if isinstance(node, ast.stmt) and not is_text and not isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def test_statements_are_counted_without_imports_and_docstrings() -> None:
    text = '"""What it is."""\nimport os\n\nx = 1; y = 2\ndef f():\n    """What it does."""\n    if x:\n        return os\n'
    assert len(list(statements(ast.parse(text)))) == 5


def test_the_package_stays_small() -> None:
    count = sum(len(list(statements(tree))) for tree in TREES.values())
    assert count <= MOST_STATEMENTS, f"{count:,} statements: delete {count - MOST_STATEMENTS:,}"


def test_the_package_has_few_files() -> None:
    assert len(TREES) <= MOST_FILES
