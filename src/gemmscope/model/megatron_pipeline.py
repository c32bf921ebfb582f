"""How a Megatron run deals the layers out to its pipeline stages.

By default every stage gets the same number, and nothing here has anything to say. A file can give the first and last stage a
number of their own, count the embedding and the loss as a layer each, or draw the whole layout: `Et|(tt|)*14t|L` has one part
between two bars, with E the embedding, t a layer, L the loss.

A stage may also hold several pieces of the model, taken in turns (the virtual pipeline: with 2 stages and 2 pieces each, stage
0 holds the first and the third quarter). How many layers a stage has is then known, but which ones is not kept: they are
counted as consecutive, and a note says so.
"""

from __future__ import annotations

import re

from gemmscope.errors import UserError, shown
from gemmscope.model.megatron_values import Settings
from gemmscope.model.spec import LARGEST, divisors_text

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
PIECES = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
LAYERS_PER_PIECE = "num_layers_per_virtual_pipeline_stage"


def stage_layers(settings: Settings, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each pipeline stage, where the file splits them unevenly."""
    if stages == 1:
        return None
    if settings.given(LAYOUT):
        parts = _layout_parts(settings, layers, stages)
        return tuple(sum(parts[stage::stages]) for stage in range(stages))
    if settings.given(FIRST) or settings.given(LAST):
        return _with_own_ends(settings, layers, stages)
    embedding = settings.flag("account_for_embedding_in_pipeline_split")
    loss = settings.flag("account_for_loss_in_pipeline_split")
    if not (embedding or loss):
        return None
    each, left_over = divmod(layers + embedding + loss, stages)
    if left_over:
        raise UserError(
            f"{layers} layers with embedding and loss counted as one each do not divide over {stages} stages",
            f"pipeline sizes that fit: {divisors_text(layers + embedding + loss)}",
        )
    return (each - embedding, *(each,) * (stages - 2), each - loss)


def several_pieces(settings: Settings, layers: int, stages: int) -> str | None:
    """The setting by which a stage holds more than one piece of the model, if there is one."""
    if stages == 1:
        return None
    for name in PIECES:
        if (settings.maybe_count(name, "layers") or 1) > 1:
            return name
    per_piece = settings.maybe_count(LAYERS_PER_PIECE, "layers")
    if per_piece and per_piece * stages < layers:
        return LAYERS_PER_PIECE
    return LAYOUT if settings.given(LAYOUT) and len(_layout_parts(settings, layers, stages)) > stages else None


def _with_own_ends(settings: Settings, layers: int, stages: int) -> tuple[int, ...]:
    """The first or last stage, or both, have a number of layers of their own; the others share the rest equally."""
    first, last = settings.maybe_size(FIRST, "layers"), settings.maybe_size(LAST, "layers")
    rest, others = layers - (first or 0) - (last or 0), stages - bool(first) - bool(last)
    if rest < 0 or (rest % others if others else rest):
        raise UserError(
            f"the first and last pipeline stage hold {(first or 0) + (last or 0)} of {layers} layers; "
            f"the other {rest} cannot be shared equally by {others} stages",
            f"change {settings.spell(FIRST)} or {settings.spell(LAST)}",
        )
    middle = (rest // others,) * others if others else ()
    return (*((first,) if first else ()), *middle, *((last,) if last else ()))


def _layout_parts(settings: Settings, layers: int, stages: int) -> list[int]:
    """Layers of each part of a layout, which is text or a list of lists: part i goes to stage i modulo the number of stages."""
    value = settings.values[LAYOUT]
    parts: list[int] = []
    if isinstance(value, list) and sum(len(part) for part in value if isinstance(part, list)) <= LARGEST["layers"] * 3:
        parts = [sum(each in ("decoder", "t") for each in part) for part in value if isinstance(part, list)]
    elif isinstance(value, str) and len(value) <= 2000:
        flat = value.replace(",", "")
        for unit in (r"\(([^()]+)\)\*([0-9]{1,4})", r"([Etm|L])\*([0-9]{1,4})"):
            flat = re.sub(unit, lambda found: found[1] * int(found[2]), flat)
        if not set(flat) - set("EtmL|"):
            parts = [part.count("t") for part in flat.split("|")]
    if not parts or len(parts) % stages or sum(parts) != layers:
        raise UserError(
            f"{settings.spell(LAYOUT)} is {shown(value)}: {len(parts)} parts with "
            f"{sum(parts)} layers, for {stages} stages and {layers} layers",
            "parts separated by |, each with E (embedding), t (a layer), m or L (loss), as in Et|(tt|)*14t|L",
        )
    return parts
