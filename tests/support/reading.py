"""Checks for every reader: any text becomes a source that later stages can use, or a message."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from gemmscope.errors import UserError
from gemmscope.findings import Fact, Finding
from gemmscope.model.spec import RUN_SETTINGS, ModelSource, ModelSpec, RunSpec


class HasFindings(Protocol):
    @property
    def findings(self) -> tuple[Finding, ...]: ...


def codes(source: HasFindings) -> list[str]:
    """The codes of its findings, in order."""
    return [finding.code for finding in source.findings]


def facts(source: HasFindings, code: str) -> dict[str, Fact]:
    """The facts of the one finding of this code."""
    (finding,) = (finding for finding in source.findings if finding.code == code)
    assert finding.text  # it has a sentence
    return dict(finding.facts)


def checked(reader: Any, text: str) -> ModelSource | None:
    """Read a text; None where the reader refuses it with a message. Anything else it raises is a defect."""
    reader.recognises(text)
    try:
        source: ModelSource = reader.read(text, "file")
    except UserError:
        return None
    assert isinstance(source.model, ModelSpec)
    assert set(source.run_settings) <= set(RUN_SETTINGS)
    RunSpec(**{"micro_batch_size": 1, "sequence_length": 8, **source.run_settings})
    return source


@contextmanager
def in_little_memory() -> Iterator[None]:
    """A few lines of text must not expand into a huge model."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
