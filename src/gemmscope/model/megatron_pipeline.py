"""Which layers a pipeline stage holds, where a Megatron file splits them unevenly."""

from __future__ import annotations


def _stage_layers(settings: Settings, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each pipeline stage, where the file splits them unevenly."""
    if stages == 1:
        return None
    if settings.given("pipeline_model_parallel_layout"):
        return _layout(settings, layers, stages)
    first = settings.maybe_size("num_layers_in_first_pipeline_stage", "layers")
    last = settings.maybe_size("num_layers_in_last_pipeline_stage", "layers")
    if first or last:
        rest, others = layers - (first or 0) - (last or 0), stages - bool(first) - bool(last)
        if rest < 0 or (rest % others if others else rest):
            raise UserError(
                f"the first and last pipeline stage hold {(first or 0) + (last or 0)} of {layers} layers; "
                f"the other {rest} cannot be shared equally by {others} stages",
                f"change {settings.spell('num_layers_in_first_pipeline_stage')} or "
                f"{settings.spell('num_layers_in_last_pipeline_stage')}",
            )
        middle = (rest // others,) * others if others else ()
        return (*((first,) if first else ()), *middle, *((last,) if last else ()))
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


def _layout(settings: Settings, layers: int, stages: int) -> tuple[int, ...]:
    """`Et*3|(tt|)*29,m|L`, or a list of lists: part i goes to stage i modulo the number of stages; t is a layer."""
    value = settings.values["pipeline_model_parallel_layout"]
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
            f"{settings.spell('pipeline_model_parallel_layout')} is {shown(value)}: {len(parts)} parts with "
            f"{sum(parts)} layers, for {stages} stages and {layers} layers",
            "parts separated by |, each with E (embedding), t (a layer), m or L (loss), as in Et|(tt|)*14t|L",
        )
    return tuple(sum(parts[stage::stages]) for stage in range(stages))
