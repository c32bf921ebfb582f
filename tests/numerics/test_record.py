"""`record_tensors` in a user's training: the recording is correct, and the training is unchanged bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import gemmscope  # noqa: E402
from gemmscope.numerics.evaluation.linear_errors import linear_error  # noqa: E402
from gemmscope.numerics.in_training.model_recorder import measured_in_a_step  # noqa: E402
from gemmscope.numerics.measure import LinearMeasurement  # noqa: E402
from gemmscope.numerics.quantizers import operands  # noqa: E402
from gemmscope.numerics.recording import RecordingFacts, read_recording  # noqa: E402
from support.recorded import LINEARS, Network, measure_few, prepared, te_class, trained  # noqa: E402

KINDS = ["eager", "reentrant", "non-reentrant", "layers", "wrapped layers", "ddp", "fsdp"]


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests compiled. Measure few recipes, except in one test."""
    torch._dynamo.reset()
    if "autocast" not in request.node.name:
        measure_few(monkeypatch)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def recorded(path: Path) -> RecordingFacts:
    return read_recording(path / "t.safetensors")


@pytest.mark.filterwarnings("ignore")  # of torch itself
@pytest.mark.parametrize("kind", KINDS)
def test_the_training_is_the_same_bit_for_bit(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind in ("ddp", "fsdp"):
        request.getfixturevalue("process_group")
    without = trained(prepared(kind), None, micro_batches=2)
    within = trained(prepared(kind), tmp_path / "t.safetensors", micro_batches=2)
    assert all(torch.equal(one, other) for one, other in zip(without, within, strict=True))
    recording = recorded(tmp_path)
    compiled = "layers" in kind
    assert [linear.name for linear in recording.linears] == [name for name in LINEARS if not compiled or "layers" not in name]
    assert [note[:36] for note in recording.notes] == ["4 linears inside compiled modules: n"] * compiled
    for linear in recording.linears:
        assert [step.step for step in linear.steps] == [5, 6, 7, 8]
        assert [step.step for step in linear.measured] == [5, 6, 7, 8], "so few linears are measured in every step"
        assert tuple(linear.measured[0].outputs) == ("fprop", "dgrad", "wgrad")
        assert linear.measured[0].tokens == 64, "of one micro-batch"


def test_autocast_decides_the_type(tmp_path: Path) -> None:
    without = trained(prepared("eager"), None, bf16=True, loop=8)  # in all recipes
    within = trained(prepared("eager"), tmp_path / "t.safetensors", bf16=True, loop=8, after=2)
    assert all(torch.equal(one, other) for one, other in zip(without, within, strict=True))
    linear = recorded(tmp_path).linears[0]
    assert linear.dtype == "bfloat16"
    assert "NVFP4/torchao" in linear.measured[0].gemms
    assert "BF16" not in linear.measured[0].gemms, "which changes nothing"


@pytest.mark.filterwarnings("ignore")  # of torch itself
@pytest.mark.parametrize("kind", ["eager", "non-reentrant"])
def test_what_is_recorded_is_what_the_linear_saw(kind: str, tmp_path: Path) -> None:
    """Compared with X, W and dY that hooks see in a plain copy of the network, which runs the same step."""
    functional_dropout, functional.dropout = functional.dropout, lambda x, *_: x  # compiled code draws other masks
    try:
        torch.manual_seed(0)
        model, plain = prepared(kind), Network()
        plain.load_state_dict({key.removeprefix("_orig_mod."): value for key, value in model.state_dict().items()})
        seen: dict[str, list[Any]] = {}
        for name in LINEARS:
            module = plain.get_submodule(name)
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.update({name: [args[0].detach(), m.weight.detach().clone()]})
            )
            module.register_forward_hook(lambda m, _, out, name=name: out.register_hook(seen[name].append) and None)
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
        (plain(x) - x.flip(-1)).square().mean().backward()
        trained(model, tmp_path / "t.safetensors", loop=1, steps=1, after=0)
    finally:
        functional.dropout = functional_dropout
    for linear in recorded(tmp_path).linears:
        x, w, dy = (tensor.reshape(-1, tensor.shape[-1]) for tensor in seen[linear.name])
        (step,) = linear.measured
        for name, tensor in {"X": x, "W": w, "dY": dy}.items():
            assert step.tensors[name].amax == pytest.approx(float(tensor.abs().max()), rel=1e-4)
            assert step.tensors[name].norm == pytest.approx(float(tensor.norm()), rel=1e-4)
        for pass_name, output in {"fprop": x @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x}.items():
            assert step.outputs[pass_name] == pytest.approx(float(output.norm()), rel=1e-4)
        low = operands("NVFP4", "fprop")
        error = low[1].quantizer(x).values @ low[0].quantizer(w).values.T - x @ w.T
        own = step.gemms["NVFP4/transformer_engine"]["fprop"]
        assert own.squared == pytest.approx(float((error.norm() / (x @ w.T).norm()) ** 2), rel=1e-3)
        assert own.damage == pytest.approx(float((error * dy).sum(1).square().sum() / 2), rel=1e-3)


