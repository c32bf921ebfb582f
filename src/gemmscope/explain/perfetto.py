"""Writes a copy of the trace with the diagnosis on tracks of its own, for Perfetto and chrome://tracing."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.trace_file import EventStream, write_trace

PROCESS = "gemmscope diagnosis"
NAMING = ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index")


def events_of(diagnosis: TraceDiagnosis) -> Iterator[dict[str, Any]]:
    """One track with the steps and one for each cause, in the time of the trace."""
    zero = diagnosis.trace.zero_us + diagnosis.trace.skew_us
    steps, verdict = diagnosis.view.steps.chosen, diagnosis.verdict.text
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": PROCESS}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PROCESS, "tid": 0, "args": {"sort_index": -1}}
    facts = {"verdict": verdict, **{name: f"{time:.3f} ms" for name, time in diagnosis.account.classes_ms.items()}}
    for step in steps:
        yield _event(f"{step.name}: {verdict}", zero + step.begin, step.time, "steps", facts)
    for number, cause in enumerate(diagnosis.causes, start=1):
        facts = {"cost": f"{cause.cost_ms:.2f} ms per step", "evidence": " ".join(proof.text for proof in cause.evidence)}
        for begin, end, label in cause.spans or [(step.begin, step.end, cause.title) for step in steps]:
            yield _event(label, zero + begin, end - begin, f"{number}. {cause.title}", facts)


def _event(name: str, start: float, time: float, track: str, facts: dict[str, str]) -> dict[str, Any]:
    return {"ph": "X", "cat": "gemmscope", "name": name, "pid": PROCESS, "tid": track, "ts": round(start, 3),
            "dur": round(time, 3), "args": facts}  # fmt: skip


def write_annotated(diagnosis: TraceDiagnosis, target: str | Path) -> None:
    """All events of the trace, followed by the diagnosis; gzipped if the name ends in .gz.

    Metadata that a viewer does not need is not copied: it may hold anything.
    """
    path, stream = Path(target), EventStream(diagnosis.trace.source)
    events = chain(stream, events_of(diagnosis))
    shown = (event for event in events if event.get("ph") != "M" or event.get("name") in NAMING)
    write_trace(path, shown, stream.head, packed=path.suffix == ".gz")
