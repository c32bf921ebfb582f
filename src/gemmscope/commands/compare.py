"""`gemmscope compare`: runs of the same thing, row by row, for people and for CI."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from gemmscope.compare.fleets import compare_fleets
from gemmscope.compare.runs import MeasuredResult, compare_runs
from gemmscope.errors import UserError, option, reject
from gemmscope.results.base import Result, command_of, damage_reported
from gemmscope.results.compare import CompareResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.read import read_result
from gemmscope.run_context import PLAIN, RunContext

KINDS = ("bench", "step", "sweep", "fleet")  # with rows of times
Comparable = MeasuredResult | FleetResult


def compare(
    runs: Sequence[str | Path | Comparable], fail_if_slower: float | None = None, context: RunContext = PLAIN
) -> CompareResult:
    """Compare results of bench, step, their sweeps or fleet, or their run files, the oldest first.

    `fail_if_slower`: the slowdown that is allowed, 0.03 for 3%; the result says whether it holds.
    """
    wide = f"{option('fail_if_slower', fail_if_slower)} must be between 0 and 1, or a percentage such as 3%"
    reject(
        (len(runs) < 2, "compare needs at least two runs", "for example before.json and after.json"),
        (fail_if_slower is not None and not 0 <= fail_if_slower < 1, wide, f"for example {option('fail_if_slower', '0.03')}"),
    )
    names = [str(run) if isinstance(run, (str, Path)) else f"run {number}" for number, run in enumerate(runs, start=1)]
    results = [_measured(run, name) for run, name in zip(runs, names, strict=True)]
    kind = results[0].kind
    for name, result in zip(names, results, strict=True):
        if result.kind != kind:
            raise UserError(
                f"{names[0]} is a result of {command_of(kind)}, {name} of {command_of(result.kind)}: they cannot be compared",
                "compare results of the same kind",
            )
    with damage_reported(*results):
        compare_kind: Callable[..., CompareResult] = compare_fleets if kind == "fleet" else compare_runs
        return compare_kind(results, names, limit=fail_if_slower, command=context.command)


def _measured(run: str | Path | Result, name: str) -> Comparable:
    """A result that has rows to compare."""
    result = read_result(run, KINDS) if isinstance(run, (str, Path)) else run
    if result.kind not in KINDS:
        raise UserError(
            f"{name} is a result of {command_of(result.kind)}, and only bench, step, sweeps and fleet have times to compare"
        )
    return cast(Comparable, result)
