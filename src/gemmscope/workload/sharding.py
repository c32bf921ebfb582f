"""How a model is split over ranks: which sizes must divide, the layers of each pipeline stage, the tokens of each expert.

The rules are Megatron's, which other frameworks follow: the first linear of a block is split by columns, the second by rows;
the vocabulary is split and padded until it divides; context parallelism splits the sequence; expert parallelism spreads the
experts over ranks that each have their own micro-batch.

How many ranks share a batch: GPUs, data-parallel size, global batch and gradient accumulation follow from each other.

    GPUs         = tp x cp x pp x dp
    global batch = micro-batch x accumulation x dp        (sequences)

Experts are folded over the ranks of a pipeline stage, as in Megatron: ep x etp divides tp x cp x dp. The given sizes decide
the rest; contradictory sizes are a `UserError` that names the nearest sizes that work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm

from gemmscope.errors import UserError, option, shown
from gemmscope.model.layer_spec import MlpSpec, MoeSpec
from gemmscope.model.limits import LARGEST, check_divides, divisors, divisors_text
from gemmscope.model.spec import ModelSpec, RunSpec


def check(model: ModelSpec, run: RunSpec) -> None:
    """Raise a `UserError` that lists the possible sizes if the model cannot be split like this."""
    _check_divides("tp", run.tp, _tensor_parallel_sizes(model, run))
    if run.expert_tp != run.tp:
        check_divides(
            run.expert_tp,
            run.tp,
            f"{option('etp', run.expert_tp)} does not divide {option('tp', run.tp)}",
            f"possible values of {option('etp')}",
        )
        _check_divides("etp", run.expert_tp, _expert_widths(model))
    _check_experts(model, run)
    _check_sequence(model, run)
    stages = stage_layers(model, run)
    if run.vp > 1:
        _check_virtual_stages(stages, run)
    if run.dp is not None:
        _check_ranks(run, run.dp)
    if run.pp_stage is not None and not 0 <= run.pp_stage < run.pp:
        raise UserError(
            f"{option('pp_stage', run.pp_stage)} does not exist",
            f"with {option('pp', run.pp)}, stages are numbered 0 to {run.pp - 1}",
        )


def _tensor_parallel_sizes(model: ModelSpec, run: RunSpec) -> dict[str, int]:
    """Every size that tensor parallelism divides, by its common name."""
    sizes: dict[str, int] = {}
    for layer, _ in model.layer_groups():
        if layer.attention is not None:
            sizes["num_attention_heads"] = gcd(sizes.get("num_attention_heads", 0), layer.attention.heads)
            if layer.attention.compressed is not None:  # its one head of keys is the same on every rank
                sizes["o_groups"] = layer.attention.compressed.out_groups
            else:
                sizes["num_key_value_heads"] = gcd(sizes.get("num_key_value_heads", 0), layer.attention.kv_heads)
        if layer.mixer is not None:
            parts = "heads" if layer.mixer.value_dim > 1 else "channels"
            sizes[f"the number of {layer.mixer.name} {parts}"] = layer.mixer.heads
            if layer.mixer.kind != "selective scan":  # whose B and C serve all channels
                sizes[f"the number of {layer.mixer.name} groups (key heads)"] = layer.mixer.groups
        if isinstance(layer.mlp, MlpSpec):
            sizes["intermediate_size"] = gcd(sizes.get("intermediate_size", 0), layer.mlp.intermediate_size)
        elif layer.mlp is not None and layer.mlp.shared is not None:
            sizes["the shared expert's intermediate_size"] = layer.mlp.shared.intermediate_size
    if model.prediction_layers:
        sizes["hidden_size"] = model.hidden_size
    if run.expert_tp == run.tp:
        sizes |= _expert_widths(model)
    return sizes


def _expert_widths(model: ModelSpec) -> dict[str, int]:
    widths = [layer.mlp.expert.intermediate_size for layer, _ in model.layer_groups() if isinstance(layer.mlp, MoeSpec)]
    return {"the experts' intermediate_size": gcd(*widths)} if widths else {}


def _check_divides(argument: str, parts: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % parts:
            all_sizes = "" if len(sizes) == 1 else ", which divide all the sizes it splits"
            raise UserError(
                f"{option(argument, parts)} does not divide {name} = {size}",
                f"possible values of {option(argument)}{all_sizes}: {divisors_text(gcd(*sizes.values()))}",
            )


def _check_experts(model: ModelSpec, run: RunSpec) -> None:
    moe = [layer.mlp for layer, _ in model.layer_groups() if isinstance(layer.mlp, MoeSpec)]
    if not moe:
        for argument, value, neutral in (("ep", run.ep, 1), ("etp", run.etp, None), ("imbalance", run.imbalance, 1.0)):
            if value != neutral:
                raise UserError(f"{option(argument, value)}: {model.name} has no experts", f"leave out {option(argument)}")
        return
    for spec in moe:
        _check_divides("ep", run.ep, {"the number of experts": spec.experts})
        if run.imbalance > spec.experts:
            raise UserError(
                f"{option('imbalance', f'{run.imbalance:g}')} is too large for {spec.experts} experts",
                f"at most {spec.experts}, when the busiest expert has all tokens",
            )
    if run.tokens * moe[0].top_k * run.expert_tp % run.tp:
        raise UserError(
            f"{run.tokens} tokens x top {moe[0].top_k} cannot be split evenly over {option('tp', run.tp)} with "
            f"{option('etp', run.expert_tp)}",
            f"use a sequence length that is a multiple of {run.tp}",
        )


def _check_sequence(model: ModelSpec, run: RunSpec) -> None:
    if run.cp > 1:  # a recurrence needs the whole sequence: context parallelism splits its heads
        mixers = [layer.mixer for layer, _ in model.layer_groups() if layer.mixer is not None]
        _check_divides("cp", run.cp, {f"the number of {mixer.name} heads of one rank": mixer.heads // run.tp for mixer in mixers})
    # Causal context parallelism gives each rank one early and one late chunk, so that all ranks have the same work.
    chunks = run.cp * 2 if model.causal and run.cp > 1 else run.cp
    if run.sequence_length % chunks:
        raise UserError(
            f"{option('cp', run.cp)} does not split {option('sequence_length', run.sequence_length)} evenly"
            + (f" (a causal model needs a multiple of 2 x {run.cp} = {chunks})" if chunks != run.cp else ""),
            f"the nearest possible sequence lengths: {_neighbours(run.sequence_length, chunks)}",
        )
    if run.sequence_parallel and (run.sequence_length // run.cp) % run.tp:
        raise UserError(
            f"{option('sequence_parallel')}: {option('tp', run.tp)} does not divide the sequence length of one rank, "
            f"{run.sequence_length // run.cp}",
            f"the nearest possible sequence lengths: {_neighbours(run.sequence_length, chunks * run.tp)}",
        )


def _check_virtual_stages(stages: list[tuple[int, int]], run: RunSpec) -> None:
    """Every piece has the same number of layers, unless each stage was given its own number."""
    layers = stages[0][1] - stages[0][0]
    if run.pp == 1:
        raise UserError(
            f"{option('vp', run.vp)} splits each stage of a pipeline, but there is no pipeline",
            f"remove {option('vp')}"
            + (f", or add {option('pp')}: {divisors_text(layers // run.vp)}" if layers % run.vp == 0 and layers > run.vp else ""),
        )
    if run.pp_layers is None and layers % run.vp:
        raise UserError(
            f"{option('vp', run.vp)} does not divide the {layers} layers of a pipeline stage",
            f"possible values of {option('vp')}: {divisors_text(layers)}",
        )


def _check_ranks(run: RunSpec, dp: int) -> None:
    """The experts are shared by ranks of one pipeline stage; sharded states by ranks that hold the same weights."""
    if (run.tp * run.cp * dp) % (run.ep * run.expert_tp):
        raise UserError(
            f"{option('ep', run.ep)} x {option('etp', run.expert_tp)} does not divide the {run.tp * run.cp * dp} ranks "
            f"that share the experts (tp x cp x dp = {run.tp} x {run.cp} x {dp})",
            f"{option('dp')} must be a multiple of {dp_step(run)}: for example {option('dp', dp_step(run))}",
        )
    if run.zero_ranks is not None and (dp * run.cp) % run.zero_ranks:
        raise UserError(
            f"{option('zero_ranks', run.zero_ranks)} does not divide the {dp * run.cp} ranks that hold the same weights",
            f"possible values of {option('zero_ranks')}: {divisors_text(dp * run.cp)}",
        )


def check_schedule(run: RunSpec) -> None:
    """Raise a `UserError` if an interleaved pipeline cannot run that many micro-batches: it takes them in groups of pp.

    torchtitan's schedules take other numbers too.
    """
    if run.vp > 1 and run.gradient_accumulation % run.pp:
        counts = _multiples(run.gradient_accumulation, run.pp)
        accumulation, batch = (
            " or ".join(option(name, per_micro_batch * count) for count in counts)
            for name, per_micro_batch in (
                ("gradient_accumulation", 1),
                ("global_batch", run.global_batch // run.gradient_accumulation),
            )
        )
        nearest = "the nearest that work" if len(counts) > 1 else "the nearest that works"
        raise UserError(
            f"{option('vp', run.vp)} needs a multiple of {option('pp', run.pp)} micro-batches, but a step has "
            f"{run.gradient_accumulation} ({option('gradient_accumulation')})",
            f"{nearest}: {accumulation}; as a global batch, {batch}",
        )


def _neighbours(value: int, multiple: int) -> str:
    return ", ".join(map(str, _multiples(value, multiple)))


def stage_layers(model: ModelSpec, run: RunSpec) -> list[tuple[int, int]]:
    """(first, last + 1) layer of each pipeline stage."""
    total = len(model.layers)
    if run.pp_layers is not None:
        if len(run.pp_layers) != run.pp or sum(run.pp_layers) != total or min(run.pp_layers) < 0:
            raise UserError(
                f"{option('pp_layers')} must be {run.pp} numbers that add up to {total} layers, not {shown(run.pp_layers)}",
                f"for example {option('pp_layers', _even_split(total, run.pp))}",
            )
        ends = list(accumulate(run.pp_layers))
    elif total % run.pp:
        raise UserError(
            f"{option('pp', run.pp)} does not divide num_hidden_layers = {total}",
            f"possible values of {option('pp')}: {divisors_text(total)}"
            + (f"; or give each stage its layers: {option('pp_layers', _even_split(total, run.pp))}" if run.pp <= total else ""),
        )
    else:
        ends = [total // run.pp * (stage + 1) for stage in range(run.pp)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _even_split(total: int, parts: int) -> str:
    return ",".join(map(str, spread(total, parts))) if parts <= 64 else "…"


def padded_vocab(vocab: int, run: RunSpec) -> int:
    """The vocabulary padded to the next multiple of tp (in Megatron, of 128 per rank)."""
    multiple = run.vocab_multiple * run.tp
    return -(-vocab // multiple) * multiple


def spread(total: int, parts: int) -> list[int]:
    """`total` as `parts` whole numbers that are as equal as possible, larger ones first.

    >>> spread(10, 4)
    [3, 3, 2, 2]
    """
    return [total // parts + (index < total % parts) for index in range(parts)]


def expert_rows(moe: MoeSpec, run: RunSpec, ep_rank: int = 0) -> tuple[int, ...]:
    """How many tokens each expert of one expert-parallel rank receives, top-k copies counted.

    Balanced: every rank receives as many tokens as it sent, spread evenly. With `imbalance` F, the loads fall geometrically from
    the busiest expert, which has F times the average. Rank 0 has the busiest experts, and all ranks wait for it.
    """
    per_rank = moe.computed(run.tokens * moe.top_k * run.expert_tp // run.tp)
    local = moe.experts // run.ep
    if run.imbalance == 1.0:
        return tuple(spread(per_rank, local))
    rows = apportion(per_rank * run.ep, _geometric_loads(moe.experts, run.imbalance))
    return tuple(rows[ep_rank * local : (ep_rank + 1) * local])


def _geometric_loads(count: int, busiest_over_mean: float) -> list[float]:
    """Loads 1, r, r², … whose largest is `busiest_over_mean` times their mean. r is found by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        if count * (1 - ratio) / (1 - ratio**count) > busiest_over_mean:
            low = ratio
        else:
            high = ratio
    return [high**i for i in range(count)]


