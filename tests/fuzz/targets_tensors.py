"""Recordings and checkpoints with hostile headers, facts and bytes: read, and quantized as `numerics` does it.

The process that computes errors runs in this one, so that its limits and exceptions are seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from fuzz.hostile import OUTPUTS
from fuzz.targets import Target, command_line
from fuzz.targets_runs import HOSTILE, WAYS, change
from gemmscope.errors import UserError

NEEDS = ("torch", "gemmscope.commands.numerics", "gemmscope.numerics.evaluation.worker")
EDITS = st.lists(st.tuples(st.sampled_from(WAYS), st.lists(st.integers(0, 1000), min_size=2, max_size=8), HOSTILE), max_size=3)
FORMS = st.sampled_from(["whole", "whole", "whole", "whole", "cut", "flipped", "longer", "other length"])
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.experts.3.up_proj", "lm_head")
Tensors = dict[str, tuple[str, np.ndarray]]
"""Name → dtype in the file and bytes."""


def container(tensors: Tensors, metadata: Any, edits: list[Any], form: str, at: int) -> bytes:
    """A safetensors file whose header was edited, and whose bytes were damaged."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    begin = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [begin, begin + values.nbytes]}
        begin += values.nbytes
    for how, numbers, hostile in edits:
        change(header, how, numbers, hostile)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    length = at if form == "other length" else len(text)
    raw = length.to_bytes(8, "little") + text + b"".join(values.tobytes() for _, values in tensors.values())
    at %= len(raw)
    damaged = {"cut": raw[:at], "flipped": raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :], "longer": raw + b"x"}
    return damaged.get(form, raw)


# --- recordings


@cache
def recording() -> dict[str, Any]:
    """The facts of a small recording: three linears of 128 x 96 in two steps, in every variant of every recipe."""
    variants = import_module("gemmscope.numerics.measure").variants()
    draw = np.random.default_rng(0).uniform
    operand = {"relative": 0.03, "underflow": 0.001, "saturated": 0.0}
    more = {"fprop": {"damage": 1e-4}, "dgrad": {}, "wgrad": {"bias": 1e-5, "bias_error": 1e-6, "noise": 1e-3}}

    def gemm(pass_name: str) -> dict[str, Any]:
        errors = {"squared": draw(1e-4, 1e-2), "variance": 1e-9, "first_share": 0.5, "parallel": 0.001}
        return {**errors, "operands": [operand, operand], **more[pass_name]}

    tensor = {"amax": 3.0, "norm": 10.0, "smallest": 1e-3}
    steps = [
        {
            "step": step, "tokens": 64, "tensors": dict.fromkeys(("X", "W", "dY"), tensor), "outputs": dict.fromkeys(more, 9.0),
            "gradient": {"squared": 4.0, "noise": 0.5, "energy": 6.0},
            "gemms": {name: {pass_name: gemm(pass_name) for pass_name in pairs} for name, pairs in variants.items()},
        }
        for step in (0, 5)
    ]  # fmt: skip
    linears = []
    for name in NAMES[:3]:
        linear = name.partition(".0.")[2] or name.partition(".1.")[2]
        about = {"name": name, "linear": linear, "layer": int(name.split(".")[2]), "op": "MLP Up", "kind": "Linear"}
        linears.append({**about, "inputs": 128, "outputs": 96, "dtype": "bfloat16", "steps": steps})
    version = import_module("gemmscope.numerics.recording").VERSION
    return {"version": version, "source": "recording", "model": "Net", "steps": [0, 5], "linears": linears}


@st.composite
def recordings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "facts": draw(st.just([]) | EDITS),
        "renamed": draw(st.none() | st.none() | st.text(max_size=5) | st.sampled_from(["\ud800", "\x1b[2J", "a/b", "=1", "<b>"])),
        "header": draw(st.just([]) | EDITS),
        "form": draw(FORMS),
        "at": draw(st.integers(0, 10**6)),
        "fill": draw(st.none() | st.none() | st.sampled_from([0.0, float("nan"), float("inf"), -1.0, 1e30, 1e-30])),
        "arguments": draw(OUTPUTS)
        + draw(st.sampled_from([[], ["--bound", "5%"], ["--recipes", "nvfp4"], ["--backend", "torchao"]])),
    }


def recording_bytes(value: dict[str, Any]) -> bytes:
    """The recording that an input describes."""
    facts = json.loads(json.dumps(recording()))  # a copy whose parts are apart
    if value["renamed"] is not None:
        facts["linears"][0].update(name=value["renamed"], linear=value["renamed"])
    if value["fill"] is not None:
        step = facts["linears"][value["at"] % 3]["steps"][0]
        places = [numbers for gemms in step["gemms"].values() for numbers in gemms.values()]
        places[value["at"] % len(places)].update(squared=value["fill"], variance=value["fill"])
        step["tensors"]["X"]["amax"] = value["fill"]
    for how, numbers, hostile in value["facts"]:
        change(facts, how, numbers, hostile)
    return container({}, {"gemmscope": json.dumps(facts)}, value["header"], value["form"], value["at"])


