"""What a mix keeps higher in a stack: whole layers, and parts of every layer.

Parts are what a kit can run in a precision of its own. An op of `gemmscope shapes` belongs to one of them; the projections of
attention belong together.
"""

from collections.abc import Sequence

from gemmscope.errors import UserError, option
from gemmscope.recipe.kept import KeptHigher
from gemmscope.recipe.recipes import recipe
from gemmscope.roles import kit_part, name_of
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack_plan import StackPlan

WHOLE_MLP = "mlp"  # all of the feed-forward block


def kept_parts(kept: KeptHigher | None) -> frozenset[str]:
    """The parts of every layer that a mix keeps.

    >>> sorted(kept_parts(KeptHigher("BF16", ops=("mlp-gate-up", "mlp-down", "attention-out")))), kept_parts(None)
    (['attn out', 'mlp down', 'mlp up'], frozenset())
    """
    return frozenset(filter(None, map(kit_part, kept.ops if kept is not None else ())))


def check_kept(name: str, ops: Sequence[str]) -> None:
    """A `UserError` if a stack cannot keep what a mix of a model with these quantized ops keeps."""
    kept = recipe(name).kept
    if kept is None:
        return
    if strange := [op for op in kept.ops if not kit_part(op)]:
        possible = [name_of(op) for op in ops if kit_part(op)]
        raise UserError(
            f"a step cannot keep {name_of(strange[0])} in a different precision",
            f"it can keep {', '.join(possible)}; gemmscope forecast supports all",
        )
    for part in dict.fromkeys(map(kit_part, kept.ops)):
        present = [op for op in ops if kit_part(op) == part]
        if missing := [name_of(op) for op in present if op not in kept.ops]:
            raise UserError(
                f"a step keeps {', '.join(map(name_of, present))} in a higher precision only together, but the mix does not keep "
                f"{missing[0]}",
                f"add {missing[0]} to {option('keep_higher')}, or use gemmscope forecast, which supports each",
            )


def keeps_half_an_mlp(name: str) -> bool:
    """Whether a mix keeps one linear of an MLP and not the other.

    >>> keeps_half_an_mlp("FP8Current (in BF16: MLP Down)"), keeps_half_an_mlp("FP8Current (in BF16: MLP Gate+Up, MLP Down)")
    (True, False)
    """
    return len(kept_parts(recipe(name).kept) & {"mlp up", "mlp down"}) == 1


def too_shallow(plan: StackPlan | ModulePlan, depth: int, kept: KeptHigher | None) -> str:
    """Why a stack of this depth says nothing about the whole mix; empty if it does."""
    if kept is None or isinstance(plan, ModulePlan) or depth == plan.depth:
        return ""
    count = kept.first_layers + kept.last_layers
    return f"it keeps {count} layers in {kept.recipe}, but only {depth} fit in memory" if count >= depth else ""


def kept_layers(plan: StackPlan, kept: KeptHigher | None) -> list[bool]:
    """Which layers of a stack a mix keeps: the first and last ones of the model, as far as they are on this rank.

    A shallower stack keeps as many: so the whole depth is on the line through two shallower ones.
    """
    if kept is None:
        return [False] * plan.depth
    first, last = max(kept.first_layers - plan.layers_before, 0), max(kept.last_layers - plan.layers_after, 0)
    return [place < first or place >= plan.depth - last for place in range(plan.depth)]


def parts_of(path: str) -> frozenset[str]:
    """The parts that a linear of a layer of the stack belongs to, by its path in the layer.

    >>> sorted(parts_of("feed_forward.second.down")), sorted(parts_of("attention.projections.second"))
    (['mlp', 'mlp down'], ['qkv'])
    """
    names = path.split(".")
    if names[0] == "attention":
        return frozenset({"qkv"} if "projections" in names else {"attn out"})
    if names[0] != "feed_forward":
        return frozenset()
    block = "experts" if "experts" in names else "shared expert" if "shared" in names else WHOLE_MLP
    return frozenset({WHOLE_MLP, f"{block} {'down' if 'down' in names else 'up'}"})