@pytest.mark.parametrize("how", ["wrapped", "forward"])
def test_a_compiled_model_is_left_alone(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = prepared("whole" if how == "wrapped" else "eager")
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
    call = model.forward
    trained(model, tmp_path / "t.safetensors", loop=2, steps=1, after=0)
    assert not (tmp_path / "t.safetensors").exists()
    assert "TORCH_COMPILE_DISABLE=1" in capsys.readouterr().err
    assert model.forward == call


@pytest.mark.parametrize("kind", ["layers", "wrapped layers", "whole"])
def test_compilation_that_is_disabled(kind: str, tmp_path: Path) -> None:
    """As the message about compiled modules says; the variable sets this option."""
    torch._dynamo.reset()  # what other tests compiled is not there where the variable is set
    with torch._dynamo.config.patch(disable=True):
        trained(prepared(kind), tmp_path / "t.safetensors", loop=1, steps=1, after=0)
    torch._dynamo.reset()
    assert [linear.name for linear in recorded(tmp_path).linears] == LINEARS


def test_parts_of_a_pipeline_stage(tmp_path: Path) -> None:
    """As in Megatron: a list of modules, whose layers know their numbers in the whole model."""
    parts = [Network(), Network()]
    for first, part in zip((3, 7), parts, strict=True):
        for number, layer in enumerate(part.layers):
            layer.layer_number = first + number
    with gemmscope.record_tensors(parts, tmp_path / "t.safetensors", steps=1, after=0) as recording:
        parts[1](parts[0](torch.randn(4, 32))).sum().backward()
        recording.step()
    linears = recorded(tmp_path).linears
    assert [linear.layer for linear in linears if linear.linear == "up_proj"] == [2, 3, 6, 7]
    assert len({linear.name for linear in linears}) == 12
    assert {linear.op for linear in linears if linear.linear == "up_proj"} == {"MLP Up"}


def test_maxima_of_every_step_and_errors_of_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.numerics.in_training.model_recorder.FEWEST", 1)
    trained(prepared("eager"), tmp_path / "t.safetensors", loop=8, after=1, samples=2)
    linears = recorded(tmp_path).linears
    for linear in linears:
        assert [step.step for step in linear.steps] == [1, 2, 3, 4]
        assert len(linear.measured) == 2
        assert all(set(step.tensors) == {"X", "W", "dY"} for step in linear.steps)
    assert [sum(len(step.outputs) > 0 for step in steps) for steps in zip(*(one.steps for one in linears), strict=True)] == [
        3
    ] * 4


def test_every_linear_is_measured_as_often_as_asked() -> None:
    for linears, steps, samples in ((196, 8, 1), (7, 8, 1), (100, 3, 2), (9, 1, 1)):
        count = measured_in_a_step(linears, steps, samples)
        times = [0] * linears
        for place in range(steps * count):
            times[place % linears] += 1
        assert min(times) >= samples
        assert count <= max(-(-linears * samples // steps), 8)


def test_delayed_scaling_knows_the_maxima_of_earlier_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    real = LinearMeasurement.numbers
    monkeypatch.setattr(LinearMeasurement, "numbers", lambda self: given.append(self.delayed) or real(self))
    trained(prepared("eager"), tmp_path / "t.safetensors", loop=4, steps=3, after=0)
    head = recorded(tmp_path).linears[-1]
    assert given[0] == {}
    known = [step.tensors for step in head.steps[:2]]
    largest = {name: max(one[name].amax for one in known) for name in ("X", "W", "dY")}
    assert given[2 * len(LINEARS)] == largest, "the head is first"


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 600), nn.Linear(600, 32))
        trained(model, tmp_path / name, loop=2, steps=1, after=0, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_files_are_small(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256)) for _ in range(8)))
    with gemmscope.record_tensors(model, tmp_path / "t.safetensors", steps=2, after=0) as recording:
        for _ in range(2):
            model(torch.randn(128, 256)).sum().backward()
            recording.step()
    assert (tmp_path / "t.safetensors").stat().st_size < 100_000
    assert len(recorded(tmp_path).linears) == 8


