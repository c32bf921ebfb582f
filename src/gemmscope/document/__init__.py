"""`document(result)` builds the Document of any result: with the function `KIND_document` of the module `document/KIND.py`.

A result is data, and may hold any text. A Document is for people: invisible characters are written out here, for every writer.
"""

from dataclasses import replace
from importlib import import_module

from gemmscope.document.model import Document, visible
from gemmscope.results.base import Result, damage_reported

ASSUMED = "batch-assumed"
"""The finding that stands above the answer, because the answer depends on it."""


def document(result: Result, name: str = "") -> Document:
    """Build the Document of a result. `name` is the name of the run file that it was read from."""
    build = getattr(import_module(f".{result.kind}", __name__), f"{result.kind}_document")
    with damage_reported(result):
        told: Document = build(result, name)
        assumed = tuple(entry.text for entry in result.findings if entry.code == ASSUMED)
        shown: Document = visible(replace(told, context=(*told.context, *assumed)))
    return shown
