"""A recommendation ready to paste: code for Transformer Engine and torchao, options for torchtitan, Megatron-LM and its Bridge.

How each framework names a recipe is data (`recipe/recipes.toml`: `class`, `float8`, `megatron`), and so are the texts (`texts/`).
What stays in BF16 is named as its models name the modules (`modules.toml`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gemmscope.recipe.recipes import BASELINE
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.plan import PlanLayout
from gemmscope.toml import load_data

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
    requested, texts = recipe_named(recipe), {}
    for framework, (template, backend, setting) in FRAMEWORKS.items():
        name = requested.settings.get(backend, {}).get(setting)
        if requested.quantizes and name is not None:
            blocks = [modules()["blocks"][block] for block in left_out]
            if framework == "Megatron-LM":
                patterns = [f"*.{pattern}" for block in blocks for pattern in block["megatron"]]
                texts[framework] = megatron_text(recipe, BASELINE, patterns=patterns)
                continue
            names = {
                "torchtitan": [pattern for block in blocks for pattern in block["torchtitan"]],
                "torchao": [pattern for block in blocks for pattern in block["torchtitan"] + block["hugging_face"]],
            }.get(framework, left_out)
            plain: dict[str, Any] = {"converter": "float8", "nearest": False, "notes": (), "mix": None, "higher": ""}
            texts[framework] = templates().get_template(template).render(name=name, left_out=names, **plain).rstrip()
    return texts


def megatron_text(
    recipe: str, higher: str, *, first: int = 0, last: int = 0, patterns: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """Options of Megatron-LM, and the file that keeps modules of these patterns in `higher`. `first`, `last`: layers in BF16.

    Delayed scaling supports neither: then a comment says so.
    """
    flags, known = recipe_named(recipe).settings["megatron"]["flags"], modules()["megatron_recipes"]
    mixed = bool(first or last or patterns)
    if mixed and (missing := next((given for given in (recipe, higher) if given not in known), None)) is not None:
        first, last, patterns = 0, 0, ()
        notes = [f"Megatron-LM cannot mix {missing} with another precision, and rejects other layers and modules next to it"]
    values = {"first": first, "last": last, "patterns": patterns, "notes": notes, "settings": known.get(higher, {})}
    return templates().get_template("megatron.j2").render(name=flags, **values).rstrip()


LAYOUTS = {"Megatron-LM": "layout_megatron.j2", "Megatron-Bridge": "layout_bridge.j2", "torchtitan": "layout_torchtitan.j2"}
JOINED = ("Megatron-LM", "Megatron-Bridge")  # options of one command, a few on each line


def layout_to_paste(layout: PlanLayout, global_batch: int, sequence_length: int, layers: int, *, experts: bool) -> dict[str, str]:
    """A layout with its recipe for every framework: framework → text. `layers`: of the model; `experts`: whether it has any.

    A framework that does not have the recipe gets the nearest one, or a comment.
    """
    settings, texts = recipe_named(layout.recipe).settings, {}
    stages = layout.pp_layers or ()
    for framework, template in LAYOUTS.items():
        text = (
            templates()
            .get_template(template)
            .render(
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
        )
        lines = [line.rstrip() for line in text.strip().splitlines() if line.strip() or framework not in JOINED]
        texts[framework] = (" \\\n" if framework in JOINED else "\n").join(lines)
    return texts


@cache
def templates() -> Environment:
    """The templates of `texts/`."""
    return Environment(
        loader=PackageLoader("gemmscope.paste", "texts"), undefined=StrictUndefined, trim_blocks=True, autoescape=False
    )


@cache
def modules() -> dict[str, Any]:
    """What frameworks call the linears of a layer."""
    return load_data("gemmscope.paste", "modules.toml")