def test_an_interrupted_training_writes_what_there_is(tmp_path: Path) -> None:
    model = prepared("eager")

    def train() -> None:
        with gemmscope.record_tensors(model, tmp_path / "t.safetensors", steps=9, after=0) as recording:
            for step in range(3):
                loss = model(torch.randn(4, 32)).sum()
                if step == 2:
                    raise KeyboardInterrupt
                loss.backward()
                recording.step()

    with pytest.raises(KeyboardInterrupt):
        train()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    for linear in recorded(tmp_path).linears:
        assert [step.step for step in linear.measured][:2] == [0, 1]


def test_hooks_exist_only_in_recorded_steps(tmp_path: Path) -> None:
    model = prepared("eager")
    hooks = []
    with gemmscope.record_tensors(model, tmp_path / "t.safetensors", steps=2, after=2) as recording:
        for _ in range(6):
            model(torch.randn(4, 32)).sum().backward()
            hooks.append(sum(len(module._forward_hooks) for module in model.modules()))
            recording.step()
    assert [count > 0 for count in hooks] == [False, False, True, True, False, False]
    assert recording.recorded


def test_failures_are_said_and_the_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared("eager")

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory\nsomewhere")

    monkeypatch.setattr("gemmscope.numerics.in_training.capture.LinearMeasurement", fails)
    trained(model, tmp_path / "t.safetensors", loop=3, steps=2, after=0)
    assert capsys.readouterr().err == "gemmscope: no tensors are recorded, the training goes on: RuntimeError: out of memory\n"
    assert all(not module._forward_hooks for module in model.modules())
    assert not (tmp_path / "t.safetensors").exists()


def test_what_fails_with_one_linear_is_said_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Any, w: torch.Tensor, *rest: Any) -> Any:
        if w.shape == (64, 32):
            raise torch.OutOfMemoryError("no memory")
        return LinearMeasurement(x, w, *rest)

    monkeypatch.setattr("gemmscope.numerics.in_training.capture.LinearMeasurement", fails)
    trained(prepared("eager"), tmp_path / "t.safetensors", loop=2, steps=1, after=0)
    failures = {linear.name: linear.failure for linear in recorded(tmp_path).linears}
    assert failures == {name: "OutOfMemoryError: no memory" if "up_proj" in name else "" for name in LINEARS}


