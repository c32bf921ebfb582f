"""What GPUs exchange: their links, how long a collective takes, which ones a split model runs, and how much of them is hidden.

Inside an NVLink domain times were measured and fitted (`coefficients/collectives.toml`); between domains they follow from the
network's bandwidth (`network.toml`).

Ranks are placed as Megatron-LM places them: those of tensor parallelism are neighbours, then come context, data and pipeline
parallelism; experts are spread over the same GPUs, those of one expert next to each other.

Each exchange hides behind something else: tensor parallelism behind the GEMMs it feeds, context parallelism behind attention,
gradients behind the backward pass of the last micro-batch, weights behind the forward pass. A share of what overlaps stays
exposed (`cluster.toml`), and so does the part that is longer than the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import hypot, sqrt
from typing import Literal, NamedTuple

from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.limits import check_size
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.parts import StepPart
from gemmscope.results.step import ExchangeKind
from gemmscope.toml import load_data
from gemmscope.workload.mixers import input_widths
from gemmscope.workload.ops import ELEMENT_BYTES

SLOWEST_GBPS, FASTEST_GBPS = 0.001, 10_000
FORWARD, BACKWARD = 1 / 3, 2 / 3  # of a micro-batch's time
BOTH = FORWARD + BACKWARD
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]
network_facts = cache(partial(load_data, "gemmscope.forecast", "coefficients/network.toml"))
"""The table of networks."""
_collectives = cache(partial(load_data, "gemmscope.forecast", "coefficients/collectives.toml"))
cluster = cache(partial(load_data, "gemmscope.forecast", "coefficients/cluster.toml"))
"""What several GPUs and experts add."""


@dataclass(frozen=True)
class Network:
    """`gbps`: GB/s that the network gives one GPU in one direction. `domain`: GPUs that NVLink joins. `host_gbps`: GB/s between
    one GPU and the memory of its CPU."""

    gbps: float
    domain: int
    name: str = ""
    host_gbps: float = 64.0

    @property
    def reached_gbps(self) -> float:
        """The bandwidth that collectives of large messages reach, in GB/s."""
        return self.gbps * float(network_facts()["reached"])

    def inside(self, ranks: int, apart: int = 1) -> int:
        """How many of a group's ranks are in one NVLink domain, where `apart` GPUs lie from one rank to the next.

        >>> network = Network(50, 72)
        >>> network.inside(64), network.inside(128), network.inside(8, apart=16)
        (64, 64, 4)
        """
        most = max(self.domain // apart, 1)
        if ranks <= most:
            return ranks
        return max(size for size in range(1, most + 1) if ranks % size == 0)

    def describe(self) -> str:
        """The network in words: `400 Gb/s per GPU between NVLink domains of 8 GPUs (infiniband-ndr)`."""
        name = f" ({self.name})" if self.name else ""
        return f"{self.gbps * 8:g} Gb/s per GPU between NVLink domains of {self.domain} GPUs{name}"


def network_of(chip: GpuSpec, network: str | float | None = None, domain: int | None = None) -> Network:
    """The network of the GPU's usual system, or the one named: by its name, or by its GB/s per GPU.

    >>> from gemmscope.gpu.specs import gpu
    >>> network_of(gpu("gb200")).domain, network_of(gpu("h100"), "25", domain=16)
    (72, Network(gbps=25.0, domain=16, name='', host_gbps=64.0))
    """
    domain = chip.nvlink_domain if domain is None else check_size(option("nvlink_domain"), domain, "parallel")
    name, gbps = (chip.network, float(network_facts()["networks"][chip.network])) if network is None else _named(network)
    return Network(gbps, domain, name, chip.host_gbps)


def _named(network: str | float) -> tuple[str, float]:
    known = network_facts()["networks"]
    if isinstance(network, str) and network.strip().lower() in known:
        return network.strip().lower(), float(known[network.strip().lower()])
    try:
        gbps = float(network)
    except ValueError:
        similar = did_you_mean(str(network), known, 1)
        raise UserError(
            f"{option('network')} {shown(network)} is not a known network",
            f"{similar}give one of {', '.join(known)}, or the GB/s of one GPU, such as {option('network', 50)}",
        ) from None
    if not SLOWEST_GBPS <= gbps <= FASTEST_GBPS:
        raise UserError(
            f"{option('network')} must be from {SLOWEST_GBPS} to {FASTEST_GBPS} GB/s per GPU, not {shown(network)}",
            f"for example {option('network', 50)}: 50 GB/s, which is 400 Gb/s",
        )
    return "", gbps


@cache
def _known(chip: str, operation: Collective, inside: int) -> tuple[float, float, float]:
    """Launch ms, ms per square root of bytes, and ms per byte, for a collective among `inside` GPUs of one domain."""
    known = _collectives()[chip][operation]
    nearest = max((int(size) for size in known if int(size) <= inside), default=2)
    launch, root, per_byte = known[str(nearest)]
    scale = ((inside - 1) / inside) / ((nearest - 1) / nearest)  # the share that crosses links
    return launch, scale * root, scale * per_byte


def _within_ms(chip: GpuSpec, operation: Collective, inside: int, message_bytes: float) -> float:
    """The time of a collective among `inside` GPUs of one domain."""
    if inside < 2:
        return 0.0
    launch, root, per_byte = _known(chip.collectives_of, operation, inside)
    return launch + (root * sqrt(message_bytes) + per_byte * message_bytes) * chip.collectives_slower


def collective_ms(
    chip: GpuSpec, network: Network, operation: Collective, ranks: int, message_bytes: float, apart: int = 1
) -> float:
    """One collective of `ranks` GPUs on a message of that many bytes, all ranks' parts together (all-to-all: what one sends).

    `apart`: how many GPUs lie from one rank of the group to the next, because other groups are placed closer. Of a domain of 8
    that tensor parallelism of 4 shares, two ranks are left for each group.

    >>> from gemmscope.gpu.specs import gpu
    >>> h200 = gpu("h200"), network_of(gpu("h200"))
    >>> 0.2 < collective_ms(*h200, "all_gather", 8, 128e6) < 0.5
    True
    >>> collective_ms(*h200, "all_gather", 8, 128e6, apart=8) > 5 * collective_ms(*h200, "all_gather", 8, 128e6)
    True
    """
    if ranks < 2 or message_bytes <= 0:
        return 0.0
    inside = network.inside(ranks, apart)
    within = _within_ms(chip, operation, inside, message_bytes * inside / ranks if operation == "alltoall" else message_bytes)
    if inside == ranks:
        return within
    travels = message_bytes * (ranks - inside) / ranks * (2 if operation == "all_reduce" else 1)
    if operation != "alltoall":
        travels /= inside  # the GPUs of one domain split this traffic across their ports
    return max(within, travels / (network.reached_gbps * 1e6)) + 2 * float(network_facts()["latency_ms"])


class Exchange(NamedTuple):
    """What one rank exchanges for one reason: milliseconds of one micro-batch (`per_step`: of one step), nothing hidden yet.

    `crosses`: some of it leaves the NVLink domain.
    """

    kind: ExchangeKind
    time_ms: float
    crosses: bool
    per_step: bool = False


class RankShare(NamedTuple):
    """What one rank holds: layers, those of them with experts, parameters outside experts and in experts, those of them that are
    trained; and its blocks: attentions, these and all other mixers, MLPs without experts."""

    layers: int
    moe_layers: int
    parameters: int
    in_experts: int
    trained: int
    trained_in_experts: int
    attentions: int
    mixers: int
    mlps: int

    @property
    def dense_layers(self) -> float:
        """Layers without experts; a layer that is a mixer or an MLP alone counts as half of one."""
        return max((self.mixers + self.mlps - self.moe_layers) / 2, 0.0)


def exchanges(chip: GpuSpec, network: Network, model: ModelSpec | None, run: RunSpec, share: RankShare) -> list[Exchange]:
    """All exchanges of one rank in this layout. A traced model (`model` is None) has only those of gradients and weights."""
    if model is None:
        return [exchange for exchange in _data(chip, network, run, share) if exchange.time_ms > 0]
    forward_runs = 1 + run.recompute_share if run.recompute == "full" else 1.0
    expert_runs = 1 + run.recompute_share if run.recompute == "full" or "moe" in run.recompute_modules else 1.0
    return [
        exchange
        for exchange in (
            _tensor(chip, network, model, run, share, forward_runs),
            _context(chip, network, model, run, share, forward_runs),
            _experts(chip, network, model, run, share, expert_runs),
            _stages(chip, network, model, run),
            *_data(chip, network, run, share),
        )
        if exchange.time_ms > 0
    ]


def _tensor(chip: GpuSpec, network: Network, model: ModelSpec, run: RunSpec, share: RankShare, runs: float) -> Exchange:
    """Tensor parallelism: collectives before and after each split block; with sequence parallelism, inputs once more for wgrad.

    Experts that are not split get their tokens from the sharded sequence, without a gather.
    """
    activations = run.tokens * model.hidden_size * ELEMENT_BYTES
    shared = any(isinstance(layer.mlp, MoeSpec) and layer.mlp.shared is not None for layer, _ in model.layer_groups())
    blocks = share.mixers + share.mlps + (share.moe_layers if run.expert_tp > 1 or shared else 0)
    if run.sequence_parallel:
        gather = collective_ms(chip, network, "all_gather", run.tp, activations)
        scatter = collective_ms(chip, network, "reduce_scatter", run.tp, activations)
        time_ms = blocks * ((runs + 2) * gather + (runs + 1) * scatter)
    else:
        time_ms = blocks * (runs + 1) * collective_ms(chip, network, "all_reduce", run.tp, activations)
    return Exchange("tensor", time_ms, network.inside(run.tp) < run.tp)


def _context(chip: GpuSpec, network: Network, model: ModelSpec, run: RunSpec, share: RankShare, runs: float) -> Exchange:
    """Context parallelism: keys and values of all ranks in forward and in backward, and their gradients.

    A recurrence needs the whole sequence: each rank gets all positions of a part of the heads, and returns the outputs, as
    Megatron's Mamba mixer does.
    """
    attention, time_ms = next(model.attentions, None), 0.0
    mixer = next((layer.mixer for layer, _ in model.layer_groups() if layer.mixer is not None), None)
    if attention is not None:
        kept = run.micro_batch_size * run.sequence_length * attention.kv_width(run.tp) * ELEMENT_BYTES
        gather = collective_ms(chip, network, "all_gather", run.cp, kept, run.tp)
        scatter = collective_ms(chip, network, "reduce_scatter", run.cp, kept, run.tp)
        time_ms = share.attentions * ((runs + 1) * gather + scatter)
    if mixer is not None and mixer.kind != "short convolution":  # a short convolution needs only a few positions of the neighbour
        widths = (sum(input_widths(mixer).values()), mixer.inner)
        sent = [run.tokens * width / run.tp * ELEMENT_BYTES for width in widths]
        both = sum(collective_ms(chip, network, "alltoall", run.cp, size, run.tp) for size in sent)
        time_ms += (share.mixers - share.attentions) * (runs + 1) * both
    return Exchange("context", time_ms, network.inside(run.cp, run.tp) < run.cp)


def _experts(chip: GpuSpec, network: Network, model: ModelSpec, run: RunSpec, share: RankShare, runs: float) -> Exchange:
    """Expert parallelism: tokens to the ranks of their experts and back, in forward and in backward.

    A token travels once to each rank that has one of its experts, and once to each other domain, as DeepEP and Megatron's
    HybridEP send it.
    """
    moe = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeSpec)), None)
    if run.ep < 2 or moe is None or not share.moe_layers:
        return Exchange("experts", 0.0, crosses=False)
    inside = network.inside(run.ep, run.expert_tp)
    domains = run.ep // inside
    token = (
        run.tokens * run.expert_tp / run.tp * (moe.latent or model.hidden_size) * ELEMENT_BYTES
    )  # all tokens of one rank, once
    once = _within_ms(chip, "alltoall", inside, token * _distinct(inside, moe.top_k / domains))
    if domains > 1:
        far = token * _distinct(domains, moe.top_k) * (domains - 1) / domains
        once = max(once, far / (network.reached_gbps * 1e6)) + 2 * float(network_facts()["latency_ms"])
    return Exchange("experts", share.moe_layers * 2 * (runs + 1) * once, domains > 1)


def _distinct(places: int, chosen: float) -> float:
    """The expected number of distinct `places` among this many random choices.

    >>> round(_distinct(8, 8), 2), _distinct(1, 4)
    (5.25, 1.0)
    """
    return places * (1 - (1 - 1 / places) ** chosen) if places > 1 else 1.0


def _stages(chip: GpuSpec, network: Network, model: ModelSpec, run: RunSpec) -> Exchange:
    """Pipeline parallelism: activations to the next stage and gradients back, for each virtual stage."""
    if run.pp < 2:
        return Exchange("stages", 0.0, crosses=False)
    shard = run.tp if run.sequence_parallel else 1
    message = run.tokens * model.streams * model.hidden_size * ELEMENT_BYTES / shard
    apart = run.tp * run.cp * run.data_parallel
    near = network.domain >= 2 * apart
    if near:  # an all-to-all of two ranks sends half of its message: twice the message here
        once = _within_ms(chip, "alltoall", 2, 2 * message)
    else:
        once = message / (network.reached_gbps * 1e6) + float(network_facts()["latency_ms"])
    return Exchange("stages", 2 * run.vp * once, crosses=not near)


def _data(chip: GpuSpec, network: Network, run: RunSpec, share: RankShare) -> list[Exchange]:
    """Data parallelism: gradients and weights, among all ranks that have the same weights (or the same experts)."""
    reduce_ms, gather_ms, crosses = 0.0, 0.0, False
    every = run.zero_stage == 3  # weights are gathered for forward and again for backward, gradients reduced, in each micro-batch
    shared = run.ep * run.expert_tp
    for parameters, trained, ranks, apart in (
        (share.parameters, share.trained, run.cp * run.data_parallel, run.tp),
        (share.in_experts, share.trained_in_experts, run.tp * run.cp * run.data_parallel // shared, shared),
    ):
        message, gathered = trained * ELEMENT_BYTES, (parameters if every else trained) * ELEMENT_BYTES
        if not gathered or ranks < 2:
            continue
        crosses = crosses or network.inside(ranks, apart) < ranks
        sharing = min(run.zero_ranks or ranks, ranks) if run.zero_stage else 1
        reduce_ms += collective_ms(chip, network, "reduce_scatter", sharing, message, apart)
        gather_ms += collective_ms(chip, network, "all_gather", sharing, gathered, apart)
        # Copies of a shard (without ZeRO, of all weights) agree on its gradients.
        reduce_ms += collective_ms(chip, network, "all_reduce", ranks // sharing, message / sharing, apart * sharing)
    return [
        Exchange("gradients", reduce_ms, crosses, per_step=not every),
        Exchange("weights", (2 if every else 1) * gather_ms, crosses, per_step=not every),
    ]


def offload(network: Network, kept_bytes: float) -> Exchange:
    """Offloading: `kept_bytes` of activations per micro-batch to CPU memory in forward, and back in backward."""
    return Exchange("offload", 2 * kept_bytes / (network.host_gbps * float(network_facts()["reached"]) * 1e6), crosses=False)


class Exposed(NamedTuple):
    """One exchange in one step: its full time, the time that the step waits, and its uncertainty. `crosses`: as in `Exchange`."""

    kind: ExchangeKind
    time_ms: float
    exposed_ms: float
    unsure_ms: float
    crosses: bool
    basis: str


def exposed(exchange: Exchange, run: RunSpec, computed_ms: Mapping[StepPart, float]) -> Exposed:
    """How long one step waits for an exchange. `computed_ms`: the computation of one micro-batch, by part of the step."""
    table, times = cluster()["exposed"], 1 if exchange.per_step else run.gradient_accumulation
    known = table[exchange.kind]
    if _overlaps(exchange.kind, run):
        waited = max(known["least"] * exchange.time_ms, exchange.time_ms - known["behind"] * _hides_behind(exchange, computed_ms))
        unsure = known["unsure"] * exchange.time_ms
    else:
        waited, unsure = exchange.time_ms, table["not_overlapped"]["unsure"] * exchange.time_ms
    if exchange.crosses:
        unsure = hypot(unsure, network_facts()["uncertainty"] * waited)
    return Exposed(exchange.kind, times * exchange.time_ms, times * waited, times * unsure, exchange.crosses, known["basis"])


def _overlaps(kind: ExchangeKind, run: RunSpec) -> bool:
    overlaps: dict[ExchangeKind, bool] = {
        "tensor": run.tp_overlap and run.sequence_parallel,
        "experts": run.ep_overlap,
        "stages": run.vp > 1,
        "gradients": run.dp_overlap,
        "weights": run.dp_overlap,
    }
    return overlaps.get(kind, True)


def _hides_behind(exchange: Exchange, computed_ms: Mapping[StepPart, float]) -> float:
    """Milliseconds of the computation that an exchange overlaps with."""
    all_ms = sum(computed_ms.values())
    behind: dict[ExchangeKind, float] = {
        "tensor": computed_ms.get("GEMMs", 0.0),
        "context": computed_ms.get("attention", 0.0),
        "gradients": BACKWARD * all_ms,
        # Of ZeRO-3 before every forward and every backward pass, else before the first forward pass.
        "weights": (FORWARD if exchange.per_step else BOTH) * all_ms,
    }
    return behind.get(exchange.kind, all_ms)
