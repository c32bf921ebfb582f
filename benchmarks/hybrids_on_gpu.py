"""Runs steps of small hybrids or of presets on this GPU in several recipes, launched and as CUDA graphs, and prints their times.

    python benchmarks/hybrids_on_gpu.py [MODEL ...] [--recipes BF16,FP8Current] [--ep 8] [--no-graphs]

A model is one of those below, or a preset.
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module

import torch

from gemmscope.model import presets
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, MixerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.frameworks import measuring_classes
from gemmscope.recipe.recipes import recipe
from gemmscope.step.stack import CapturedStep, GraphMemory, Step, Weights
from gemmscope.step.stack_plan import plan_step

GATED = MlpSpec(6144, gated=True, activation="silu")
RELU2 = MlpSpec(1856, gated=False, activation="relu2")
SPARSE = MoeSpec(
    16, 4, MlpSpec(768, gated=True, activation="silu"), MlpSpec(768, gated=True, activation="silu"), shared_gate=True
)
NANO = MixerSpec("ssd", 64, 64, groups=8, key_dim=128, conv_kernel=4, conv_bias=True, chunk=128, norm="group")
DELTA = MixerSpec("gated delta rule", 32, 128, groups=16, key_dim=128, conv_kernel=4, norm="head")
KDA = MixerSpec("kda", 32, 128, groups=32, key_dim=128, conv_kernel=4, rank=128, norm="head")
LIGHTNING = MixerSpec("lightning attention", 64, 128, groups=64, key_dim=128)
SHORT = MixerSpec("short convolution", 1, 2048, conv_kernel=3, gated=False, norm="")
ATTENTION = AttentionSpec(16, 2, 256, qk_norm="head")
MODELS = {
    "nemotron": (2688, [LayerSpec(None, None, 1, NANO), LayerSpec(None, MoeSpec(16, 2, RELU2, MlpSpec(3712, gated=False)), 1)] * 2
        + [LayerSpec(AttentionSpec(32, 2, 128, rotary=False), None, 1)]),
    "qwen-next": (2048, [LayerSpec(None, SPARSE, 2, DELTA)] * 3 + [LayerSpec(ATTENTION, SPARSE, 2)]),
    "kimi": (2304, [LayerSpec(None, GATED, 2, KDA)] * 3),
    "minimax": (6144, [LayerSpec(None, GATED, 2, LIGHTNING)] * 2),
    "lfm": (2048, [LayerSpec(None, GATED, 2, SHORT)] * 2),
    "falcon": (2048, [LayerSpec(AttentionSpec(8, 2, 128), GATED, 2, NANO)] * 2),
    "gemma": (2304, [LayerSpec(AttentionSpec(8, 4, 256, window=window), GATED, 4) for window in (1024, None)]),
    "dense": (2048, [LayerSpec(AttentionSpec(32, 8, 64), GATED, 2)] * 4),
}  # fmt: skip


def mean_ms(step: Step | CapturedStep, count: int = 5) -> float:
    """The time of one step, averaged over consecutive steps."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    step.run()
    wait()
    began = time.perf_counter()
    for _ in range(count):
        step.run()
    wait()
    return (time.perf_counter() - began) / count * 1000


def main() -> None:
    """Every model in every recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--recipes", default="BF16,FP8Current,FP8Delayed,FP8Block")
    parser.add_argument("--batch", default="1x8192")
    parser.add_argument("--kit", default="transformer_engine")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module, class_name = measuring_classes("step")[arguments.kit if device == "cuda" else "cpu"]
    kit_class = getattr(import_module(module), class_name)
    batch, length = map(int, arguments.batch.split("x"))
    for name in arguments.models or MODELS:
        if name in MODELS:
            hidden, layers = MODELS[name]
            model = ModelSpec(name, hidden, tuple(layers), 32768)
        else:
            preset = presets.load(name).model
            assert preset is not None
            model = preset
        plan, findings = plan_step(model, RunSpec(batch, length, ep=arguments.ep))
        print(f"{name}: {plan.depth} layers, {batch} x {length}; {[one.code for one in findings]}", flush=True)
        weights, memory = Weights(), GraphMemory() if device == "cuda" else None
        for recipe_name in arguments.recipes.split(","):
            try:
                began = time.perf_counter()
                kit = kit_class(recipe(recipe_name), device=device)
                step = Step(plan.padded(recipe(recipe_name).multiple_of), kit, weights, device)
                step.run()
                loss, first_s = step.loss(), time.perf_counter() - began
                launched = mean_ms(step)
                line = f"  {recipe_name:11} loss {loss:6.3f} first {first_s:5.1f} s launched {launched:8.2f} ms"
            except Exception as error:  # this recipe, not the others
                print(f"  {recipe_name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
                continue
            try:
                if memory is not None and not arguments.no_graphs:
                    line += f" captured {mean_ms(CapturedStep(step, memory)):8.2f} ms"
            except Exception as error:
                line += f" not captured: {type(error).__name__}: {str(error)[:300]}"
            print(line, dict(kit.kernels.sources) if recipe_name == "BF16" else "", flush=True)
            del step


if __name__ == "__main__":
    main()
