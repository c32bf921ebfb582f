"""A recommendation ready to paste: code for Transformer Engine and torchao, options for torchtitan and Megatron-LM.

How each framework names a recipe is data (`recipe/recipes.toml`: `class`, `float8`, `megatron`); what stays in BF16 is named as
its models name the modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemmscope.recipe.recipes import recipe as recipe_named

# Block -> the names that torchtitan's layers give to its linears.
TORCHTITAN_MODULES = {
    "qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attn out": ("attention.wo",),
    "mlp": ("feed_forward", "moe"),
}
# And those of Hugging Face.
HUGGING_FACE_MODULES = {"qkv": ("q_proj", "k_proj", "v_proj"), "attn out": ("o_proj",), "mlp": ("mlp",)}


def ready_to_paste(recipe: str, left_out: Sequence[str] = ()) -> dict[str, str]:
    """A recipe for every framework that can run it: framework → text. `left_out`: the blocks that stay in BF16.

    >>> print(ready_to_paste("FP8Current")["Megatron-LM"])
    --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise
    """
    requested = recipe_named(recipe)
    if not requested.quantizes:
        return {}
    texts, settings = {}, requested.settings
    if "transformer_engine" in settings:
        texts["Transformer Engine"] = _transformer_engine(left_out, settings["transformer_engine"]["class"])
    if "float8" in settings.get("torchao", {}):
        texts["torchao"] = _torchao(left_out, settings["torchao"]["float8"])
        texts["torchtitan"] = _torchtitan(left_out, settings["torchao"]["float8"])
    if "megatron" in settings:
        left = f"  # Megatron-LM cannot leave out {' and '.join(left_out)} alone" if left_out else ""
        texts["Megatron-LM"] = f"--transformer-impl transformer_engine {settings['megatron']['flags']}{left}"
    return texts


def _transformer_engine(left_out: Sequence[str], class_name: str) -> str:
    lines = [
        "import transformer_engine.pytorch as te",
        f"from transformer_engine.common.recipe import {class_name}",
        "",
        f"recipe = {class_name}()",
        "with te.autocast(enabled=True, recipe=recipe):",
        "    hidden = layers(hidden)  # embedding, head and loss stay outside",
    ]
    if left_out:
        lines += [
            "",
            f"# inside each layer, around {' and '.join(left_out)}:",
            "with te.autocast(enabled=False):",
            "    ...",
        ]
    return "\n".join(lines)


def _torchao(left_out: Sequence[str], name: str) -> str:
    """Heads and routers stay as they are, and so do sizes that FP8 cannot have, as in the step that was measured."""
    left = [module for block in left_out for names in (TORCHTITAN_MODULES, HUGGING_FACE_MODULES) for module in names[block]]
    listed = ", ".join(f'"{module}"' for module in left)
    return "\n".join(
        [
            "import torch",
            "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
            "",
            *([f"left_out = ({listed},)", ""] if left else []),
            "def fits(module, name):",
            '    if name.endswith(("output", "lm_head", "router", "gate")):',
            "        return False",
            *(["    if any(each in name for each in left_out):", "        return False"] if left else []),
            "    return module.in_features % 16 == 0 and module.out_features % 16 == 0",
            "",
            "convert_to_float8_training(",
            "    model,",
            f'    config=Float8LinearConfig.from_recipe_name("{name}"),',
            "    module_filter_fn=fits,",
            ")",
            "for index, layer in enumerate(model.layers):  # measured compiled: casts fuse; Hugging Face: model.model.layers",
            "    model.layers[index] = torch.compile(layer)",
        ]
    )


def _torchtitan(left_out: Sequence[str], name: str) -> str:
    """As its TOML files name it (0.1 and 0.2); versions configured in Python take the same two values."""
    spared = ["output", "lm_head", "router.gate", *(module for block in left_out for module in TORCHTITAN_MODULES[block])]
    listed = ", ".join(f'"{module}"' for module in spared)
    return "\n".join(
        [
            "[model]",
            'converters = ["quantize.linear.float8"]',
            "",
            "[compile]",
            "enable = true",
            "",
            "[quantize.linear.float8]",
            f'recipe_name = "{name}"',
            f"filter_fqns = [{listed}]",
        ]
    )
