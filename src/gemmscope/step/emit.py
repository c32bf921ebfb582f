"""A recommendation ready to paste: code for Transformer Engine and torchao, options for torchtitan and Megatron-LM.

How each framework names a recipe is data (`recipe/recipes.toml`: `class`, `float8`, `megatron`), and so are the texts (`paste/`).
What stays in BF16 is named as its models name the modules (`paste/modules.j2`).
"""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from gemmscope.recipe.recipes import recipe as recipe_named

# Framework → its template, and where a recipe's settings have its name for the recipe.
FRAMEWORKS = {
    "Transformer Engine": ("transformer_engine.j2", "transformer_engine", "class"),
    "torchao": ("torchao.j2", "torchao", "float8"),
    "torchtitan": ("torchtitan.j2", "torchao", "float8"),
    "Megatron-LM": ("megatron.j2", "megatron", "flags"),
}


def ready_to_paste(recipe: str, left_out: Sequence[str] = ()) -> dict[str, str]:
    """A recipe for every framework that can run it: framework → text. `left_out`: the blocks that stay in BF16.

    >>> print(ready_to_paste("FP8Current")["Megatron-LM"])
    --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise
    """
    templates = Environment(
        loader=PackageLoader("gemmscope.step", "paste"), undefined=StrictUndefined, trim_blocks=True, autoescape=False
    )
    requested, texts = recipe_named(recipe), {}
    for framework, (template, backend, setting) in FRAMEWORKS.items():
        name = requested.settings.get(backend, {}).get(setting)
        if requested.quantizes and name is not None:
            texts[framework] = templates.get_template(template).render(name=name, left_out=left_out).rstrip()
    return texts
