"""What connects the GPUs of a run: NVLink inside a domain, a network between domains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.limits import check_size
from gemmscope.toml import load_data

FASTEST_GBPS = 10_000


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
        return self.gbps * float(facts()["reached"])

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


@cache
def facts() -> dict[str, Any]:
    """The table of networks."""
    return load_data("gemmscope.forecast", "coefficients/network.toml")


def network_names() -> list[str]:
    """The names of the known networks."""
    return list(facts()["networks"])


def network_of(chip: GpuSpec, network: str | float | None = None, domain: int | None = None) -> Network:
    """The network of the GPU's usual system, or the one named: by its name, or by its GB/s per GPU.

    >>> from gemmscope.gpu.specs import gpu
    >>> network_of(gpu("gb200")).domain, network_of(gpu("h100"), "25", domain=16)
    (72, Network(gbps=25.0, domain=16, name='', host_gbps=64.0))
    """
    systems = facts()["systems"]
    usual = systems.get(chip.name, systems["default"])
    domain = usual["domain"] if domain is None else check_size(option("nvlink_domain"), domain, "parallel")
    name, gbps = _named(usual["network"] if network is None else network)
    return Network(gbps, domain, name, float(usual["host"]))


def _named(network: str | float) -> tuple[str, float]:
    known = facts()["networks"]
    if isinstance(network, str) and network.strip().lower() in known:
        return network.strip().lower(), float(known[network.strip().lower()])
    try:
        gbps = float(network)
    except ValueError:
        similar = closest(str(network), network_names(), 1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise UserError(
            f"{option('network')} {shown(network)} is not a known network",
            f"{hint}give one of {', '.join(known)}, or the GB/s of one GPU, such as {option('network', 50)}",
        ) from None
    if not 0 < gbps <= FASTEST_GBPS:
        raise UserError(
            f"{option('network')} must be more than 0 and at most {FASTEST_GBPS} GB/s per GPU, not {shown(network)}",
            f"for example {option('network', 50)}: 50 GB/s, which is 400 Gb/s",
        )
    return "", gbps
