"""How many ranks share a batch: GPUs, data-parallel size, global batch and gradient accumulation follow from each other.

    GPUs         = tp x cp x pp x dp
    global batch = micro-batch x accumulation x dp        (sequences)

Experts are folded over the ranks of a pipeline stage, as in Megatron: ep x etp divides tp x cp x dp. The given sizes decide
the rest; contradictory sizes are a `UserError` that names the nearest sizes that work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from gemmscope.errors import UserError, option
from gemmscope.model.limits import LARGEST
from gemmscope.model.spec import RunSpec


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
        message = f"{option('gpus', gpus)} is not {given.dp} data-parallel replicas of {group} GPUs (tp x cp x pp)"
        raise UserError(message, f"use {option('gpus', group * given.dp)}, or remove {option('dp')}")
    dp, rest = divmod(gpus, group)
    if not dp:
        message = f"one replica of the model takes {group} GPUs (tp x cp x pp), more than {option('gpus', gpus)}"
        raise UserError(message, _or("gpus", [group * near for near in _nearest(run, given, 1)]))
    if rest:
        message = f"{gpus} GPUs do not divide into groups of {group} (tp x cp x pp)"
        raise UserError(message, _or("gpus", [group * near for near in _nearest(run, given, dp, above=dp + 1)]))
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
        message = (
            f"{option('ep', run.ep)} x {option('etp', run.expert_tp)} does not divide the {run.tp * run.cp * dp} ranks "
            f"that share the experts (tp x cp x dp = {run.tp} x {run.cp} x {dp})"
        )
        raise UserError(message, _or(name, [near * per_replica for near in _nearest(run, given, dp)]))
    if given.fsdp is not None and (dp * run.cp) % given.fsdp:
        message = f"{option('fsdp', given.fsdp)} does not divide the {dp * run.cp} ranks that hold the same weights (dp x cp)"
        raise UserError(message, _or(name, [near * per_replica for near in _nearest(run, given, dp)]))


def _accumulation(run: RunSpec, given: Given, dp: int) -> int | None:
    """Micro-batches per step: as given, or as the global batch needs them."""
    batch, accumulation = given.global_batch, given.gradient_accumulation
    if batch is None:
        return accumulation
    micro = run.micro_batch_size
    if accumulation is not None and micro * accumulation * dp != batch:
        message = (
            f"{option('global_batch', batch)} is not {option('micro_batch_size', micro)} x "
            f"{option('gradient_accumulation', accumulation)} x {dp} data-parallel ranks = {micro * accumulation * dp}"
        )
        raise UserError(message, f"use {option('global_batch', micro * accumulation * dp)}, or remove one of them")
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
        if given.gradient_accumulation is not None:
            fitting = [per_rank] if per_rank and not rest and per_rank % step == 0 and per_rank <= limit else []
        else:
            fitting = [step * part for part in _divisors(per_rank // step)] if not rest and per_rank % step == 0 else []
        fitting = [size for size in fitting if size <= limit]
        if fitting:
            below, beyond = [size for size in fitting if size <= dp], [size for size in fitting if size >= above]
            return list(dict.fromkeys([*below[-1:], *beyond[:1]]))
    return _multiples(dp, step, limit, above)


def _multiples(value: int, step: int, limit: int, above: int | None = None) -> list[int]:
    """The nearest multiples of `step`, at most one on each side, from `step` to `limit`.

    >>> _multiples(10, 4, 100), _multiples(3, 4, 100), _multiples(8, 4, 100)
    ([8, 12], [4], [8])
    """
    below, beyond = min(value, limit) // step * step, -(-(value if above is None else above) // step) * step
    return list(dict.fromkeys(size for size in (below, beyond) if step <= size <= limit))


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _or(name: str, sizes: list[int], lead: str = "the nearest that works: ") -> str:
    """`the nearest that work: --gpus 56 or --gpus 64`."""
    if not sizes:
        return f"change {option(name)}"
    plural = lead if len(sizes) == 1 else lead.replace("that works", "that work")
    return plural + " or ".join(option(name, size) for size in sizes)
