"""Holds runs of the same thing against each other, row by row: faster, slower, or too close to call.

A row is judged by the interval of the *ratio* of its times. Three kinds of doubt go into it:

* within each run: the 95% interval that the run file states;
* between runs: the same measurement, repeated on the same GPU, comes out a little differently each time (`BETWEEN_RUNS`);
* many rows: of thirty, one or two would pass a 95% test by chance. Rows of one recipe and mode are timed in the same bursts and
  move together (on an H200 by the same 0.1 to 0.8%, within 0.4%), so they count as one test; intervals are widened so that all
  recipes, modes and runs hold together with 95% (Bonferroni). A run compared with itself is "too close to call" on every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from gemmscope.errors import UserError
from gemmscope.store.benchfile import BenchFile, IntervalRecord
from gemmscope.store.stepfile import StepFile

RunFile = BenchFile | StepFile
Verdict = Literal["faster", "slower", "too close to call", "missing"]
# Relative standard deviation of one run's figure about the truth, beyond what its own interval says. On an H200 the same bench,
# four times in a row, had times that varied by 0.49%, where their intervals say 0.35%: that leaves 0.34%.
BETWEEN_RUNS = 0.0035
CONFIDENCE = 0.95
_NORMAL = 1.959964


@dataclass(frozen=True)
class Key:
    """What a row is of. `what`: an op, or all linears, or the step."""

    what: str
    recipe: str
    mode: str

    def __str__(self) -> str:
        return " · ".join(part for part in (self.what, self.recipe, self.mode) if part)


@dataclass(frozen=True)
class Change:
    """From one run to another. `ratio`: new over old, above one is slower; the interval holds for all rows together."""

    ratio: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True)
class Line:
    """One row: its milliseconds in every run (None: not measured there), and the change from the first run to each other."""

    key: Key
    times_ms: tuple[float | None, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything. `environment`: what differs beside the times, as (name, value in each run)."""

    names: tuple[str, ...]
    lines: tuple[Line, ...]
    environment: tuple[tuple[str, tuple[str, ...]], ...]

    def failing(self, limit: float) -> list[Line]:
        """Rows that are slower beyond doubt, and not shown to be slower by less than `limit`; of the last run."""
        return [
            line
            for line in self.lines
            if line.changes and line.changes[-1].verdict == "slower" and line.changes[-1].high >= 1 + limit
        ]


def compare(runs: Sequence[RunFile], names: Sequence[str]) -> Comparison:
    """The first run is what the others are held against. They must be of one model, batch and command."""
    _refuse_strangers(runs, names)
    tables = [_times(run) for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    judged = len({(key.recipe, key.mode, number) for number, table in enumerate(tables) for key in table if number})
    wide = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(judged, 1))
    lines = [
        Line(
            key,
            tuple(table[key].value if key in table else None for table in tables),
            tuple(change(tables[0].get(key), table.get(key), wide) for table in tables[1:]),
        )
        for key in keys
    ]
    for number, name in enumerate(names[1:]):
        if all(line.changes[number].verdict == "missing" for line in lines):
            old, new = _recipes(tables[0]), _recipes(tables[number + 1])
            raise UserError(
                f"no row was measured in {names[0]} and in {name}: recipes {old}, and {new}",
                "measure the same recipes with both",
            )
    return Comparison(tuple(names), tuple(lines), tuple(_environment(runs)))


def _recipes(table: dict[Key, IntervalRecord]) -> str:
    return " ".join(dict.fromkeys(key.recipe for key in table)) or "none"


def change(old: IntervalRecord | None, new: IntervalRecord | None, wide: float) -> Change:
    """`wide`: how many standard errors the interval reaches on either side.

    >>> a, b = IntervalRecord(value=1.0, low=0.99, high=1.01), IntervalRecord(value=1.1, low=1.09, high=1.11)
    >>> change(a, b, 3.0).verdict, change(a, a, 3.0).verdict, change(a, None, 3.0).verdict
    ('slower', 'too close to call', 'missing')
    """
    if old is None or new is None or not (_is_time(old.value) and _is_time(new.value)):
        return Change(math.nan, math.nan, math.nan, "missing")
    ratio = new.value / old.value
    errors = [_error(each) for each in (old, new)]
    if any(error is None for error in errors):
        return Change(ratio, 0.0, math.inf, "too close to call")
    reach = wide * math.sqrt(sum((error or 0.0) ** 2 + BETWEEN_RUNS**2 for error in errors))
    low, high = ratio * math.exp(-reach), ratio * math.exp(reach)
    return Change(ratio, low, high, "slower" if low > 1 else "faster" if high < 1 else "too close to call")


def _is_time(value: float) -> bool:
    """What a clock may say: neither NaN, which damaged or foreign files hold, nor zero."""
    return 0 < value < math.inf


