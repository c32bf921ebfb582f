"""What a reader returns: the model, and whatever the same file says about the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmscope.findings import Finding
from gemmscope.model.spec import ModelSpec


@dataclass(frozen=True)
class ModelSource:
    """A model as it was found.

    `run_settings` are the `RunSpec` fields that the file gave (batch, sequence, parallel sizes); options typed by the user win
    over them. `findings` say what was assumed, ignored or left out. `model` is None where
    only tracing can tell the shapes: a module of the user's (`module`), or a `config` whose model type has no closed form.
    """

    origin: str
    model: ModelSpec | None
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    config: Mapping[str, Any] | None = None  # the Hugging Face config, for tracing the same model
    module: str | None = None  # file.py:factory
