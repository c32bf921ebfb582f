"""A plan in the words of the frameworks: code for Transformer Engine, options for torchtitan and Megatron-LM.

How each framework names a recipe is data (`recipe/recipes.toml`: `class`, `float8`, `megatron`); what stays in BF16 is named as
its models name the modules.
"""

from __future__ import annotations

from gemmscope.recipe.recipes import recipe
from gemmscope.step.recommend import Plan

# Part -> the names that torchtitan's layers give to its linears.
TORCHTITAN_MODULES = {
    "qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attn out": ("attention.wo",),
    "mlp": ("feed_forward",),
}


def ready_to_paste(plan: Plan) -> dict[str, str]:
    """The plan for every framework that can run it: framework → text.

    >>> print(ready_to_paste(Plan("FP8Current"))["Megatron-LM"])
    --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise
    """
    asked = recipe(plan.recipe)
    if not asked.quantizes:
        return {}
    texts = {}
    if "transformer_engine" in asked.settings:
        texts["Transformer Engine"] = _transformer_engine(plan, asked.settings["transformer_engine"]["class"])
    if "float8" in asked.settings.get("torchao", {}):
        texts["torchtitan"] = _torchtitan(plan, asked.settings["torchao"]["float8"])
    if "megatron" in asked.settings:
        left = f"  (Megatron-LM cannot leave out {' and '.join(plan.left_out)} alone)" if plan.left_out else ""
        texts["Megatron-LM"] = f"--transformer-impl transformer_engine {asked.settings['megatron']['flags']}{left}"
    return texts


def _transformer_engine(plan: Plan, class_name: str) -> str:
    lines = [
        "import transformer_engine.pytorch as te",
        f"from transformer_engine.common.recipe import {class_name}",
        "",
        f"recipe = {class_name}()",
        "with te.autocast(enabled=True, recipe=recipe):",
        "    hidden = layers(hidden)  # embedding, head and loss stay outside",
    ]
    if plan.left_out:
        lines += [
            "",
            f"# inside each layer, around {' and '.join(plan.left_out)}:",
            "with te.autocast(enabled=False):",
            "    ...",
        ]
    return "\n".join(lines)


def _torchtitan(plan: Plan, name: str) -> str:
    spared = ["output", *(module for part in plan.left_out for module in TORCHTITAN_MODULES[part])]
    listed = ", ".join(f'"{each}"' for each in spared)
    return "\n".join(
        [
            "[model]",
            'converters = ["float8"]',
            "",
            "[quantize.linear.float8]",
            f'recipe_name = "{name}"',
            f"filter_fqns = [{listed}]",
        ]
    )
