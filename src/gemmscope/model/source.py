"""What a reader returns: the model, and the run settings of the same file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmscope.findings import Finding
from gemmscope.model.spec import ModelSpec


@dataclass(frozen=True)
class ModelSource:
    """A model, and where it came from.

    `run_settings` are the `RunSpec` fields that the file gives (batch, sequence, parallel sizes); the user's own arguments
    override them. `findings` say what was assumed, ignored or not included. `model` is None where only a trace shows the shapes:
    the user's own `module`, or a `config` whose model type has no closed form.
    """

    origin: str
    model: ModelSpec | None
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    config: Mapping[str, Any] | None = None  # the Hugging Face config, for tracing the same model
    module: str | None = None  # file.py:factory
    global_batch: int | None = None  # sequences per step on all GPUs, where the file says
    framework: str = ""  # whose file it is, where that decides which recipes can be used
