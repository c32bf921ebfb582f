"""Recognizes files of other profilers, to say what they are and what to record instead."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from gemmscope.errors import UserError
from gemmscope.toml import load_data

MOST_NAMES = 200  # of categories and processes that are checked
OTHER_DEVICES = ("mtia_", "hpu_")  # categories of accelerators that are not GPUs


def reject_member(source: object, key: str) -> None:
    """Raise a `UserError` if only another profiler writes this member of the outermost object."""
    for file in _files():
        if file.get("member") == key:
            raise _error(source, file)


def reject_foreign(source: object, categories: Iterable[str], processes: Iterable[str]) -> None:
    """Raise a `UserError` if the categories of events or the names of processes are those of another profiler."""
    kinds, names = tuple(categories), tuple(processes)
    for file in _files():
        by_category = "category" in file and any(kind.startswith(file["category"]) for kind in kinds)
        by_process = "process" in file and any(re.search(file["process"], name) for name in names)
        if by_category or by_process:
            raise _error(source, file)


def _error(source: object, file: dict[str, Any]) -> UserError:
    return UserError(f"{source} is {file['is']}", file["instead"])


@cache
def _files() -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = load_data("gemmscope.explain", "foreign.toml")["file"]
    return files
