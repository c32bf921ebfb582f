"""Builds the model and the run from settings under Megatron's names: the part that Megatron-LM and Megatron-Bridge files share.

A reader collects the settings of its file as `MegatronSettings`: values under Megatron-core's names (`num_moe_experts`, not
`--num-experts`), still as written, how the file spells a name, and the few defaults in which Megatron-LM's arguments and
Megatron-core's dataclasses differ. Everything else is decided once, as Megatron does: `megatron_values` parses
values, `megatron_model` builds the layers, `megatron_pipeline` assigns them to pipeline stages. This module handles the run, the
required settings and the findings.

A setting that changes shapes and cannot be modelled is an error. One that only adds work that is not counted is a finding.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.model import megatron_layout, megatron_pipeline
from gemmscope.model.megatron_hybrid import LINEAR_ATTENTION, SPARSE_ATTENTION, VARIANT, hybrid_pattern
from gemmscope.model.megatron_model import dense_mlp, model_spec
from gemmscope.model.megatron_values import FACTS, MegatronSettings, Unknown
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import MlpSpec, ModelSpec

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
"""The settings that every file must have."""

ATTENTION = "core_attn"  # the only module whose recomputation is counted
OPTIONAL = {  # gemmscope's own arguments can give these, so an unknown value is ignored
    *FACTS["run_sizes"],
    *("sequence_parallel", "recompute_granularity", "recompute_modules", "global_batch_size", "world_size", "data_parallel_size"),
    *(megatron_pipeline.FIRST, megatron_pipeline.LAST, megatron_pipeline.LAYOUT),
    *(*megatron_pipeline.PIECES, megatron_pipeline.LAYERS_PER_PIECE),
    *("expert_tensor_parallel_size", "max_position_embeddings", "mtp_num_layers"),
    *megatron_layout.NAMES,
}
MODEL_RANKS = {"tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"}


def model_source(
    settings: MegatronSettings,
    origin: str,
    findings: Sequence[Finding] = (),
    unknown_names: Collection[str] = (),
    model: ModelSpec | None = None,
) -> ModelSource:
    """The model and run that the settings describe.

    `findings` are those of the reader. `unknown_names` are names in the file that are not used here: one of them may be the
    misspelling of a missing setting. `model`: it is known already, and the settings describe only the run.
    """
    unknown = {name: value for name, value in settings.values.items() if name in OPTIONAL and isinstance(value, Unknown)}
    findings = [
        *findings,
        *(
            finding("setting-without-value", setting=settings.spell(name), value=value.text[:60], reason=value.why)
            for name, value in unknown.items()
        ),
    ]
    ignored = [*unknown, *(["world_size"] if MODEL_RANKS & unknown.keys() else [])]  # then the data-parallel size is unknown too
    settings = replace(settings, values={**settings.values, **dict.fromkeys(ignored)})
    if model is None:
        _reject_not_modelled(settings)
        _require_sizes(settings, unknown_names)
        model = model_spec(settings, origin)
        findings = [*findings, *_model_findings(settings, model)]
    samples = settings.maybe_size("global_batch_size", "vocab_size")
    run = _run_settings(settings, model, samples)
    findings = (*findings, *_run_findings(settings, model, run))
    return ModelSource(origin=origin, model=model, run_settings=run, findings=findings, global_batch=samples)


def other_model(evidence: str, what: str) -> UserError:
    """The error for a model that has the settings of a GPT but is not one. `evidence`: what shows it, as in "pretrain_t5.py
    trains"."""
    return UserError(
        f"{evidence} {what}; only GPT models and hybrids can be read from Megatron settings",
        f"trace it with {option('module', 'FILE.py:FUNCTION')}, or give its Hugging Face config.json with {option('config')}",
    )


def _reject_not_modelled(settings: MegatronSettings) -> None:
    variant = settings.text(VARIANT).lower()
    if variant not in ("", "none", SPARSE_ATTENTION, *LINEAR_ATTENTION):
        raise UserError(
            f"{settings.spell(VARIANT)} {shown(variant)} is not supported for a file",
            f"supported: {', '.join((*LINEAR_ATTENTION, SPARSE_ATTENTION))}; for others, trace the model with "
            f"{option('module', 'FILE.py:FUNCTION')}",
        )
    for name, meaning in FACTS["not_modelled"].items():
        if settings.values.get(name) not in (None, False, "False", "false", ""):
            raise UserError(
                f"{settings.spell(name)} {meaning}, which is not supported for a file",
                f"trace the model instead: {option('module', 'FILE.py:FUNCTION')}",
            )


def _require_sizes(settings: MegatronSettings, unknown_names: Collection[str]) -> None:
    pattern = hybrid_pattern(settings)
    not_needed = {"num_layers"} if pattern else set()
    if pattern and not pattern.has_attention:
        not_needed.add("num_attention_heads")
    missing = [name for name in REQUIRED if name not in not_needed and not settings.given(name)]
    if not missing:
        return
    wanted = [settings.spell(name) for name in missing]
    misspelled = [f"{similar[0]} (did you mean {name}?)" for name in wanted if (similar := _misspellings(name, unknown_names))]
    raise UserError(
        f"the file has no {' and no '.join(wanted)}" + (f"; it has {', '.join(misspelled)}" if misspelled else ""),
        f"add for example {', '.join(settings.example(name) for name in missing)}",
    )


