"""The kits without their frameworks: which sizes they refuse, and how they name their modules."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmscope.errors import MissingFactError
from gemmscope.model.layer_spec import MlpSpec
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.recipe.recipes import recipe
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack_plan import plan_step

torch = pytest.importorskip("torch", reason="kits need torch")
from torch import nn  # noqa: E402

from gemmscope.step.kits.plain import Kit, Routing  # noqa: E402

TE = "transformer_engine"
STAND_INS = (
    "torchao", "torchao.float8", TE, f"{TE}.common", f"{TE}.pytorch", f"{TE}.pytorch.attention", f"{TE}.pytorch.attention.rope",
    f"{TE}.pytorch.quantization",
)  # fmt: skip
NAMES = ("Float8LinearConfig", "convert_to_float8_training", "recipe", "apply_rotary_pos_emb", "FP8GlobalState",
         "FP8GlobalStateManager")  # fmt: skip


def kit(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kit's module, its framework replaced by empty modules."""
    for module_name in STAND_INS:
        module = ModuleType(module_name)
        vars(module).update(dict.fromkeys(NAMES, lambda: None))
        vars(module)["__path__"] = []
        monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.delitem(sys.modules, f"gemmscope.step.kits.{name}", raising=False)
    loaded = importlib.import_module(f"gemmscope.step.kits.{name}")
    del sys.modules[loaded.__name__]  # not shared with other tests
    return loaded


@pytest.mark.parametrize(
    ("activation", "plain", "gated"),
    [
        ("silu", "silu", "swiglu"), ("swish", "silu", "swiglu"), ("gelu", "gelu", "geglu"), ("gelu_new", "gelu", "geglu"),
        ("quick_gelu", "qgelu", "qgeglu"), ("relu", "relu", "reglu"), ("relu2", "srelu", "sreglu"), ("xielu", "gelu", "geglu"),
    ],
)  # fmt: skip
def test_transformer_engines_names_of_activations(
    activation: str, plain: str, gated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kit("transformer_engine", monkeypatch)._activation
    assert name(MlpSpec(64, gated=False, activation=activation)) == plain
    assert name(MlpSpec(64, gated=True, activation=activation)) == gated


@pytest.mark.parametrize(
    ("recipe_name", "sequence", "reason"),
    [
        ("BF16", 17, ""),
        ("FP8Tensorwise", 16, ""),
        ("FP8Tensorwise", 17, "tokens = 17 is not a multiple of 16, which FP8Tensorwise GEMMs need: pad it to 32"),
        ("FP8RowwiseGWHP", 17, ""),
        ("MXFP8", 16, "MXFP8 is not yet supported in steps with torchao"),
    ],
)
def test_what_torchao_refuses(recipe_name: str, sequence: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that do not fit stay in BF16; recipes cannot run tokens that do not fit."""
    model = from_hyperparameters(hidden_size=64, intermediate_size=90, num_attention_heads=4, num_hidden_layers=2)
    torchao_kit = kit("torchao", monkeypatch).TorchaoKit(recipe(recipe_name))
    assert torchao_kit.why_not(plan_step(model, RunSpec(1, sequence))[0]) == reason


@pytest.mark.parametrize(
    ("recipe_name", "rows", "reason"),
    [("FP8Tensorwise", 34, "rows = 34 is not a multiple of 16"), ("FP8RowwiseGWHP", 34, ""), ("FP8Rowwise", 32, "")],
)
def test_which_linears_of_a_module_torchao_can_run(
    recipe_name: str, rows: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchao_kit = kit("torchao", monkeypatch).TorchaoKit(recipe(recipe_name))
    assert torchao_kit.why_not_linear(rows, 128, 256) == reason
    assert torchao_kit.why_not_linear(rows, 128, 250) == "output features = 250 is not a multiple of 16"
    assert torchao_kit.why_not(ModulePlan("file.py:build", None, 0, 0, 0)) == ""


def test_torchao_converts_the_chosen_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, asked = kit("torchao", monkeypatch), []
    loaded.Float8LinearConfig = SimpleNamespace(from_recipe_name=str.upper)

    def convert(module: nn.Module, config: str, module_filter_fn: Any) -> None:
        asked.append((config, [name for name, child in module.named_modules() if module_filter_fn(child, name)]))

    loaded.convert_to_float8_training = convert
    torchao_kit = loaded.TorchaoKit(recipe("FP8Rowwise"), device="cpu", compiled="none")
    torchao_kit.convert(nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)}), ["down"])
    assert asked == [("ROWWISE", ["down"])]


@pytest.mark.parametrize("bias", [True, False])
def test_transformer_engines_linear_takes_over_the_parameters(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear(nn.Module):
        def __init__(self, inputs: int, outputs: int, **how: Any) -> None:
            super().__init__()
            assert (inputs, outputs, how.pop("params_dtype"), how) == (4, 2, torch.float32, {"bias": bias, "device": "cpu"})

    loaded = kit("transformer_engine", monkeypatch)
    loaded.te = SimpleNamespace(Linear=Linear)
    te_kit = loaded.TransformerEngineKit(recipe("BF16"), device="cpu")
    module = nn.ModuleDict({"linear": nn.Linear(4, 2, bias=bias)}).eval()
    before = dict(module.named_parameters())
    te_kit.convert(module, ["linear"])
    assert isinstance(module["linear"], Linear)
    assert not module["linear"].training
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    assert te_kit.why_not(ModulePlan("file.py:build", None, 0, 0, 0)) == ""


def test_tokens_go_to_as_many_experts_as_planned() -> None:
    """Every expert gets its rows; what it returns goes back to its tokens, by the weight of the slot."""
    torch.manual_seed(0)
    routing, x = Routing(12, (16, 5, 9), "cpu"), torch.randn(12, 4)
    sent, places = routing.send(x)
    assert sent.shape == (30, 4)
    assert [int((routing.experts == expert).sum()) for expert in range(4)] == [16, 5, 9, 6]  # six places are left over
    weights = torch.rand(12, 2)
    combined = routing.combine(sent, weights, places)
    slots = weights.repeat(1, 2)[:, : routing.slots]
    expected = x * (slots * (routing.experts < 3)).sum(dim=1, keepdim=True)
    assert torch.allclose(combined, expected, atol=1e-5)


def test_a_recipe_that_is_not_quantized_runs_in_its_own_format() -> None:
    """One without a dtype is asked for, rather than run as another."""
    assert [str(Kit(recipe(name)).precision) for name in ("FP32", "BF16", "MXFP8")] == ["torch.float32", *["torch.bfloat16"] * 2]
    kit = Kit(replace(recipe("FP32"), name="TF32", operands={"fprop": ("tf32", "tf32")}))
    with pytest.raises(MissingFactError) as error:
        assert kit.precision
    assert error.value.key == "format.tf32"
