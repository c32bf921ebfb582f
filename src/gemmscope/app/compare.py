"""`gemmscope compare`: runs of the same thing, row by row, for people and for CI."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from gemmscope.compare.rows import MeasuredResult, compare_runs
from gemmscope.errors import UserError, option
from gemmscope.results.base import damage_reported
from gemmscope.results.compare import CompareResult
from gemmscope.results.read import read_result


def compare(
    runs: Sequence[str | Path | MeasuredResult], *, fail_if_slower: float | None = None, command: str = ""
) -> CompareResult:
    """Compare results of bench or step, or their run files, the oldest first.

    `fail_if_slower`: the slowdown that is allowed, 0.03 for 3%; the result says whether it holds.
    """
    if len(runs) < 2:
        raise UserError("compare needs at least two runs", "gemmscope compare before.json after.json")
    if fail_if_slower is not None and not 0 <= fail_if_slower < 1:
        raise UserError(
            f"{option('fail_if_slower', fail_if_slower)} must be a share between 0 and 1, or a percentage such as 3%",
            f"for example {option('fail_if_slower', '0.03')}",
        )
    results = [cast(MeasuredResult, read_result(run, ("bench", "step"))) if isinstance(run, (str, Path)) else run for run in runs]
    names = [str(run) if isinstance(run, (str, Path)) else f"run {number}" for number, run in enumerate(runs, start=1)]
    with damage_reported(*results):
        return compare_runs(results, names, limit=fail_if_slower, command=command)
