"""Builds the model and the run from settings under Megatron's names: the part that Megatron-LM and Megatron-Bridge files share.

A reader collects the settings of its file as `MegatronSettings`: values under Megatron-core's names (`num_moe_experts`, not
`--num-experts`), still as written, how the file spells a name, and the few defaults in which Megatron-LM's arguments and
Megatron-core's dataclasses differ. Everything else is decided once, as Megatron does: `megatron_settings` parses values,
`megatron_model` builds the layers, and this module says how they run. A setting that changes shapes and cannot be modelled is an
error. One that only adds work that is not counted is a finding.

Data-parallel ranks are the GPUs that tensor, context and pipeline parallelism leave. They keep whole copies of the optimizer,
unless the distributed optimizer (ZeRO-1) or FSDP splits it. Every overlap and CUDA graphs must be turned on: launch arguments
that do not name one leave it off. A Megatron-Bridge file may hold only some settings; then the others stay unknown.

By default every pipeline stage gets the same number of layers. A file can set the number of the first and the last stage, count
the embedding and the loss as one layer each, or give the whole layout: in `Et|(tt|)*14t|L`, bars separate the parts, E is the
embedding, t a layer, L the loss. In the pattern of a hybrid model, bars separate the parts in the same way. A stage can also have
several pieces of the model (the virtual pipeline: with 2 stages and 2 pieces each, stage 0 has the first and the third quarter).
The number of layers of each stage is then kept, but not which ones: they are counted as consecutive. If layers differ, a finding
says so.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.limits import LARGEST, check_divides, divisors_text
from gemmscope.model.megatron_hybrid import PATTERNS, hybrid_pattern
from gemmscope.model.megatron_model import model_findings, model_spec
from gemmscope.model.megatron_settings import FACTS, MegatronSettings, Unknown
from gemmscope.model.spec import ModelSource, ModelSpec, recomputed_facts

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUT, LAYERS_PER_PIECE = "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"
PIECES = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
TORCH_FSDP, GRADIENTS, WEIGHTS = "use_torch_fsdp2", "overlap_grad_reduce", "overlap_param_gather"
OPTIONAL = {*FACTS["run_sizes"], *FACTS["run_settings"]}  # gemmscope's own arguments can give these too
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
        model = model_spec(settings, origin, unknown_names)
        findings = [*findings, *model_findings(settings, model)]
    samples = settings.maybe_size("global_batch_size", "vocab_size")
    run, of_run = _run(settings, model, samples)
    return ModelSource(
        origin=origin, model=model, run_settings=run, findings=(*findings, *of_run), global_batch=samples, stack="nvidia"
    )


def _run(settings: MegatronSettings, model: ModelSpec, samples: int | None) -> tuple[dict[str, Any], list[Finding]]:
    """The fields of `RunSpec` that the file sets, and what is not modelled about the run."""
    spell, findings = settings.spell, list[Finding]()
    run = _known({field: settings.maybe_size(name, limit) for name, (field, limit) in FACTS["run_sizes"].items()})
    layers, stages, tp = len(model.layers), run.get("pp", 1), run.get("tp", 1)
    run["sequence_parallel"] = settings.flag("sequence_parallel", default=settings.defaults["sequence_parallel"])
    if settings.values.get("moe_expert_capacity_factor") not in (None, 0, "0", False):
        findings.append(finding("expert-capacity-not-modelled", setting=spell("moe_expert_capacity_factor")))
    expert_tp = settings.maybe_size("expert_tensor_parallel_size", "parallel")
    if expert_tp and any(layer.is_moe for layer in model.layers):
        if tp % expert_tp:
            setting, tp_setting = spell("expert_tensor_parallel_size"), spell("tensor_model_parallel_size")
            findings.append(finding("expert-tp-not-modelled", setting=setting, size=expert_tp, tp_setting=tp_setting, tp=tp))
        elif expert_tp < tp or tp == 1:  # where equal, etp follows tp by itself
            run["etp"] = expert_tp
    if stages > 1:
        setting, parts = _parts(settings, layers, stages)
        split = _stage_layers(settings, layers, stages, parts)
        pieces_by, pieces = _virtual_stages(settings, layers, stages, setting, parts)
        run |= _known({"pp_layers": split, "vp": pieces if pieces > 1 else None})
        if pieces > 1 and len(dict(model.layer_groups())) > 1:
            findings.append(finding("stage-of-several-pieces", setting=spell(pieces_by)))
    recompute, of_recompute = _recompute(settings, layers, stages * run.get("vp", 1))
    run |= recompute | _layout(settings, run)
    run |= _known({"gradient_accumulation": _accumulation(samples, run)})
    sharded = run.get("dp_overlap") and run.get("zero") and not settings.flag(TORCH_FSDP)
    if sharded and _any(settings, WEIGHTS) is False:  # only gradients are exchanged during computation
        findings.append(finding("weights-not-overlapped", setting=spell(GRADIENTS), other=spell(WEIGHTS)))
    return run, [*findings, *of_recompute]


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the file determines."""
    return {name: value for name, value in fields.items() if value is not None}


