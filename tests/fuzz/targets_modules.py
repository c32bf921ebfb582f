"""Modules of users: factories that return anything, with any names inside. Traced in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from fuzz.hostile import OUTPUTS, TEXTS
from fuzz.targets import Target, command_line
from gemmscope.errors import UserError

NEEDS = ("torch", "gemmscope.workload.trace_worker")
SOURCE = """
import torch
class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module({path!a}, torch.nn.ModuleDict({{{inner!a}: torch.nn.Linear({inputs}, {outputs})}}))
        self._buffers[{inner!a}] = torch.zeros({outputs})
    def forward(self, x):
        return self._modules[{path!a}][{inner!a}](x)
def build({arguments}):
    module, x = {name}(), torch.zeros({batch}, {inputs})
    return {result}
"""
RESULTS = (
    "module", "module, x", "module, (x,)", "module, {'x': x}", "module, {%a: x}", "module, x, lambda out: out.sum()", "None", "x",
    "module, x, lambda out: out", "module, x, lambda out: 1.0", "module, x, 3", "(module,) * 9", "type(module)", "module, None",
    "module, [x, [x]]", "torch.nn.Sequential()", "torch.nn.LazyLinear(4), x", "[][9]", "{}[%a]", "1 / 0", "x.item()", "module.%s",
)  # fmt: skip
ARGUMENTS = ("", "", "micro_batch_size=1", "micro_batch_size, sequence_length", "*args", "**kwargs", "other", "x=%a")
SIZES = st.sampled_from([0, 1, 7, 16, 64, 2**20, 2**40, -1])


@dataclass(frozen=True)
class Module:
    """The file, and the name after the colon."""

    text: bytes
    function: str


@st.composite
def modules(draw: st.DrawFn) -> Module:
    if draw(st.integers(0, 9)) == 0:
        return Module(draw(st.binary(max_size=50) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass"))), "build")
    usual, hostile = st.sampled_from([16, 64]), draw(st.integers(0, 3)) == 0
    sizes = usual | SIZES if hostile else usual
    fill = draw(TEXTS)
    text = SOURCE.format(
        name=draw(st.sampled_from(["Net", "Net", "é", "_"])),
        path=draw(TEXTS.map(lambda text: text.replace(".", "") or "layers")),
        inner=draw(TEXTS if hostile else st.just("up")),
        inputs=draw(sizes),
        outputs=draw(sizes),
        batch=draw(sizes),
        arguments=draw(st.sampled_from(ARGUMENTS if hostile else ("",))).replace("%a", ascii(fill)),
        result=draw(st.sampled_from(RESULTS if hostile else RESULTS[1:3])).replace("%a", ascii(fill)).replace("%s", "weight"),
    )
    return Module(text.encode(), draw(st.sampled_from(["build"] * 9 + ["Net", "missing", "torch", "1", ""])))


@contextmanager
def traced_inside() -> Iterator[None]:
    """Modules are traced in this process, and the answer takes the way through its file."""
    trace, worker = import_module("gemmscope.workload.trace"), import_module("gemmscope.workload.trace_worker")
    import_module("torch").set_num_threads(1)

    def ask(request: dict[str, Any], micro_batch: int | None, sequence: int | None, *_: object) -> Any:
        adapter = trace.TypeAdapter(trace.ModuleTrace)
        try:
            traced = worker.answer({**request, "micro_batch": micro_batch, "sequence": sequence})
        except worker.TraceError as error:
            text = json.dumps({"error": str(error), "hint": error.hint})
            raise UserError(*json.loads(text).values()) from None
        return adapter.validate_python(json.loads(json.dumps(adapter.dump_python(traced, mode="json", by_alias=True))))

    with mock.patch.object(trace, "_ask_worker", ask):
        yield


def run_module(case: tuple[list[str], list[str], Module], folder: Path) -> str:
    command, output, module = case
    (folder / "mine.py").write_bytes(module.text)
    outputs = ["--json", str(folder / "out.json"), "--csv", str(folder / "out.csv"), *output]
    with traced_inside():
        return command_line([*command, "--module", f"{folder}/mine.py:{module.function}", *outputs])


COMMANDS = st.sampled_from(
    [["shapes"], ["shapes", "--micro-batch-size", "1", "--sequence-length", "8"], ["forecast", "--gpu", "h200"]]
)
TARGETS = [Target("modules", st.tuples(COMMANDS, OUTPUTS, modules()), run_module, needs=NEEDS)]
