"""Reads a torchtitan job config: a TOML file that names a model and says how it is trained.

The file has no sizes: its `[model]` table only names a model, which `torchtitan_model` knows. The rest of the file describes the
run: sequence and batch in `[training]`, the parallel sizes in `[parallelism]`, and recomputation in `[activation_checkpoint]`.

How torchtitan decides shapes:

- Q, K and V are three linears, gate (w1) and up (w3) are two: nothing is fused, except gpt_oss's experts. Since jobs are
  configured in Python (`torchtitan_registry`), Q, K and V of most families are one (`registries` in torchtitan_flavors.toml).
- Tensor parallelism always splits the norms along the sequence too, but not the router and the latent down projections:
  the tokens are gathered first, and every rank runs all of them.
- Expert parallelism takes the experts out of tensor parallelism, unless `expert_tensor_parallel_degree` keeps them in: by
  default each tensor-parallel rank sends its share of the tokens to whole experts, and is one of the expert-parallel ranks.
- Data-parallel ranks split weights, gradients and optimizer (FSDP), in `data_parallel_replicate_degree` groups that hold the
  same. A pipeline keeps the gathered weights until the backward pass, unless `fsdp_reshard_after_forward` says otherwise.
- A pipeline splits the local batch into micro-batches of `pipeline_parallel_microbatch_size`, by default 1. The first and the
  last stage have fewer layers, because they also have the embedding and the output.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.limits import check_flag, check_size
from gemmscope.model.spec import EVERY_SECOND, ModelSource, ModelSpec, framework_defaults
from gemmscope.model.torchtitan_model import load_flavor, model_and_flavor, model_findings, model_spec
from gemmscope.toml import load_data, parse_toml

Tables = Mapping[str, Any]
RunPart = tuple[dict[str, Any], list[Finding]]
"""A part of the run: `RunSpec` fields, and findings about them."""

DEFAULTS = framework_defaults("torchtitan")
TABLES = ("job", "model", "training", "parallelism", "activation_checkpoint")
RUN_TABLES = ("parallelism", "training", "compile", "experimental")  # releases of 2024 kept the degrees in training or the last
MOST_DOTS = 1000  # in one line, or fewer in several: the parser's memory grows with the square of a dotted key's parts
TOKENS = ("max_context_length", "num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step")
SPLITS_BY_NAME = ("module_fqns_per_model_part", "pipeline_parallel_split_points")

# How a schedule places stages on the pipeline's ranks: one each, several in rounds, or two in a V (down and back up).
SCHEDULES = {
    **dict.fromkeys(("1f1b", "gpipe", "pipelineschedulesingle"), "single"),
    **dict.fromkeys(("interleaved1f1b", "flexibleinterleaved1f1b", "loopedbfs"), "loop"),
    **dict.fromkeys(("interleavedzerobubble", "pipelineschedulemulti"), "loop"),
    **dict.fromkeys(("zbvzerobubble", "dualpipev"), "v"),
}


def recognises(text: str) -> bool:
    """Whether a text looks like a torchtitan job config, even one with a syntax error (which `read` then reports).

    >>> recognises('[model]\\nname = "llama3"\\nflavor = "8B"'), recognises('{"hidden_size": 4096}')
    (True, False)
    """
    try:
        tables = _parse(text)
    except UserError:
        headers = set(re.findall(r"^\[(\w+)\]", text, flags=re.MULTILINE))
        return "model" in headers and len(headers.intersection(TABLES)) >= 2
    model = tables.get("model")
    if isinstance(model, dict) and "flavor" in model:
        return True
    return model is not None and sum(name in tables for name in TABLES) >= 3


def read(text: str, origin: str) -> ModelSource:
    """The model and the run settings of a torchtitan job config; `origin` names the file.

    >>> source = read('[model]\\nname = "llama3"\\nflavor = "8B"\\n[training]\\nseq_len = 8192', "8b.toml")
    >>> source.model.name, source.model.hidden_size, source.run_settings["sequence_length"]
    ('torchtitan llama3 8B', 4096, 8192)
    """
    return read_tables(_parse(text), origin)


def read_tables(
    tables: Tables, origin: str, findings: Sequence[Finding] = (), spec: ModelSpec | None = None, *, registries: bool = False
) -> ModelSource:
    """The model and the run settings of the tables of a job config.

    `findings`: those of the reader; `spec`: the model, where the tables do not name it; `registries`: as since jobs are
    configured in Python, with tokens instead of sequences.
    """
    pp = _size(tables, "pipeline_parallel_degree") or 1
    tables, notes = _in_sequences(tables, pp) if registries else tables, list(findings)
    if spec is None:
        model = _table(tables, "model")
        family, name = model_and_flavor(model)
        flavor = load_flavor(family, name, registries=registries)
        depth = model.get("num_mtp_layers")
        spec = model_spec(family, name, flavor, prediction_layers=depth if type(depth) is int else 0)
        notes += model_findings(model, flavor)
    layers, graphs = len(spec.layers), registries and pp == 1 and not _flag(tables, "disable_cuda_graphs", default=False)
    parts = [
        _batch(tables, pp),
        _parallel(tables, spec, pp),
        (_data_parallel(tables, pp) | {"cuda_graphs": graphs}, []),
        _pipeline(tables, layers, pp, mixed=len(dict(spec.layer_groups())) > 1),
        _recompute(tables, layers),
        ({name: DEFAULTS[name] for name in ("separate_projections", "sequence_parallel_linears")}, []),
    ]
    settings = {key: value for part, _ in parts for key, value in part.items()}
    findings = (*notes, *(item for _, of_part in parts for item in of_part))
    stack, batch = "pytorch" if _eager(tables) else "torchtitan", _global_batch(tables)
    return ModelSource(origin, spec, settings, findings, global_batch=batch, framework="torchtitan", stack=stack)


def _parse(text: str) -> Tables:
    """Parse the text into tables. Rejects keys with so many parts that the parser would use all memory."""
    dots = [line.count(".") for line in text.split("\n")]
    if sum(count * count for count in dots) > MOST_DOTS * MOST_DOTS:
        raise UserError(f"too many dots: a line has {max(dots)}", "write each setting on its own line")
    return parse_toml(text)


def _table(tables: Tables, name: str) -> Tables:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise UserError(
            f"{name} must be a table, not {shown(table)}", f"write [{name}] on its own line and its settings below it"
        )
    return table


def _find(tables: Tables, key: str) -> tuple[str, Any]:
    """A run setting with its table's name, and its value; None where the file does not have it."""
    for name in RUN_TABLES:
        table = _table(tables, name)
        if key in table:
            return f"[{name}] {key}", table[key]
    return key, None


