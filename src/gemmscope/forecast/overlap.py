"""How much of an exchange is hidden behind computation, and how long the step waits for the rest.

Each exchange hides behind something else: tensor parallelism behind the GEMMs it feeds, context parallelism behind attention,
gradients behind the backward pass of the last micro-batch, weights behind the forward pass. A share of what overlaps stays
exposed (`cluster.toml`), and so does the part that is longer than the computation.
"""

from collections.abc import Iterable
from functools import cache
from math import hypot
from typing import Any, NamedTuple

from gemmscope.forecast.comm import Exchange, ExchangeKind
from gemmscope.forecast.network import facts as network_facts
from gemmscope.model.spec import RunSpec
from gemmscope.toml import load_data

FORWARD, BACKWARD = 1 / 3, 2 / 3  # of a micro-batch's time
BOTH = FORWARD + BACKWARD


@cache
def cluster() -> dict[str, Any]:
    """The table of what several GPUs and experts add."""
    return load_data("gemmscope.forecast", "coefficients/cluster.toml")


class MicroBatch(NamedTuple):
    """Milliseconds of computation of one micro-batch that exchanges can hide behind."""

    gemms_ms: float
    attention_ms: float
    all_ms: float


class Exposed(NamedTuple):
    """One exchange in one step: its full time, the time that the step waits, and its uncertainty. `crosses`: as in `Exchange`."""

    kind: ExchangeKind
    time_ms: float
    exposed_ms: float
    unsure_ms: float
    crosses: bool
    basis: str


def exposed(exchanges: Iterable[Exchange], run: RunSpec, computed: MicroBatch) -> list[Exposed]:
    """How long one step waits for each exchange."""
    return [_exposed(exchange, run, computed) for exchange in exchanges]


def _exposed(exchange: Exchange, run: RunSpec, computed: MicroBatch) -> Exposed:
    facts, times = cluster()["exposed"], 1 if exchange.per_step else run.gradient_accumulation
    known = facts[exchange.kind]
    if _overlaps(exchange.kind, run):
        waited = max(known["least"] * exchange.time_ms, exchange.time_ms - known["behind"] * _hides_behind(exchange, computed))
        unsure = known["unsure"] * exchange.time_ms
    else:
        waited, unsure = exchange.time_ms, facts["not_overlapped"]["unsure"] * exchange.time_ms
    if exchange.crosses:
        unsure = hypot(unsure, network_facts()["uncertainty"] * waited)
    return Exposed(exchange.kind, times * exchange.time_ms, times * waited, times * unsure, exchange.crosses, known["basis"])


def _overlaps(kind: ExchangeKind, run: RunSpec) -> bool:
    if kind == "tensor":
        return run.tp_overlap and run.sequence_parallel
    if kind == "experts":
        return run.ep_overlap
    if kind == "stages":
        return run.vp > 1
    return kind in ("context", "offload") or run.dp_overlap


def _hides_behind(exchange: Exchange, computed: MicroBatch) -> float:
    """Milliseconds of the computation that an exchange overlaps with."""
    if exchange.kind == "tensor":
        return computed.gemms_ms
    if exchange.kind == "context":
        return computed.attention_ms
    if exchange.kind == "gradients":
        return BACKWARD * computed.all_ms
    if exchange.kind == "weights":  # of ZeRO-3 before every forward and every backward pass, else before the first forward pass
        return (FORWARD if exchange.per_step else BOTH) * computed.all_ms
    return computed.all_ms
