"""From settings under Megatron's names to a model and a run: what Megatron-LM arguments and Megatron-Bridge YAML share.

A reader collects what its file says as `Settings`: values under Megatron-core's names (`num_moe_experts`, not
`--num-experts`), still as written, plus a `Dialect`: how that file's user spells a name, and the few defaults in which
Megatron-LM's arguments and Megatron-core's dataclasses differ. Everything else is decided once, as Megatron does: what a text
means as a value in `megatron_values`, the layers in `megatron_model`, their way into pipeline stages in `megatron_pipeline`,
and here the run, what must be there, and what the reader of the result should know.

What decides a shape and cannot be described is an error; what only adds work that is not counted is a note.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import chain
from typing import Any

from gemmscope.errors import UserError, closest
from gemmscope.findings import finding
from gemmscope.model import megatron_pipeline
from gemmscope.model.megatron_model import dense_mlp, model_spec
from gemmscope.model.megatron_values import Settings, Unknown
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import LARGEST, ModelSpec

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
"""Without these there is no model."""

NOT_DESCRIBABLE = {
    "hybrid_override_pattern": "mixes Mamba layers in",
    "hybrid_layer_pattern": "mixes Mamba layers in",
    "is_hybrid_model": "mixes Mamba layers in",
    "heterogeneous_layers_config_path": "gives each layer its own sizes, from another file",
    "heterogeneous_layers_config_encoded_json": "gives each layer its own sizes",
    "experimental_attention_variant": "replaces the attention by a variant",
    "attention_output_gate": "widens the QKV projection by a gate",
    "head_wise_attn_gate": "widens the QKV projection by a gate",
    "moe_latent_size": "puts the experts behind a narrower projection",
}
NOT_COUNTED = {
    "mtp_num_layers": "multi-token-prediction layers, which are not included",
    "moe_expert_capacity_factor": "experts with a capacity: dropped and padded tokens are not modelled",
}
RUN_SIZES = {  # Megatron-core's name: (field of RunSpec, its limit)
    "seq_length": ("sequence_length", "sequence_length"),
    "micro_batch_size": ("micro_batch_size", "micro_batch_size"),
    "tensor_model_parallel_size": ("tp", "parallel"),
    "context_parallel_size": ("cp", "parallel"),
    "pipeline_model_parallel_size": ("pp", "parallel"),
    "expert_model_parallel_size": ("ep", "parallel"),
    "make_vocab_size_divisible_by": ("vocab_multiple", "parallel"),
}
ATTENTION = "core_attn"  # among the modules that can be recomputed: the one that is counted
NOT_NEEDED = {  # a run can be told otherwise, so one of these that cannot be known is left out
    *RUN_SIZES,
    *("sequence_parallel", "recompute_granularity", "recompute_modules", "global_batch_size", "world_size", "data_parallel_size"),
    *(megatron_pipeline.FIRST, megatron_pipeline.LAST, megatron_pipeline.LAYOUT),
    *(*megatron_pipeline.PIECES, megatron_pipeline.LAYERS_PER_PIECE),
    *("expert_tensor_parallel_size", "max_position_embeddings"),
}
MODEL_RANKS = {"tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"}


def model_source(settings: Settings, origin: str, notes: Sequence[str] = (), strangers: Collection[str] = ()) -> ModelSource:
    """The model and run that the settings describe.

    `strangers` are names in the file that mean nothing here: one of them may be the misspelling of a missing setting.
    """
    left_out = [name for name in settings.values if name in NOT_NEEDED and isinstance(settings.values[name], Unknown)]
    notes = [*notes, *(f"{settings.spell(name)} is left out: {settings.values[name]}" for name in left_out)]
    if MODEL_RANKS.intersection(left_out):
        left_out.append("world_size")  # how many of its GPUs hold the same model is not known then
    settings = replace(settings, values={**settings.values, **dict.fromkeys(left_out)})
    try:
        _refuse_what_cannot_be_described(settings)
        _require_sizes(settings, strangers)
        model = model_spec(settings, origin)
        run = _run_settings(settings, model)
        found = dict.fromkeys(chain(notes, _notes(settings, model, run)))
    except UserError as error:
        raise UserError(f"{origin}: {error.message}", error.hint) from None
    return ModelSource(origin=origin, model=model, run_settings=run, findings=tuple(finding("model-note", text=note) for note in found))


def other_model(found: str, what: str) -> UserError:
    """The refusal of a model that has the settings of a GPT, and is none: `found` is what gave it away, as "x.sh: … trains"."""
    return UserError(
        f"{found} {what}: from Megatron's settings only GPT models can be read",
        "trace the model itself with --module file.py:factory, or give --config its Hugging Face config.json",
    )


# ---- what must be there, and what must not


def _refuse_what_cannot_be_described(settings: Settings) -> None:
    for name, meaning in NOT_DESCRIBABLE.items():
        if settings.values.get(name) not in (None, False, "False", "false", ""):
            raise UserError(
                f"{settings.spell(name)} {meaning}: that cannot be read from a file",
                "trace the model itself: --module file.py:factory",
            )


def _require_sizes(settings: Settings, strangers: Collection[str]) -> None:
    missing = [name for name in REQUIRED if not settings.given(name)]
    if not missing:
        return
    wanted = [settings.spell(name) for name in missing]
    meant = [f"{near[0]} (did you mean {name}?)" for name in wanted if (near := _slips(name, strangers))]
    add = ", ".join(settings.example(name) for name in missing)
    raise UserError(
        f"no {' and no '.join(wanted)} in the file" + (f", but {', '.join(meant)}" if meant else ""),
        f"add for example {add}",
    )


def _slips(wanted: str, strangers: Collection[str]) -> list[str]:
    """Names so like the wanted one that they may be meant for it: --hiden-size, but not --hidden-dropout."""
    return [near for near in closest(wanted, strangers) if SequenceMatcher(None, near, wanted).ratio() > 0.8]


# ---- the run


def _run_settings(settings: Settings, model: ModelSpec) -> dict[str, Any]:
    run: dict[str, Any] = {}
    for name, (field, limit) in RUN_SIZES.items():
        value = settings.maybe_size(name, limit)
        if value is not None:
            run[field] = value
    if settings.given("sequence_parallel"):
        run["sequence_parallel"] = settings.flag("sequence_parallel")
    if settings.given("recompute_granularity"):
        run["recompute"] = settings.word("recompute_granularity", ("selective", "full"), "")
        modules = _recompute_modules(settings)
        if run["recompute"] == "selective" and modules is not None and ATTENTION not in modules:
            run["recompute"] = "none"
    expert_tp, tp = _expert_tensor_parallel(settings, model), run.get("tp", 1)
    if expert_tp and tp % expert_tp == 0 and (expert_tp < tp or tp == 1):  # equal to tp: left to follow it
        run["etp"] = expert_tp
    stages = megatron_pipeline.stage_layers(settings, len(model.layers), run.get("pp", 1))
    if stages:
        run["pp_layers"] = stages
    steps = _accumulation(settings, run)
    if steps:
        run["gradient_accumulation"] = steps
    return run


def _recompute_modules(settings: Settings) -> set[str] | None:
    """What selective recomputation repeats; None where the file does not say, which is attention."""
    modules = settings.values.get("recompute_modules")
    if isinstance(modules, str):
        modules = re.findall(r"\w+", modules)
    if not isinstance(modules, list) or modules == ["None"]:
        return None
    return {each for each in modules if isinstance(each, str)}


def _expert_tensor_parallel(settings: Settings, model: ModelSpec) -> int | None:
    """Tensor parallelism inside the experts, where the model has any and the file says; Megatron's default is tp."""
    size = settings.maybe_size("expert_tensor_parallel_size", "parallel")
    return size if any(layer.is_moe for layer in model.layers) else None


