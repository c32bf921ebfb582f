"""Compares runs of the same thing row by row: faster, slower, or too close to call.

A row is judged by the interval of the *ratio* of its times. Three kinds of uncertainty go into it:

* within each run: the 95% confidence interval in its result;
* between runs: the same measurement, repeated on the same GPU, differs a little each time (`BETWEEN_RUNS`);
* many rows: of thirty rows, one or two would fail a 95% test by chance. Rows of one recipe and mode are timed in the same bursts
  and move together (on an H200 by the same 0.1 to 0.8%, within 0.4%), so they count as one test; intervals are widened so that
  all recipes, modes and runs hold together with 95% (Bonferroni). A run compared with itself is "too close to call" in every row.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from statistics import NormalDist
from typing import NamedTuple

from gemmscope import units
from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.fleet.spread import NORMAL_95
from gemmscope.interval import Interval
from gemmscope.results.base import UNCOMPARED_SETTINGS
from gemmscope.results.bench import BenchResult
from gemmscope.results.compare import Change, ComparedRow, CompareResult, EnvironmentDifference, Verdict
from gemmscope.results.step import StepResult
from gemmscope.results.sweep import SweepResult

MeasuredResult = BenchResult | StepResult | SweepResult
# Relative standard deviation of the result of one run, beyond its own interval. On an H200 the times of one bench, run four
# times in a row, varied by 0.49%, where their intervals say 0.35%: that leaves 0.34%.
BETWEEN_RUNS = 0.0035
CONFIDENCE = 0.95
WHICH_CHIP = {"node": "node", "GPU UUID": "uuid", "CPU": "cpu"}
"""Facts that are compared where all runs have them: run files of older versions do not say which chip it was."""


class RowKey(NamedTuple):
    """What a row is about: an op, all linears, the step, or a point of a sweep; in a recipe and mode."""

    what: str
    recipe: str
    mode: str = ""


def compare_runs(
    runs: Sequence[MeasuredResult], names: Sequence[str], *, limit: float | None = None, command: str = ""
) -> CompareResult:
    """Compare the first run with each of the others. They must be about one model and batch, and of one kind."""
    first, swept = runs[0], isinstance(runs[0], SweepResult)
    for run, name in zip(runs[1:], names[1:], strict=True):
        if different := _different(first, run):
            what, same = ("sweeps", "the same") if swept else ("runs", "the same model and batch")
            raise UserError(f"{names[0]} and {name} are not {what} of the same thing: {different}", f"measure {same} in both")
    tables = [_times(run) for run in runs]
    later = [(number, key) for number, table in enumerate(tables) for key in table if number]
    # Every point of a sweep is a measurement of its own, and counts as one test.
    width = interval_width(len({(number, key if swept else (key.recipe, key.mode)) for number, key in later}))
    rows = tuple(
        ComparedRow(
            what=key.what,
            recipe=key.recipe,
            mode=key.mode,
            times_ms=tuple(table[key].value if key in table else None for table in tables),
            changes=tuple(change(tables[0].get(key), table.get(key), width) for table in tables[1:]),
        )
        for key in dict.fromkeys(chain(*tables))
    )
    for number, name in enumerate(names[1:]):
        if all(row.changes[number].verdict == "missing" for row in rows):
            if swept:
                raise UserError(f"{names[0]} and {name} have no point and recipe in common", "measure the same points in both")
            recipes = [" ".join(dict.fromkeys(key.recipe for key in tables[side])) or "none" for side in (0, number + 1)]
            raise UserError(
                f"{names[0]} and {name} have no row in common: the recipes are {' and '.join(recipes)}",
                "measure the same recipes in both",
            )
    return with_verdict(CompareResult(command=command, runs=tuple(names), rows=rows, differences=_differences(runs), limit=limit))


def interval_width(tests: int) -> float:
    """How many standard errors an interval extends on either side, if so many hold together."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(tests, 1))


def change(old: Interval | None, new: Interval | None, width: float) -> Change:
    """The change of one row. `width`: how many standard errors the interval extends on either side.

    >>> a, b = Interval(1.0, 0.99, 1.01), Interval(1.1, 1.09, 1.11)
    >>> change(a, b, 3.0).verdict, change(a, a, 3.0).verdict, change(a, None, 3.0).verdict
    ('slower', 'too close to call', 'missing')
    """
    if old is None or new is None or not (_is_time(old.value) and _is_time(new.value)):
        return Change(ratio=None, verdict="missing")
    ratio = new.value / old.value
    known = [(time.high - time.low, time.value) for time in (old, new) if time.low is not None and time.high is not None]
    if len(known) < 2:
        return judged(Interval(ratio))
    errors = [width_ms / 2 / value / NORMAL_95 for width_ms, value in known]  # relative standard errors
    reach = width * math.sqrt(sum(error**2 + BETWEEN_RUNS**2 for error in errors))
    return judged(Interval(ratio, ratio * math.exp(-reach), ratio * math.exp(reach)))


