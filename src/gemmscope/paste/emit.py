"""A recommendation ready to paste: code for Transformer Engine and torchao, options for torchtitan, Megatron-LM and its Bridge.

How each framework names a recipe is data (`recipe/recipes.toml`, `recipe/frameworks.toml`), and so are the texts (`texts/`).
What stays in BF16 is named as its models name the modules (`modules.toml`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined

from gemmscope.recipe.frameworks import Framework, frameworks
from gemmscope.recipe.recipes import BASELINE, Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.plan import PlanLayout
from gemmscope.toml import load_data

modules = cache(partial(load_data, "gemmscope.paste", "modules.toml"))
"""What frameworks call the linears of a layer."""


def ready_to_paste(recipe: str, left_out: Sequence[str] = ()) -> dict[str, str]:
    """A recipe for every framework that can run it: framework → text. `left_out`: the blocks that stay in BF16.

    >>> print(ready_to_paste("FP8Current")["Megatron-LM"])
    --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise
    """
    requested, texts = recipe_named(recipe), {}
    for framework, name in with_texts("recipe", requested):
        if requested.quantizes:
            blocks = [modules()["blocks"][block] for block in left_out]
            if framework.name == "megatron":
                patterns = [f"*.{pattern}" for block in blocks for pattern in block["megatron"]]
                texts[framework.title] = megatron_text(recipe, BASELINE, patterns=patterns)
                continue
            names = {
                "torchtitan": [pattern for block in blocks for pattern in block["torchtitan"]],
                "torchao": [pattern for block in blocks for pattern in block["torchtitan"] + block["hugging_face"]],
            }.get(framework.name, left_out)
            plain: dict[str, Any] = {
                "recipe": recipe,
                "converter": "float8",
                "nearest": False,
                "notes": (),
                "mix": None,
                "higher": "",
            }
            text = templates().get_template(framework.paste["recipe"])
            texts[framework.title] = text.render(name=name, left_out=names, **plain).rstrip()
    return texts


def with_texts(kind: str, chosen: Recipe) -> Iterator[tuple[Framework, str]]:
    """The frameworks that have such a text and this recipe, with their name of the recipe."""
    for known in frameworks().values():
        name = chosen.settings.get(known.paste["named_in"], {}).get(known.paste["named"]) if kind in known.paste else None
        if name is not None:
            yield known, name


def megatron_text(
    recipe: str, higher: str, *, first: int = 0, last: int = 0, patterns: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """Options of Megatron-LM, and the file that keeps modules of these patterns in `higher`. `first`, `last`: layers in BF16.

    Delayed scaling supports neither: then a comment says so.
    """
    flags, settings = recipe_named(recipe).settings["megatron"]["flags"], _precision_config(higher)
    unnamed = next((given for given in (recipe, higher) if _precision_config(given) is None), None)
    if (first or last or patterns) and unnamed is not None:
        first, last, patterns = 0, 0, ()
        notes = [f"Megatron-LM cannot mix {unnamed} with another precision, and rejects other layers and modules next to it"]
    values = {"first": first, "last": last, "patterns": patterns, "notes": notes, "settings": settings or {}}
    return templates().get_template("megatron.j2").render(name=flags, **values).rstrip()


def _precision_config(recipe: str) -> Mapping[str, str] | None:
    """A recipe in Megatron-LM's file of precisions; None if it cannot be named there."""
    return cast("Mapping[str, str] | None", recipe_named(recipe).settings.get("megatron", {}).get("precision_config"))


def layout_to_paste(layout: PlanLayout, global_batch: int, sequence_length: int, layers: int, *, experts: bool) -> dict[str, str]:
    """A layout with its recipe for every framework: framework → text. `layers`: of the model; `experts`: whether it has any.

    A framework that does not have the recipe gets the nearest one, or a comment.
    """
    chosen, texts = recipe_named(layout.recipe), {}
    stages = layout.pp_layers or ()
    pasted = [known for known in frameworks().values() if "layout" in known.paste]
    for framework in sorted(pasted, key=lambda known: not known.one_command):
        text = (
            templates()
            .get_template(framework.paste["layout"])
            .render(
                layout=layout,
                recipe=layout.recipe,
                global_batch=global_batch,
                sequence_length=sequence_length,
                experts=experts,
                piece=(piece := -(-layers // (layout.pp * layout.vp))),
                recomputed=round(layout.recompute_share * piece),
                symmetric=stages[:1] == stages[-1:],
                flags=chosen.settings.get("megatron", {}).get("flags", ""),
                precision=chosen.settings.get("bridge", {}).get("mixed_precision", ""),
                titan=chosen.settings.get("torchtitan"),
            )
        )
        lines = [line.rstrip() for line in text.strip().splitlines() if line.strip() or not framework.one_command]
        texts[framework.title] = (" \\\n" if framework.one_command else "\n").join(lines)
        if chosen.quantizes and framework.name not in chosen.settings:
            note = f"# {framework.title} does not have {chosen.name}: with these settings it trains in {BASELINE}"
            texts[framework.title] += f"\n{note}" if framework.one_command else f"\n\n{note}"
    return texts


@cache
def templates() -> Environment:
    """The templates of `texts/`."""
    return Environment(
        loader=PackageLoader("gemmscope.paste", "texts"), undefined=StrictUndefined, trim_blocks=True, autoescape=False
    )
