"""Makes a profiler trace small: keeps what explains a step and drops the rest.

Kept are GPU work, the calls that launched it, the operators of those calls (with the shapes of their inputs), functions of
frameworks, step marks and annotations. Python frames, allocator events, arrows and PyTorch operators that launched nothing are
dropped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemmscope.explain.stream import EventStream

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
MARKS = frozenset({"user_annotation"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
LAUNCH_WORDS = ("Launch", "Memcpy", "Memset", "Synchronize")
KEPT_ARGUMENTS = (
    "External id", "correlation", "stream", "device", "Input Dims", "Input type", "Sequence number", "Fwd thread id",
    "Collective name", "In msg nelems", "Group size", "dtype",
)  # fmt: skip
KEPT_HEAD = ("schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds", "gemmscope")


def slim(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a whole trace that `gemmscope explain` reads.

    >>> kept = {"ph": "X", "cat": "kernel", "name": "nvjet", "ts": 1.23456, "dur": 2.0, "args": {"stream": 7, "grid": [1]}}
    >>> slim({"traceEvents": [kept, {"ph": "X", "cat": "python_function", "name": "f", "ts": 1, "dur": 9}]})["traceEvents"]
    [{'ph': 'X', 'cat': 'kernel', 'name': 'nvjet', 'ts': 1.235, 'dur': 2.0, 'args': {'stream': 7}}]
    """
    events = [event for event in raw.get("traceEvents", ()) if isinstance(event, dict)]
    wanted = {_arguments(event).get("External id") for event in events if event.get("cat") in GPU_CATEGORIES} - {None}
    kept = [_trimmed(event) for event in events if _explains(event, wanted)]
    return {**{key: raw[key] for key in KEPT_HEAD if key in raw}, "traceEvents": kept}


def slim_file(raw_path: Path, target: Path, facts: dict[str, Any]) -> None:
    """Write the small, gzipped form of a trace file, with facts about the run. Memory use is limited."""
    first = EventStream(raw_path)
    wanted = {_arguments(event).get("External id") for event in first if event.get("cat") in GPU_CATEGORIES} - {None}
    head = {"gemmscope": facts, **{key: value for key, value in first.head.items() if key in KEPT_HEAD}}
    with gzip.open(target, "wt", encoding="utf-8") as out:
        out.write(json.dumps(head, separators=(",", ":"))[:-1] + ',"traceEvents":[')
        separator = ""
        for event in EventStream(raw_path):
            if _explains(event, wanted):
                out.write(separator + json.dumps(_trimmed(event), separators=(",", ":")))
                separator = ","
        out.write("]}")


def _explains(event: dict[str, Any], wanted: Iterable[Any]) -> bool:
    category, name = event.get("cat"), str(event.get("name", ""))
    if event.get("ph") == "M":
        return name in ("process_name", "process_labels") and "Spans" not in str(event.get("args"))
    if event.get("ph") != "X":
        return False
    if category in GPU_CATEGORIES or category in MARKS:
        return True
    if category in LAUNCHES:
        return any(word in name for word in LAUNCH_WORDS)
    if category == "cpu_op":
        return not name.startswith("aten::") or name == "aten::linear" or _arguments(event).get("External id") in wanted
    return False


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _trimmed(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "M":
        return event
    small: dict[str, Any] = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid") if key in event}
    small.update({key: _rounded(event[key]) for key in ("ts", "dur") if key in event})
    arguments = {key: value for key, value in _arguments(event).items() if key in KEPT_ARGUMENTS and value not in ([], "", None)}
    return {**small, "args": arguments} if arguments else small


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
