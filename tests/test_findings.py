"""The catalog of findings and the code that makes findings agree: known codes, the facts of each sentence, valid levels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from string import Formatter
from typing import Any, get_args

import pytest

from gemmscope.errors import MissingFactError
from gemmscope.findings import Finding, Level, catalog, finding, sentence
from gemmscope.interval import Interval
from support.sources import PACKAGE, TREES


def fields(text: str) -> dict[str, str]:
    """The facts that a sentence uses, with their formats."""
    return {name: spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None}


def calls() -> Iterator[tuple[str, str, set[str], bool]]:
    """Calls of `finding` with a literal code and rows of `Notes`: where, code, names of the facts, whether there are others."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "finding" and node.args:
                codes = [node.args[0].body, node.args[0].orelse] if isinstance(node.args[0], ast.IfExp) else [node.args[0]]
                names = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                others = any(keyword.arg is None for keyword in node.keywords)
                for code in codes:
                    if isinstance(code, ast.Constant):
                        yield f"{path.relative_to(PACKAGE)}:{node.lineno}", str(code.value), names, others
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.annotation) == "Notes":
                for code, value in zip(node.value.keys, node.value.values, strict=True):
                    assert isinstance(code, ast.Constant)
                    assert isinstance(value, ast.Tuple)
                    facts = value.elts[1]
                    assert isinstance(facts, ast.Dict)
                    names = {str(name.value) for name in facts.keys if isinstance(name, ast.Constant)}
                    yield f"{path.relative_to(PACKAGE)}:{code.lineno}", str(code.value), names, None in facts.keys


CALLS = list(calls())


@pytest.mark.parametrize(("where", "code", "names", "others"), CALLS, ids=[f"{where} {code}" for where, code, _, _ in CALLS])
def test_calls_name_a_known_code_with_the_facts_of_its_sentence(where: str, code: str, names: set[str], others: bool) -> None:
    assert code in catalog(), where
    assert others or set(fields(catalog()[code]["text"])) <= names, where


def test_every_code_is_used() -> None:
    used = {node.value for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(catalog()) - used == set()


def example(spec: str) -> Any:
    """A fact that this format takes."""
    if spec == "x":
        return Interval(1.5, 1.4, 1.6)
    return "name" if spec == "" else ["name"] if spec == "kernel" else 2


@pytest.mark.parametrize("code", catalog())
def test_every_sentence_can_be_written(code: str) -> None:
    entry = catalog()[code]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)
    assert entry.keys() == {"level", "text"}
    assert entry["level"] in get_args(Level)
    facts = {name: example(spec) for name, spec in fields(entry["text"]).items()}
    text = sentence(Finding(code, entry["level"], facts))
    assert text == finding(code, **facts).text
    assert not re.search(r"[{}‹›]", text)
    assert text.endswith((".", "?", "!"))
    assert not re.search(r"\bproducts?\b", text), "LANGUAGE.md: GEMM"


def test_facts_are_formatted() -> None:
    assert finding("linears-replicated", ops=["a", "b"]).text.endswith("same a, b.")
    assert finding("convolutions", count=1).text.endswith(": 1 convolution.")
    assert "‹" not in finding("accumulation-reset", assumed=1).text
    assert "--gradient-accumulation" in finding("accumulation-reset", assumed=1).text


def test_an_interval_of_a_run_file_is_an_interval_again() -> None:
    read = Finding("nothing-measured", "warning", {"speedup": {"value": 1.5, "low": 1.4, "high": None}})  # type: ignore[dict-item]
    assert read.facts["speedup"] == Interval(1.5, 1.4, None)


def test_an_unknown_code_is_a_mistake() -> None:
    with pytest.raises(MissingFactError, match="no-such-code"):
        finding("no-such-code")