def _size(tables: Tables, key: str, limit: str = "parallel", *, example: int = 1, also: tuple[int, ...] = ()) -> int | None:
    """A whole number of at least 1, or one of `also`, under that key; None where the file does not have it."""
    what, value = _find(tables, key)
    if value is None or (type(value) is int and value in also):
        return value
    return check_size(what, value, limit, f"for example: {key} = {example}")


def _eager(tables: Tables) -> bool:
    """Whether the file says that nothing is compiled."""
    return _table(tables, "compile").get("enable") is False or _table(tables, "training").get("compile") is False


def _flag(tables: Tables, key: str, *, default: bool) -> bool:
    what, value = _find(tables, key)
    return default if value is None else check_flag(what, value, f"for example: {key} = {str(default).lower()}")


def _in_sequences(tables: Tables, pp: int) -> Tables:
    """The tables of a Python job: its batch counts tokens, here it counts sequences of the longest context."""
    if any(_find(tables, key)[1] is not None for key in ("seq_len", "local_batch_size")):  # a release before that
        return tables
    default = load_data("gemmscope.model", "torchtitan_registry.toml")["defaults"]
    length, tokens = (_size(tables, key, "sequence_length") or default[key] for key in TOKENS[:2])
    length = min(length, tokens)
    if tokens % length:
        raise UserError(
            f"{TOKENS[1]} = {tokens} is not a multiple of {TOKENS[0]} = {length}", "choose sizes that divide each other"
        )
    total, pieces = _size(tables, TOKENS[2], "sequence_length", also=(-1,)), _size(tables, "num_pp_microbatches") or 1
    sizes = {"seq_len": length, "local_batch_size": tokens // length * (pieces if pp > 1 else 1)}
    sizes |= {"pipeline_parallel_microbatch_size": tokens // length, "global_batch_size": total // length if total else -1}
    return {**tables, "training": {**_table(tables, "training"), **sizes}}


def _batch(tables: Tables, pp: int) -> RunPart:
    """Sequence length, micro-batch size and micro-batches per step."""
    sequence_length = _size(tables, "seq_len", "sequence_length", example=8192)
    settings = {} if sequence_length is None else {"sequence_length": sequence_length}
    local = _size(tables, "local_batch_size", "micro_batch_size") or _size(tables, "batch_size", "micro_batch_size")
    total = _global_batch(tables)
    micro = local if pp == 1 else _size(tables, "pipeline_parallel_microbatch_size", "micro_batch_size") or 1
    if local is None or micro is None:
        return settings, [] if total is None else [finding("global-batch-without-local")]
    if local % micro:
        raise UserError(
            f"local_batch_size = {local} is not a multiple of pipeline_parallel_microbatch_size = {micro}",
            "torchtitan rejects this: make local_batch_size a multiple of pipeline_parallel_microbatch_size",
        )
    settings["micro_batch_size"] = micro
    findings = [] if pp == 1 else [finding("pipeline-micro-batches", batch=local, micro_batch=micro)]
    local_batches = _local_batches(tables, total, local) if total is not None else None
    if local_batches is not None or local != micro:  # where the number of ranks is unknown, at least one local batch
        accumulation = (local_batches or 1) * (local // micro)
        settings["gradient_accumulation"] = check_size("gradient accumulation", accumulation, "parallel")
    return settings, findings


def _global_batch(tables: Tables) -> int | None:
    total = _size(tables, "global_batch_size", "sequence_length", example=-1, also=(-1,))
    return None if total == -1 else total


def _replicas(tables: Tables) -> tuple[int | None, int]:
    """Ranks that split the weights (None: all that are left), and groups of them that hold the same."""
    shard = _size(tables, "data_parallel_shard_degree", also=(-1,))
    return (None if shard == -1 else shard), _size(tables, "data_parallel_replicate_degree") or 1


def _local_batches(tables: Tables, total: int, local: int) -> int | None:
    """Local batches per optimizer step; None where the number of data-parallel ranks is unknown."""
    shard, replicate = _replicas(tables)
    if shard is None:
        return None
    if total % (local * shard * replicate):
        raise UserError(
            f"global_batch_size = {total} is not a multiple of local_batch_size x data-parallel ranks"
            f" = {local} x {shard * replicate}",
            f"for example: global_batch_size = {local * shard * replicate}",
        )
    return total // (local * shard * replicate)


def _data_parallel(tables: Tables, pp: int) -> dict[str, Any]:
    """What data-parallel ranks share. FSDP gathers weights in BF16 from FP32 ones; it prefetches, so the exchange overlaps."""
    (shard, replicate), cp = _replicas(tables), _size(tables, "context_parallel_degree") or 1
    bf16 = _find(tables, "dtype")[1] == "bfloat16"
    settings: dict[str, Any] = {"optimizer_state": "bf16" if bf16 else DEFAULTS["optimizer_state"], "dp_overlap": True}
    if shard is not None:
        settings["dp"] = check_size("the number of data-parallel ranks", shard * replicate, "parallel")
    if shard is not None and shard * cp == 1:
        return {**settings, "zero": 0}
    reshard = _find(tables, "fsdp_reshard_after_forward")[1]
    kept = reshard == "never" or (reshard != "always" and pp > 1)
    settings["zero"] = 2 if kept else 3
    if shard is not None and replicate > 1:
        settings["zero_ranks"] = shard * cp
    return settings


def _parallel(tables: Tables, spec: ModelSpec, pp: int) -> RunPart:
    degrees = {
        "tp": _size(tables, "tensor_parallel_degree"),
        "cp": _size(tables, "context_parallel_degree"),
        "pp": pp if _find(tables, "pipeline_parallel_degree")[1] is not None else None,
        "ep": _size(tables, "expert_parallel_degree"),
    }
    settings: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree is not None}
    tp, ep = settings.get("tp", 1), settings.get("ep", 1)
    expert_tp = _size(tables, "expert_tensor_parallel_degree") or 1  # torchtitan's default, whatever tp is
    findings = []
    if tp > 1:
        settings["sequence_parallel"] = _flag(tables, "enable_sequence_parallel", default=DEFAULTS["sequence_parallel"])
    overlap = _flag(tables, "enable_async_tensor_parallel", default=False)
    settings |= {"tp_overlap": overlap and settings.get("sequence_parallel", False), "ep_overlap": False}
    if ep > 1 and not any(layer.is_moe for layer in spec.layers):
        del settings["ep"]
        findings.append(finding("expert-parallel-ignored", size=ep))
    elif ep > 1 and tp % expert_tp:
        setting, tp_setting = "expert_tensor_parallel_degree", "tensor_parallel_degree"
        findings.append(finding("expert-tp-not-modelled", setting=setting, size=expert_tp, tp_setting=tp_setting, tp=tp))
    elif ep > 1 and (expert_tp < tp or tp == 1):  # where equal, etp follows tp by itself
        settings["etp"] = expert_tp
    return settings, findings


def split_layers(layers: int, stages: int, first_less: int = 1, last_less: int = 1) -> list[int]:
    """Layers per pipeline stage, split evenly; the embedding and the output count as `first_less` and `last_less` layers.

    >>> split_layers(32, 4)
    [8, 9, 8, 7]
    """
    per_stage, extra = divmod(layers + first_less + last_less, stages)
    if per_stage < max(first_less, last_less, 1):
        raise UserError(
            f"{layers} layers cannot be split into {stages} pipeline stages",
            "lower pipeline_parallel_degree, or pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers",
        )
    sizes = [per_stage + (stage < extra) for stage in range(stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    return sizes


def _pipeline(tables: Tables, layers: int, pp: int, *, mixed: bool) -> RunPart:
    """Layers and pieces of each stage. `mixed`: the model has different kinds of layers."""
    if pp == 1:
        return {}, []
    what, schedule = _find(tables, "pipeline_parallel_schedule")
    schedule = "1F1B" if schedule is None else schedule
    if not isinstance(schedule, str):
        raise UserError(f"{what} must be text, not {shown(schedule)}", 'for example: "1F1B" or "Interleaved1F1B"')
    style = SCHEDULES.get(schedule.lower())
    ignored = [] if style else [f"pipeline_parallel_schedule = {shown(schedule)}"]
    ignored += [key for key in SPLITS_BY_NAME if _find(tables, key)[1]]
    if ignored:
        return {}, [finding("stage-split-not-modelled", setting=ignored[0])]
    stages = _stages(tables, layers, pp, single=style == "single")
    if len(stages) % pp or (style == "single") != (len(stages) == pp):
        raise UserError(
            f"schedule {shown(schedule)} cannot run {len(stages)} stages on {pp} pipeline ranks",
            f"it needs {'one stage' if style == 'single' else 'two or more stages'} per rank: correct or remove"
            " pipeline_parallel_layers_per_stage",
        )
    pieces = {"vp": len(stages) // pp} if len(stages) > pp else {}
    if style == "v":
        layers_of_ranks = tuple(stages[rank] + stages[-1 - rank] for rank in range(pp))
        return {"pp_layers": layers_of_ranks, **pieces}, [finding("output-on-last-stage")]
    uneven = [finding("stage-of-several-pieces", setting="pipeline_parallel_schedule")] if pieces and mixed else []
    return {"pp_layers": tuple(sum(stages[rank::pp]) for rank in range(pp)), **pieces}, uneven


def _stages(tables: Tables, layers: int, pp: int, *, single: bool) -> list[int]:
    """Layers per stage, in the model's order. A schedule with several stages per rank has two by default."""
    less = [_size(tables, f"pipeline_parallel_{end}_stage_less_layers", also=(0,)) for end in ("first", "last")]
    first, last = (1 if number is None else number for number in less)
    per_stage = _size(tables, "pipeline_parallel_layers_per_stage")
    stages = ceil((layers + first + last) / per_stage) if per_stage else pp if single else 2 * pp
    return split_layers(layers, stages, first, last)


def _recompute(tables: Tables, layers: int) -> RunPart:
    """What the backward pass recomputes: every layer, every n-th one, or every second GEMM of each layer ("op", the default)."""
    table = _table(tables, "activation_checkpoint")
    mode = table.get("mode", DEFAULTS["recompute"])
    if mode == "none" or mode == "full":
        return {"recompute": mode}, []
    if mode == "memory_budget":
        return {"recompute": "none", "partly_recomputed": True}, [finding("recompute-by-memory-budget")]
    if mode != "selective":
        raise UserError(
            f"[activation_checkpoint] mode = {shown(mode)} is not a mode of torchtitan",
            'for example: mode = "none"; modes: none, selective, full, memory_budget',
        )
    option = table.get("selective_ac_option")
    every = int(option) if isinstance(option, str) and re.fullmatch("[0-9]{1,9}", option) else option
    if type(every) is int and 0 <= every < 2**31:
        return {"recompute": "full", "recompute_share": layers // max(every, 1) / layers}, []
    if option not in ("op", None):
        raise UserError(
            f"[activation_checkpoint] selective_ac_option = {shown(option)} is neither a number of layers nor op",
            'for example: selective_ac_option = "op", or "2" for every second layer',
        )
    unknown = [finding("recompute-unknown-gemms")] * (option is None)
    return {"recompute": "selective", "recompute_modules": (EVERY_SECOND,)}, unknown