def apportion(total: int, loads: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `loads` that add up to `total` (largest remainders rounded up).

    >>> apportion(5, [6, 2]), apportion(4, [1, 1, 1])
    ([4, 1], [2, 1, 1])
    """
    whole = sum(loads)
    exact = [load * total / whole for load in loads]
    rows = [int(value) for value in exact]
    by_remainder = sorted(range(len(rows)), key=lambda index: rows[index] - exact[index])
    for index in by_remainder[: total - sum(rows)]:
        rows[index] += 1
    return rows


@dataclass(frozen=True)
class Given:
    """The sizes that the user gave; None: not given. `fsdp`: the number of ranks that shard weights, gradients and optimizer."""

    gpus: int | None = None
    dp: int | None = None
    global_batch: int | None = None
    gradient_accumulation: int | None = None
    fsdp: int | None = None


@dataclass(frozen=True)
class Ranks:
    """The sizes that follow; None: not determined, which means the fewest ranks and one micro-batch."""

    dp: int | None
    gradient_accumulation: int | None


def model_ranks(run: RunSpec) -> int:
    """GPUs of one replica."""
    return run.tp * run.cp * run.pp


def dp_step(run: RunSpec, fsdp: int | None = None) -> int:
    """dp must be a multiple of this, for the experts to be shared and for `fsdp` ranks to share what they hold.

    >>> dp_step(RunSpec(1, 512, tp=2, ep=64, etp=1)), dp_step(RunSpec(1, 512, cp=2), fsdp=8)
    (32, 4)
    """
    sharing = run.ep * run.expert_tp
    step = sharing // gcd(sharing, run.tp * run.cp)
    return lcm(step, fsdp // gcd(fsdp, run.cp)) if fsdp else step


def solve(run: RunSpec, given: Given) -> Ranks:
    """dp and accumulation of a run with these sizes, as far as they are determined.

    >>> solve(RunSpec(2, 512, tp=4), Given(gpus=32, global_batch=128))
    Ranks(dp=8, gradient_accumulation=8)
    >>> solve(RunSpec(2, 512), Given(global_batch=128, gradient_accumulation=4))
    Ranks(dp=16, gradient_accumulation=4)
    """
    dp = given.dp
    if dp is not None:
        _check_dp(run, given, dp)
    if given.gpus is not None:
        dp = _dp_of_gpus(run, given, given.gpus)
    elif dp is None and given.global_batch is not None and given.gradient_accumulation is not None:
        dp = _dp_of_batch(run, given, given.global_batch, given.gradient_accumulation)
    elif dp is None and given.fsdp is not None:
        dp = _nearest(run, given, 1)[0] if _nearest(run, given, 1) else dp_step(run, given.fsdp)
    if dp is not None and given.dp is None:
        _check_dp(run, given, dp)
    return Ranks(dp, _accumulation(run, given, dp if dp is not None else dp_step(run)))


def _dp_of_gpus(run: RunSpec, given: Given, gpus: int) -> int:
    group = model_ranks(run)
    if given.dp is not None and gpus != group * given.dp:
        raise UserError(
            f"{option('gpus', gpus)} is not {given.dp} data-parallel replicas of {group} GPUs (tp x cp x pp)",
            f"use {option('gpus', group * given.dp)}, or remove {option('dp')}",
        )
    dp, rest = divmod(gpus, group)
    if not dp:
        raise UserError(
            f"one replica of the model takes {group} GPUs (tp x cp x pp), more than {option('gpus', gpus)}",
            _or("gpus", [group * near for near in _nearest(run, given, 1)]),
        )
    if rest:
        raise UserError(
            f"{gpus} GPUs do not divide into groups of {group} (tp x cp x pp)",
            _or("gpus", [group * near for near in _nearest(run, given, dp, above=dp + 1)]),
        )
    return dp


def _dp_of_batch(run: RunSpec, given: Given, batch: int, accumulation: int) -> int:
    dp, rest = divmod(batch, run.micro_batch_size * accumulation)
    step = dp_step(run, given.fsdp)
    if rest or dp % step or dp > LARGEST["parallel"]:
        unit = run.micro_batch_size * accumulation * step
        message = (
            f"{option('global_batch', batch)} does not split into {option('micro_batch_size', run.micro_batch_size)} x "
            f"{option('gradient_accumulation', accumulation)} x data-parallel ranks"
        )
        raise UserError(
            message + (f", whose number must be a multiple of {step} in this layout" if step > 1 else ""),
            _or("global_batch", _multiples(batch, unit, unit * LARGEST["parallel"] // step)),
        )
    return dp


def _check_dp(run: RunSpec, given: Given, dp: int) -> None:
    """Raise a `UserError` if the experts or the `fsdp` ranks do not fit into that many replicas."""
    name, per_replica = ("gpus", model_ranks(run)) if given.dp is None and given.gpus is not None else ("dp", 1)
    if (run.tp * run.cp * dp) % (run.ep * run.expert_tp):
        raise UserError(
            f"{option('ep', run.ep)} x {option('etp', run.expert_tp)} does not divide the {run.tp * run.cp * dp} ranks "
            f"that share the experts (tp x cp x dp = {run.tp} x {run.cp} x {dp})",
            _or(name, [near * per_replica for near in _nearest(run, given, dp)]),
        )
    if given.fsdp is not None and (dp * run.cp) % given.fsdp:
        raise UserError(
            f"{option('fsdp', given.fsdp)} does not divide the {dp * run.cp} ranks that hold the same weights (dp x cp)",
            _or(name, [near * per_replica for near in _nearest(run, given, dp)]),
        )


def _accumulation(run: RunSpec, given: Given, dp: int) -> int | None:
    """Micro-batches per step: as given, or as the global batch needs them."""
    batch, accumulation = given.global_batch, given.gradient_accumulation
    if batch is None:
        return accumulation
    micro = run.micro_batch_size
    if accumulation is not None and micro * accumulation * dp != batch:
        raise UserError(
            f"{option('global_batch', batch)} is not {option('micro_batch_size', micro)} x "
            f"{option('gradient_accumulation', accumulation)} x {dp} data-parallel ranks = {micro * accumulation * dp}",
            f"use {option('global_batch', micro * accumulation * dp)}, or remove one of them",
        )
    micro_batches, rest = divmod(batch, micro * dp)
    if rest or not 0 < micro_batches <= LARGEST["parallel"]:
        message = f"{option('global_batch', batch)} does not split into micro-batches of {micro} on {dp} data-parallel ranks"
        hint = _or("global_batch", _multiples(batch, micro * dp, micro * dp * LARGEST["parallel"]))
        others = [near for near in _nearest(run, given, dp) if near != dp]
        if others and (given.gpus is None) != (given.dp is None):
            name, per_replica = ("gpus", model_ranks(run)) if given.gpus is not None else ("dp", 1)
            hint += f"; or {_or(name, [near * per_replica for near in others], 'use ')}"
        raise UserError(message, hint)
    return micro_batches


def _nearest(run: RunSpec, given: Given, dp: int, above: int | None = None) -> list[int]:
    """The nearest data-parallel sizes that work: at most one below or equal to `dp`, and one from `above` on.

    They split the global batch too, where any size does.
    """
    step, limit = dp_step(run, given.fsdp), LARGEST["parallel"]
    above = dp if above is None else above
    if given.global_batch is not None:
        per_rank, rest = divmod(given.global_batch, run.micro_batch_size * (given.gradient_accumulation or 1))
        exact = given.gradient_accumulation is not None
        candidates = [per_rank] if exact else [step * part for part in divisors(per_rank // step)]
        fitting = [size for size in candidates if 0 < size <= limit and not rest and per_rank % step == 0]
        if fitting:
            below, beyond = [size for size in fitting if size <= dp], [size for size in fitting if size >= above]
            return list(dict.fromkeys([*below[-1:], *beyond[:1]]))
    return _multiples(dp, step, limit, above)


def _multiples(value: int, step: int, limit: int = sys.maxsize, above: int | None = None) -> list[int]:
    """The nearest multiples of `step`, at most one on each side, from `step` to `limit`.

    >>> _multiples(10, 4), _multiples(3, 4), _multiples(8, 4)
    ([8, 12], [4], [8])
    """
    below, beyond = min(value, limit) // step * step, -(-(value if above is None else above) // step) * step
    return list(dict.fromkeys(size for size in (below, beyond) if step <= size <= limit))


def _or(name: str, sizes: list[int], lead: str = "the nearest that works: ") -> str:
    """`the nearest that work: --gpus 56 or --gpus 64`."""
    if not sizes:
        return f"change {option(name)}"
    plural = lead if len(sizes) == 1 else lead.replace("that works", "that work")
    return plural + " or ".join(option(name, size) for size in sizes)
