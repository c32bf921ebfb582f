"""Writes the diagnosis into a copy of the trace, as tracks of their own that Perfetto and chrome://tracing show."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError
from gemmscope.explain.diagnose import Diagnosis
from gemmscope.explain.stream import EventStream

PROCESS = "gemmscope diagnosis"


def events_of(found: Diagnosis) -> Iterator[dict[str, Any]]:
    """Events: one track of steps, one for each cause, in the trace's own time."""
    zero = found.trace.zero_us + found.trace.skew_us
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": PROCESS}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PROCESS, "tid": 0, "args": {"sort_index": -1}}
    verdict = {"verdict": found.words, **{name: f"{time:.3f} ms" for name, time in found.account.classes.items()}}
    for step in found.seen.steps.chosen:
        yield _event(f"{step.name}: {found.words}", zero + step.begin, step.time, "steps", verdict)
    for number, cause in enumerate(found.causes, start=1):
        track = f"{number}. {cause.title}"
        told = {"cost": f"{cause.cost_ms:.2f} ms per step", "evidence": "; ".join(cause.evidence)}
        spans = cause.spans or tuple((step.begin, step.end, cause.title) for step in found.seen.steps.chosen)
        for begin, end, words in spans:
            yield _event(words, zero + begin, end - begin, track, told)


def _event(name: str, start: float, time: float, track: str, told: dict[str, str]) -> dict[str, Any]:
    return {"ph": "X", "cat": "gemmscope", "name": name, "pid": PROCESS, "tid": track, "ts": round(start, 3),
            "dur": round(time, 3), "args": told}  # fmt: skip


def write_annotated(found: Diagnosis, target: str | Path) -> None:
    """The whole trace again, event by event, with the annotations behind it; gzipped if its name says so."""
    path = Path(target)
    stream = EventStream(found.trace.path)
    try:
        with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as out:
            out.write('{"traceEvents": [\n')
            first = True
            for events in (stream, events_of(found)):
                for event in events:
                    out.write(("" if first else ",\n") + json.dumps(event))
                    first = False
            out.write("\n]")
            for key, value in stream.head.items():
                out.write(f",\n{json.dumps(key)}: {json.dumps(value)}")
            out.write("}\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
