"""Reads a torchtitan job config: a TOML file that names a model and says how it is trained.

The file holds no sizes: its `[model]` table only names a model, which `torchtitan_model` knows. The rest of the file, read
here, fills the run: sequence and batch from `[training]`, the split over GPUs from `[parallelism]`, and what is computed
twice from `[activation_checkpoint]`.

What torchtitan does that a shape reader must know:

- Q, K and V are three linears, gate (w1) and up (w3) are two: nothing is fused, except gpt_oss's experts.
- Tensor parallelism always splits the norms along the sequence too, but not the router and the latent down projections:
  the tokens are gathered first, and every rank runs all of them.
- Expert parallelism takes the experts out of tensor parallelism, unless `expert_tensor_parallel_degree` keeps them in: by
  default each tensor-parallel rank sends its share of the tokens to whole experts, and is one of the expert-parallel ranks.
- A pipeline cuts the local batch into micro-batches of `pipeline_parallel_microbatch_size`, by default 1, and gives
  the first and last stage fewer layers, because they also hold the embedding and the output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.findings import finding
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import check_size
from gemmscope.model.torchtitan_model import Flavor, load_flavor, model_and_flavor, model_notes, model_spec
from gemmscope.toml import parse_toml

Document = Mapping[str, Any]
Found = tuple[dict[str, Any], list[str]]
"""What part of a file says: `RunSpec` fields, and notes for the reader of the result."""

TABLES = ("job", "model", "training", "parallelism", "activation_checkpoint")
RUN_TABLES = ("parallelism", "training", "experimental")  # releases of 2024 kept the degrees in the last two
MOST_DOTS = 1000  # in a line: the parser's memory grows with the square of a dotted key's parts
SPLITS_BY_NAME = ("module_fqns_per_model_part", "pipeline_parallel_split_points")

# How a schedule places stages on the pipeline's ranks: one each, several in rounds, or two in a V (down and back up).
SCHEDULES = {
    "1f1b": "single",
    "gpipe": "single",
    "pipelineschedulesingle": "single",
    "interleaved1f1b": "loop",
    "flexibleinterleaved1f1b": "loop",
    "loopedbfs": "loop",
    "interleavedzerobubble": "loop",
    "pipelineschedulemulti": "loop",
    "zbvzerobubble": "v",
    "dualpipev": "v",
}


def recognises(text: str) -> bool:
    """Whether a text looks like a torchtitan job config, even one with a syntax error (which `read` will then explain).

    >>> recognises('[model]\\nname = "llama3"\\nflavor = "8B"'), recognises('{"hidden_size": 4096}')
    (True, False)
    """
    try:
        document = _parse(text)
    except UserError:
        headers = set(re.findall(r"^\[(\w+)\]", text, flags=re.MULTILINE))
        return "model" in headers and len(headers.intersection(TABLES)) >= 2
    model = document.get("model")
    if isinstance(model, dict) and "flavor" in model:
        return True
    return model is not None and sum(table in document for table in TABLES) >= 3


def read(text: str, origin: str) -> ModelSource:
    """The model and the run settings of a torchtitan job config; `origin` names the file in messages.

    >>> source = read('[model]\\nname = "llama3"\\nflavor = "8B"\\n[training]\\nseq_len = 8192', "8b.toml")
    >>> source.model.name, source.model.hidden_size, source.run_settings["sequence_length"]
    ('torchtitan llama3 8B', 4096, 8192)
    """
    try:
        return _source(_parse(text), origin)
    except UserError as error:
        raise UserError(f"{origin}: {error.message}", error.hint) from None


def _parse(text: str) -> Document:
    """The tables of a text, unless a key in it has so many parts that the parser would take all memory for them."""
    if any(line.count(".") > MOST_DOTS for line in text.split("\n")):
        raise UserError(
            f"a line with more than {MOST_DOTS} dots is not in a TOML job config", "write each setting on its own line"
        )
    return parse_toml(text)


def _source(document: Document, origin: str) -> ModelSource:
    named = _table(document, "model")
    family, name = model_and_flavor(named)
    flavor = load_flavor(family, name)
    pp = _size(document, "pipeline_parallel_degree") or 1
    parts = [
        _batch(document, pp),
        _parallel(document, flavor, pp),
        _pipeline(document, flavor.n_layers, pp),
        _recompute(document, flavor.n_layers),
        ({"separate_projections": True, "sequence_parallel_linears": False}, model_notes(named, flavor)),
    ]
    settings = {key: value for part, _ in parts for key, value in part.items()}
    return ModelSource(origin, model_spec(family, name, flavor), settings, tuple(finding("model-note", text=note) for _, notes in parts for note in notes))


# ------------------------------------------------------------------------------------------- what stands in the file


def _table(document: Document, name: str) -> Document:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{name} must be a table, not {shown(table)}", f"write [{name}] on a line, its settings below it")
    return table


def _find(document: Document, key: str) -> tuple[str, Any]:
    """A run setting and the table it stands in; None where the file does not have it."""
    for name in RUN_TABLES:
        table = _table(document, name)
        if key in table:
            return f"[{name}] {key}", table[key]
    return key, None


def _size(document: Document, key: str, limit: str = "parallel", *, example: int = 1, also: tuple[int, ...] = ()) -> int | None:
    """A whole number of at least 1, or one of `also`, under that key; None where the file does not have it."""
    what, value = _find(document, key)
    if value is None or (type(value) is int and value in also):
        return value
    hint = f"for example: {key} = {example}"
    if type(value) is not int or abs(value) >= 2**63:
        raise UserError(f"{what} must be a whole number of a size that can be trained, not {shown(value)}", hint)
    try:
        return check_size(what, value, limit)
    except UserError as error:
        raise UserError(error.message, hint) from None


def _flag(document: Document, key: str, *, default: bool) -> bool:
    what, value = _find(document, key)
    if value is None or isinstance(value, bool):
        return default if value is None else value
    raise UserError(f"{what} must be true or false, not {shown(value)}", f"for example: {key} = {str(default).lower()}")


# ------------------------------------------------------------------------------------------------------------ the run


def _batch(document: Document, pp: int) -> Found:
    """Sequence length, micro-batch and how many of them make an optimizer step."""
    sequence_length = _size(document, "seq_len", "sequence_length", example=8192)
    settings = {} if sequence_length is None else {"sequence_length": sequence_length}
    local = _size(document, "local_batch_size", "micro_batch_size")
    if local is None:
        local = _size(document, "batch_size", "micro_batch_size")
    total = _size(document, "global_batch_size", "sequence_length", example=-1, also=(-1,))
    total = None if total == -1 else total
    micro = local if pp == 1 else _size(document, "pipeline_parallel_microbatch_size", "micro_batch_size") or 1
    if local is None or micro is None:
        return settings, [] if total is None else ["global_batch_size is not used: the file has no local_batch_size"]
    if local % micro:
        raise UserError(
            f"local_batch_size = {local} is not a multiple of pipeline_parallel_microbatch_size = {micro}",
            "make the one a multiple of the other: torchtitan refuses such a pipeline",
        )
    settings["micro_batch_size"] = micro
    notes = [] if pp == 1 else [f"the pipeline runs local_batch_size = {local} as micro-batches of {micro}"]
    passes: int | None = 1
    if total is not None:
        passes = _passes(document, total, local)
        if passes is None:
            notes.append(
                f"global_batch_size = {total} is not used: gradient accumulation follows from it only where"
                " data_parallel_shard_degree and data_parallel_replicate_degree are both given and positive"
            )
    if passes is not None and (total is not None or local != micro):
        settings["gradient_accumulation"] = check_size("gradient accumulation", passes * (local // micro), "parallel")
    return settings, notes


def _passes(document: Document, total: int, local: int) -> int | None:
    """Forward and backward passes per optimizer step; None where the number of data-parallel ranks is unknown."""
    shard = _size(document, "data_parallel_shard_degree", also=(-1,))
    replicate = _size(document, "data_parallel_replicate_degree")
    if shard is None or shard < 1 or replicate is None:
        return None
    if total % (local * shard * replicate):
        raise UserError(
            f"global_batch_size = {total} is not a multiple of local_batch_size x data-parallel ranks"
            f" = {local} x {shard * replicate}",
            f"for example: global_batch_size = {local * shard * replicate}",
        )
    return total // (local * shard * replicate)


def _parallel(document: Document, flavor: Flavor, pp: int) -> Found:
    """The split over GPUs, and what of it is not modelled."""
    degrees = {
        "tp": _size(document, "tensor_parallel_degree"),
        "cp": _size(document, "context_parallel_degree"),
        "pp": pp if _find(document, "pipeline_parallel_degree")[1] is not None else None,
        "ep": _size(document, "expert_parallel_degree"),
    }
    settings: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree is not None}
    tp, ep = settings.get("tp", 1), settings.get("ep", 1)
    expert_tp = _size(document, "expert_tensor_parallel_degree") or 1  # torchtitan's default, whatever tp is
    notes = []
    if tp > 1:
        settings["sequence_parallel"] = _flag(document, "enable_sequence_parallel", default=True)
    if _flag(document, "enable_async_tensor_parallel", default=False) and tp > 1:
        notes.append(f"asynchronous tensor parallelism runs a GEMM in {tp} pieces, between transfers; here it is whole")
    if ep > 1 and not flavor.num_experts:
        del settings["ep"]
        notes.append(f"expert_parallel_degree = {ep} is not used: the model has no experts")
    elif ep > 1 and tp % expert_tp:
        notes.append(
            f"expert_tensor_parallel_degree = {expert_tp} does not divide tensor_parallel_degree = {tp}, which is not"
            " modelled (torchtitan takes 1 or the same): the experts are split like the rest"
        )
    elif ep > 1 and (expert_tp < tp or tp == 1):  # equal to tp: left to follow it
        settings["etp"] = expert_tp
    return settings, notes


def split_layers(layers: int, stages: int, first_less: int = 1, last_less: int = 1) -> list[int]:
    """Layers per pipeline stage: shared out evenly, with the embedding and the output counted as so many layers.

    >>> split_layers(32, 4)
    [8, 9, 8, 7]
    """
    each, extra = divmod(layers + first_less + last_less, stages)
    if each < max(first_less, last_less, 1):
        raise UserError(
            f"{layers} layers cannot be split into {stages} pipeline stages",
            "lower pipeline_parallel_degree, or the layers that the first and last stage have less",
        )
    sizes = [each + (stage < extra) for stage in range(stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    return sizes


def _pipeline(document: Document, layers: int, pp: int) -> Found:
    """How many layers each pipeline rank holds."""
    if pp == 1:
        return {}, []
    what, schedule = _find(document, "pipeline_parallel_schedule")
    schedule = "1F1B" if schedule is None else schedule
    if not isinstance(schedule, str):
        raise UserError(f"{what} must be a text, not {shown(schedule)}", 'for example: "1F1B" or "Interleaved1F1B"')
    style = SCHEDULES.get(schedule.lower())
    unread = [] if style else [f"pipeline_parallel_schedule = {shown(schedule)}"]
    unread += [key for key in SPLITS_BY_NAME if _find(document, key)[1]]
    if unread:
        return {}, [f"{unread[0]} is not read: how torchtitan splits the layers over the stages is not modelled"]
    stages = _stages(document, layers, pp, single=style == "single")
    if len(stages) % pp or (style == "single") != (len(stages) == pp):
        raise UserError(
            f"{len(stages)} stages do not fit {pp} pipeline ranks with schedule {shown(schedule)}",
            f"it needs {'one stage' if style == 'single' else 'two or more stages'} per rank: correct"
            " pipeline_parallel_layers_per_stage, or leave it out",
        )
    if style == "v":
        note = "this schedule puts embedding and output on the first pipeline rank; here the output is on the last"
        return {"pp_layers": tuple(stages[rank] + stages[-1 - rank] for rank in range(pp))}, [note]
    rounds = "a pipeline rank holds several pieces of the model; they are counted as consecutive layers"
    held = tuple(sum(stages[rank::pp]) for rank in range(pp))
    return {"pp_layers": held}, [rounds] if style == "loop" else []


def _stages(document: Document, layers: int, pp: int, *, single: bool) -> list[int]:
    """Layers per stage, in the model's order; by default a schedule with several stages per rank has two."""
    less = [_size(document, f"pipeline_parallel_{end}_stage_less_layers", also=(0,)) for end in ("first", "last")]
    first, last = (1 if number is None else number for number in less)
    per_stage = _size(document, "pipeline_parallel_layers_per_stage")
    stages = ceil((layers + first + last) / per_stage) if per_stage else pp if single else 2 * pp
    return split_layers(layers, stages, first, last)


