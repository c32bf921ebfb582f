"""What all results share: the schema version, the command, the findings, the model and how it was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic_core import PydanticSerializationError, to_json

from gemmscope import __version__
from gemmscope.errors import UserError, in_a_line
from gemmscope.findings import Finding
from gemmscope.gpu.environment import Environment
from gemmscope.interval import Interval
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.reading import without_surrogates
from gemmscope.text import visible_json

SCHEMA_VERSION: Literal[2] = 2
Origin = Literal["measured", "forecast"]


UNCOMPARED_SETTINGS = ("seed", "silence_s", "max_rounds", "for_nsight", "host")
"""Settings of a measurement in which runs of the same thing may differ."""
LONGEST_REPR = 160
"""The maximum length of the `repr` of a result, or of a part of one."""


def shortened(text: str, longest: int) -> str:
    """The text, cut to at most `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def short_repr(name: str, values: Mapping[str, Any]) -> str:
    """A value in one short line: numbers and texts as they are, collections by their length, parts by their name.

    >>> short_repr("Case", {"op": "MLP Up", "time": Interval(1.234567, 1.2, 1.3), "rows": (1, 2), "note": ""})
    "Case(op='MLP Up', time=1.235 [1.2, 1.3], rows=2 items)"
    """
    fields = [f"{field}={_brief(value)}" for field, value in values.items() if value not in (None, "", (), {}, [])]
    return shortened(f"{name}({', '.join(fields)})", LONGEST_REPR)


def _brief(value: Any) -> str:
    match value:
        case Interval(middle, low, high):
            return f"{middle:.4g}" + (f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else "")
        case tuple() | list() | dict():
            return f"{len(value)} item{'s' * (len(value) != 1)}"
        case float():
            return f"{value:.4g}"
    return shortened(repr(value), 40) if isinstance(value, (str, int)) else f"{type(value).__name__}(…)"


class Part(BaseModel):
    """A part of a result. Unknown keys are refused, so that a typo does not pass for data."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, defer_build=True)

    def __dir__(self) -> list[str]:
        """What it has of its own, for tab completion: pydantic's many methods are left out."""
        return [name for name in super().__dir__() if name.startswith("__") or not hasattr(BaseModel, name)]

    def __repr__(self) -> str:
        return short_repr(type(self).__name__, {name: getattr(self, name) for name in type(self).model_fields})


class Result(Part):
    """The fields that every result has."""

    schema_version: Literal[2] = SCHEMA_VERSION
    kind: str
    gemmscope_version: str = __version__
    command: str
    """The command line, or the Python call, that made this result."""
    findings: tuple[Finding, ...] = ()
    """What there is to know beside the numbers: code, level and facts."""
    _file: str = PrivateAttr(default="")

    def note_file(self, name: str) -> None:
        """Remember the run file that the result was read from, for messages."""
        self._file = name

    def has(self, code: str) -> bool:
        """Whether there is a finding of this code."""
        return any(finding.code == code for finding in self.findings)

    @property
    def sample_count(self) -> int | None:
        """How much was measured or computed, to tell which of two results holds more; None if that has no meaning."""
        return None

    def to_json(self) -> str:
        """The result as it is written to a run file."""
        try:
            text = self.model_dump_json(by_alias=True, indent=1)
        except PydanticSerializationError:  # lone surrogates, which JSON cannot hold
            whole = without_surrogates(self.model_dump(mode="json", by_alias=True))
            text = to_json(whole, indent=1, inf_nan_mode="null").decode()
        return visible_json(text) + "\n"

    def save(self, path: str | Path) -> None:
        """Write a file; its ending selects the format: .json, .md, .csv (every table), .html, or .png, .svg or .pdf (charts)."""
        _show().save(self, path)

    def __str__(self) -> str:
        return str(_show().text(self))

    def to_frame(self, table: str = "") -> Any:
        """Its main table as a pandas DataFrame, or the one with this name, such as "memory". Numbers are plain, and one with an
        interval has two more columns, `NAME low` and `NAME high`. Needs pandas."""
        return _show().frame(self, table)

    def to_frames(self) -> dict[str, Any]:
        """Every table as a pandas DataFrame, by its short name. Needs pandas."""
        frames: dict[str, Any] = _show().frames(self)
        return frames

    def __repr__(self) -> str:
        try:
            said = str(_show().answer(self))
        except Exception:  # of a damaged file: a repr never fails
            said = f"of {self.command!r}"
        return f"<{type(self).__name__}: {shortened(said, LONGEST_REPR - 30)}>"

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        return str(_show().notebook(self))


VALUE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)


@contextmanager
def damage_reported(*results: Result) -> Iterator[None]:
    """Name the run file if its values turn out to be invalid where they are used.

    Some parts of a file are free in form (clocks, kernels, settings), and rows may not belong together.
    """
    files = {result._file: result.kind for result in results if result._file}
    try:
        yield
    except UserError as error:
        if files and not any(file in error.message for file in files):
            raise UserError(f"{' or '.join(files)}: {error.message}", error.hint) from error
        raise
    except VALUE_ERRORS as error:
        if not files:
            raise
        reason = ascii(in_a_line(error))[1:-1][:120]
        raise UserError(
            f"{' or '.join(files)} is damaged: its values are not valid ({reason})",
            f"run {command_of(next(iter(files.values())))} again with --json",
        ) from error


def command_of(kind: str) -> str:
    """The command that makes results of a kind.

    >>> command_of("bench"), command_of("sweep")
    ('gemmscope bench', 'gemmscope bench or step with --sweep')
    """
    return "gemmscope bench or step with --sweep" if kind == "sweep" else f"gemmscope {kind}"


def _show() -> ModuleType:
    """The module that shows results. It imports them, so it is loaded when it is used."""
    return import_module("gemmscope.show")


class ModelSummary(Part):
    """The model of a result: its name, where it comes from, and its main sizes."""

    name: str
    model_type: str = ""
    source: str = ""
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    layers: str
    """The kinds of layers with their numbers, or "traced"."""
    description: str = ""
    """The sizes in one line."""

    @classmethod
    def of(cls, model: ModelSpec | None, name: str, origin: str) -> ModelSummary:
        """The summary of a model; of a traced one (`model` None) only its name is known."""
        if model is None:
            return cls(name=name, source=origin, layers="traced")
        return cls(
            name=model.name,
            model_type=model.model_type,
            source=model.source,
            hidden_size=model.hidden_size,
            num_hidden_layers=len(model.layers),
            layers=model.pattern(),
            description=model.describe(),
        )


class ModelResult(Result):
    """A result about a model, or about bare GEMMs (`model` is null)."""

    origin: str
    """Where the model came from: a file, a preset, the command line."""
    model: ModelSummary | None = None
    run: RunSpec | None = None
    """Batch and parallelism."""
    stage: int = 0
    """The pipeline stage that was analyzed."""

    @property
    def name(self) -> str:
        """What the result is about, in a title."""
        return self.model.name if self.model is not None else "GEMMs"


class OneGpuResult(ModelResult):
    """A measurement on one GPU, or on the CPU: of the linears, or of the training step."""

    environment: Environment
    device: dict[str, Any]
    versions: dict[str, str]
    fingerprint: str = ""
    """The same for runs that measure the same: --resume finds the journal by it, or the run file of a GPU."""
    interrupted: bool = False

    @property
    def where(self) -> str:
        """The name of the GPU."""
        return str(self.device.get("name", "this machine"))


@dataclass(kw_only=True, repr=False)
class Samples:
    """Samples burst by burst, and the GPU's state after each. `failure` says why there are none."""

    rounds_ms: list[list[float]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    failure_kind: str = ""

    def __repr__(self) -> str:
        return short_repr(type(self).__name__, vars(self))

    @property
    def sample_count(self) -> int:
        return sum(map(len, self.rounds_ms))

    @property
    def measured(self) -> bool:
        return bool(self.rounds_ms) and not self.failure

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed because it does not fit in the memory of the GPU."""
        return self.failure_kind in ("out of memory", "too large")

    @property
    def pending(self) -> bool:
        """Whether samples are still to come: there are none, and it did not fail."""
        return not self.rounds_ms and not self.failure