# --- checkpoints


@cache
def checkpoint() -> Tensors:
    """Weights in BF16, F32 and FP8 with scales, experts in one parameter, and what is no linear."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 60, (256, 128), np.uint8)
    floats = random.standard_normal((64, 128)).astype("<f4")
    return {
        "model.embed_tokens.weight": ("F32", floats),
        f"{NAMES[0]}.weight": ("F32", floats),
        f"{NAMES[1]}.weight": ("BF16", (floats.view(np.uint32) >> 16).astype("<u2")),
        f"{NAMES[2]}.weight": ("F16", floats.astype("<f2")),
        "model.layers.2.mlp.up_proj.weight": ("F8_E4M3", bits),
        "model.layers.2.mlp.up_proj.weight_scale_inv": ("F32", np.ones((2, 1), "<f4")),
        "model.layers.3.mlp.experts.gate_up_proj": ("F32", random.standard_normal((3, 32, 16)).astype("<f4")),
        f"{NAMES[3]}.weight": ("F32", floats),
    }


SCALES = st.sampled_from([(), (1,), (256,), (256, 1), (2, 1), (1, 2), (4, 4), (0,), (0, 9), (300, 300), (1, 1, 1)])


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kind": draw(st.sampled_from(["file", "file", "folder", "index", "index alone"])),
        "header": draw(st.just([]) | EDITS),
        "index": draw(st.just([]) | EDITS),
        "scales": draw(st.none() | SCALES),
        "renamed": draw(st.none() | st.text(max_size=8) | st.sampled_from(["\ud800", "\x1b[2J", "layers." + "9" * 30, "." * 50])),
        "form": draw(FORMS),
        "at": draw(st.integers(0, 10**6)),
        "arguments": draw(OUTPUTS) + draw(st.sampled_from([[], ["--preset", "gpt2"], ["--recipes", "mxfp8"], ["--detail"]])),
    }


def write_checkpoint(value: dict[str, Any], folder: Path) -> Path:
    """The checkpoint that an input describes; the file, folder or index to name."""
    tensors = dict(checkpoint())
    if value["scales"] is not None:
        tensors["model.layers.2.mlp.up_proj.weight_scale_inv"] = ("F32", np.ones(value["scales"], "<f4"))
    if value["renamed"] is not None:
        tensors[f"{value['renamed']}.weight"] = tensors.pop(f"{NAMES[0]}.weight")
    if value["kind"] == "file":
        (folder / "model.safetensors").write_bytes(container(tensors, None, value["header"], value["form"], value["at"]))
        return folder / "model.safetensors"
    place = folder / "checkpoint"
    place.mkdir()
    names, weight_map = list(tensors), {}
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        edits, form = (value["header"], value["form"]) if number else ([], "whole")
        (place / f"part-{number}.safetensors").write_bytes(container(part, None, edits, form, value["at"]))
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    if value["kind"] == "folder":
        return place
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    for how, numbers, hostile in value["index"]:
        change(index, how, numbers, hostile)
    (place / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return place / "model.safetensors.index.json" if value["kind"] == "index alone" else place


def whole_checkpoint() -> bytes:
    """A checkpoint without damage."""
    return container(checkpoint(), None, [], "whole", 0)


# --- both


@contextmanager
def worker_inside() -> Iterator[None]:
    """Errors are computed in this process, and every message takes the way through the pipe."""
    requests = import_module("gemmscope.numerics.evaluation.requests")
    worker = import_module("gemmscope.numerics.evaluation.worker")
    import_module("torch").set_num_threads(1)  # a thread pool does not survive a fork

    def messages(request: Any, *_: object) -> Iterator[Any]:
        request = requests.from_line(requests.REQUEST, requests.to_line(requests.REQUEST, request).encode())
        try:
            for message in worker.compute(request):
                yield requests.from_line(requests.MESSAGE, requests.to_line(requests.MESSAGE, message).encode())
        except UserError as error:
            yield requests.NotComputed(error.message, error.hint)

    with mock.patch.object(requests, "_messages", messages):
        yield


def run_recording(value: dict[str, Any], folder: Path) -> str:
    path = folder / "recording.safetensors"
    path.write_bytes(recording_bytes(value))
    with worker_inside():
        return command_line(["numerics", str(path), "--json", str(folder / "out.json"), *value["arguments"]])


def run_checkpoint(value: dict[str, Any], folder: Path) -> str:
    path = write_checkpoint(value, folder)
    with worker_inside():
        return command_line(["numerics", "--checkpoint", str(path), "--csv", str(folder / "out.csv"), *value["arguments"]])


TARGETS = [
    Target("recordings", recordings(), run_recording, needs=NEEDS),
    Target("checkpoints", checkpoints(), run_checkpoint, needs=NEEDS),
]
