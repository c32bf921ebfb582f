"""The result of `gemmscope compare`: runs of the same thing, row by row."""

from typing import Literal

from gemmscope.interval import Interval
from gemmscope.results.base import Part, Result

Verdict = Literal["faster", "slower", "too close to call", "missing"]


class Change(Part):
    """The change from the first run to another. The ratio is new over old: above one is slower. Its interval holds for all rows
    together."""

    ratio: Interval | None
    """Null where one of the runs lacks the row."""
    verdict: Verdict

    @property
    def half_width(self) -> float:
        """Half the width of the interval; infinite where there is none."""
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return float("inf")
        return (self.ratio.high - self.ratio.low) / 2


class ComparedRow(Part):
    """One row: its milliseconds in every run (null: not measured there), and the change from the first run to each other."""

    what: str
    """An op, all linears, or the step."""
    recipe: str
    mode: str = ""
    times_ms: tuple[float | None, ...]
    changes: tuple[Change, ...]

    @property
    def name(self) -> str:
        return " · ".join(part for part in (self.what, self.recipe, self.mode) if part)


class EnvironmentDifference(Part):
    """Something besides the times that differs between the runs."""

    name: str
    values: tuple[str, ...]


class CompareResult(Result):
    """The result of `gemmscope compare`: runs compared row by row."""

    kind: Literal["compare"] = "compare"
    runs: tuple[str, ...]
    """The files, the oldest first."""
    rows: tuple[ComparedRow, ...]
    differences: tuple[EnvironmentDifference, ...] = ()
    """What differs in the environment, the settings and the precision that ran."""
    limit: float | None = None
    """The slowdown that --fail-if-slower allows."""

    def failing(self) -> list[ComparedRow]:
        """Rows of the last run that are slower beyond their interval, and not shown to be slower by less than the limit."""
        if self.limit is None:
            return []
        slower = [row for row in self.rows if row.changes and row.changes[-1].verdict == "slower"]
        return [row for row in slower if (ratio := row.changes[-1].ratio) and (ratio.high or 0.0) >= 1 + self.limit]

    def unresolved(self) -> list[ComparedRow]:
        """Rows of the last run that are too close to call, and too noisy to tell a slowdown of the limit from none.

        With a limit of zero there are none: it asks for certain slowdowns only.
        """
        if not self.limit:
            return []
        close = [row for row in self.rows if row.changes and row.changes[-1].verdict == "too close to call"]
        return [row for row in close if row.changes[-1].half_width > self.limit]
