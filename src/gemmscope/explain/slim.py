"""Makes a profiler trace small: keeps what explains a step and drops the rest.

Kept are GPU work, the calls that launched it, the operators of those calls (with the shapes of their inputs), functions of
frameworks, step marks and annotations. Python frames, allocator events, arrows and PyTorch operators that launched nothing are
dropped.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemmscope.explain.stream import EventStream
from gemmscope.explain.trace import ATTENTION_FORWARD, CONCRETE
from gemmscope.files import replacing, text_into

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
LAUNCH_NAMES = ("Launch", "Memcpy", "Memset", "Synchronize", "StreamWaitEvent", "Malloc", "Free", "HostAlloc")
KEPT_ARGUMENTS = (
    "External id", "correlation", "stream", "device", "Input Dims", "Input type", "Sequence number", "Fwd thread id",
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name", "Process Group Ranks",
    "Process Group Description",
)  # fmt: skip


def slim_file(raw_path: Path, target: Path, facts: dict[str, Any]) -> None:
    """Write the small, gzipped form of a trace file, with facts about the run. Memory use is limited."""
    first = EventStream(raw_path)
    wanted = {_external_id(event) for event in first if event.get("cat") in GPU_CATEGORIES} - {None}
    head = {**first.head, "gemmscope": facts}
    with replacing(target) as raw, text_into(raw, packed=True) as out:
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
    if category in (*GPU_CATEGORIES, "user_annotation"):
        return True
    if category in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        return any(part in name for part in LAUNCH_NAMES)
    if category == "cpu_op":
        forward = name.startswith(("aten::linear", "aten::conv"))  # which show that backward recomputes a layer
        return not name.startswith("aten::") or forward or _external_id(event) in wanted
    return False


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _external_id(event: dict[str, Any]) -> int | str | None:
    identifier = _arguments(event).get("External id")
    return identifier if isinstance(identifier, (int, str)) else None


def _trimmed(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "M":
        return event
    small: dict[str, Any] = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid") if key in event}
    times = {key: event[key] for key in ("ts", "dur") if key in event}
    small |= {key: round(time, 3) if isinstance(time, float) else time for key, time in times.items()}
    kept = (*KEPT_ARGUMENTS, CONCRETE) if ATTENTION_FORWARD.match(str(event.get("name"))) else KEPT_ARGUMENTS
    arguments = {key: value for key, value in _arguments(event).items() if key in kept and value not in ([], "", None)}
    return {**small, "args": arguments} if arguments else small
