"""Compares measured sweeps point by point: the time of every recipe, faster, slower, or too close to call.

Each point is a measurement of its own, so every row counts as one test: intervals are widened for all of them together.
"""

from collections.abc import Sequence
from itertools import chain
from statistics import NormalDist

from gemmscope import units
from gemmscope.compare.rows import CONFIDENCE, RowKey, change, verdict_findings
from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.results.compare import ComparedRow, CompareResult, EnvironmentDifference
from gemmscope.results.sweep import SweepResult


def compare_sweeps(
    runs: Sequence[SweepResult], names: Sequence[str], *, limit: float | None = None, command: str = ""
) -> CompareResult:
    """Compare the first sweep with each of the others. They must vary the same sizes of the same thing."""
    for run, name in zip(runs[1:], names[1:], strict=True):
        if different := _difference(runs[0], run):
            raise UserError(f"{names[0]} and {name} are not sweeps of the same thing: {different}", "measure the same in both")
    tables = [_times(run) for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    tests = sum(len(table) for table in tables[1:])
    width = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(tests, 1))
    rows = tuple(
        ComparedRow(
            what=key.what,
            recipe=key.recipe,
            mode=key.mode,
            times_ms=tuple(table[key].value if key in table else None for table in tables),
            changes=tuple(change(tables[0].get(key), table.get(key), width) for table in tables[1:]),
        )
        for key in keys
    )
    for number, name in enumerate(names[1:]):
        if all(row.changes[number].verdict == "missing" for row in rows):
            raise UserError(f"{names[0]} and {name} have no point and recipe in common", "measure the same points in both")
    result = CompareResult(command=command, runs=tuple(names), rows=rows, differences=_differences(runs), limit=limit)
    return result.model_copy(update={"findings": tuple(verdict_findings(result))})


def _difference(first: SweepResult, other: SweepResult) -> str:
    """Why two sweeps cannot be compared; empty if they can."""
    sides = first, other
    if first.of != other.of:
        return f"one is of gemmscope {first.of}, the other of gemmscope {other.of}"
    sizes = [" and ".join(side.sweeps[0].sizes) for side in sides]
    if sizes[0] != sizes[1]:
        return f"one varies {sizes[0]}, the other {sizes[1]}"
    models = [(side.model.hidden_size, side.model.layers) if side.model is not None else None for side in sides]
    return f"the models differ ({first.name} and {other.name})" if models[0] != models[1] else ""


def _times(run: SweepResult) -> dict[RowKey, Interval]:
    return {
        RowKey(point.place if len(sweep.sizes) > 1 else f"{sweep.sizes[0]} {point.place}", name, sweep.mode): time
        for sweep in run.sweeps
        for point in sweep.points
        for name, time in point.times_ms.items()
    }


def _differences(runs: Sequence[SweepResult]) -> tuple[EnvironmentDifference, ...]:
    """What differs besides the times: types of GPUs, versions, and which GPU measured each point."""
    tables = [_facts(run) for run in runs]
    values = {name: tuple(table.get(name, "") for table in tables) for name in dict.fromkeys(chain(*tables))}
    values = {name: texts for name, texts in values.items() if len(set(texts)) > 1}
    chips = [{point.place: point.uuid or point.gpu for point in run.sweeps[0].points if not point.reason} for run in runs]
    moved = sum(any(chip.get(place) != where for chip in chips[1:] if place in chip) for place, where in chips[0].items())
    if moved:
        name = f"GPU, a different one at {units.counted(moved, 'point')}"
        values[name] = tuple(units.names(gpu.place for gpu in run.gpus) for run in runs)
    return tuple(EnvironmentDifference(name=name, values=texts) for name, texts in values.items())


def _facts(run: SweepResult) -> dict[str, str]:
    facts = {"gemmscope": run.gemmscope_version, "GPU": run.where, "backend": run.backend}
    facts |= {"setting precision": str(run.precision), "setting time limit": str(run.time_limit_s)}
    for name in dict.fromkeys(name for gpu in run.gpus for name in gpu.versions):
        facts[name] = ", ".join(dict.fromkeys(gpu.versions[name] for gpu in run.gpus if name in gpu.versions))
    return facts