def _error(found: IntervalRecord) -> float | None:
    """The relative standard error that a 95% interval stands for."""
    if found.low is None or found.high is None:
        return None
    return (found.high - found.low) / 2 / found.value / _NORMAL


def _times(run: RunFile) -> dict[Key, IntervalRecord]:
    if isinstance(run, StepFile):
        return {Key("step", each.recipe, ""): each.step_ms for each in run.recipes}
    rows = {Key(row.op, row.recipe, row.mode): row.total_ms for row in run.rows}
    return rows | {Key("all linears", total.recipe, total.mode): total.total_ms for total in run.totals}


def _refuse_strangers(runs: Sequence[RunFile], names: Sequence[str]) -> None:
    first = runs[0]
    for run, name in zip(runs[1:], names[1:], strict=True):
        if run.kind != first.kind:
            raise UserError(
                f"{names[0]} is of {first.kind}, {name} of {run.kind}: they have no rows in common", "give two of a kind"
            )
        found = [words for words in (_sizes(first, run), _batches(first, run)) if words]
        if found:
            raise UserError(f"{names[0]} and {name} are not runs of the same thing: {'; '.join(found)}", "measure one with both")


def _sizes(first: RunFile, run: RunFile) -> str:
    if isinstance(first, BenchFile) and isinstance(run, BenchFile):
        sizes = [{(row.op, row.tokens, row.inputs, row.outputs, row.groups) for row in each.rows} for each in (first, run)]
        if {size[0] for size in sizes[0]} & {size[0] for size in sizes[1]}:
            both = [{size[0]: size[1:] for size in side} for side in sizes]
            for op in both[0].keys() & both[1].keys():
                if both[0][op] != both[1][op]:
                    old, new = ("x".join(str(size) for size in side[op][:3]) for side in both)
                    return f"{op} is {old} in one and {new} in the other"
            return ""
        return "no op is in both"
    if first.model is not None and run.model is not None:
        models = [
            (each.model.hidden_size, each.model.num_hidden_layers, each.model.layers) for each in (first, run) if each.model
        ]
        if models[0] != models[1]:
            described = [f"hidden size {hidden}, {layers} layers" for hidden, layers, _ in models]
            return f"the models differ ({described[0]}; {described[1]})"
    return ""


def _batches(first: RunFile, run: RunFile) -> str:
    if first.run is None or run.run is None:
        return ""
    before, after = first.run.model_dump(), run.run.model_dump()
    differing = [f"{name} {before[name]} and {after[name]}" for name in before if before[name] != after[name]]
    return ", ".join(differing)


def _environment(runs: Sequence[RunFile]) -> list[tuple[str, tuple[str, ...]]]:
    """What differs between the runs beside their times."""
    tables = [_facts(run) for run in runs]
    found = []
    for name in dict.fromkeys(key for table in tables for key in table):
        values = tuple(table.get(name, "") for table in tables)
        if len(set(values)) > 1 and not (name == "SM clock while measuring" and _near(values)):
            found.append((name, values))
    return found


def _facts(run: RunFile) -> dict[str, str]:
    facts = {"gemmscope": run.gemmscope_version, "GPU": str(run.device.get("name", ""))}
    facts |= {name: str(run.device.get(name, "")) for name in ("power_limit_w", "max_sm_mhz", "memory_bytes", "cuda")}
    facts |= {name: str(run.environment.get(name, "")) for name in ("driver", "python", "system", "cpus")}
    packages = run.environment.get("packages")
    facts |= {str(name): str(version) for name, version in (packages if isinstance(packages, dict) else {}).items()}
    facts |= dict(run.versions)
    settings = run.settings if isinstance(run.settings, dict) else run.settings.model_dump()
    facts |= {f"setting {name}": str(value) for name, value in settings.items() if name not in ("longest_s",)}
    facts |= _fallbacks(run)
    clocks = _clocks(run)
    if clocks:
        facts["SM clock while measuring"] = f"{sum(clocks) / len(clocks):.0f} MHz"
    return facts


def _fallbacks(run: RunFile) -> dict[str, str]:
    """Recipes in modes that ran in another precision than asked for: then it is that which differs, not how fast it is."""
    rows = run.rows if isinstance(run, BenchFile) else []
    fell = [row for row in rows if not row.note and any(proof.verdict == "fallback" for proof in row.evidence.values())]
    return {f"precision of {row.recipe}, {row.mode}": "FALLBACK" for row in fell}


def _clocks(run: RunFile) -> list[float]:
    series = run.tasks if isinstance(run, BenchFile) else run.variants
    found = [state.get("sm_mhz") for each in series for state in each.states]
    return [float(clock) for clock in found if isinstance(clock, (int, float)) and _is_time(clock)]


def _near(values: Sequence[str]) -> bool:
    """A clock moves by a per cent or two by itself."""
    found = [float(value.split()[0]) for value in values if value]
    return len(found) == len(values) and max(found) <= 1.02 * min(found)
