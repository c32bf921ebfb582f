"""Collectives: their time from message size and link, and which ones a split model runs.

Inside a node (or an NVLink domain) times were measured and fitted (`coefficients/collectives.toml`); between nodes they follow
from the network's bandwidth. What tensor, context and expert parallelism exchange is waited for; gradients of data parallelism
are exchanged behind the backward pass, as far as that lasts.
"""

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any, Literal

from gemmscope.forecast.training import facts
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.spec import ModelSpec, MoeSpec, RunSpec
from gemmscope.toml import load_data
from gemmscope.workload.ops import ELEMENT_BYTES

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]
GRADIENTS: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
NEAREST = {"h200-nvl": "h200", "rtx-5090": "rtx-pro-6000"}


@cache
def _table() -> dict[str, Any]:
    return load_data("gemmscope.forecast", "coefficients/collectives.toml")


def collective_ms(chip: GpuSpec, operation: Collective, ranks: int, message_bytes: float, apart: int = 1) -> float:
    """One collective of `ranks` GPUs on a message of that many bytes, all ranks' parts together.

    `apart`: how many GPUs lie from one rank of the group to the next, because other groups are placed closer. Of a domain of 8
    that tensor parallelism of 4 shares, two ranks are left for each group.

    >>> from gemmscope.gpu.specs import gpu
    >>> 0.2 < collective_ms(gpu("h200"), "all_gather", 8, 128e6) < 0.5
    True
    >>> collective_ms(gpu("h200"), "all_gather", 8, 128e6, apart=8) > 5 * collective_ms(gpu("h200"), "all_gather", 8, 128e6)
    True
    """
    if ranks < 2 or message_bytes <= 0:
        return 0.0
    network = facts()["network"]
    domain = max(network["domain"].get(chip.name, network["domain"]["default"]) // apart, 1)
    within, inside = 0.0, min(ranks, domain)
    if inside > 1:
        known = _table()[NEAREST.get(chip.name, chip.name)][operation]
        nearest = max(int(each) for each in known if int(each) <= inside)
        launch, root, per_byte = known[str(nearest)]
        scale = ((inside - 1) / inside) / ((nearest - 1) / nearest)  # the share that travels
        within = launch + scale * (root * sqrt(message_bytes) + per_byte * message_bytes)
    if ranks <= domain:
        return float(within)
    travels = (2 if operation == "all_reduce" else 1) * message_bytes * (ranks - 1) / ranks
    shared = 1 if operation == "alltoall" else domain  # the node's ports work together on what its GPUs have in common
    gbps = network["beyond"].get(chip.name, network["gbps"] * network["reached"])
    between = network["latency_ms"] + travels / (shared * gbps * 1e6)
    return float(max(within, between) + network["latency_ms"])


@dataclass(frozen=True)
class Communication:
    """Milliseconds: of one micro-batch, waited for; and of gradients, once a step, before any of it is hidden."""

    per_micro_batch_ms: float
    data_ms: float


def communication(
    chip: GpuSpec, model: ModelSpec, run: RunSpec, layers: int, parameters: int, dp: int, in_experts: int = 0
) -> Communication:
    """What one rank of this layout exchanges. `layers` and `parameters` are those it holds, `in_experts` of them in experts; `dp`
    replicas share gradients, and so do ranks of context and expert parallelism.

    Ranks of tensor parallelism are neighbours; then come context, expert, pipeline and data parallelism, each farther apart.
    """
    activations = run.tokens * model.hidden_size * ELEMENT_BYTES
    runs = 2 if run.recompute == "full" else 1  # of forward
    tensor = 0.0
    if run.tp > 1 and run.sequence_parallel:  # before and after each block; the inputs once more for wgrad
        gathers = 2 * (runs + 2) * collective_ms(chip, "all_gather", run.tp, activations)
        tensor = layers * (gathers + 2 * (runs + 1) * collective_ms(chip, "reduce_scatter", run.tp, activations))
    elif run.tp > 1:
        tensor = layers * 2 * (runs + 1) * collective_ms(chip, "all_reduce", run.tp, activations)
    attention = model.layers[0].attention
    kept = run.micro_batch_size * run.sequence_length * (attention.k_width + attention.v_width) / run.tp * ELEMENT_BYTES
    gathers = (runs + 1) * collective_ms(chip, "all_gather", run.cp, kept, run.tp)  # nothing where cp is 1
    context = layers * (gathers + collective_ms(chip, "reduce_scatter", run.cp, kept, run.tp))
    expert = 0.0
    moe = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeSpec)]
    if run.ep > 1 and moe:
        sent = run.tokens * moe[0].top_k * model.hidden_size * ELEMENT_BYTES * run.expert_tp / run.tp
        exchanges = layers * len(moe) / len(model.layers) * 2 * (runs + 1)
        expert = exchanges * collective_ms(chip, "alltoall", run.ep, sent, run.tp * run.cp)
    data = _gradients_ms(chip, run, parameters - in_experts, run.cp * run.ep, run.tp, dp)
    data += _gradients_ms(chip, run, in_experts, run.cp * run.tp // run.expert_tp, run.expert_tp, dp)  # experts are split over ep
    return Communication(tensor + context + expert, data)


def _gradients_ms(chip: GpuSpec, run: RunSpec, parameters: int, near: int, apart: int, dp: int) -> float:
    """Gradients of weights that `near` ranks hold alike, `apart` from each other, in each of `dp` replicas: one group where all
    are equally far apart; else the near ones first, then each its part with those of the other replicas."""
    message, far = parameters * ELEMENT_BYTES, run.tp * run.cp * run.ep * run.pp
    if near * apart == far:
        return sum(collective_ms(chip, each, near * dp, message, apart) for each in GRADIENTS)
    return sum(
        collective_ms(chip, each, near, message, apart) + collective_ms(chip, each, dp, message / near, far) for each in GRADIENTS
    )
