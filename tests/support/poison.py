"""Results with hostile text in every string that a run file may contain.

Equal strings get equal poison, so that what refers to each other still does. Strings that a result does not accept (names of
passes, levels, codes, recipes that are looked up) stay as they are.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from string import Formatter
from typing import Any

from pydantic import ValidationError

from gemmscope.document import document
from gemmscope.errors import UserError
from gemmscope.findings import catalog
from gemmscope.recipe.recipes import recipes
from gemmscope.results.base import Result
from gemmscope.results.read import result_type

HOSTILE = (
    "<script>window.broken = 1</script>",
    '"><img src=x onerror="window.broken = 1">',
    "</script><svg onload=window.broken=1>",
    "javascript:window.broken=1",
    "{{7*7}}${7*7}<%= 7*7 %>",
    "'-window.broken-'\u2028\u2029",
    "](http://attacker.example/x) ![x](http://attacker.example/y.png) <http://attacker.example> www.attacker.example",
    "http://attacker.example/z `code` **bold** | cell | $x_1$ &lt;b&gt; \\",
    "\x1b[31m\x1b]0;title\x07\x9b2J\x08\r\x7f",
    "\u202e\u2066\u200b\ufeff\ud800",
    '=HYPERLINK("http://attacker.example")',
    "[bold red]markup[/bold red] [/]",
)
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def invisible(text: str, allowed: str = "\n\t") -> set[str]:
    """The characters in a text that nobody sees, and that do something to a terminal, a line or a file."""
    return {character for character in text if unicodedata.category(character) in INVISIBLE and character not in allowed}


@cache
def _field_names(kind: str) -> frozenset[str]:
    """Keys that are fields of a result, not data."""
    names: set[str] = set()

    def collect(schema: Any) -> None:
        if isinstance(schema, dict):
            names.update(schema.get("properties", {}))
            for value in schema.values():
                collect(value)
        elif isinstance(schema, list):
            for value in schema:
                collect(value)

    collect(result_type(kind).model_json_schema(by_alias=True))
    return frozenset(names | {"value", "low", "high"})


def _mapped(data: Any, change: Callable[[str], str], fields: frozenset[str]) -> Any:
    if isinstance(data, str):
        return change(data)
    if isinstance(data, list):
        return [_mapped(item, change, fields) for item in data]
    if isinstance(data, dict):
        return {
            name if name in fields or name in _facts() else change(name): _mapped(value, change, fields)
            for name, value in data.items()
        }
    return data


@cache
def _facts() -> frozenset[str]:
    """What the sentences of findings name, and what free tables are asked for: their keys are ours, not data."""
    named = {name for entry in catalog().values() for _, name, _, _ in Formatter().parse(entry["text"]) if name}
    return frozenset(named)


def poisoned(result: Result, poison: Callable[[str], str]) -> tuple[Result, set[str]]:
    """The result with everything poisoned that can be, and the strings that could not be."""
    clean, fields = json.loads(result.to_json()), _field_names(result.kind)
    refused = {result.kind, *catalog()}
    back: dict[str, str] = {}

    def change(text: str) -> str:
        if text in refused or not text:
            return text
        evil = poison(text)
        back[evil] = text
        return evil

    for _ in range(50):
        back.clear()
        data = _mapped(clean, change, fields)
        try:
            evil = type(result).model_validate(data)
            document(evil)
        except (UserError, KeyError) as error:  # a recipe that is looked up, a size that is
            wrong = set(recipes()) | {text for word, text in back.items() if word in error.args}
            assert wrong - refused, error
            refused |= wrong
        except ValidationError as error:
            wrong = {
                back[problem["input"]]
                for problem in error.errors()
                if isinstance(problem["input"], str) and problem["input"] in back
            }
            wrong |= {
                back[part] for problem in error.errors() for part in problem["loc"] if isinstance(part, str) and part in back
            }
            assert wrong - refused, error
            refused |= wrong
        else:
            return evil, refused
    raise AssertionError("no end of refusals")
