"""What a Document is made of. All of it is plain data and finished text, so that every writer shows the same numbers and words.

The short view is the answer with its reasons, the compact table (`summary`), and the messages that are not notes (`decisive`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from gemmscope.document.charts import BarChart, Chart, CurveChart, HeatCell, HeatMap, RankChart, ScatterChart, WaterfallChart
from gemmscope.document.table import Cell, Facts, Table
from gemmscope.errors import UserError
from gemmscope.findings import Finding, Level
from gemmscope.interval import Interval
from gemmscope.recipe.frameworks import frameworks
from gemmscope.text import printable

__all__ = [
    "BarChart", "Block", "Chart", "CurveChart", "Document", "HeatMap", "Message", "RankChart", "ScatterChart", "Section",
    "Table", "WaterfallChart",
]  # fmt: skip

Block = Table | Chart


@dataclass(frozen=True)
class Message:
    """A finding as text. `gpu`: if it is about only one of several GPUs, that GPU; the text then begins with its name."""

    code: str
    level: Level
    text: str
    gpu: str = ""

    @classmethod
    def of(cls, finding: Finding, gpu: str = "") -> Message:
        return cls(finding.code, finding.level, f"{gpu}: {finding.text}" if gpu else finding.text, gpu)


@dataclass(frozen=True)
class Section:
    """Tables and charts under one heading; `text` is a sentence or two below it; `gpu`: if it is about one of several."""

    title: str
    blocks: tuple[Block, ...]
    text: str = ""
    gpu: str = ""

    def tables(self) -> list[Table]:
        """Every table, those of charts included; if it is about one GPU of several, their names begin with it."""
        tables = [block if isinstance(block, Table) else block.table() for block in self.blocks]
        return [table.of(self.gpu) for table in tables] if self.gpu else tables


@dataclass(frozen=True)
class Advice:
    """What to use, and the text to paste: framework → text."""

    text: str
    ready_to_paste: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KeyFigure:
    """A number that belongs to the answer: its name, its text, and its interval or a few words on it."""

    name: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Card:
    """A cause of lost time: what it costs, the speedup if it is fixed, how to fix it, and the evidence."""

    title: str
    cost: str
    speedup: str
    remedy: tuple[str, ...]
    evidence: str
    where: str = ""


@dataclass(frozen=True)
class NamedSpeedup:
    """A speedup to show beside those of other runs: where it was measured, of what (linears, the step), in which recipe."""

    where: str
    what: str
    recipe: str
    speedup: Interval


@dataclass(frozen=True)
class NamedTime:
    """A time to compare with those of other GPUs and runs: where, of what, in which recipe. `tokens_per_s` is the rate of one
    GPU; `unit` says what it counts."""

    where: str
    what: str
    recipe: str
    time_ms: Interval
    tokens_per_s: float | None = None
    unit: str = "tokens"


@dataclass(frozen=True)
class Subject:
    """What a run was about, to tell whether two runs belong on one page. Sizes that are not known are left out."""

    title: str
    bare: bool = False
    model: Mapping[str, object] = field(default_factory=dict)
    batch: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """Everything that is shown about one result."""

    kind: str
    title: str
    subject: Subject
    where: str  # the GPU that it was measured on or is a forecast for
    answer: str  # one sentence
    because: tuple[str, ...] = ()
    key_figures: tuple[KeyFigure, ...] = ()
    summary: Table | None = None  # the one compact table of the short view
    cards: tuple[Card, ...] = ()
    context: tuple[str, ...] = ()  # batch and parallelism, backend, how the run ended
    sections: tuple[Section, ...] = ()
    messages: tuple[Message, ...] = ()
    advice: Advice | None = None
    facts: Mapping[str, Facts] = field(default_factory=dict)  # heading → names and values: method, environment
    speedups: tuple[NamedSpeedup, ...] = ()
    times: tuple[NamedTime, ...] = ()
    forecast: bool = False
    tag: str = ""  # shown as a mark on the page if the numbers are synthetic or a forecast
    next_purpose: str = ""  # what to do next
    next_command: str = ""  # the command that does it
    name: str = ""  # of the run file, where there is one

    def settings_for(self, framework: str) -> str:
        """The settings of the recommendation for a framework; a `UserError` if there are none."""
        known, title = self.advice.ready_to_paste if self.advice is not None else {}, frameworks()[framework].title
        if title not in known:
            why = f"there are settings for {', '.join(known)}" if known else f"nothing to set: {self.answer}"
            raise UserError(f"there are no settings for {title}", why)
        return known[title]

    def tables(self) -> list[Table]:
        """Every table, those of charts included, in reading order."""
        return [table for section in self.sections for table in section.tables()]

    def charts(self) -> list[Chart]:
        """Every chart, in reading order."""
        return [block for section in self.sections for block in section.blocks if not isinstance(block, Table)]


def decisive(document: Document) -> tuple[Message, ...]:
    """The messages of the short view: errors first, then warnings. Causes have cards, and the answer is not repeated."""
    warnings = [message for message in document.messages if message.level != "note" and message.text != document.answer]
    return tuple(
        sorted([message for message in warnings if not message.code.startswith("cause-")], key=lambda message: message.level)
    )


def visible(value: Any, keep: str = "", longest: int | None = None) -> Any:
    """A part of a Document with invisible characters written out: each text on one line, unless it is meant to have several.

    `longest`: the maximum length of each text. Values that need no change are returned as they are, not as copies.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, Cell):  # a fleet has hundreds of thousands of them
        text = visible(value.text, "", longest)
        return value if text == value.text else replace(value, text=text)
    if isinstance(value, str):
        text = printable(value, keep)
        return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"
    if isinstance(value, tuple):
        items = tuple(visible(item, keep, longest) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, Mapping):
        return {visible(name, "", longest): visible(item, keep, longest) for name, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    keep = "\n" if isinstance(value, (Advice, HeatCell)) else ""
    changed = {name: new for name, old in vars(value).items() if (new := visible(old, keep, longest)) is not old}
    return replace(value, **changed) if changed else value
