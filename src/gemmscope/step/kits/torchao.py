"""torchao: plain norms and linears, each layer converted to the recipe and compiled, as torchtitan trains them."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from gemmscope.recipe.recipes import Recipe
from gemmscope.step.kits.plain import Kit
from gemmscope.step.plan import StackPlan

MODULES = {"qkv": "attention.projections", "attn out": "attention.out", "mlp": "feed_forward"}  # part -> its module in a layer


class TorchaoKit(Kit):
    """BF16 is compiled too, unconverted. `left_out` parts are not converted."""

    name = "torchao"
    compiles = True

    def __init__(self, recipe: Recipe, left_out: frozenset[str] = frozenset(), device: str = "cuda") -> None:
        super().__init__(recipe, left_out, device)
        torch._dynamo.config.recompile_limit = 64

    def why_not(self, plan: StackPlan) -> str:
        if self.recipe.quantizes and "float8" not in self.recipe.settings.get(self.name, {}):
            return f"{self.recipe.name} is not yet supported in steps with torchao"
        if "bf16" in self.recipe.operands["wgrad"]:  # the GEMM that sums over tokens
            return ""
        return self.recipe.misaligned({"tokens": plan.tokens})

    def finish(self, block: nn.Module) -> nn.Module:
        settings = self.recipe.settings.get(self.name, {})
        if "float8" in settings:
            spared = [MODULES[part] for part in sorted(self.left_out)]
            convert_to_float8_training(
                block,
                config=Float8LinearConfig.from_recipe_name(settings["float8"]),
                module_filter_fn=lambda module, name: _fits(module, name) and not name.startswith(tuple(spared)),
            )
        return torch.compile(block, dynamic=False)


def _fits(module: Any, name: str) -> bool:
    """Sizes that GEMMs in FP8 can have; routers stay as they are."""
    aligned = isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0
    return aligned and not name.endswith((".router", ".gate"))
