"""What a report is made of, whatever was run: answers, bars, waterfalls, curves, tables, findings, facts, recommendations.

All of it is plain data and finished text, so that a page, a Markdown file and a figure show the same numbers in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemmscope.store.benchfile import IntervalRecord

Shade = Literal["plain", "light", "hatched"]
Level = Literal["alarm", "warning", "note"]
REST = -1  # the colour of what has none of its own


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; None where one round alone gave none."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(record: IntervalRecord) -> Estimate:
        return Estimate(record.value, record.low, record.high)

    @property
    def times(self) -> str:
        """As a speedup.

        >>> Estimate(1.6543, 1.6421, 1.6668).times, Estimate(2.0).times
        ('1.654x [1.642, 1.667]', '2.000x [?]')
        """
        return f"{self.value:.3f}x {self.interval}"

    @property
    def interval(self) -> str:
        return f"[{max(self.low, 0.0):.3f}, {self.high:.3f}]" if self.low is not None and self.high is not None else "[?]"

    @property
    def too_close(self) -> bool:
        """Whether it cannot be told which side is faster."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high

    @property
    def loses(self) -> bool:
        return self.high is not None and self.high < 1


Facts = tuple[tuple[str, str], ...]
"""What a hover or a list shows: names and values."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar. `colour` counts through the palette; `facts` are shown when it is pointed at."""

    name: str
    time_ms: float
    colour: int
    shade: Shade = "plain"
    facts: Facts = ()


@dataclass(frozen=True)
class Bar:
    """One recipe. Without segments it is a gap, and `note` says why; `alarm` stands where the speedup would."""

    label: str
    segments: tuple[Segment, ...] = ()
    gain: Estimate | None = None
    baseline: bool = False
    alarm: str = ""
    note: str = ""

    @property
    def total_ms(self) -> float:
        return sum(segment.time_ms for segment in self.segments)


@dataclass(frozen=True)
class Bars:
    """Stacked bars side by side, one for each recipe."""

    title: str
    words: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Fall:
    """One row of a waterfall: its time on both sides, and the speedup of everything down to it."""

    row: str
    baseline_ms: float
    recipe_ms: float
    speedup: float
    facts: Facts = ()


@dataclass(frozen=True)
class Waterfall:
    """From the products' speedup to the step's."""

    recipe: str
    baseline: str
    falls: tuple[Fall, ...]
    words: str = ""


@dataclass(frozen=True)
class Point:
    """A speedup somewhere along a curve."""

    at: str
    gain: Estimate
    facts: Facts = ()


@dataclass(frozen=True)
class Curve:
    """Speedups against a size: of shapes, or of batches. `series`: recipe → points; `order` gives each recipe its colour."""

    title: str
    words: str
    axis: str
    series: Mapping[str, tuple[Point, ...]]
    order: tuple[str, ...] = ()

    def colour(self, name: str) -> int:
        """The same in every picture of a run."""
        return self.order.index(name) if name in self.order else list(self.series).index(name)

    @property
    def places(self) -> list[str]:
        """Along the axis, in the order of the run."""
        return list(dict.fromkeys(point.at for points in self.series.values() for point in points))


@dataclass(frozen=True)
class Cell:
    """Of a table: its text, what it sorts by (None: its text), and whether it must not be overlooked."""

    text: str
    value: float | None = None
    level: Level | Literal[""] = ""


@dataclass(frozen=True)
class Table:
    """Rows that a reader may sort. `columns`: name → whether it holds numbers."""

    title: str
    columns: Mapping[str, bool]
    rows: tuple[tuple[Cell, ...], ...]
    words: str = ""


@dataclass(frozen=True)
class Finding:
    """What to know beside the numbers."""

    level: Level
    words: str


LOUD = ("emulated:", "unproven:", "not measured:", "not possible:", "does not fit:", "warning:", "HOST-BOUND")


def noted(words: str) -> Finding:
    """A sentence of a run file, as loud as it begins."""
    level: Level = "alarm" if words.startswith("FALLBACK") else "warning" if words.startswith(LOUD) else "note"
    return Finding(level, words)


@dataclass(frozen=True)
class Recommendation:
    """What to use, and the text to paste: framework → text."""

    words: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Gain:
    """A speedup to set beside other runs' ones: of what (linears, products, the step), in which recipe."""

    what: str
    recipe: str
    gain: Estimate


@dataclass(frozen=True)
class Subject:
    """What a run was about, to tell whether two runs belong together. A size that a run does not know is left out."""

    title: str
    bare: bool = False
    model: Mapping[str, object] = field(default_factory=dict)
    batch: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunPart:
    """Everything that a report says about one run."""

    kind: str
    name: str  # of the file, without its folder
    subject: Subject
    where: str  # it was measured, or which GPU it is a forecast for
    answer: str
    because: tuple[str, ...] = ()
    bars: tuple[Bars, ...] = ()
    waterfalls: tuple[Waterfall, ...] = ()
    curves: tuple[Curve, ...] = ()
    modes: Table | None = None
    ops: tuple[Table, ...] = ()
    tables: tuple[Table, ...] = ()
    gains: tuple[Gain, ...] = ()
    findings: tuple[Finding, ...] = ()
    method: Facts = ()
    environment: Facts = ()
    recommendation: Recommendation | None = None
    forecast: bool = False


@dataclass(frozen=True)
class Report:
    """One or several runs on one page."""

    title: str
    runs: tuple[RunPart, ...]
    findings: tuple[Finding, ...] = ()

    def label(self, run: RunPart) -> str:
        """How a run is called beside others: a letter, and where it ran; nothing if it is alone."""
        return f"{self.letter(run)} · {run.where}" if len(self.runs) > 1 else ""

    def letter(self, run: RunPart) -> str:
        index = next(place for place, each in enumerate(self.runs) if each is run)
        return chr(ord("A") + index)


def legend(bars: Sequence[Bars]) -> dict[str, int]:
    """The names in plain or light shade, with their colours, in the order they are stacked."""
    found: dict[str, int] = {}
    for bar in (bar for each in bars for bar in each.bars):
        for segment in bar.segments:
            if segment.shade != "hatched":
                found.setdefault(segment.name, segment.colour)
    return found


def how(report: Report) -> str:
    """The title of what was done: a forecast is no measurement."""
    forecasts = [run.forecast for run in report.runs]
    if all(forecasts):
        return "How it was forecast"
    return "How it was measured and forecast" if any(forecasts) else "How it was measured"
