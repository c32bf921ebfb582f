"""Reading traces piece by piece: every form of the format, and every way a file can be broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.explain import trace_file
from gemmscope.explain.record_trace import slim_file
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.trace_file import EventStream
from support.traces import events_of, recorded, steady

EVENTS = [{"ph": "X", "name": f'quote " bracket ] brace }} {number}', "args": {"deep": [[{"a": "\\"}]]}} for number in range(50)]


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    events = EventStream(path)
    return list(events), events.head


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("first", [True, False])
def test_whole_however_it_is_cut(
    piece: int, indent: int | None, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "PIECE", piece)
    head = {"schemaVersion": 1, "deviceProperties": [{"name": "X", "id": 0}], "baseTimeNanoseconds": 17}
    whole = {**head, "traceEvents": EVENTS} if not first else {"traceEvents": EVENTS, **head}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole, indent=indent))
    assert read(path) == (EVENTS, head)


def test_forms(tmp_path: Path) -> None:
    text = json.dumps(EVENTS)
    forms = {
        "array": text,
        "array without its end": text[:-1],
        "array ending in a comma": text[:-1] + ",\n",
        "byte order mark": "\ufeff" + json.dumps({"traceEvents": EVENTS}),
        "trailing comma": '{"traceEvents": ' + text[:-1] + ",]}",
    }
    for name, written in forms.items():
        path = tmp_path / f"{name}.json"
        path.write_text(written, encoding="utf-8")
        assert read(path)[0] == EVENTS, name
    packed = tmp_path / "no_ending"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read(packed)[0] == EVENTS


@given(cut=st.integers(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_cut_short_is_said(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = json.dumps({"traceEvents": EVENTS, "end": 1})
    path = tmp_path_factory.mktemp("cut") / "t.json"
    path.write_text(text[: -min(cut, len(text) - 1)])
    with pytest.raises(UserError, match=r"truncated|not a trace|is empty"):
        read(path)


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bytes_end_in_a_message(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t")
        for given_bytes in (content, b'{"traceEvents": [' + content, b"\x1f\x8b" + content):
            path.write_bytes(given_bytes)
            try:
                read_trace(path)
            except UserError:
                continue


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 not json", "not a trace"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": []}', "has no events"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}', "no GPU kernels"),
        (b'{"traceEvents": [{"ph": nonsense}]}', "truncated|not valid JSON"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "gzip data"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_trace(path)


def test_broken_in_the_middle_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event without an end does not make the reader read the whole file."""
    monkeypatch.setattr(trace_file, "PIECE", 1000)
    monkeypatch.setattr(trace_file, "LONGEST_EVENT", 10_000)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": oops},' + " " * 1_000_000 + "]}")
    with pytest.raises(UserError, match="not valid JSON from character 1"):
        read(path)


def test_folder_and_missing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", Path("zero\0byte")):
        with pytest.raises(UserError, match=r"cannot be read|is a folder"):
            read(path)


def test_slim_keeps_the_diagnosis(tmp_path: Path) -> None:
    """Slimming what is slim changes nothing; slimming a raw trace drops frames and keeps kernels."""

    def slim(raw: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "raw.json").write_text(json.dumps(raw))
        slim_file(tmp_path / "raw.json", tmp_path / "slim.json.gz", facts={})
        return events_of(tmp_path / "slim.json.gz")

    raw = events_of(recorded("healthy_te_current"))
    assert len(slim(raw)["traceEvents"]) == len(raw["traceEvents"])
    builder = steady()
    builder.mark("step.py(3): train", 0, 9999, "python_function")
    builder.mark("aten::empty", 0, 5, "cpu_op", args={"External id": 99})
    kept = slim({"traceEvents": builder.events, "displayTimeUnit": "ms"})
    assert {event["cat"] for event in kept["traceEvents"]} == {"kernel", "cuda_runtime", "user_annotation"}
