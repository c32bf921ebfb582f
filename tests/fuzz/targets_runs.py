"""Run files with hostile values: read, shown by every writer, compared, reported, and compared with a trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.targets import Target, command_line
from gemmscope.commands.report import answers, report
from gemmscope.errors import UserError
from gemmscope.results.read import read_result
from gemmscope.show import text
from gemmscope.writers import figure, html, markdown, tables
from support.predictions import bench_run, step_run
from support.results import RESULTS
from support.traces import RECORDED

OF_KIND = {
    "shapes": ("shapes", "shapes of experts"),
    "bench": ("bench", "bench with a fallback", "bench of bare GEMMs"),
    "step": ("step", "verified step"),
    "sweep": ("measured sweep", "measured sweep of a plane"),
    "forecast": ("forecast", "forecast of several GPUs", "sweep", "sweep of a plane"),
    "plan": ("plan", "plan of experts", "plan of several models"),
    "numerics": ("numerics", "numerics of synthetic tensors"),
    "explain": ("explain", "explain recast_weights"),
    "compare": ("compare",),
    "fleet": ("fleet",),
}
"""Results of every kind of run file (`results/read.py`), by their names in `support/results.py`."""
EVERY = tuple(name for names in OF_KIND.values() for name in names)
MEASURED = ("bench", "bench with a fallback", "bench of bare GEMMs", "step", "verified step", "step of a small model")
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    0.0,
    -0.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    10**400,
    2**63,
    10**29,
    -(10**29),
    1e29,
    -1e29,
    0.5,
]
TEXTS = [
    "", "x", "BF16", "FP8Current", "NVFP4", "autocast", "pre-quantized", "fprop", "QKV Proj", "GEMMs", "\x1b[31m", "\ud800",
    "[/]", "[bold]a[/]", "\u202e", "{x}", "‹tp=2›", "NaN", "a\nb\r\x00", "x" * 5000, "<script>alert(1)</script>", "=1+1|x",
]  # fmt: skip
OTHERS = [
    None, True, False, [], {}, [[]], [None], {"": None}, {"value": 1.0, "low": 2.0, "high": None},
    {"value": 0.0, "low": 0.0, "high": 0.0}, {"value": 1e29, "low": -1e29, "high": 1e29},
]  # fmt: skip
HOSTILE = st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.sampled_from(OTHERS)
WAYS = ["alike", "alike", "alike", "alike", "replace", "delete", "twice", "empty", "swap", "nest", "rename"]


@st.composite
def damages(draw: st.DrawFn, names: Sequence[str] = EVERY) -> dict[str, Any]:
    """Which result is damaged, and how: each change goes to a place that its numbers choose."""
    return {
        "result": draw(st.sampled_from(names)),
        "other": draw(st.sampled_from(MEASURED)),
        "changes": draw(
            st.lists(
                st.tuples(
                    st.sampled_from(WAYS),
                    st.lists(st.integers(0, 1000), min_size=2, max_size=7),
                    HOSTILE,
                ),
                min_size=1,
                max_size=3,
            )
        ),
        "bytes": draw(st.sampled_from(["plain", "plain", "plain", "plain", "gzip", "cut", "cut gzip", "flipped"])),
        "at": draw(st.integers(0, 10**6)),
    }


@cache
def recorded(name: str) -> str:
    return RESULTS[name]().to_json()


def damaged(value: dict[str, Any], text: str) -> bytes:
    """The bytes of the damaged run file."""
    data = json.loads(text)
    for how, numbers, hostile in value["changes"]:
        change(data, how, numbers, hostile)
    raw = json.dumps(data).encode("utf-8", "surrogatepass")
    at = value["at"] % len(raw)
    packed = gzip.compress(raw, 1, mtime=0)
    forms = {"gzip": packed, "cut": raw[:at], "cut gzip": packed[: value["at"] % len(packed)]}
    if value["bytes"] == "flipped":
        return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
    return forms.get(value["bytes"], raw)


def change(data: Any, how: str, numbers: list[int], hostile: Any) -> None:
    """Walk down as the numbers say, and change what is there."""
    place: Any = data
    for depth, number in enumerate(numbers):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = keys[number % len(keys)]
        deeper = place[key]
        if depth + 1 < len(numbers) and isinstance(deeper, (dict, list)) and deeper:
            place = deeper
            continue
        if how == "alike":  # of the same kind, so that the file is still read
            place[key] = _alike(deeper, number + len(str(hostile)))
        elif how == "replace":
            place[key] = deepcopy(hostile)
        elif how == "delete":
            del place[key]
        elif how == "nest":
            place[key] = {"a": [deeper]}
        elif how == "empty" and isinstance(deeper, (dict, list)):
            deeper.clear()
        elif how == "twice" and isinstance(place, list):
            place.insert(key, deeper)
        elif how == "swap":
            place[key], place[keys[0]] = place[keys[0]], place[key]
        elif how == "rename" and isinstance(place, dict):
            place[str(hostile)[:50]] = place.pop(key)
        return


def _alike(value: Any, number: int) -> Any:
    if isinstance(value, str):
        return TEXTS[number % len(TEXTS)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return NUMBERS[number % len(NUMBERS)]
    return value[:: number % 3 - 1 or 2] if isinstance(value, list) else value


def show(value: dict[str, Any], folder: Path) -> str:
    """Read it, and write it in every format."""
    path = folder / "run.json"
    path.write_bytes(damaged(value, recorded(value["result"])))
    result = read_result(path)
    repr(result), result.to_json()
    shown = text(result) + text(result, detail=True)
    documents, messages = report([path])
    shown += "\n".join(answers(documents)) + markdown.markdown(documents, messages) + tables.csv_text(documents[0])
    html.page(documents, messages)
    return shown


def draw_figures(value: dict[str, Any], folder: Path) -> str:
    """Draw the main charts."""
    path = folder / "run.json"
    path.write_bytes(damaged(value, recorded(value["result"])))
    documents, _ = report([path])
    if documents[0].charts():
        (folder / "figure.svg").write_bytes(figure.image(documents[0], ".svg"))
    return ""


def compare(value: dict[str, Any], folder: Path) -> str:
    """Compare it with the same run undamaged, and a trace with it."""
    name = value["other"]
    (folder / "old.json").write_text(recorded(name))
    (folder / "new.json").write_bytes(damaged(value, recorded(name)))
    lines = [["compare", "old.json", "new.json", "--fail-if-slower", "3%"], ["compare", "new.json", "old.json", "--detail"]]
    return _commands([[str(folder / word) if word.endswith(".json") else word for word in line] for line in lines])


def against(value: dict[str, Any], folder: Path) -> str:
    """Compare a trace with it."""
    make = step_run if value["other"].endswith("step") else bench_run
    path = make(folder)
    path.write_bytes(damaged(value, path.read_text()))
    return command_line(["explain", str(RECORDED / "healthy_te_current.json.gz"), "--against", str(path)])


def _commands(lines: list[list[str]]) -> str:
    shown = ""
    for line in lines:
        try:
            shown += command_line(line)
        except UserError as error:
            shown += str(error)
    return shown


TARGETS = [
    *(Target(f"run files of {kind} shown", damages(names), show, in_suite=4) for kind, names in OF_KIND.items()),
    Target("run files drawn", damages(), draw_figures, in_suite=10),
    Target("run files compared", damages(), compare),
    Target("run files against a trace", damages(), against, in_suite=20),
]
