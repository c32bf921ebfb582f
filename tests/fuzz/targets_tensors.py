"""Recordings and checkpoints with hostile headers, facts and bytes: read, and quantized as `numerics` does it.

The process that computes errors runs in this one, so that its limits and exceptions are seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
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
TENSORS = ("X", "W", "dY")
PASSES = {"fprop": ("W", "X"), "dgrad": ("W", "dY"), "wgrad": ("X", "dY")}
ROUNDINGS = ("e4m3", "e5m2", "e4m3-delayed", "e4m3-power-of-two", "e4m3-power-of-two-blocks", "e2m1", "e2m1-stochastic")
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
def recording() -> tuple[dict[str, Any], Tensors]:
    """The facts and tensors of a small recording: 64 tokens, linears of 128 x 96."""
    random, tensors = np.random.default_rng(0), {}
    sizes = {"fprop": 128, "dgrad": 96, "wgrad": 64}
    linears = []
    for name in NAMES[:3]:
        steps = []
        for step in (0, 5):
            passes = {}
            for pass_name, pair in PASSES.items():
                reduced = sizes[pass_name]
                passes[pass_name] = {"reduced": reduced, "blocks": [0], "weights": [1.0], "product": 9.0, "norm": 3.0}
                for place, tensor in zip(("first", "second"), pair, strict=True):
                    prefix = f"{name}/{step}/{pass_name}.{place}."
                    tensors |= {
                        f"{prefix}rows": random.standard_normal((4, reduced)),
                        f"{prefix}weights": np.ones(4),
                        f"{prefix}row_amax": np.full(4, 3.0),
                        f"{prefix}energy": np.ones(reduced),
                    }
                    if tensor == "W":
                        tensors |= {f"{prefix}amax{size}": np.full((4, -(-reduced // size)), 3.0) for size in (128, 16)}
            tensors |= {f"{name}/{step}/{tensor}.exponents": np.arange(256.0) for tensor in TENSORS}
            probes = {
                f"{one}/{tensor}/{way}": [0.1, 0.01, 0.0, 0.01, 3.0] for one in PASSES for tensor in TENSORS for way in ROUNDINGS
            }
            probes |= {f"{one}/{way}+{way}": [0.0, 0.1, 0.0] for one in PASSES for way in ROUNDINGS}
            facts = {tensor: {"amax": 3.0, "norm": 10.0, "zeros": 0.0, "nonfinite": 0} for tensor in TENSORS}
            steps.append({"step": step, "tokens": 64, "tensors": facts, "passes": passes, "probes": probes})
        linear = name.partition(".0.")[2] or name.partition(".1.")[2]
        about = {"name": name, "linear": linear, "layer": int(name.split(".")[2]), "op": "MLP Up", "kind": "Linear"}
        linears.append({**about, "inputs": 128, "outputs": 96, "dtype": "bfloat16", "expert": None, "experts": 1, "steps": steps})
    facts = {"version": 1, "source": "recording", "model": "Net", "steps": [0, 5], "linears": linears, "packages": {"torch": "2"}}
    return facts, {name: ("F32", values.astype("<f4")) for name, values in tensors.items()}


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
    facts, tensors = recording()
    facts = deepcopy(facts)
    if value["renamed"] is not None:
        old, new = facts["linears"][0]["name"], value["renamed"]
        facts["linears"][0].update(name=new, linear=new)
        tensors = {name.replace(f"{old}/", f"{new}/"): stored for name, stored in tensors.items()}
    for how, numbers, hostile in value["facts"]:
        change(facts, how, numbers, hostile)
    if value["fill"] is not None:
        names = list(tensors)
        name = names[value["at"] % len(names)]
        tensors = {**tensors, name: ("F32", np.full_like(tensors[name][1], value["fill"]))}
    return container(tensors, {"gemmscope": json.dumps(facts)}, value["header"], value["form"], value["at"])


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
