"""The training step with Transformer Engine on a GPU: the well-known models, two layers of each, in every recipe it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.recipe.recipes import recipe
from gemmscope.step.module_plan import ModulePlan
from support.small_steps import RUN, two_layers

torch = pytest.importorskip("torch", reason="steps need torch")
if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)
pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine's layers")

from gemmscope.engine.timer import segments  # noqa: E402
from gemmscope.step.kits.transformer_engine import TransformerEngineKit  # noqa: E402
from gemmscope.step.live_module import LiveModule, ModuleStep  # noqa: E402
from gemmscope.step.marks import mark_step, recording  # noqa: E402
from gemmscope.step.stack import CapturedStep, GraphMemory, Step, Weights  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.gpu
RECIPES = ("FP8Current", "FP8Delayed", "FP8Block")


@pytest.mark.parametrize("name", RUN)
def test_every_preset_runs_in_every_recipe(name: str) -> None:
    plan, weights = two_layers(name), Weights()
    losses = {}
    for recipe_name in ("BF16", *RECIPES):
        kit = TransformerEngineKit(recipe(recipe_name))
        if kit.why_not(plan):
            continue
        step = Step(plan, kit, weights, "cuda")
        step.run()
        step.run()
        losses[recipe_name] = step.loss()
    assert all(abs(loss / losses["BF16"] - 1) < 0.1 for loss in losses.values()), losses


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "selective"}, {"gradient_accumulation": 2}])
def test_options(options: dict[str, object]) -> None:
    plan, weights = two_layers("llama-3.1-8b", **options), Weights()
    for recipe_name in ("BF16", *RECIPES):
        step = Step(plan, TransformerEngineKit(recipe(recipe_name)), weights, "cuda")
        step.run()
        step.run()
        assert step.loss() > 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b"])
def test_a_step_is_captured_in_every_recipe(name: str) -> None:
    plan, weights, memory = two_layers(name), Weights(), GraphMemory()
    for recipe_name in ("BF16", *RECIPES):
        step = CapturedStep(Step(plan, TransformerEngineKit(recipe(recipe_name)), weights, "cuda"), memory)
        step.run()
        torch.cuda.synchronize()
        assert step.loss() > 0


@pytest.mark.parametrize("left_out", ["qkv", "attn out", "mlp"])
def test_parts_left_in_bf16(left_out: str) -> None:
    """Its GEMMs run in BF16, the others do not."""
    from gemmscope.engine.kernels import classify
    from gemmscope.step.waterfall import place

    plan = two_layers("llama-3.1-8b")
    step = Step(plan, TransformerEngineKit(recipe("FP8Current"), frozenset({left_out})), Weights(), "cuda")
    labels: list[tuple[str, str]] = []

    def work() -> None:
        step.run()
        torch.cuda.synchronize()
        with recording() as marks:
            step.run()
            torch.cuda.synchronize()
            mark_step("end")
        labels.extend(marks)

    pieces = segments(work)
    assert len(pieces) == len(labels)
    parts = [
        (part, way, [[event.name(), 1.0, 0] for event in events]) for (part, way), events in zip(labels, pieces, strict=True)
    ]
    operands: dict[str, set[object]] = {}
    for kernel in place(parts):
        facts = classify(kernel.name)
        if facts.kernel_class == "gemm" and kernel.block in ("qkv", "attn out", "mlp"):
            operands.setdefault(kernel.block, set()).add(facts.operands)
    for part, seen in operands.items():
        assert (("bf16", "bf16") in seen) == (part == left_out), (part, seen)


MODULE = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build():
    return nn.Sequential(Layer(), Layer()), torch.randn(128, 256)
"""


def test_linears_of_a_module_are_replaced(tmp_path: Path) -> None:
    """The losses are those of BF16, nearly; the parameters are the module's own."""
    (tmp_path / "toy_layers.py").write_text(MODULE)
    live = LiveModule.build(ModulePlan(f"{tmp_path}/toy_layers.py:build", None, 0, 0, 0), "cuda", torch.bfloat16, "adamw")
    losses = {}
    for recipe_name in ("BF16", *RECIPES):
        step = ModuleStep(live, TransformerEngineKit(recipe(recipe_name)))
        step.run()
        step.run()
        losses[recipe_name] = step.loss()
        assert list(step.conversion.values()).count("") == (4 if recipe_name != "BF16" else 0)
    assert all(abs(loss / losses["BF16"] - 1) < 0.1 for loss in losses.values()), losses
