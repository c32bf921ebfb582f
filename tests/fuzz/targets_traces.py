"""Traces with hostile events: explained, annotated, and slimmed."""

from __future__ import annotations

import gzip
import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.targets import Target, command_line
from gemmscope.explain.record_trace import slim_file
from support.traces import events_of, recorded, steady

SOURCES = ("steady", "recompute", "host_bound", "experts", "recast_weights", "syncs", "low_clock", "eager_torchao")
NUMBERS = [0, -1, 1, 0.0, 1e-9, 1e18, 1e19, 1e20, -1e18, 1e308, float("nan"), float("inf"), 10**400, 2**63, True, "12.5", "-3"]
TEXTS = [
    "", "x", "kernel", "ProfilerStep#1", "ProfilerStep", "Optimizer.step#A", "aten::mm", "\x1b[31m", "\ud800", "[/]", "{x}",
    "\u202e", "a\nb\r\x00", "x" * 20_000, "ncclDevKernel_AllReduce", "cudaStreamSynchronize", "nvjet_sm90_qqtst_", "<script>",
    "Memcpy HtoD",
]  # fmt: skip
OTHERS = [None, [], {}, [[]], [[1, 2], [2, 3]], {"": None}, [[10**400, 2]], [[-1, 0], [0, 5]], [["x"]]]
HOSTILE = st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.sampled_from(OTHERS)
FIELDS = st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "ts", "dur", "dur", "args"])
ARGUMENTS = st.sampled_from(
    ["stream", "device", "correlation", "External id", "Input Dims", "Input type", "Sequence number", "Collective name"]
)
WAYS = ["field", "argument", "drop field", "drop argument", "drop", "twice", "all", "all arguments", "of a kind"]
HEADS = st.dictionaries(
    st.sampled_from(["deviceProperties", "distributedInfo", "gemmscope", "schemaVersion", "kind", "schema_version", "x\x1b"]),
    HOSTILE
    | st.fixed_dictionaries({"rank": HOSTILE, "world_size": HOSTILE})
    | st.lists(st.fixed_dictionaries({"name": HOSTILE}), max_size=2)
    | st.fixed_dictionaries(
        {"clock": st.fixed_dictionaries({"max_sm_mhz": HOSTILE, "readings": st.just([{"sm_mhz": 1}]) | HOSTILE})}
    ),
    max_size=3,
)


@st.composite
def damages(draw: st.DrawFn) -> dict[str, Any]:
    """Which trace is damaged, and how."""
    changes = st.tuples(
        st.sampled_from(
            ["field", "argument", "drop field", "drop argument", "drop", "twice", "all", "all arguments", "of a kind"]
        ),
        st.integers(0, 10**6),
        FIELDS,
        ARGUMENTS,
        HOSTILE,
    )
    return {
        "trace": draw(st.sampled_from(SOURCES)),
        "changes": draw(st.lists(changes, max_size=6)),
        "head": draw(HEADS),
        "form": draw(st.sampled_from(["object", "array", "object", "cut", "gzip", "cut gzip", "flipped", "events last"])),
        "at": draw(st.integers(0, 10**7)),
        "options": draw(st.sampled_from([[], [], ["--steps", "1"], ["--steps", "3"], ["--steps", "10000000"], ["--detail"]])),
    }


@cache
def _source(name: str) -> str:
    return json.dumps({"traceEvents": steady().events} if name == "steady" else events_of(recorded(name)))


def damaged(value: dict[str, Any]) -> bytes:
    """The bytes of the damaged trace."""
    data = json.loads(_source(value["trace"]))
    for how, number, field, argument, hostile in value["changes"]:
        change(data["traceEvents"], how, number, field, argument, hostile)
    data = {**data, **value["head"]}
    if value["form"] == "events last":
        data["traceEvents"] = data.pop("traceEvents")
    raw = json.dumps(data["traceEvents"] if value["form"] == "array" else data).encode("utf-8", "surrogatepass")
    packed = gzip.compress(raw, 1, mtime=0)
    at = value["at"] % len(raw)
    if value["form"] == "flipped":
        return raw[:at] + bytes([raw[at] ^ 2]) + raw[at + 1 :]
    return {"cut": raw[:at], "gzip": packed, "cut gzip": packed[: value["at"] % len(packed)]}.get(value["form"], raw)


def change(events: list[Any], how: str, number: int, field: str, argument: str, hostile: Any) -> None:
    """Change one event, or all of them."""
    if not events:
        return
    at = number % len(events)
    event = events[at]
    if how in ("all", "of a kind", "all arguments") and isinstance(hostile, str):
        hostile = hostile[:100]  # otherwise the file would have hundreds of megabytes
    same = [
        other for other in events if isinstance(other, dict) and isinstance(event, dict) and other.get("cat") == event.get("cat")
    ]
    if how == "drop":
        del events[at : at + 1 + number % 50]
    elif how == "twice":
        events += deepcopy(events[at : at + 1 + number % 50])
    elif not isinstance(event, dict):
        events[at] = deepcopy(hostile)
    elif how == "field":
        event[field] = deepcopy(hostile)
    elif how == "drop field":
        event.pop(field, None)
    elif how in ("all", "of a kind"):
        for changed in same if how == "of a kind" else events:
            if isinstance(changed, dict):
                changed[field] = hostile
    else:
        for changed in same if how == "all arguments" else [event]:
            if isinstance(changed.get("args"), dict):
                if how == "drop argument":
                    changed["args"].pop(argument, None)
                else:
                    changed["args"][argument] = deepcopy(hostile)


def explain(value: dict[str, Any], folder: Path) -> str:
    """The command, with every output."""
    path = folder / "trace.json"
    path.write_bytes(damaged(value))
    places = [f"--{form}={folder}/out.{form}" for form in ("json", "csv", "markdown", "perfetto")]
    shown = command_line(["explain", str(path), *places, *value["options"]])
    return shown + "".join((folder / f"out.{form}").read_text() for form in ("csv", "markdown"))


def from_standard_input(value: dict[str, Any], folder: Path) -> str:
    """The same from a pipe, beside an undamaged trace."""
    other = ["--baseline", str(recorded("healthy_te_bf16"))] if value["at"] % 2 else []
    return command_line(["explain", "-", *other, *value["options"], f"--perfetto={folder}/out.json.gz"], damaged(value))


def slim(value: dict[str, Any], folder: Path) -> str:
    """Slim the trace as `trace_me` does."""
    path = folder / "trace.json"
    path.write_bytes(damaged(value))
    slim_file(path, folder / "slim.json.gz", {})
    return command_line(["explain", str(folder / "slim.json.gz")])


TARGETS = [
    Target("traces", damages(), explain),
    Target("traces from a pipe", damages(), from_standard_input, in_suite=15),
    Target("slimmed traces", damages(), slim, in_suite=15),
]
