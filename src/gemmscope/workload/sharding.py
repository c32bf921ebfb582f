"""How a model is split over ranks: which sizes must divide, what each pipeline stage holds, which tokens reach which expert.

The rules are Megatron's, which the other frameworks follow: the first linear of a block is split by columns, the second by
rows; the vocabulary is split and padded until it divides; context parallelism splits the sequence; expert parallelism spreads
the experts over ranks that each bring a micro-batch of their own.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd

from gemmscope.errors import UserError
from gemmscope.model.spec import MlpSpec, ModelSpec, MoeSpec, RunSpec, divisors_text


def check(model: ModelSpec, run: RunSpec) -> None:
    """Raise a `UserError` that says which sizes would do, if the model cannot be split as `run` asks."""
    _check_divides("tp", run.tp, _tensor_parallel_sizes(model, run))
    if run.expert_tp != run.tp:
        if run.tp % run.expert_tp:
            raise UserError(f"etp = {run.expert_tp} does not divide tp = {run.tp}", f"etp sizes that do: {divisors_text(run.tp)}")
        _check_divides("etp", run.expert_tp, _expert_widths(model))
    _check_experts(model, run)
    _check_sequence(model, run)
    stage_layers(model, run)
    if run.pp_stage is not None and not 0 <= run.pp_stage < run.pp:
        raise UserError(f"pp_stage = {run.pp_stage}: with pp = {run.pp}, stages are numbered 0 to {run.pp - 1}")


def _tensor_parallel_sizes(model: ModelSpec, run: RunSpec) -> dict[str, int]:
    """Every size that tensor parallelism divides, by the name people know it by."""
    sizes: dict[str, int] = {}
    for layer, _ in model.layer_groups():
        sizes["num_attention_heads"] = layer.attention.heads
        sizes["num_key_value_heads"] = layer.attention.kv_heads
        if isinstance(layer.mlp, MlpSpec):
            sizes["intermediate_size"] = gcd(sizes.get("intermediate_size", 0), layer.mlp.intermediate_size)
        elif layer.mlp.shared is not None:
            sizes["the shared expert's intermediate_size"] = layer.mlp.shared.intermediate_size
    if run.expert_tp == run.tp:
        sizes |= _expert_widths(model)
    return sizes


def _expert_widths(model: ModelSpec) -> dict[str, int]:
    widths = [layer.mlp.expert.intermediate_size for layer in model.layers if isinstance(layer.mlp, MoeSpec)]
    return {"the experts' intermediate_size": gcd(*widths)} if widths else {}


def _check_divides(option: str, parts: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % parts:
            others = "" if len(sizes) == 1 else " of all the sizes it splits"
            raise UserError(
                f"{option} = {parts} does not divide {name} = {size}",
                f"{option} sizes that are divisors{others}: {divisors_text(gcd(*sizes.values()))}",
            )


def _check_experts(model: ModelSpec, run: RunSpec) -> None:
    moe = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeSpec)]
    if not moe:
        for option, value, neutral in (("ep", run.ep, 1), ("etp", run.etp, None), ("imbalance", run.imbalance, 1.0)):
            if value != neutral:
                raise UserError(f"{option} = {value}, but {model.name} has no experts", f"leave out --{option}")
        return
    for spec in moe:
        _check_divides("ep", run.ep, {"the number of experts": spec.experts})
        if run.imbalance > spec.experts:
            raise UserError(
                f"imbalance = {run.imbalance:g} is too much for {spec.experts} experts",
                f"the busiest can have at most {spec.experts} times the average: all tokens",
            )
    if run.tokens * moe[0].top_k * run.expert_tp % run.tp:
        raise UserError(
            f"{run.tokens} tokens x top {moe[0].top_k} do not split over tp = {run.tp} with etp = {run.expert_tp}",
            "use a sequence length that is a multiple of tp",
        )


def _check_sequence(model: ModelSpec, run: RunSpec) -> None:
    # Causal context parallelism gives each rank one early and one late chunk, so that all have the same work.
    chunks = run.cp * 2 if model.causal and run.cp > 1 else run.cp
    if run.sequence_length % chunks:
        raise UserError(
            f"cp = {run.cp} does not split sequence_length = {run.sequence_length} evenly"
            + (f" (a causal model needs a multiple of 2 x cp = {chunks})" if chunks != run.cp else ""),
            f"the nearest sequence lengths that do: {_neighbours(run.sequence_length, chunks)}",
        )
    if run.sequence_parallel and (run.sequence_length // run.cp) % run.tp:
        raise UserError(
            f"sequence parallelism: tp = {run.tp} does not divide sequence_length / cp = {run.sequence_length // run.cp}",
            f"the nearest sequence lengths that work: {_neighbours(run.sequence_length, chunks * run.tp)}",
        )


def _neighbours(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return ", ".join(str(size) for size in (below, below + multiple) if size)


def stage_layers(model: ModelSpec, run: RunSpec) -> list[tuple[int, int]]:
    """(first, last + 1) layer of each pipeline stage."""
    total = len(model.layers)
    if run.pp_layers is not None:
        if len(run.pp_layers) != run.pp or sum(run.pp_layers) != total or min(run.pp_layers) < 0:
            raise UserError(
                f"pp_layers = {','.join(map(str, run.pp_layers))} must be {run.pp} numbers (pp) that add up to {total} layers",
                f"for example --pp-layers {_even_split(total, run.pp)}",
            )
        ends = list(accumulate(run.pp_layers))
    elif total % run.pp:
        raise UserError(
            f"pp = {run.pp} does not divide num_hidden_layers = {total}",
            f"pp sizes that do: {divisors_text(total)}"
            + (f"; or give each stage its layers: --pp-layers {_even_split(total, run.pp)}" if run.pp <= total else ""),
        )
    else:
        ends = [total // run.pp * (stage + 1) for stage in range(run.pp)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _even_split(total: int, parts: int) -> str:
    return ",".join(map(str, spread(total, parts))) if parts <= 64 else "…"


def padded_vocab(vocab: int, run: RunSpec) -> int:
    """The vocabulary made divisible by tp (and, in Megatron, by 128 per rank): the smallest multiple that holds it."""
    multiple = run.vocab_multiple * run.tp
    return -(-vocab // multiple) * multiple


def spread(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers as equal as can be, larger ones first.

    >>> spread(10, 4)
    [3, 3, 2, 2]
    """
    return [total // parts + (index < total % parts) for index in range(parts)]


def expert_rows(moe: MoeSpec, run: RunSpec, ep_rank: int = 0) -> tuple[int, ...]:
    """How many tokens each expert of one expert-parallel rank receives, top-k copies counted.

    Balanced: every rank gets what it sent out, spread evenly. With `imbalance` F, loads fall geometrically from the busiest
    expert, which has F times the average, to the idlest; rank 0 holds the busiest, and sets the pace.
    """
    per_rank = run.tokens * moe.top_k * run.expert_tp // run.tp
    local = moe.experts // run.ep
    if run.imbalance == 1.0:
        return tuple(spread(per_rank, local))
    rows = _apportion(per_rank * run.ep, _geometric_loads(moe.experts, run.imbalance))
    return tuple(rows[ep_rank * local : (ep_rank + 1) * local])


def _geometric_loads(count: int, busiest_over_mean: float) -> list[float]:
    """Loads 1, r, r², … whose largest is `busiest_over_mean` times their mean; r by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        if count * (1 - ratio) / (1 - ratio**count) > busiest_over_mean:
            low = ratio
        else:
            high = ratio
    return [high**i for i in range(count)]


def _apportion(total: int, loads: list[float]) -> list[int]:
    """Whole numbers in proportion to `loads` that add up to `total` (largest remainders rounded up)."""
    scale = total / sum(loads)
    exact = [load * scale for load in loads]
    rows = [int(value) for value in exact]
    by_remainder = sorted(range(len(rows)), key=lambda index: rows[index] - exact[index])
    for index in by_remainder[: total - sum(rows)]:
        rows[index] += 1
    return rows
