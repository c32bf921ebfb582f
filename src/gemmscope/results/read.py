"""Reads run files back, plain or gzipped. Any problem with a file becomes one message."""

import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gemmscope.errors import UserError, shown
from gemmscope.reading import LIMITS, called, check_numbers, enough_memory, parse_json, read_bytes
from gemmscope.results.base import SCHEMA_VERSION, Result, command_of
from gemmscope.results.fleet import FleetGpu
from gemmscope.units import listed

KINDS = ["shapes", "bench", "step", "sweep", "forecast", "plan", "numerics", "explain", "compare", "fleet"]
LARGEST, MOST_VALUES = (LIMITS["run_file"][name] for name in ("bytes", "entries"))
LARGEST_FLEET, MOST_VALUES_OF_FLEET, MOST_VALUES_OF_GPU = (LIMITS["fleet"][name] for name in ("bytes", "entries", "gpu"))
FLEET = re.compile(rb'"kind"\s*:\s*"fleet"')
EXPECTED = "give a run file written by --json"
Validated = TypeVar("Validated")


def result_type(kind: str) -> type[Result]:
    """The type of the results of a kind. Its module is loaded when it is needed."""
    named: type[Result] = getattr(import_module(f"gemmscope.results.{kind}"), f"{kind.capitalize()}Result")
    return named


def read_result(path: str | Path, kinds: Collection[str] = KINDS) -> Result:
    """The result in a run file, if it is of one of these kinds; else a `UserError`."""
    with enough_memory(called(path)):
        return _result(path, kinds)


def _result(path: str | Path, kinds: Collection[str]) -> Result:
    data, values = _json(Path(path))
    path = called(path)
    kind, version = data.get("kind"), data.get("schema_version")
    if "traceEvents" in data:
        raise UserError(f"{path} is a profiler trace, not a run file", f"gemmscope explain {path}")
    if not isinstance(kind, str) or kind not in kinds:
        given = f"its kind is {shown(kind)}" if kind else "it has no kind"
        hint = "write one with --json PATH" + "; gemmscope report shows all kinds" * (isinstance(kind, str) and kind in KINDS)
        raise UserError(f"{path} is not a run file of {listed(kinds, 'or')}: {given}", hint)
    if version != SCHEMA_VERSION:
        older = isinstance(version, int) and version < SCHEMA_VERSION
        hint = f"run {command_of(kind)} again with --json" if older or version is None else "update gemmscope"
        raise UserError(f"{path} has schema version {shown(version)}; this gemmscope reads version {SCHEMA_VERSION}", hint)
    if kind == "fleet":
        data["gpus"] = _gpus(data.get("gpus"), path)
    elif values > MOST_VALUES:
        raise UserError(f"{path} is too large: it has more than {MOST_VALUES:,} values", EXPECTED)
    result = _validated(TypeAdapter(result_type(kind)), data, path, kind)
    result.note_file(path)
    return result


def _validated(adapter: TypeAdapter[Validated], data: Any, path: str, kind: str, prefix: str = "") -> Validated:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = prefix + ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} is damaged: {where}: {first['msg']}", f"run {command_of(kind)} again with --json") from None


def _gpus(gpus: Any, path: str) -> list[FleetGpu]:
    """The GPUs of a fleet, one by one: all errors of a file with millions of values would need gigabytes."""
    if not isinstance(gpus, list):
        raise UserError(f"{path} is damaged: gpus is not a list", "run gemmscope fleet again with --json")
    adapter = TypeAdapter(FleetGpu)
    validated = []
    for number, gpu in enumerate(gpus):
        if _count(gpu, MOST_VALUES_OF_GPU) > MOST_VALUES_OF_GPU:
            raise UserError(f"{path} is too large: gpus.{number} has more than {MOST_VALUES_OF_GPU:,} values", EXPECTED)
        validated.append(_validated(adapter, gpu, path, "fleet", f"gpus.{number}."))
    return validated


def _count(value: Any, most: int) -> int:
    """The number of values inside a value; counting stops beyond `most`."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    count = 1
    for item in inside:
        count += _count(item, most - count)
        if count > most:
            break
    return count


def _json(path: Path) -> tuple[dict[str, Any], int]:
    """The content of a file, and its number of values outside the GPUs of a fleet. What may be a fleet has larger limits."""
    raw = read_bytes(path, LARGEST_FLEET, EXPECTED, unpack=True)
    fleet = FLEET.search(raw) is not None
    if not fleet and len(raw) > LARGEST:
        raise UserError(f"{called(path)} is too large: it has more than {LARGEST:,} bytes", EXPECTED)
    most = MOST_VALUES_OF_FLEET if fleet else MOST_VALUES
    values = raw.count(b",")
    if values > most:
        raise UserError(f"{called(path)} is too large: it has more than {most:,} values", EXPECTED)
    data = parse_json(raw, path, EXPECTED, most_containers=most // 5)
    del raw
    if not isinstance(data, dict):
        raise UserError(f"{called(path)} is JSON, but not a run file", "write one with --json PATH")
    rest = _count({name: value for name, value in data.items() if name != "gpus"}, MOST_VALUES) if fleet else values
    if rest > MOST_VALUES:
        raise UserError(f"{called(path)} is too large: it has more than {MOST_VALUES:,} values", EXPECTED)
    check_numbers(data, path, EXPECTED)
    return data, values
