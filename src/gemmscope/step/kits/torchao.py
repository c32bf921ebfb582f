"""torchao: plain norms and linears, converted to the recipe and compiled, layer by layer as torchtitan trains them by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.step.kits.plain import Kit
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack_plan import StackPlan, parts_of


class TorchaoKit(Kit):
    """BF16 is compiled too, unconverted. `left_out` parts are not converted, or to the precision that a mix keeps them in."""

    name = "torchao"

    def why_not(self, plan: StackPlan | ModulePlan) -> str:
        for chosen in (self.recipe, *([recipe_named(self.recipe.kept.recipe)] if self.recipe.kept is not None else [])):
            if chosen.quantizes and "float8" not in chosen.settings.get(self.name, {}):
                return f"{chosen.name} is not yet supported in steps with torchao"
        if isinstance(plan, ModulePlan) or "bf16" in self.recipe.operands["wgrad"]:
            return ""  # decided linear by linear, or the GEMM that sums over tokens takes any number of them
        return self.recipe.misaligned({"tokens": plan.run.tokens})

    def finish(self, block: nn.Module, *, kept: bool = False) -> nn.Module:
        higher = recipe_named(self.recipe.kept.recipe) if self.recipe.kept is not None else None
        if self.recipe.quantizes and not kept:
            self._convert(block, lambda module, name: _fits(module, name) and not parts_of(name) & self.left_out)
        if higher is not None and higher.quantizes:
            self._convert(
                block, lambda module, name: _fits(module, name) and (kept or bool(parts_of(name) & self.left_out)), higher
            )
        return self.compile(block)

    def why_not_linear(self, rows: int, inputs: int, outputs: int) -> str:
        if "bf16" in self.recipe.operands["wgrad"]:  # the GEMM that sums over rows
            rows = self.recipe.multiple_of
        return super().why_not_linear(rows, inputs, outputs)

    def convert(self, module: nn.Module, paths: Sequence[str]) -> None:
        chosen = frozenset(paths)
        self._convert(module, lambda _, name: name in chosen)

    def _convert(self, module: nn.Module, chosen: Callable[[Any, str], bool], recipe: Recipe | None = None) -> None:
        config = Float8LinearConfig.from_recipe_name((recipe or self.recipe).settings[self.name]["float8"])
        convert_to_float8_training(
            module,
            config=config,
            module_filter_fn=lambda part, name: type(part).__name__ != "Float8Linear" and chosen(part, name),
        )


def _fits(module: Any, name: str) -> bool:
    """Sizes that GEMMs in FP8 can have; routers stay as they are."""
    aligned = isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0
    return aligned and not name.endswith((".router", ".gate"))