def judged(ratio: Interval) -> Change:
    """The change with this ratio of new over old time; too close to call where it has no interval."""
    verdict: Verdict = "slower" if ratio.above_one else "faster" if ratio.below_one else "too close to call"
    return Change(ratio=ratio, verdict=verdict)


def _is_time(value: float) -> bool:
    """Whether this is a valid time: neither NaN, as in damaged files, nor zero."""
    return 0 < value < math.inf


def _times(run: MeasuredResult) -> dict[RowKey, Interval]:
    if isinstance(run, StepResult):
        return {RowKey("step", time.recipe): time.step_ms for time in run.step.recipes}
    if isinstance(run, SweepResult):
        return {
            RowKey(point.place if len(sweep.sizes) > 1 else f"{sweep.sizes[0]} {point.place}", name, sweep.mode): time
            for sweep in run.sweeps
            for point in sweep.points
            for name, time in point.times_ms.items()
        }
    ops = {RowKey(cell.op, cell.recipe, cell.mode): cell.total_ms for cell in run.linears.ops}
    return ops | {RowKey("all linears", total.recipe, total.mode): total.total_ms for total in run.linears.totals}


def with_verdict(result: CompareResult) -> CompareResult:
    """The result with findings before those that it has: how many rows of the last run changed, and whether they are within the
    limit."""
    verdicts = [row.changes[-1].verdict for row in result.rows]
    slower, faster, close = (verdicts.count(verdict) for verdict in ("slower", "faster", "too close to call"))
    findings = [
        finding("compare-changed", slower=slower, faster=faster, close=close)
        if slower or faster
        else finding("compare-equal", rows=close)
    ]
    if missing := verdicts.count("missing"):
        findings.append(finding("compare-missing", rows=missing))
    if result.limit is not None:
        limit = f"{100 * result.limit:.3g}%"
        ratios = {row.name: ratio.value for row in result.failing() if (ratio := row.changes[-1].ratio)}
        if ratios:
            worst = max(ratios, key=lambda name: ratios[name])
            findings.append(finding("compare-too-slow", limit=limit, rows=len(ratios), worst=worst, change=ratios[worst] - 1))
        elif unresolved := result.unresolved():
            noisiest = max(unresolved, key=lambda row: row.changes[-1].half_width)
            width, count = noisiest.changes[-1].half_width, len(unresolved)
            spread = f"±{100 * width:.{0 if width >= 0.1 else 1}f}%" if math.isfinite(width) else "interval unknown"
            findings.append(
                finding("compare-too-noisy", limit=limit, rows=count, of=len(result.rows), noisiest=noisiest.name, spread=spread)
            )
        else:
            findings.append(finding("compare-within-limit", limit=limit))
    return result.model_copy(update={"findings": (*findings, *result.findings)})


def _different(first: MeasuredResult, run: MeasuredResult) -> str:
    """Why two runs of one kind cannot be compared; empty if they can."""
    if isinstance(first, SweepResult) and isinstance(run, SweepResult):
        return _different_sweeps(first, run)
    return "; ".join(filter(None, (_different_sizes(first, run), _different_runs(first, run))))


def _different_sizes(first: MeasuredResult, run: MeasuredResult) -> str:
    if isinstance(first, BenchResult) and isinstance(run, BenchResult):
        before, after = (
            {case.op: (case.tokens, case.inputs, case.outputs, len(case.rows)) for case in side.linears.cases}
            for side in (first, run)
        )
        common = [op for op in before if op in after]
        op = next((op for op in common if before[op] != after[op]), None)
        if op is None:
            return "" if common else "no op is in both"
        sizes = ("x".join(map(str, side[op][:3])) for side in (before, after))
        return f"{op} is {' in one and '.join(sizes)} in the other"
    models = [side.model for side in (first, run) if side.model is not None]
    if len({(model.hidden_size, model.num_hidden_layers, model.layers) for model in models}) < 2:
        return ""
    texts = (f"hidden size {model.hidden_size}, {model.num_hidden_layers} layers" for model in models)
    return f"the models differ ({'; '.join(texts)})"