def _ranks(settings: Settings, run: Mapping[str, Any]) -> int | None:
    """Data-parallel ranks, where the file knows how many GPUs there are."""
    world = settings.maybe_size("world_size", "parallel")
    if world is None:
        return settings.maybe_size("data_parallel_size", "parallel")
    model_ranks = run.get("tp", 1) * run.get("pp", 1) * run.get("cp", 1)
    return None if world % model_ranks else int(world // model_ranks)


def _accumulation(settings: Settings, run: Mapping[str, Any]) -> int | None:
    samples, ranks = settings.maybe_size("global_batch_size", "vocab_size"), _ranks(settings, run)
    if not samples or not ranks or "micro_batch_size" not in run:
        return None
    steps, left_over = divmod(samples, ranks * run["micro_batch_size"])
    return None if left_over or steps > LARGEST["parallel"] else steps


# ---- what the reader of the result should know


def _notes(settings: Settings, model: ModelSpec, run: Mapping[str, Any]) -> Iterator[str]:
    spell = settings.spell
    if model.vocab_size is None:
        example = settings.example("vocab_size")
        yield f"the file gives no {spell('vocab_size')}: embedding and output head are left out (add it, for example {example})"
    uses_default = not (settings.given("moe_ffn_hidden_size") and all(layer.is_moe for layer in model.layers))
    if uses_default and not settings.given("ffn_hidden_size"):
        width = dense_mlp(settings, model.hidden_size).intermediate_size
        yield f"{spell('ffn_hidden_size')} is not given: {width}, Megatron's default"
    for name, meaning in NOT_COUNTED.items():
        if settings.values.get(name) not in (None, 0, "0", False):
            yield f"{spell(name)} asks for {meaning}"
    if settings.given("global_batch_size") and "gradient_accumulation" not in run:
        yield (
            f"{spell('global_batch_size')} is given, but the micro-batches per step do not follow from the file: "
            "give them with --gradient-accumulation, or else one is counted"
        )
    expert_tp, tp = _expert_tensor_parallel(settings, model), run.get("tp", 1)
    if expert_tp and tp % expert_tp:
        yield (
            f"{spell('expert_tensor_parallel_size')} = {expert_tp} does not divide {spell('tensor_model_parallel_size')} = {tp}, "
            "which is not modelled: the experts are split like the rest"
        )
    interleaved = megatron_pipeline.several_pieces(settings, len(model.layers), run.get("pp", 1))
    if interleaved:
        yield f"{spell(interleaved)} gives a pipeline stage several pieces of the model: they are counted as consecutive layers"
    yield from _recompute_notes(settings, run)


def _recompute_notes(settings: Settings, run: Mapping[str, Any]) -> Iterator[str]:
    modules = _recompute_modules(settings) or set()
    others = ", ".join(sorted(modules - {ATTENTION}))[:100]
    if run.get("recompute") in ("selective", "none") and others:
        counted = "only that of attention" if ATTENTION in modules else "nothing is counted as recomputed"
        yield f"{settings.spell('recompute_modules')}: recomputing {others} is not modelled, {counted}"
    if run.get("recompute") == "full" and settings.values.get("recompute_method") == "block":
        yield f"{settings.spell('recompute_method')} block recomputes only some layers: all are counted as recomputed"
