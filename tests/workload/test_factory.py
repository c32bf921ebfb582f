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
failures = pytest.importorskip("gemmscope.workload.failures", reason="tracing needs torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter", reason="tracing needs torch")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")

FILE = """
from dataclasses import dataclass
from typing import NamedTuple
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

X = lambda: torch.ones(4, 8)
def module(): return Tokens()
def images(): return Plain(), X()
def named(): return Plain(), {"x": X()}
def with_loss(): return Plain(), (X(),), lambda output: output.pow(2).mean()
def sized(micro_batch_size=3): return Plain(), torch.zeros(micro_batch_size, 8)
def both(micro_batch_size, sequence_length): return Plain(), torch.zeros(micro_batch_size, sequence_length, 8)
def on_cpu(): return Plain().to(torch.device("cpu")).cpu(), X().to("cpu")

@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0

class Unpacks(Plain):
    def forward(self, batch, pair):
        return {"out": [Batch(self.linear(batch["image"]["x"]) + self.linear(pair.first) * pair.second.scale)]}

class Pair(NamedTuple):
    first: torch.Tensor
    second: Batch

def inside(): return Unpacks(), ({"image": {"x": X()}, "rest": [X()]}, Pair(X(), Batch(X())))

class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    def forward(self, x, mask, **known):
        return self.encoder(x, mask, **known)

MASK = nn.Transformer.generate_square_subsequent_mask
def masked_encoder(): return Causal(), {"x": torch.zeros(2, 4, 8), "mask": MASK(4)}
def causal_encoder(): return Causal(), {"x": torch.zeros(2, 4, 8), "mask": MASK(4), "is_causal": True}

class Fills(Plain):
    def forward(self, x):
        y = self.linear(x)
        y[x[:, 0] > 0] = self.linear.bias
        return y

def fills(): return Fills(), X()
@torch.library.custom_op("gemmscope_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

class Custom(Plain):
    def forward(self, x):
        return self.linear(twice(x))

def custom(): return Custom(), X()
def custom_on_meta(): only_on_meta(); return Custom(), X()
def only_on_meta():
    if X().device.type != "meta":
        raise MemoryError("too large")
def fills_on_meta(): only_on_meta(); return Fills(), X()
def items_on_meta(): only_on_meta(); return Items(), X()
def loss_of_values(): return Plain(), X(), lambda output: output.mean().item()

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.attend = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    def forward(self, x):
        x = self.attend(x).flatten(0, 1)
        best, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            [rows] = torch.where(best == number)
            out[rows] = expert(x[rows])
        return out

def experts(): return Experts(), torch.randn(4, 8, 8)
class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)
    def forward(self, x):
        return self.lstm(x)[0]

def recurrent(): return Remembers(), X()
def wants(hidden, micro_batch_size): return Plain(hidden), X()
def wants_size(micro_batch_size): return Plain(), X()
def on_cuda(): raise RuntimeError("Found no NVIDIA driver on your system.")
def lazy(): return nn.LazyLinear(8), X()

def peeks(): return Peeks(), X()
def items(): return Items(), X()
def masked(): return Masked(), X()
def detached(): return Detached(), X()
def counts(): return Counts(), X()
def no_scalar(): return Plain(), X(), lambda output: output
def no_tensor(): return Plain(), X(), lambda output: 1.0
def no_gradient(): return Plain(), X(), lambda output: output.detach().sum()
def no_function(): return Plain(), X(), 3
def other_device(): return Plain(), X(), lambda output: (output - torch.ones(8, device="cpu")).sum()
class Scalar(Plain):
    def forward(self, x): return super().forward(x).mean()
class Both(Plain):
    def forward(self, x): return (output := super().forward(x)), output.mean()
class Scalars(Plain):
    def forward(self, x): return (output := super().forward(x)).sum(), output.mean()
def scalar(): return Scalar(), X()
def pair(): return Both(), X()
def scalars(): return Scalars(), X()
def too_many(): return Plain(), X(), None, None
def a_class(): return Plain
def needs_kernels(): import mamba_ssm_that_is_missing
def asks_for_kernels(): raise ImportError("causal_conv1d is required: pip install causal-conv1d")
def loss_of_two(): return Plain(), X(), lambda output, target: output.sum()
def list_of_inputs(): return Plain(), [torch.zeros(4, 8), torch.zeros(2, 8)]
class Rates(Plain):
    def __init__(self):
        super().__init__()
        self.dropouts = nn.ModuleList(nn.Dropout(rate) for rate in torch.linspace(0, 0.1, 3).tolist())
def rates(): return Rates(), X()
class Rows(Tokens):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8, sparse=True)
def sparse_rows(): return Rows(), torch.zeros(4, 2, dtype=torch.long)
class Graph(Plain):
    def __init__(self):
        super().__init__()
        edges, sizes = torch.arange(4).repeat(2, 1), (4, 4)
        self.register_buffer("edges", torch.sparse_coo_tensor(edges, torch.ones(4), sizes, check_invariants=False))
    def forward(self, x): return torch.sparse.mm(self.edges, self.linear(x))
def graph(): return Graph(), X()
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
    for name in [name for name in sys.modules if name.startswith(("my_module", factory.PACKAGE))]:
        del sys.modules[name]


def load(file: Path, name: str, *sizes: int | None) -> Any:
    return factory.load_factory(f"{file}:{name}", *(sizes or (None, None)), "meta")


@pytest.mark.parametrize(
    ("name", "inputs", "samples"),
    [("images", "4 x 8", 4), ("named", "x 4 x 8", 4), ("with_loss", "4 x 8", 4), ("sized", "3 x 8", 3), ("on_cpu", "4 x 8", 4),
     ("inside", "image.x 4 x 8, rest 4 x 8, first 4 x 8, second.x 4 x 8", 4)],
)  # fmt: skip
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
    with pytest.raises(failures.TraceError, match="returned no inputs") as caught:
        load(file, "module", 2, None)
    assert "sequence_length" in caught.value.hint


def test_on_another_device(file: Path) -> None:
    built = factory.load_factory(f"{file}:with_loss", None, None, "cpu")
    assert next(built.module.parameters()).device.type == built.args[0].device.type == "cpu"
    factory.loss_of(built, built.module(*built.args)).backward()


@pytest.mark.parametrize(("name", "has_loss"), [("scalar", True), ("pair", True), ("scalars", False)])
def test_the_only_scalar_that_a_module_returns_is_its_loss(file: Path, name: str, has_loss: bool) -> None:
    assert trace_worker.answer({"module": f"{file}:{name}", "micro_batch": None, "sequence": None}).has_loss == has_loss


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("items_on_meta", "line 22 of", "without values"),
        ("detached", "no tensor that requires a gradient", "requires_grad=True"),
        ("frozen", "no tensor that requires a gradient", "requires_grad=True"),
        ("counts", "no tensor that requires a gradient", "it returned int"),
        ("no_scalar", "the loss is a tensor of shape 4 x 8", ".mean()"),
        ("no_tensor", "the loss is of type float", "scalar tensor"),
        ("no_gradient", "does not depend on a parameter", ".detach()"),
        ("no_function", "is int, not a function", "loss(output)"),
        ("other_device", "is not on the expected device", "device=x.device"),
        ("too_many", "a tuple of 4", "for example"),
        ("a_class", "the class Plain", "return Plain(…)"),
        ("needs_kernels", "No module named", "pip install mamba_ssm_that_is_missing"),
        ("asks_for_kernels", "causal_conv1d is required", "install what it needs"),
        ("fills_on_meta", "nonzero needs the values of a tensor (in the backward pass)", "a mask as an index"),
        ("custom_on_meta", "no fake impl", "register_fake"),
        ("loss_of_values", "the loss is of type float", "scalar tensor"),
        ("wants", "wants() needs hidden and micro_batch_size", "default value"),
        ("wants_size", "wants_size() needs micro_batch_size", "add "),
        ("on_cuda", "no NVIDIA driver", "without naming a device"),
        ("lazy", "lazy parameters", "call the module once"),
        ("loss_of_two", "missing 1 required positional argument: 'target'", "a loss as loss(output)"),
        ("list_of_inputs", "takes 2 positional arguments but 3 were given", "to pass a list as one argument"),
    ],
)
def test_what_to_do_about_a_module_that_cannot_be_traced(file: Path, name: str, message: str, hint: str) -> None:
    with pytest.raises(failures.TraceError) as caught:
        trace_worker.answer({"module": f"{file}:{name}", "micro_batch": None, "sequence": None})
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("start", [None, "from . import layers"], ids=["folder", "package"])
def test_a_file_with_relative_imports(tmp_path: Path, file: Path, start: str | None) -> None:
    """Of a folder with `__init__.py` or without one; what is above the folder has no name."""
    (tmp_path / "layers.py").write_text("from torch import nn\nclass Net(nn.Linear): pass")
    if start is not None:
        (tmp_path / "__init__.py").write_text(start)
    file.write_text("import torch\nfrom .layers import Net\ndef build(): return Net(8, 8), torch.zeros(4, 8)")
    assert type(load(file, "build").module).__name__ == "Net"
    file.write_text("from ..layers import Net")
    with pytest.raises(failures.TraceError, match="beyond top-level package") as caught:
        load(file, "build")
    assert "PYTHONPATH" in caught.value.hint


@pytest.mark.parametrize(("name", "mask"), [("masked_encoder", "explicit"), ("causal_encoder", "causal")])
def test_the_mask_of_an_encoder_of_pytorch_has_no_values(file: Path, name: str, mask: str) -> None:
    """PyTorch would compare it with a causal one. It counts as any mask, unless the module says that it is causal."""
    assert trace_worker.trace_built(load(file, name)).masks == {mask: 2}


@pytest.mark.parametrize("name", ["peeks", "items", "masked", "fills", "experts", "custom"])
def test_a_module_that_reads_values_runs_on_the_cpu(file: Path, name: str) -> None:
    """Its linears have exactly the FLOPs that PyTorch counts in the same run, whatever the values decide."""
    trace = trace_worker.answer({"module": f"{file}:{name}", "micro_batch": None, "sequence": None})
    assert trace.with_values
    assert "traced-with-values" in codes(as_workload(trace))
    torch.manual_seed(0)
    built = factory.load_factory(f"{file}:{name}", None, None, "cpu")
    math_alone = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # the counter knows no kernel of CPUs
    with flop_counter.FlopCounterMode(display=False) as counter, math_alone:
        built.module(*built.args).sum().backward()
    flops = sum(gemm.flops * gemm.count for gemm in trace.gemms)
    flops += sum(2 * gemm.m * gemm.k * gemm.n * gemm.batch * gemm.count for gemm in trace.batched_gemms)
    flops += sum(2 * op.count * m * k * n * batch for op in trace.attentions for _, m, k, n, batch in op.batched_gemms())
    assert flops == counter.get_total_flops()


def test_a_factory_that_reads_values_is_called_on_the_cpu(file: Path) -> None:
    """Only to build the module, which is then traced without values. `torch.linspace(…).tolist()` is how timm sets drop rates."""
    trace = trace_worker.answer({"module": f"{file}:rates", "micro_batch": None, "sequence": None})
    assert not trace.with_values
    assert [gemm.pass_name for gemm in trace.gemms] == ["fprop", "wgrad"]


@pytest.mark.parametrize(("name", "linear"), [("sparse_rows", "head"), ("graph", "linear")])
def test_sparse_tensors(file: Path, name: str, linear: str) -> None:
    """Sparse gradients of an embedding, and a sparse matrix: they have no storage, and their GEMMs are not those of linears."""
    trace = trace_worker.answer({"module": f"{file}:{name}", "micro_batch": None, "sequence": None})
    assert {gemm.op for gemm in trace.gemms} == {linear}
    assert not trace.batched_gemms


def test_cudnn_runs_recurrent_modules_in_another_way(file: Path) -> None:
    trace = trace_worker.answer({"module": f"{file}:recurrent", "micro_batch": None, "sequence": None})
    assert trace.recurrent == ("LSTM",)
    assert "recurrent-steps" in codes(as_workload(trace))
