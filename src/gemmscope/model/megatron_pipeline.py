"""How a Megatron run assigns layers to its pipeline stages.

By default every stage gets the same number. A file can set the number of the first and the last stage, count the embedding and
the loss as one layer each, or give the whole layout: in `Et|(tt|)*14t|L`, bars separate the parts, E is the embedding, t a layer,
L the loss. In the pattern of a hybrid model, bars separate the parts in the same way.

A stage can also have several pieces of the model (the virtual pipeline: with 2 stages and 2 pieces each, stage 0 has the first
and the third quarter). The number of layers of each stage is then kept, but not which ones: they are counted as consecutive. If
layers differ, a finding says so.
"""

import re

from gemmscope.errors import UserError, shown
from gemmscope.model.limits import LARGEST, divisors_text
from gemmscope.model.megatron_hybrid import PATTERNS, hybrid_pattern
from gemmscope.model.megatron_values import MegatronSettings

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
PIECES = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
LAYERS_PER_PIECE = "num_layers_per_virtual_pipeline_stage"


def stage_layers(settings: MegatronSettings, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each pipeline stage, where the file splits them unevenly."""
    if stages == 1:
        return None
    parts = _pattern_parts(settings, stages)
    if parts:
        return tuple(sum(parts[stage::stages]) for stage in range(stages))
    if settings.given(LAYOUT):
        parts = _layout_parts(settings, layers, stages)
        return tuple(sum(parts[stage::stages]) for stage in range(stages))
    if settings.given(FIRST) or settings.given(LAST):
        return _with_own_ends(settings, layers, stages)
    embedding = settings.flag("account_for_embedding_in_pipeline_split")
    loss = settings.flag("account_for_loss_in_pipeline_split")
    if not (embedding or loss):
        return None
    per_stage, remainder = divmod(layers + embedding + loss, stages)
    if remainder:
        raise UserError(
            f"{layers} layers, with embedding and loss counted as one each, cannot be split evenly over {stages} stages",
            f"pipeline sizes that divide {layers + embedding + loss}: {divisors_text(layers + embedding + loss)}",
        )
    return (per_stage - embedding, *(per_stage,) * (stages - 2), per_stage - loss)


def virtual_stages(settings: MegatronSettings, layers: int, stages: int) -> tuple[str, int] | None:
    """How many pieces of the model each stage has, and the setting that says so; None for one piece."""
    if stages == 1:
        return None
    pattern = _pattern_parts(settings, stages)
    if pattern:
        return (next(filter(settings.given, PATTERNS)), len(pattern) // stages) if len(pattern) > stages else None
    for name in PIECES:
        if (pieces := settings.maybe_count(name, "layers") or 1) > 1:
            return name, pieces
    per_piece = settings.maybe_count(LAYERS_PER_PIECE, "layers")
    if per_piece:
        counted = layers + sum(settings.flag(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
        pieces, rest = divmod(counted, stages * per_piece)
        if rest and counted % stages == 0:
            raise UserError(
                f"{settings.spell(LAYERS_PER_PIECE)} {per_piece} does not divide the {counted // stages} layers of a stage",
                f"possible values: {divisors_text(counted // stages)}",
            )
        return (LAYERS_PER_PIECE, pieces) if pieces > 1 and not rest else None
    parts = len(_layout_parts(settings, layers, stages)) if settings.given(LAYOUT) else stages
    return (LAYOUT, parts // stages) if parts > stages else None


def _pattern_parts(settings: MegatronSettings, stages: int) -> list[int]:
    """Layers of each part of a hybrid pattern, where bars separate them."""
    pattern = hybrid_pattern(settings)
    if pattern is None or len(pattern.parts) == 1:
        return []
    if len(pattern.parts) % stages:
        raise UserError(
            f"{settings.spell(pattern.setting)} has {len(pattern.parts)} parts, but there are {stages} pipeline stages",
            f"separate the layers by | into {stages} parts, or a multiple of it",
        )
    return [*pattern.parts]


def _with_own_ends(settings: MegatronSettings, layers: int, stages: int) -> tuple[int, ...]:
    """The first or last stage, or both, have their own number of layers; the others share the rest equally."""
    first, last = settings.maybe_size(FIRST, "layers"), settings.maybe_size(LAST, "layers")
    rest, others = layers - (first or 0) - (last or 0), stages - bool(first) - bool(last)
    if rest < 0 or (rest % others if others else rest):
        raise UserError(
            f"the first and last pipeline stage have {(first or 0) + (last or 0)} of {layers} layers, "
            f"and the other {rest} cannot be split evenly over {others} stages",
            f"change {settings.spell(FIRST)} or {settings.spell(LAST)}",
        )
    middle = (rest // others,) * others if others else ()
    return (*((first,) if first else ()), *middle, *((last,) if last else ()))


def _layout_parts(settings: MegatronSettings, layers: int, stages: int) -> list[int]:
    """Layers of each part of a layout, which is text or a list of lists: part i goes to stage i modulo the number of stages."""
    value = settings.values[LAYOUT]
    parts: list[int] = []
    if isinstance(value, list) and sum(len(part) for part in value if isinstance(part, list)) <= LARGEST["layers"] * 3:
        parts = [sum(block in ("decoder", "t") for block in part) for part in value if isinstance(part, list)]
    elif isinstance(value, str) and len(value) <= 2000:
        flat = value.replace(",", "")
        for unit in (r"\(([^()]+)\)\*([0-9]{1,4})", r"([Etm|L])\*([0-9]{1,4})"):
            if sum(len(block) * int(times) for block, times in re.findall(unit, flat)) > LARGEST["layers"] * 3:
                flat = "?"  # far more layers than any model has
            flat = re.sub(unit, lambda match: match[1] * int(match[2]), flat)
        if not set(flat) - set("EtmL|"):
            parts = [part.count("t") for part in flat.split("|")]
    if not parts or len(parts) % stages or sum(parts) != layers:
        raise UserError(
            f"{settings.spell(LAYOUT)} {shown(value)} has {len(parts)} parts with {sum(parts)} layers, "
            f"but there are {stages} stages and {layers} layers",
            "separate the parts by |; each has E (embedding), t (a layer), m or L (loss), as in Et|(tt|)*14t|L",
        )
    return parts
