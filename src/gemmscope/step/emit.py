"""A recommendation ready to paste: code for Transformer Engine and torchao, options for torchtitan, Megatron-LM and its Bridge.

How each framework names a recipe is data (`recipe/recipes.toml`: `class`, `float8`, `megatron`), and so are the texts (`paste/`).
What stays in BF16 is named as its models name the modules (`paste/modules.j2`).
"""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.plan import PlanLayout

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
    requested, texts, templates = recipe_named(recipe), {}, _templates()
    for framework, (template, backend, setting) in FRAMEWORKS.items():
        name = requested.settings.get(backend, {}).get(setting)
        if requested.quantizes and name is not None:
            texts[framework] = templates.get_template(template).render(name=name, left_out=left_out).rstrip()
    return texts


LAYOUTS = {"Megatron-LM": "layout_megatron.j2", "Megatron-Bridge": "layout_bridge.j2", "torchtitan": "layout_torchtitan.j2"}
JOINED = ("Megatron-LM", "Megatron-Bridge")  # options of one command, a few on each line


def layout_to_paste(layout: PlanLayout, global_batch: int, sequence_length: int, layers: int, *, experts: bool) -> dict[str, str]:
    """A layout with its recipe for every framework: framework → text. `layers`: of the model; `experts`: whether it has any.

    A framework that does not have the recipe gets the nearest one, or a comment.
    """
    settings, texts, templates = recipe_named(layout.recipe).settings, {}, _templates()
    stages = layout.pp_layers or ()
    for framework, template in LAYOUTS.items():
        text = templates.get_template(template).render(
            layout=layout,
            global_batch=global_batch,
            sequence_length=sequence_length,
            experts=experts,
            piece=max(layers // (layout.pp * layout.vp), 1),
            symmetric=stages[:1] == stages[-1:],
            quantizes=recipe_named(layout.recipe).quantizes,
            flags=settings.get("megatron", {}).get("flags", ""),
            precision=settings.get("bridge", {}).get("mixed_precision", ""),
            titan=settings.get("torchtitan"),
        )
        lines = [line.rstrip() for line in text.strip().splitlines() if line.strip() or framework not in JOINED]
        texts[framework] = (" \\\n" if framework in JOINED else "\n").join(lines)
    return texts


def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("gemmscope.step", "paste"), undefined=StrictUndefined, trim_blocks=True, autoescape=False
    )