def test_a_failure_outside_of_a_linear_ends_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmscope.numerics.in_training.linears.first_tensor", lambda *_: 1 / 0)
    without = trained(prepared("eager"), None, loop=3)
    model = prepared("eager")
    within = trained(model, tmp_path / "t.safetensors", loop=3, steps=2, after=0)
    assert all(torch.equal(one, other) for one, other in zip(without, within, strict=True))
    assert "no tensors are recorded, the training goes on: ZeroDivisionError" in capsys.readouterr().err
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "loop", "message"),
    [
        (nn.Sequential(nn.Identity()), 3, "the model has no known linears"),
        (nn.Sequential(nn.Linear(32, 32)), 1, "nothing was recorded: the loop ran 1 step, 4 are needed"),
    ],
)
def test_nothing_to_record_is_said(
    model: nn.Module, loop: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gemmscope.record_tensors(model, tmp_path / "t", steps=2, after=2 if loop == 1 else 0) as recording:
        for _ in range(loop):
            recording.step()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_loop_that_ends_where_the_recording_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gemmscope.record_tensors(nn.Sequential(nn.Linear(32, 32)), tmp_path / "t", steps=2, after=1) as recording:
        recording.step()
    assert "no tensors are recorded, the training goes on: the loop ran 1 step, 3 are needed" in capsys.readouterr().err


def test_a_compiled_function_around_a_plain_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = prepared("eager")
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randn(4, 32)).sum().backward()
    with gemmscope.record_tensors(model, tmp_path / "t", steps=1, after=0) as recording:
        compiled(torch.randn(4, 32)).sum().backward()
        recording.step()
    assert "TORCH_COMPILE_DISABLE=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"after": -1},
        {"samples": 9},
        {"seed": -1},
    ],
)
def test_wrong_arguments_are_said_at_once(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        gemmscope.record_tensors(nn.Linear(2, 2), tmp_path / "t", **wrong)


def test_other_ranks_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    trained(prepared("eager"), tmp_path / "t.safetensors", loop=6, after=0)
    assert list(tmp_path.iterdir()) == []
    trained(prepared("eager"), tmp_path / "t.safetensors", loop=6, after=0, ranks=(0, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["t.rank1.safetensors"]


class Experts(nn.Module):
    """As Hugging Face keeps experts: one parameter for all."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.is_transposed, self.calls = transposed, 0
        self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 96) if transposed else torch.randn(3, 96, 32))
        self.down_proj = nn.Parameter(torch.randn(3, 48, 32) if transposed else torch.randn(3, 32, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs = []
        for number, rows in enumerate(x.chunk(3)):
            up, down = self.gate_up_proj[number], self.down_proj[number]
            gate, up = (rows @ up if self.is_transposed else functional.linear(rows, up)).chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
            outputs.append(hidden @ down if self.is_transposed else functional.linear(hidden, down))
        return torch.cat(outputs)


class Mixture(nn.Module):
    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(32, 3)
        self.experts = Experts(transposed=transposed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 32)
        return (self.experts(flat) * 0.01 * self.router(flat).softmax(-1).amax(-1, keepdim=True)).reshape(x.shape)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_with_one_weight_for_all(transposed: bool, tmp_path: Path) -> None:
    gradients = []
    for path in (None, tmp_path / "t.safetensors"):
        torch.manual_seed(0)
        model = nn.Sequential(Mixture(transposed=transposed))
        gradients.append(trained(model, path, loop=4, steps=2, after=1))
        assert model[0].experts.calls == 4, "it runs once"
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    linears = recorded(tmp_path).linears
    assert [linear.op for linear in linears] == ["Expert Gate+Up"] * 3 + ["Expert Down"] * 3
    assert all(linear.experts == 3 and linear.expert in range(3) for linear in linears)
    assert {(linear.inputs, linear.outputs) for linear in linears} == {(32, 96), (48, 32)}
    assert all(tuple(linear.measured[0].outputs) == ("fprop", "dgrad", "wgrad") for linear in linears)
    assert {linear.measured[0].tokens for linear in linears} <= {20, 21, 22}


class Gate(nn.Module):
    """A router as in transformers: a weight of its own, whose output is the first of several."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.weight = 2, nn.Parameter(torch.randn(8, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = functional.linear(x.reshape(-1, 32), self.weight)
        return scores, scores.topk(self.top_k).indices


class Routed(nn.Module):
    """As in transformers, as in torchtitan, and two whose choice does not follow from their outputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate, self.router, self.other = nn.Linear(32, 32), Gate(), nn.Module(), Gate()
        self.router.gate, self.router.top_k = nn.Linear(32, 8, bias=False), 2
        self.other.register_buffer("expert_bias", torch.zeros(8))
        self.limited = Gate()
        self.limited.num_group = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        scores = self.gate(x)[0] + self.router.gate(x).reshape(-1, 8) + self.other(x)[0] + self.limited(x)[0]
        return self.up_proj(x) * scores.softmax(-1).amax(-1).view(*x.shape[:-1], 1)


def test_routers_say_how_many_tokens_would_get_other_experts(tmp_path: Path) -> None:
    gradients = []
    for path in (None, tmp_path / "t.safetensors"):
        torch.manual_seed(0)
        model = nn.Sequential(Routed())
        gates = [model[0].gate.weight.detach().clone(), model[0].router.gate.weight.detach().clone()]
        gradients.append(trained(model, path, loop=1, steps=1, after=0))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    linears = {one.name: one for one in recorded(tmp_path).linears}
    assert {name: one.top_k for name, one in linears.items()} == {"0.up_proj": 0, "0.gate": 2, "0.router.gate": 2}
    x = model[0].seen.reshape(-1, 32)
    for name, w in zip(("0.gate", "0.router.gate"), gates, strict=True):
        first, second = (one.quantizer(rows).values for one, rows in zip(operands("NVFP4", "fprop"), (w, x), strict=True))
        chosen = [scores.topk(2).indices.sort().values for scores in (x @ w.T, second @ first.T)]
        other = float((chosen[0] != chosen[1]).any(1).float().mean())
        error = linear_error(linears[name], "NVFP4")
        assert other > 0.05
        assert error.rerouted == pytest.approx(other, abs=1e-6)
        assert (error.layer, error.gradient) == (None, None), "it does not count"


def test_transformer_engine_modules(tmp_path: Path) -> None:
    """Stand-ins for its classes: recording reads the norm, the split of the experts, and the two linears of an MLP."""

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (32,), module.layer_norm_weight, module.eps)

    def norm_linear(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.linear(norm(self, x), torch.cat([self.query_weight, self.key_weight])), None

    def grouped(self: Any, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        return torch.cat(
            [functional.linear(rows, getattr(self, f"weight{number}")) for number, rows in enumerate(x.split(m_splits))]
        )

    def norm_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(norm(self, x), self.fc1_weight, self.fc1_bias).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.fc2_weight)

    def te_module(name: str, forward: Any, weights: dict[str, tuple[int, ...]], **attributes: Any) -> nn.Module:
        module = te_class(name, forward)()
        for key, shape in weights.items():
            setattr(module, key, nn.Parameter(torch.randn(shape) * 0.1 + ("norm" in key)))
        for key, value in attributes.items():
            setattr(module, key, value)
        return module

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rms = {"eps": 1e-5, "normalization": "RMSNorm"}
            weights = {"layer_norm_weight": (32,), "query_weight": (32, 32), "key_weight": (16, 32)}
            self.qkv = te_module("LayerNormLinear", norm_linear, weights, weight_names=["query_weight", "key_weight"], **rms)
            self.experts = te_module("GroupedLinear", grouped, {"weight0": (32, 48), "weight1": (32, 48)}, num_gemms=2)
            weights = {"layer_norm_weight": (32,), "fc1_weight": (80, 32), "fc1_bias": (80,), "fc2_weight": (32, 40)}
            self.mlp = te_module("LayerNormMLP", norm_mlp, weights, activation="swiglu", fc2_bias=torch.Tensor(), **rms)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, 32)
            flat = self.experts(self.qkv(flat)[0], m_splits=[20, 44])
            return self.mlp(flat).reshape(x.shape)

    gradients = []
    for path in (None, tmp_path / "t.safetensors"):
        torch.manual_seed(0)
        model = nn.Sequential(Layer())
        first = [parameter.detach().clone() for parameter in model.parameters()]
        gradients.append(trained(model, path, loop=2, steps=1, after=0))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    linears = {linear.name: linear.measured[0] for linear in recorded(tmp_path).linears}
    assert [step.tokens for step in linears.values()] == [64, 20, 44, 64, 64]
    assert list(linears) == ["0.qkv", "0.experts.0", "0.experts.1", "0.mlp.fc1", "0.mlp.fc2"]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first, strict=True):
            parameter.copy_(value)
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)).reshape(-1, 32)
        layer = model[0]
        qkv = layer.qkv(x)[0]
        experts = layer.experts(qkv, m_splits=[20, 44])
        outputs = {"0.qkv": qkv, "0.experts.1": experts[20:], "0.mlp.fc2": layer.mlp(experts)}
        outputs["0.mlp.fc1"] = functional.linear(norm(layer.mlp, experts), layer.mlp.fc1_weight)
    for name, output in outputs.items():
        assert linears[name].outputs["fprop"] == pytest.approx(float(output.norm()), rel=1e-4)
        assert tuple(linears[name].outputs) == ("fprop", "dgrad", "wgrad")
