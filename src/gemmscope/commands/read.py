"""Reads a run file of any kind; apart from `result.py`, because it loads the types of all of them."""

from pathlib import Path
from typing import Any

from gemmscope.errors import UserError
from gemmscope.results.read import read_result
from gemmscope.results.sweep import SweepResult

__all__ = ["continues", "read_result"]


def continues(result: SweepResult, path: Path) -> bool:
    """Whether the file holds an unfinished run of the same sweep, with no more points than this result."""
    try:
        old = read_result(path, ["sweep"])
    except UserError:  # not a run file of this sweep
        return False
    assert isinstance(old, SweepResult)
    return _subject(old) == _subject(result) and old.interrupted and old.sample_count <= result.sample_count


def _subject(result: SweepResult) -> tuple[Any, ...]:
    """What tells two sweeps apart."""
    sizes = [sweep.sizes for sweep in result.sweeps[:1]]
    return (result.of, result.origin, result.model, result.run, result.shape, result.wanted, sizes)
