"""The sentences of documents and the code that writes them agree: known codes, the facts of each, none in the code itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from string import Formatter

import pytest

from gemmscope.document.common import phrases
from support.sources import PACKAGE, TREES

DOCUMENTS = {path: tree for path, tree in TREES.items() if path.parent == PACKAGE / "document"}
SENTENCE = re.compile(r"[a-z]{2,}\.( |$)")


def patterns(node: ast.expr) -> Iterator[str]:
    """The codes that an argument can have: `*` stands for what is filled in."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.IfExp):
        yield from (*patterns(node.body), *patterns(node.orelse))
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)


def calls() -> Iterator[tuple[str, str, set[str], bool]]:
    """Every call of `phrase`: where, the code or its pattern, its facts by name, and whether there are others (**facts)."""
    for path, tree in DOCUMENTS.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "phrase" and node.args:
                names = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                others = any(keyword.arg is None for keyword in node.keywords)
                for code in patterns(node.args[0]):
                    yield f"{path.name}:{node.lineno}", code, names, others


CALLS = list(calls())


@pytest.mark.parametrize(("where", "code", "names", "others"), CALLS, ids=[f"{where} {code}" for where, code, _, _ in CALLS])
def test_calls_name_a_known_code_with_the_facts_of_its_sentence(where: str, code: str, names: set[str], others: bool) -> None:
    known = [text for name, text in phrases().items() if fnmatchcase(name, code)]
    assert known, where
    for text in known if not others else ():
        assert {name for _, name, _, _ in Formatter().parse(text) if name is not None} <= names, where


def test_every_sentence_is_used() -> None:
    constants = {node.value for tree in DOCUMENTS.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    used = {code for _, code, _, _ in CALLS} | {str(value) for value in constants if isinstance(value, str)} | {"plan-rule-*"}
    assert [name for name in phrases() if not any(fnmatchcase(name, code) for code in used)] == []


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts in code, each part of a formatted one by itself, without docstrings and messages of errors."""
    aside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    raised = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in ("UserError", "ValueError")
    ]
    aside |= {id(part) for error in raised for part in ast.walk(error)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in aside:
            yield node.lineno, node.value


def test_no_sentence_is_in_the_code() -> None:
    lines = [
        f"{path.name}:{line}: {text}" for path, tree in DOCUMENTS.items() for line, text in texts(tree) if SENTENCE.search(text)
    ]
    assert lines == []
