"""Measures CPU time and memory to read and explain a large trace, compared with parsing the same file with `json.load`.

    python benchmarks/read_trace.py [MEGABYTES] [docs/measured/explain.md]

The trace is a recorded one, repeated with later times and other ids until it is large enough, in the layout that the profiler
writes, with the Python frames that `with_stack=True` adds. The two sides run in separate processes.
"""

from __future__ import annotations

import gzip
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "traces" / "healthy_te_current.json.gz"
EXPLAIN = """
import json, resource, sys, time
begin = time.process_time()
from gemmscope.explain.diagnose import diagnose
from gemmscope.explain.trace_tables import explain_tables
from gemmscope.explain.recorded_trace import read_trace
trace = read_trace(sys.argv[1])
read = time.process_time() - begin
found = diagnose(trace)
explain_tables(found, {})
whole = time.process_time() - begin
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([read, whole, memory, trace.events, len(found.view.steps.every), found.verdict.text]))
"""
PLAIN = """
import json, resource, sys, time
begin = time.process_time()
events = json.load(open(sys.argv[1], encoding="utf-8"))["traceEvents"]
whole = time.process_time() - begin
print(json.dumps([whole, whole, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(events), 0, ""]))
"""


def grow(target: Path, megabytes: int) -> int:
    """Write the trace; returns its size in bytes."""
    raw: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    events = [event for event in raw.pop("traceEvents") if event["ph"] == "X"]
    first = min(event["ts"] for event in events)
    long = max(event["ts"] + event.get("dur", 0) for event in events) - first
    steps = sum(event["name"].startswith("ProfilerStep") and event["cat"] == "user_annotation" for event in events)
    raw.pop("gemmscope", None)
    with target.open("w", encoding="utf-8") as out:
        out.write(json.dumps(raw)[:-1] + ', "traceEvents": [\n')
        copy = 0
        while out.tell() < megabytes * 1_000_000:
            texts = [_text(event, copy, copy * (long + 1000.0), steps) for event in events]
            out.write((",\n" if copy else "") + ",\n".join(texts))
            copy += 1
        out.write('\n],"traceName": "trace.json"}\n')
    return target.stat().st_size


def _text(event: dict[str, Any], copy: int, later: float, steps: int) -> str:
    """One event with other ids, in the layout of the profiler; operators have the frames that called them."""
    arguments = dict(event.get("args", {}))
    for key in ("External id", "correlation", "Sequence number"):
        if key in arguments:
            arguments[key] += copy * 10_000_000
    name = event["name"]
    if name.startswith("ProfilerStep"):
        name = f"ProfilerStep#{int(name.split('#')[1]) + copy * steps}"
    copied = {**event, "name": name, "ts": round(event["ts"] + later, 3), "args": arguments}
    text = json.dumps(copied, indent=2)
    if event["cat"] != "cpu_op":
        return text
    frame = {**copied, "cat": "python_function", "args": {"Python parent id": 41, "Python id": 42, "Ev Idx": 2905}}
    frames = [{**frame, "name": f"torch/nn/modules/module.py({line}): _wrapped_call_impl"} for line in (1751, 1762, 1790, 1805)]
    return ",\n".join([text, *(json.dumps(frame, indent=2) for frame in frames)])


def measure(code: str, path: Path) -> list[Any]:
    """Seconds to read, total seconds, peak memory in KiB, events, steps, and the verdict."""
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    numbers: list[Any] = json.loads(child.stdout)
    return numbers


def main() -> None:
    """Write the trace, measure both sides, print the table."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        size = grow(path, megabytes) / 1e6
        read, whole, memory, count, steps, verdict = measure(EXPLAIN, path)
        _, plain, plain_memory, *_ = measure(PLAIN, path)
    lines = [
        "# Reading a large trace",
        "",
        f"Written by `benchmarks/read_trace.py {megabytes}` with Python {platform.python_version()} on {platform.machine()}: "
        f"{size:.0f} MB of JSON, {count:,} events, {steps} steps.",
        "",
        "| | CPU seconds | peak memory |",
        "| --- | ---: | ---: |",
        f"| `gemmscope explain`: reading | {read:.1f} | |",
        f"| reading, diagnosis and tables | {whole:.1f} | {memory / 1024:.0f} MiB |",
        f"| `json.load` of the same file | {plain:.1f} | {plain_memory / 1024:.0f} MiB |",
        f"| ratio of explain to `json.load` | {whole / plain:.2f} | {memory / plain_memory:.2f} |",
        "",
        f"Its verdict: {verdict}",
    ]
    print("\n".join(lines))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
