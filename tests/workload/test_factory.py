"""Module factories: what they may return, and what is said where they return something else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmscope.workload.trace import as_workload
from support.reading import codes

torch = pytest.importorskip("torch", reason="tracing needs torch")
factory = pytest.importorskip("gemmscope.workload.factory", reason="tracing needs torch")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")

FILE = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return self.linear(x)

class Peeks(Plain):
    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return x

class Items(Plain):
    def forward(self, x):
        return self.linear(x) * x.max().item()

class Masked(Plain):
    def forward(self, x):
        return self.linear(x[x[:, 0] > 0])

class Detached(Plain):
    def forward(self, x):
        return self.linear(x).detach()

class Counts(Plain):
    def forward(self, x):
        return 7

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, ids):
        return self.head(self.table(ids))

X = lambda: torch.zeros(4, 8)
def module(): return Tokens()
def images(): return Plain(), X()
def named(): return Plain(), {"x": X()}
def with_loss(): return Plain(), (X(),), lambda output: output.pow(2).mean()
def sized(micro_batch_size=3): return Plain(), torch.zeros(micro_batch_size, 8)
def both(micro_batch_size, sequence_length): return Plain(), torch.zeros(micro_batch_size, sequence_length, 8)
def on_cpu(): return Plain().to(torch.device("cpu")).cpu(), X().to("cpu")

def peeks(): return Peeks(), X()
def items(): return Items(), X()
def masked(): return Masked(), X()
def detached(): return Detached(), X()
def counts(): return Counts(), X()
def no_scalar(): return Plain(), X(), lambda output: output
def no_tensor(): return Plain(), X(), lambda output: 1.0
def no_gradient(): return Plain(), X(), lambda output: output.detach().sum()
def no_function(): return Plain(), X(), 3
def too_many(): return Plain(), X(), None, None
def a_class(): return Plain
def needs_kernels(): import mamba_ssm_that_is_missing
def asks_for_kernels(): raise ImportError("causal_conv1d is required: pip install causal-conv1d")
def frozen():
    plain = Plain()
    plain.requires_grad_(False)
    return plain, X()
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "my_module.py"
    path.write_text(FILE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("my_module", "my_module_traced"):
        sys.modules.pop(name, None)


def load(file: Path, name: str, *sizes: int | None) -> Any:
    return factory.load_factory(f"{file}:{name}", *(sizes or (None, None)), "meta")


@pytest.mark.parametrize(
    ("name", "inputs", "samples"),
    [("images", "4 x 8", 4), ("named", "x 4 x 8", 4), ("with_loss", "4 x 8", 4), ("sized", "3 x 8", 3), ("on_cpu", "4 x 8", 4)],
)
def test_a_factory_that_brings_its_inputs_needs_no_sizes(file: Path, name: str, inputs: str, samples: int) -> None:
    trace = trace_worker.answer({"module": f"{file}:{name}", "micro_batch": None, "sequence": None})
    assert (trace.inputs, trace.samples, trace.has_loss) == (inputs, samples, name == "with_loss")
    assert {gemm.pass_name for gemm in trace.gemms} == {"fprop", "wgrad"}


def test_sizes_reach_a_factory_that_takes_them(file: Path) -> None:
    assert load(file, "sized", 6, None).samples == 6
    both = load(file, "both", 2, 5)
    assert both.taken == {"micro_batch_size", "sequence_length"}
    assert trace_worker.trace_built(both).inputs is None  # the run is what was asked for: no need to name its inputs
    trace = trace_worker.answer({"module": f"{file}:sized", "micro_batch": 6, "sequence": 5})
    assert (trace.ignored, trace.inputs) == (("sequence_length",), "6 x 8")
    assert "sizes-ignored" in codes(as_workload(trace))


def test_without_inputs_a_module_gets_token_ids(file: Path) -> None:
    built = load(file, "module", 2, 5)
    assert not built.own_inputs
    assert built.args[0].shape == (2, 5)
    assert built.args[0].dtype == torch.long
    with pytest.raises(factory.TraceError, match="returned no inputs") as caught:
        load(file, "module", 2, None)
    assert "sequence_length" in caught.value.hint


def test_on_another_device(file: Path) -> None:
    built = factory.load_factory(f"{file}:with_loss", None, None, "cpu")
    assert next(built.module.parameters()).device.type == built.args[0].device.type == "cpu"
    factory.loss_of(built, built.module(*built.args)).backward()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("peeks", "line 14 of", "without values"),
        ("items", "line 20 of", "without values"),
        ("masked", "line 24 of", "without values"),
        ("detached", "no tensor that requires a gradient", "requires_grad=True"),
        ("frozen", "no tensor that requires a gradient", "requires_grad=True"),
        ("counts", "no tensor that requires a gradient", "it returned int"),
        ("no_scalar", "the loss returned a tensor of shape 4 x 8", ".mean()"),
        ("no_tensor", "the loss returned float", "scalar tensor"),
        ("no_gradient", "does not depend on a parameter", ".detach()"),
        ("no_function", "is int, not a function", "loss(output)"),
        ("too_many", "a tuple of 4", "for example"),
        ("a_class", "the class Plain", "return Plain(…)"),
        ("needs_kernels", "No module named", "pip install mamba_ssm_that_is_missing"),
        ("asks_for_kernels", "causal_conv1d is required", "install what it needs"),
    ],
)
def test_what_to_do_about_a_module_that_cannot_be_traced(file: Path, name: str, message: str, hint: str) -> None:
    with pytest.raises(factory.TraceError) as caught:
        trace_worker.answer({"module": f"{file}:{name}", "micro_batch": None, "sequence": None})
    assert message in str(caught.value)
    assert hint in caught.value.hint
