"""Which kinds of run files a report can show, and whether several of them belong on one page.

A new kind is a line in `KINDS`: the class that its files must fit, and the function that makes parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gemmscope.errors import UserError
from gemmscope.report.page.from_bench import from_bench
from gemmscope.report.page.from_explain import from_explain
from gemmscope.report.page.from_forecast import from_forecast
from gemmscope.report.page.from_shapes import from_shapes
from gemmscope.report.page.from_step import from_step
from gemmscope.report.page.parts import Finding, Report, RunPart
from gemmscope.store.benchfile import BenchFile
from gemmscope.store.explainfile import ExplainFile
from gemmscope.store.forecastfile import ForecastFile
from gemmscope.store.read import read_kind
from gemmscope.store.runfile import ShapesFile
from gemmscope.store.stepfile import StepFile

MOST_RUNS = 8  # that a page can show side by side


@dataclass(frozen=True)
class Kind:
    """What a file of this kind must fit, and what makes a part (or several) of it."""

    file: type[BaseModel]
    parts: Callable[[Any, str], RunPart | list[RunPart]]


KINDS: dict[str, Kind] = {
    "shapes": Kind(ShapesFile, from_shapes),
    "bench": Kind(BenchFile, from_bench),
    "step": Kind(StepFile, from_step),
    "forecast": Kind(ForecastFile, from_forecast),
    "explain": Kind(ExplainFile, from_explain),
}


def report_of(paths: Sequence[Path]) -> Report:
    """Read run files, see whether they belong together, and put them on one page."""
    runs: list[RunPart] = []
    names = _names(paths)
    for path in paths:
        runs += _parts(path, names[path])
    if not runs:
        raise UserError(f"there is nothing to show in {', '.join(map(str, paths))}")
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many for one page", f"up to {MOST_RUNS} stand side by side")
    for first, second in combinations(runs, 2):
        _must_belong_together(first, second)
    titled = next((run for run in runs if run.subject.model), runs[0])
    return Report(titled.subject.title, tuple(runs), tuple(_differing_batches(runs)))


def _parts(path: Path, name: str) -> list[RunPart]:
    kind, file = read_kind(path, {kind: known.file for kind, known in KINDS.items()})
    try:
        made = KINDS[kind].parts(file, name)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        # Some parts of a file are free in form (clocks, kernels, settings): what stands there may still be nonsense.
        why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is damaged: its numbers make no sense ({ascii(why)[1:-1][:120]})", "run it again with --json PATH"
        ) from error
    return made if isinstance(made, list) else [made]


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """File names, with their folder where two are alike."""
    names = [path.name for path in paths]
    return {path: path.name if names.count(path.name) == 1 else str(path) for path in paths}


def _must_belong_together(first: RunPart, second: RunPart) -> None:
    one, other = first.subject, second.subject
    if one.bare != other.bare and "explain" not in (first.kind, second.kind):
        model, bare = (second, first) if one.bare else (first, second)
        raise _apart(f"{model.name} is about a model, {bare.name} about bare products", model, bare)
    differing = [
        f"{name} {one.model[name]} against {other.model[name]}"
        for name in one.model
        if name in other.model and one.model[name] != other.model[name]
    ]
    if not differing and one.batch.get("tp") == other.batch.get("tp") and one.batch.get("ep") == other.batch.get("ep"):
        differing = [
            f"{op} of {_size(size)} against {_size(other.sizes[op])}"
            for op, size in one.sizes.items()
            if op in other.sizes and other.sizes[op] != size
        ]
    if differing:
        raise _apart(f"{first.name} and {second.name} are of different models: {', '.join(differing[:3])}", first, second)


def _apart(why: str, *runs: RunPart) -> UserError:
    each = " and ".join(f"gemmscope report {run.name}" for run in runs)
    return UserError(f"these runs do not belong on one page: {why}", f"make a report of each: {each}")


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} to {size[1]}"


def _differing_batches(runs: Sequence[RunPart]) -> list[Finding]:
    """Other batches may be compared on purpose; the reader must know."""
    batches: list[Mapping[str, object]] = [run.subject.batch for run in runs if run.subject.batch]
    if not batches:
        return []
    differing = [name for name in batches[0] if len({str(batch.get(name)) for batch in batches}) > 1]
    if not differing:
        return []
    listed = "; ".join(
        f"{run.name}: " + ", ".join(f"{name} {run.subject.batch[name]}" for name in differing)
        for run in runs
        if run.subject.batch
    )
    return [
        Finding("warning", f"the runs are of different batches or layouts, and their speedups are not of one thing ({listed})")
    ]