def _recompute(settings: MegatronSettings, layers: int, pieces: int) -> tuple[dict[str, Any], list[Finding]]:
    """What backward computes again: layers (of each of so many pieces), or modules. By default, Megatron's is attention."""
    kind, given = settings.word("recompute_granularity", ("selective", "full"), ""), settings.values.get("recompute_modules")
    modules = re.findall(r"\w+", given) if isinstance(given, str) else given
    if kind == "full" and settings.values.get("recompute_method") == "block" and settings.given("recompute_num_layers"):
        number = settings.maybe_count("recompute_num_layers", "layers") or 0
        return {"recompute": kind, "recompute_share": min(number * pieces / layers, 1.0)}, []
    if kind != "selective" or not isinstance(modules, list) or modules == ["None"]:
        return _known({"recompute": kind or None}), []
    names = sorted({module for module in modules if isinstance(module, str)})
    counted = tuple(module for module in names if module in recomputed_facts()["modules"])
    run = {"recompute": "selective" if counted else "none", "recompute_modules": counted}
    if others := [name[:100] for name in names if name not in counted]:
        not_counted = finding("recompute-not-modelled", setting=settings.spell("recompute_modules"), modules=others)
        return {**run, "partly_recomputed": True}, [not_counted]
    return run, []


def _layout(settings: MegatronSettings, run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `RunSpec` beyond one replica that the file sets. `run`: the fields that were read before."""
    kind = settings.text("cuda_graph_impl").lower()
    fields: dict[str, Any] = {
        "dp": _data_parallel(settings, run),
        "zero": _zero(settings),
        "zero_ranks": None,
        "optimizer_state": _optimizer_state(settings),
        "tp_overlap": _any(settings, "tp_comm_overlap"),
        "dp_overlap": True if settings.flag(TORCH_FSDP) else _any(settings, GRADIENTS),
        "ep_overlap": _any(settings, "overlap_moe_expert_parallel_comm"),
        "cuda_graphs": kind != "none" if kind else _any(settings, "enable_cuda_graph", "external_cuda_graph"),
        "gradient_precision": _gradient_precision(settings),
        "quantized_weights": _any(settings, "fp8_param_gather", "fp4_param_gather"),
    }
    if settings.flag("cpu_offloading", default=True):
        fields["offloaded_layers"] = settings.maybe_count("cpu_offloading_num_layers", "layers")
    if fields["tp_overlap"] and not run.get("sequence_parallel"):
        fields["tp_overlap"] = False  # Megatron overlaps only with sequence parallelism
    groups = settings.maybe_size("num_distributed_optimizer_instances", "parallel") or 1
    if fields["zero"] and fields["dp"] and groups > 1:
        sharing, rest = divmod(fields["dp"] * run.get("cp", 1), groups)
        fields["zero_ranks"] = sharing if not rest else None
    return _known(fields)


def _data_parallel(settings: MegatronSettings, run: Mapping[str, Any]) -> int | None:
    """Replicas that share the batch, where the file says how many GPUs there are."""
    world = settings.maybe_size("world_size", "parallel")
    if world is None:
        return settings.maybe_size("data_parallel_size", "parallel")
    replicas, rest = divmod(world, run.get("tp", 1) * run.get("pp", 1) * run.get("cp", 1))
    return replicas if replicas and not rest else None


def _accumulation(samples: int | None, run: Mapping[str, Any]) -> int | None:
    """Micro-batches per step, where the global batch and the data-parallel ranks are known."""
    if not samples or "dp" not in run or "micro_batch_size" not in run:
        return None
    micro_batches, rest = divmod(samples, run["dp"] * run["micro_batch_size"])
    return None if rest or not 0 < micro_batches <= LARGEST["parallel"] else micro_batches


def _any(settings: MegatronSettings, *names: str) -> bool | None:
    """Whether one of these switches is on; None where the file does not say."""
    if any(settings.flag(name) for name in names):
        return True
    return False if settings.defaults["silent_means_off"] or any(settings.given(name) for name in names) else None


def _zero(settings: MegatronSettings) -> int | None:
    """The ZeRO stage: Megatron-FSDP's strategy, everything with torch's FSDP, the optimizer with the distributed optimizer."""
    if settings.flag(TORCH_FSDP):
        return 3
    strategies: dict[str, int] = FACTS["sharding_strategies"]
    if _any(settings, "use_megatron_fsdp", "use_custom_fsdp") and settings.given("data_parallel_sharding_strategy"):
        return strategies[settings.word("data_parallel_sharding_strategy", tuple(strategies), "no_shard")]
    sharded = _any(settings, "use_distributed_optimizer")
    return None if sharded is None else int(sharded)


def _optimizer_state(settings: MegatronSettings) -> str | None:
    """Master weights and moments are FP32, unless the precision-aware optimizer keeps both moments in fewer bits."""
    if settings.flag("use_precision_aware_optimizer") and all(
        _bits(settings.values.get(name)) <= 16 for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ):
        return "bf16"
    return "fp32" if settings.given("use_precision_aware_optimizer") else settings.defaults.get("optimizer_state")


def _gradient_precision(settings: MegatronSettings) -> str | None:
    """Gradients are summed and exchanged in FP32, unless a setting says BF16."""
    if settings.given("grad_reduce_in_fp32"):
        return "fp32" if settings.flag("grad_reduce_in_fp32") else "bf16"
    if settings.flag("grad_reduce_in_bf16") or _bits(settings.values.get("main_grads_dtype")) <= 16:
        return "bf16"
    return settings.defaults.get("gradient_precision")


def _bits(dtype: object) -> int:
    name = dtype.strip().lower().rpartition(".")[2] if isinstance(dtype, str) else ""
    return {"bf16": 16, "bfloat16": 16, "fp16": 16, "float16": 16, "half": 16, "fp8": 8, "uint8": 8}.get(name, 32)


def _parts(settings: MegatronSettings, layers: int, stages: int) -> tuple[str, list[int]]:
    """The setting in which bars separate the parts of the pipeline, and the layers of each; empty where there is none."""
    pattern = hybrid_pattern(settings)
    if pattern is None or len(pattern.parts) == 1:
        return (LAYOUT, _layout_parts(settings, layers, stages)) if settings.given(LAYOUT) else ("", [])
    if len(pattern.parts) % stages:
        raise UserError(
            f"{settings.spell(pattern.setting)} has {len(pattern.parts)} parts, but there are {stages} pipeline stages",
            f"separate the layers by | into {stages} parts, or a multiple of it",
        )
    return pattern.setting, [*pattern.parts]


def _stage_layers(settings: MegatronSettings, layers: int, stages: int, parts: list[int]) -> tuple[int, ...] | None:
    """Layers of each pipeline stage, where the file splits them unevenly."""
    if parts:
        return tuple(sum(parts[stage::stages]) for stage in range(stages))
    if settings.given(FIRST) or settings.given(LAST):
        return _with_own_ends(settings, layers, stages)
    embedding, loss = (settings.flag(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
    if not (embedding or loss):
        return None
    counted = layers + embedding + loss
    check_divides(
        stages,
        counted,
        f"{layers} layers, with embedding and loss counted as one each, cannot be split evenly over {stages} stages",
        f"pipeline sizes that divide {counted}",
    )
    per_stage = counted // stages
    return (per_stage - embedding, *(per_stage,) * (stages - 2), per_stage - loss)


def _virtual_stages(settings: MegatronSettings, layers: int, stages: int, split_by: str, parts: list[int]) -> tuple[str, int]:
    """How many pieces of the model each stage has, and the setting that says so. `split_by`: where the `parts` come from."""
    if split_by in PATTERNS:
        return split_by, len(parts) // stages
    for name in PIECES:
        if (pieces := settings.maybe_count(name, "layers") or 1) > 1:
            return name, pieces
    per_piece = settings.maybe_count(LAYERS_PER_PIECE, "layers")
    if per_piece is None:
        return split_by, len(parts) // stages
    counted = layers + sum(settings.flag(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
    pieces, rest = divmod(counted, stages * per_piece)
    if rest and counted % stages == 0:
        raise UserError(
            f"{settings.spell(LAYERS_PER_PIECE)} {per_piece} does not divide the {counted // stages} layers of a stage",
            f"possible values: {divisors_text(counted // stages)}",
        )
    return LAYERS_PER_PIECE, pieces if not rest else 1


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