def _misspellings(wanted: str, unknown_names: Collection[str]) -> list[str]:
    """Names so similar to the wanted one that they are probably misspellings of it: --hiden-size, but not --hidden-dropout."""
    return [name for name in closest(wanted, unknown_names) if SequenceMatcher(None, name, wanted).ratio() > 0.8]


def _run_settings(settings: MegatronSettings, model: ModelSpec, samples: int | None) -> dict[str, Any]:
    run: dict[str, Any] = {}
    for name, (field, limit) in FACTS["run_sizes"].items():
        value = settings.maybe_size(name, limit)
        if value is not None:
            run[field] = value
    if settings.given("sequence_parallel"):
        run["sequence_parallel"] = settings.flag("sequence_parallel")
    if settings.given("recompute_granularity"):
        run["recompute"] = settings.word("recompute_granularity", ("selective", "full"), "")
        modules = _recompute_modules(settings)
        if run["recompute"] == "selective" and modules is not None:
            run |= {"partly_recomputed": True} if modules - {ATTENTION} else {}
            run["recompute"] = "selective" if ATTENTION in modules else "none"
    expert_tp, tp = _expert_tensor_parallel(settings, model), run.get("tp", 1)
    if expert_tp and tp % expert_tp == 0 and (expert_tp < tp or tp == 1):  # where equal, etp follows tp by itself
        run["etp"] = expert_tp
    stages = megatron_pipeline.stage_layers(settings, len(model.layers), run.get("pp", 1))
    if stages:
        run["pp_layers"] = stages
    pieces = megatron_pipeline.virtual_stages(settings, len(model.layers), run.get("pp", 1))
    if pieces:
        run["vp"] = pieces[1]
    run |= megatron_layout.layout(settings, run)
    accumulation = megatron_layout.accumulation(samples, run)
    if accumulation:
        run["gradient_accumulation"] = accumulation
    return run


def _recompute_modules(settings: MegatronSettings) -> set[str] | None:
    """The modules that selective recomputation runs again; None where the file does not say (Megatron's default is attention)."""
    modules = settings.values.get("recompute_modules")
    if isinstance(modules, str):
        modules = re.findall(r"\w+", modules)
    if not isinstance(modules, list) or modules == ["None"]:
        return None
    return {module for module in modules if isinstance(module, str)}


def _expert_tensor_parallel(settings: MegatronSettings, model: ModelSpec) -> int | None:
    """Tensor parallelism inside the experts, where the model has any and the file says; Megatron's default is tp."""
    size = settings.maybe_size("expert_tensor_parallel_size", "parallel")
    return size if any(layer.is_moe for layer in model.layers) else None


def _model_findings(settings: MegatronSettings, model: ModelSpec) -> Iterator[Finding]:
    spell = settings.spell
    if model.vocab_size is None:
        yield finding("vocabulary-missing", setting=spell("vocab_size"), example=settings.example("vocab_size"))
    uses_default = any(isinstance(layer.mlp, MlpSpec) for layer in model.layers)
    uses_default |= not settings.given("moe_ffn_hidden_size") and any(layer.is_moe for layer in model.layers)
    if uses_default and not settings.given("ffn_hidden_size"):
        width = dense_mlp(settings, model.hidden_size).intermediate_size
        yield finding("mlp-width-default", setting=spell("ffn_hidden_size"), width=width)

    pattern = hybrid_pattern(settings)
    if pattern and pattern.depths and not model.prediction_layers:
        yield finding(
            "prediction-layers-not-included", setting=spell(pattern.setting), added=option("mtp_layers", pattern.depths)
        )


def _run_findings(settings: MegatronSettings, model: ModelSpec, run: Mapping[str, Any]) -> Iterator[Finding]:
    spell = settings.spell
    if settings.values.get("moe_expert_capacity_factor") not in (None, 0, "0", False):
        yield finding("expert-capacity-not-modelled", setting=spell("moe_expert_capacity_factor"))
    expert_tp, tp = _expert_tensor_parallel(settings, model), run.get("tp", 1)
    if expert_tp and tp % expert_tp:
        setting, tp_setting = spell("expert_tensor_parallel_size"), spell("tensor_model_parallel_size")
        yield finding("expert-tp-not-modelled", setting=setting, size=expert_tp, tp_setting=tp_setting, tp=tp)
    pieces = megatron_pipeline.virtual_stages(settings, len(model.layers), run.get("pp", 1))
    if pieces and len(dict(model.layer_groups())) > 1:
        yield finding("stage-of-several-pieces", setting=spell(pieces[0]))
    if megatron_layout.weights_exposed(settings, run):
        gradients, weights = spell(megatron_layout.GRADIENTS), spell(megatron_layout.WEIGHTS)
        yield finding("weights-not-overlapped", setting=gradients, other=weights)
    yield from _recompute_findings(settings, run)


def _recompute_findings(settings: MegatronSettings, run: Mapping[str, Any]) -> Iterator[Finding]:
    modules = _recompute_modules(settings) or set()
    others = [name[:100] for name in sorted(modules - {ATTENTION})]
    if run.get("recompute") in ("selective", "none") and others:
        code = "recompute-only-attention" if ATTENTION in modules else "recompute-not-modelled"
        yield finding(code, setting=settings.spell("recompute_modules"), modules=others)
    if run.get("recompute") == "full" and settings.values.get("recompute_method") == "block":
        yield finding("recompute-all-layers", setting=settings.spell("recompute_method"))