def _different_runs(first: MeasuredResult, run: MeasuredResult) -> str:
    settings = [
        {**asdict(side.run), "pp_stage": side.stage, "etp": side.run.expert_tp}
        for side in (first, run)
        if not isinstance(side, SweepResult) and side.run is not None
    ]
    if len(settings) < 2:
        return ""
    before, after = settings
    return ", ".join(f"{name} {before[name]} and {after[name]}" for name in before if before[name] != after[name])


def _different_sweeps(first: SweepResult, other: SweepResult) -> str:
    sides = first, other
    if first.of != other.of:
        return f"one is of gemmscope {first.of}, the other of gemmscope {other.of}"
    sizes = [" and ".join(side.sweeps[0].sizes) for side in sides]
    if sizes[0] != sizes[1]:
        return f"one varies {sizes[0]}, the other {sizes[1]}"
    models = [(side.model.hidden_size, side.model.layers) if side.model is not None else None for side in sides]
    return f"the models differ ({first.name} and {other.name})" if models[0] != models[1] else ""


def differing(tables: Sequence[dict[str, str]]) -> dict[str, tuple[str, ...]]:
    """The facts that differ, of every run; empty where a run does not have one."""
    values = {name: tuple(table.get(name, "") for table in tables) for name in dict.fromkeys(chain(*tables))}
    return {name: texts for name, texts in values.items() if len(set(texts)) > 1}


def _differences(runs: Sequence[MeasuredResult]) -> tuple[EnvironmentDifference, ...]:
    """What differs between the runs besides their times."""
    values = {
        name: texts for name, texts in differing([_facts(run) for run in runs]).items() if all(texts) or name not in WHICH_CHIP
    }
    sweeps = [run for run in runs if isinstance(run, SweepResult)]
    chips = [{point.place: point.uuid or point.gpu for point in run.sweeps[0].points if not point.reason} for run in sweeps]
    before = chips[0] if chips else {}
    if moved := sum(any(chip.get(place) != where for chip in chips[1:] if place in chip) for place, where in before.items()):
        name = f"GPU, a different one at {units.counted(moved, 'point')}"
        values[name] = tuple(units.names(gpu.place for gpu in run.gpus) for run in sweeps)
    clocks = [_mean_clock(run) for run in runs]
    known = [clock for clock in clocks if clock is not None]
    if known and (len(known) < len(clocks) or max(known) > 1.02 * min(known)):  # a clock varies by a percent or two by itself
        values["SM clock while measuring"] = tuple(f"{clock:.0f} MHz" if clock is not None else "" for clock in clocks)
    return tuple(EnvironmentDifference(name=name, values=texts) for name, texts in values.items())


def _facts(run: MeasuredResult) -> dict[str, str]:
    if isinstance(run, SweepResult):
        facts = {"gemmscope": run.gemmscope_version, "GPU": run.where, "backend": run.backend}
        facts |= {"setting precision": str(run.precision), "setting time limit": str(run.time_limit_s)}
        for name in dict.fromkeys(name for gpu in run.gpus for name in gpu.versions):
            facts[name] = ", ".join(dict.fromkeys(gpu.versions[name] for gpu in run.gpus if name in gpu.versions))
        return facts
    environment = run.environment
    facts = {"gemmscope": run.gemmscope_version, "GPU": str(run.device.get("name", ""))}
    facts |= {name: str(run.device.get(key) or "") for name, key in WHICH_CHIP.items()}
    facts |= {name: str(run.device.get(name, "")) for name in ("power_limit_w", "max_sm_mhz", "memory_bytes", "cuda")}
    facts |= {name: str(getattr(environment, name)) for name in ("driver", "python", "system", "cpus")}
    facts |= environment.packages | run.versions
    settings = {name: value for name, value in asdict(run.settings).items() if name not in UNCOMPARED_SETTINGS}
    if isinstance(run, BenchResult):
        settings["precision"] = run.precision
        fallbacks = [cell for cell in run.linears.ops if cell.fallbacks]
        facts |= {f"precision of {cell.recipe}, {cell.mode}": "FALLBACK" for cell in fallbacks}
    return facts | {f"setting {name}": str(value) for name, value in settings.items()}


def _mean_clock(run: MeasuredResult) -> float | None:
    series = () if isinstance(run, SweepResult) else run.tasks if isinstance(run, BenchResult) else run.variants
    values = [state.get("sm_mhz") for result in series for state in result.states]
    clocks = [float(clock) for clock in values if isinstance(clock, (int, float)) and _is_time(clock)]
    return sum(clocks) / len(clocks) if clocks else None
