"""Layers that mix positions in linear time: state-space scans, delta rules, lightning attention, short convolutions.

One description serves all of them, because they share a structure: projections of the hidden state, a short causal convolution,
a recurrence over the sequence that is computed chunk by chunk, a gated norm, and an output projection. In the terms of linear
attention a state-space model has keys (B), queries (C) and values (x): `groups` key heads of `key_dim`, the state's size, and
`heads` value heads of `value_dim`.
"""

from dataclasses import dataclass
from typing import Literal

from gemmscope.errors import UserError
from gemmscope.model.limits import check_size, divisors_text
from gemmscope.roles import name_of

MixerKind = Literal["ssd", "selective scan", "gated delta rule", "kda", "lightning attention", "short convolution"]
MIXER_NAMES: dict[MixerKind, str] = {
    "ssd": "Mamba-2",
    "selective scan": "Mamba",
    "gated delta rule": "gated delta rule",
    "kda": "KDA",
    "lightning attention": "lightning attention",
    "short convolution": "short convolution",
}


@dataclass(frozen=True)
class LinearSpec:
    """A linear beside attention, mixer and MLP, on every token. `role`: a key of `roles.toml`."""

    role: str
    inputs: int
    outputs: int
    bias: bool = False
    count: int = 1

    def __post_init__(self) -> None:
        check_size(f"the input features of {name_of(self.role)}", self.inputs, "intermediate_size")
        check_size(f"the output features of {name_of(self.role)}", self.outputs, "intermediate_size")


@dataclass(frozen=True)
class MixerSpec:
    """A mixer of one layer. What a kind does not have is 0.

    `rank`: the width of the low-rank projections (Mamba's time step, KDA's gates). `stored`: how the checkpoint's own code
    splits the input projection, as sums of the names "q", "k", "v", "z" (output gate), "b" (write strength or B), "a" (decay
    or time step), for example ("qkvz", "ba"); frameworks run one GEMM.
    """

    kind: MixerKind
    heads: int
    value_dim: int
    groups: int = 1
    key_dim: int = 1
    conv_kernel: int = 0
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    chunk: int = 64  # positions that the recurrence takes at once
    rank: int = 0
    gated: bool = True  # the output is multiplied by a gate, which the input projection makes too
    norm: Literal["", "full", "group", "head"] = "full"  # before the output projection: one weight over all heads, or one for all
    stored: tuple[str, ...] = ()
    state_norm: Literal["", "plain", "weighted"] = ""  # of Mamba's time step, B and C: without or with weights

    def __post_init__(self) -> None:
        check_size("the mixer's number of heads", self.heads, "intermediate_size")
        check_size("the mixer's head size", self.value_dim, "intermediate_size")
        check_size("the mixer's number of groups (key heads)", self.groups, "intermediate_size")
        check_size("the mixer's state size (key head size)", self.key_dim, "intermediate_size")
        check_size("the mixer's chunk size", self.chunk, "sequence_length")
        if self.heads % self.groups:
            raise UserError(
                f"the mixer's {self.heads} heads are not a multiple of its {self.groups} groups (key heads)",
                f"numbers of groups that divide {self.heads}: {divisors_text(self.heads)}",
            )

    @property
    def name(self) -> str:
        return MIXER_NAMES[self.kind]

    @property
    def inner(self) -> int:
        """Width of the values: input features of the output projection."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of the keys, and of the queries."""
        return self.groups * self.key_dim