def _recompute(document: Document, layers: int) -> Found:
    """What the backward pass computes again. Only none, and whole layers, are what torchtitan also has."""
    table = _table(document, "activation_checkpoint")
    mode = table.get("mode", "selective")  # torchtitan's own default
    if mode == "none" or mode == "full":
        return {"recompute": mode}, []
    if mode == "memory_budget":
        return {"recompute": "none"}, ["activation checkpointing by memory budget is not modelled: nothing is recomputed here"]
    if mode != "selective":
        raise UserError(
            f"[activation_checkpoint] mode = {shown(mode)} is not a mode of torchtitan",
            'for example: mode = "none"; known: none, selective, full, memory_budget',
        )
    return _recompute_selectively(table.get("selective_ac_option"), layers)


def _recompute_selectively(option: object, layers: int) -> Found:
    """Selective checkpointing, which is either every n-th layer, or every second GEMM of each layer ("op").

    Neither is this package's "selective" (attention alone, which torchtitan keeps), so nothing is counted twice.
    """
    every = int(option) if isinstance(option, str) and re.fullmatch("[0-9]{1,9}", option) else option
    if type(every) is int and 0 <= every <= 1:
        return {"recompute": "full"}, []
    if type(every) is int and 1 < every < 2**31:
        what = f"the forward GEMMs of every {every}th layer ({layers // every} of {layers})"
    elif option == "op":
        what = "every second forward GEMM of each layer (not attention)"
    elif option is None:
        what = "part of the forward GEMMs (it is torchtitan's default, and its default option differs between releases)"
    else:
        raise UserError(
            f"[activation_checkpoint] selective_ac_option = {shown(option)} is neither a number of layers nor op",
            'for example: selective_ac_option = "op", or "2" for every second layer',
        )
    note = f"selective activation checkpointing runs {what} again in the backward pass; this is not counted here"
    return {"recompute": "none"}, [note]
