"""Reads run files back, plain or gzipped. Whatever is wrong with one becomes one message."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gemmscope.errors import UserError, shown
from gemmscope.reading import called, enough_memory, parse_json, read_bytes
from gemmscope.results.base import SCHEMA_VERSION, Result
from gemmscope.results.bench import BenchResult
from gemmscope.results.compare import CompareResult
from gemmscope.results.explain import ExplainResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.plan import PlanResult
from gemmscope.results.shapes import ShapesResult
from gemmscope.results.step import StepResult

KINDS: dict[str, type[Result]] = {
    "shapes": ShapesResult,
    "bench": BenchResult,
    "step": StepResult,
    "forecast": ForecastResult,
    "plan": PlanResult,
    "explain": ExplainResult,
    "compare": CompareResult,
}
LARGEST = 64 << 20  # bytes: no run file comes near
MOST_VALUES = 600_000  # a run file of 6 MB has 200,000; each may be wrong, and then needs a kilobyte to say so
LARGEST_NUMBER = 1e30  # more than FLOPs or bytes of any training
DEEPEST = 50  # levels of lists and objects
EXPECTED = "name a run file, as --json writes it"


def read_result(path: str | Path, kinds: Collection[str] = tuple(KINDS)) -> Result:
    """The result in a run file, if it is of one of these kinds; else a `UserError`."""
    with enough_memory(called(path)):
        return _result(path, kinds)


def _result(path: str | Path, kinds: Collection[str]) -> Result:
    data = _json(Path(path))
    path = called(path)
    kind, version = data.get("kind"), data.get("schema_version")
    if "traceEvents" in data:
        raise UserError(f"{path} is a profiler trace, not a run file", f"gemmscope explain {path}")
    if not isinstance(kind, str) or kind not in kinds:
        *most, last = kinds
        given = f"its kind is {shown(kind)}" if kind else "it has no kind"
        raise UserError(f"{path} is not a run file of {', '.join(most)} or {last}: {given}", "write one with --json PATH")
    if version != SCHEMA_VERSION:
        older = isinstance(version, int) and version < SCHEMA_VERSION
        hint = f"run gemmscope {kind} again with --json" if older or version is None else "update gemmscope"
        raise UserError(f"{path} has schema version {shown(version)}; this gemmscope reads version {SCHEMA_VERSION}", hint)
    try:
        result = TypeAdapter(KINDS[kind]).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} is damaged: {where}: {first['msg']}", f"run gemmscope {kind} again with --json") from None
    result.note_file(path)
    return result


def _json(path: Path) -> dict[str, Any]:
    raw = read_bytes(path, LARGEST, EXPECTED, unpack=True)
    if raw.count(b",") > MOST_VALUES:
        raise UserError(f"{called(path)} is too large: it has more than {MOST_VALUES:,} values", EXPECTED)
    data = parse_json(raw, path, EXPECTED, most_containers=MOST_VALUES // 5)
    if not isinstance(data, dict):
        raise UserError(f"{called(path)} is JSON, but not a run file", "write one with --json PATH")
    return {_plain(key, path): _plain(value, path) for key, value in data.items()}


def _plain(value: Any, path: Path, depth: int = 1) -> Any:
    """A value without halves of characters; a `UserError` for numbers and nesting that no result has."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:  # also NaN
        raise UserError(f"{called(path)} is damaged: {shown(value)} is not a number of a result", EXPECTED)
    if depth > DEEPEST:
        raise UserError(f"{called(path)} is damaged: it is nested too deeply", EXPECTED)
    if isinstance(value, list):
        return [_plain(item, path, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_plain(key, path): _plain(item, path, depth + 1) for key, item in value.items()}
    return value
