"""`record_tensors` in training loops that do unusual things with their linears, and used in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import gemmscope  # noqa: E402
from gemmscope.numerics.recording import LinearFacts, read_recording  # noqa: E402
from support.recorded import measure_few  # noqa: E402

ALL = ("fprop", "dgrad", "wgrad")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)


class Pair(nn.Module):
    """Two linears; what is between them is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu_())


def plain(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def two_losses(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()


def first_call_unused(model: nn.Module, x: Tensor) -> None:
    model(2 * x.detach())
    plain(model, x)


def called_twice(model: nn.Module, x: Tensor) -> None:
    model(model(x)).square().sum().backward()


def called_twice_with_recomputation(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        x = checkpoint(model, x, use_reentrant=False)
    x.square().sum().backward()


def recorded(
    path: Path, step: Callable[[nn.Module, Tensor], None], model: nn.Module | None = None, **settings: Any
) -> dict[str, LinearFacts]:
    """The recording of a network, after checking that its gradients are those without recording, bit for bit."""
    torch.manual_seed(0)
    model = model if model is not None else Pair()
    x = torch.randn(2, 8, 32, requires_grad=True)
    step(model, x)
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with gemmscope.record_tensors(model, path, **({"steps": 1, "after": 0} | settings)) as recording:
        step(model, x)
        recording.step()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    return {linear.name: linear for linear in read_recording(path).linears}


def wgrad_norm(linear: LinearFacts) -> float:
    return linear.measured[0].outputs["wgrad"]


@pytest.mark.parametrize("step", [two_losses, first_call_unused, called_twice, called_twice_with_recomputation])
def test_every_pass_is_recorded(step: Callable[[nn.Module, Tensor], None], tmp_path: Path) -> None:
    linears = recorded(tmp_path / "t.safetensors", step)
    assert {name: tuple(linear.measured[0].outputs) for name, linear in linears.items()} == {"up_proj": ALL, "down_proj": ALL}


@pytest.mark.parametrize("step", [plain, first_call_unused])
def test_an_output_that_is_changed_in_place(step: Callable[[nn.Module, Tensor], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pair()
    linears = recorded(tmp_path / "t.safetensors", step, model)
    for name in ("up_proj", "down_proj"):
        gradient = model.get_submodule(name).weight.grad
        assert wgrad_norm(linears[name]) == pytest.approx(float(gradient.norm()), rel=1e-4)


@pytest.mark.parametrize("step", [called_twice, called_twice_with_recomputation])
def test_input_and_gradient_are_of_the_same_call(step: Callable[[nn.Module, Tensor], None], tmp_path: Path) -> None:
    """The last one, which is the first one in the backward pass."""
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(2, 8, 32)
    linears = recorded(tmp_path / "t.safetensors", lambda model, _: step(model, x), model)
    model.zero_grad()
    plain(model, model(x).detach())
    for name, linear in linears.items():
        assert wgrad_norm(linear) == pytest.approx(float(model.get_submodule(name).weight.grad.norm()), rel=1e-4)


def test_only_gemms_that_run_are_recorded(tmp_path: Path) -> None:
    model = Pair()
    model.down_proj.weight.requires_grad_(False)
    linears = recorded(tmp_path / "t.safetensors", lambda model, x: plain(model, x.detach()), model)
    assert tuple(linears["up_proj"].measured[0].outputs) == ("fprop", "wgrad")
    assert tuple(linears["down_proj"].measured[0].outputs) == ("fprop", "dgrad")


def test_a_frozen_linear_without_gradients_has_its_fprop(tmp_path: Path) -> None:
    """As the first linear of a model with LoRA; what runs without autograd, such as a validation, is not recorded."""

    def step(model: Pair, x: Tensor) -> None:
        with torch.no_grad():
            model(100 * x)
        plain(model, x.detach())

    model = Pair()
    model.up_proj.requires_grad_(False)
    linears = recorded(tmp_path / "t.safetensors", step, model)
    frozen = linears["up_proj"]
    assert not frozen.failure
    assert tuple(frozen.measured[0].outputs) == ("fprop",)
    assert frozen.measured[0].tensors["X"].amax < 50
    assert set(frozen.steps[0].tensors) == {"X", "W"}
    assert tuple(linears["down_proj"].measured[0].outputs) == ("fprop", "wgrad")


def test_two_recordings_of_a_model(tmp_path: Path) -> None:
    model = Pair()
    with (
        gemmscope.record_tensors(model, tmp_path / "a", steps=1, after=0) as first,
        gemmscope.record_tensors(model, tmp_path / "b", steps=2, after=0) as second,
    ):
        for _ in range(3):
            plain(model, torch.randn(4, 32))
            first.step()
            second.step()
    assert [step.step for step in read_recording(tmp_path / "b").linears[0].steps] == [0, 1]


def test_a_recording_that_was_not_begun_or_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    recording = gemmscope.record_tensors(model, tmp_path / "a", steps=1, after=0)
    recording.step()
    recording.step()
    assert capsys.readouterr().err.count("write `with gemmscope.record_tensors(...) as recording:`") == 1
    recording = gemmscope.record_tensors(model, tmp_path / "b", steps=1, after=0)
    for _ in range(2):
        with recording:
            plain(model, torch.randn(4, 32))
            recording.step()
    assert "this recording has ended" in capsys.readouterr().err


class Patches(nn.Module):
    """Parameters of three dimensions that are no experts, and an attention that calls no linears."""

    def __init__(self) -> None:
        super().__init__()
        self.position_embeddings = nn.Parameter(torch.zeros(1, 16, 32))
        self.patches = nn.Conv1d(32, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 2)
        self.up_proj = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches((x.reshape(1, 16, 32) + self.position_embeddings).mT).mT
        return self.up_proj(self.attention(x, x, x)[0])


def test_only_linears_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    assert list(recorded(path, plain, Patches())) == ["up_proj"]
    assert "nn.MultiheadAttention is not recorded (1 module)" in read_recording(path).notes[0]


def test_a_path_that_cannot_be_written_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    with gemmscope.record_tensors(model, tmp_path / ("t" * 300), steps=1, after=0) as recording:
        plain(model, torch.randn(4, 32))
        recording.step()
    assert "cannot be written: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["model", Pair().parameters(), [Pair(), None]])
def test_something_that_is_no_model(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a torch"):
        gemmscope.record_tensors(model, tmp_path / "t")


def test_the_callback_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Hugging Face's Trainer, with accumulated gradients: the losses and weights are the same, bit for bit."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    (snippet,) = (block.partition("```")[0] for block in page.split("```python\n") if "TrainerCallback" in block)
    weights = []
    for recorded in (False, True):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (64, 8))]
        arguments = transformers.TrainingArguments(
            "out", max_steps=12, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True
        )
        if recorded:
            exec(snippet, {"gemmscope": gemmscope, "model": model, "arguments": arguments, "dataset": dataset})
        else:
            transformers.Trainer(model, arguments, train_dataset=dataset).train()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    linears = read_recording(tmp_path / "recording.safetensors").linears
    assert all(tuple(one.measured[0].outputs) == ALL for one in linears if one.measured)
    assert [step.step for step in linears[0].steps] == [10, 11]
