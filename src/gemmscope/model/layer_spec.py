"""What a layer consists of: attention in all its forms, mixers in linear time, feed-forward blocks, experts, residual streams.

Every size is checked when a description is made, so that later stages can rely on it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from gemmscope.errors import UserError
from gemmscope.model.limits import Checked, Size, check_divides, check_size
from gemmscope.roles import role

QkNorm = Literal["head", "each_head", "full"]
"""Normalisation of queries and keys: one weight of a head's size shared by all heads; one per head; one over all heads."""


@dataclass(frozen=True)
class LatentSpec(Checked):
    """Multi-head latent attention (DeepSeek): queries and keys/values pass through a low-rank bottleneck."""

    q_rank: Annotated[int | None, Size("q_lora_rank", "hidden_size")]  # None: queries are projected directly
    kv_rank: Annotated[int, Size("kv_lora_rank", "hidden_size")]
    # the part of a head that carries positions; its key is shared by all heads
    rope_dim: Annotated[int, Size("qk_rope_head_dim", "head_dim")]
    down_bias: bool = False


@dataclass(frozen=True)
class IndexerSpec(Checked):
    """The lightning indexer of sparse attention (DeepSeek): small heads that share one key and score every visible position."""

    heads: Annotated[int, Size("index_n_heads", "heads")]
    dim: Annotated[int, Size("index_head_dim", "head_dim")]
    # Each head chooses whole blocks of so many positions for a group of query heads, and no weights add the heads (MiniMax-M3).
    block: Annotated[int, Size("index_block_size", "sequence_length", or_none=True)] = 0


@dataclass(frozen=True)
class CompressedSpec(Checked):
    """DeepSeek-V4's attention: one head of keys, which are the values too, in a window of positions; and beside them entries that
    each stand for `rate` positions (0: none).

    A query sees all entries before it (heavily compressed attention), or the best of them by an indexer, whose entries overlap
    (compressed sparse attention). The output goes through `out_groups` projections to `out_rank`, each of a share of the heads,
    and one more to the hidden size.
    """

    q_rank: Annotated[int, Size("q_lora_rank", "hidden_size")]
    rope_dim: int
    out_groups: Annotated[int, Size("o_groups", "heads")]
    out_rank: Annotated[int, Size("o_lora_rank", "hidden_size")]
    rate: Annotated[int, Size("compress_rates", "sequence_length", or_none=True)] = 0
    overlaps: bool = False  # an entry also covers the positions of the entry before, by a second value of each position

    def entries(self, sequence: int) -> int:
        """Compressed entries of a sequence; the positions after the last whole one have none."""
        return sequence // self.rate if self.rate else 0

    def entry_pairs(self, sequence: int, top_k: int | None = None) -> int:
        """(query, entry) pairs of one sequence: a query sees the entries that are complete, at most `top_k`.

        >>> spec = CompressedSpec(q_rank=1, rope_dim=1, out_groups=1, out_rank=1, rate=4)
        >>> spec.entry_pairs(9), spec.entry_pairs(9, top_k=1)
        (8, 6)
        """
        whole = self.entries(sequence)
        seen = min(whole, top_k) if top_k is not None else whole
        return self.rate * seen * (seen - 1) // 2 + seen * (sequence - self.rate * seen + 1) if seen else 0


@dataclass(frozen=True)
class AttentionSpec(Checked):
    """Self-attention of one layer. `kv_heads` < `heads` is grouped-query attention; 1 is multi-query."""

    heads: Annotated[int, Size("num_attention_heads", "heads")]
    kv_heads: Annotated[int, Size("num_key_value_heads", "heads")]
    head_dim: Annotated[int, Size("head_dim", "head_dim")]
    # a value head's size where it differs (latent attention)
    value_dim: Annotated[int | None, Size("v_head_dim", "head_dim")] = None
    input_size: int | None = None  # where it is not the hidden size (Zamba: the hidden state beside the embedding)
    qkv_bias: bool = False
    out_bias: bool = False
    causal: bool = True
    # how many positions back a query sees; None: all
    window: Annotated[int | None, Size("sliding_window", "sequence_length")] = None
    # a query sees only its own chunk of this many positions; None: no chunks
    chunk: Annotated[int | None, Size("attention_chunk_size", "sequence_length")] = None
    qk_norm: QkNorm | None = None
    qk_norm_bias: bool = False
    qk_norm_weight: bool = True
    v_norm: bool = False  # values are normalised too, without a weight
    temperature: bool = False  # queries are scaled by their position
    sinks: bool = False  # one learned logit per head
    rotary: bool = True  # positions enter by rotating queries and keys
    rotary_dim: int | None = None  # the part of a head that is rotated; None: all of it
    gated: bool = False  # the output is multiplied by a gate, which makes the query projection twice as wide
    gate_width: int = 0  # the gate is a linear of its own, with one output for each head, or for each of its channels
    stored_fused: bool = False  # the checkpoint's own code keeps Q, K and V in one weight
    latent: LatentSpec | None = None
    # sparse: how many of the visible positions a query attends to
    top_k: Annotated[int | None, Size("index_topk", "sequence_length")] = None
    indexer: IndexerSpec | None = None  # chooses them; None with `top_k`: the choice of an earlier layer is used again
    values_are_keys: bool = False  # one projection makes both
    shares_kv: bool = False  # keys and values are those of an earlier layer
    compressed: CompressedSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressed is not None:
            check_divides(
                self.compressed.out_groups,
                self.out_width,
                f"the attention's output, {self.out_width} wide, cannot be split into o_groups = {self.compressed.out_groups}",
                "numbers of groups that divide it",
            )
        check_divides(
            self.kv_heads,
            self.heads,
            f"num_attention_heads = {self.heads} is not a multiple of num_key_value_heads = {self.kv_heads}",
            f"numbers of key/value heads that divide {self.heads}",
        )
        if self.latent and self.latent.rope_dim > self.head_dim:
            raise UserError(f"qk_rope_head_dim = {self.latent.rope_dim} is larger than the query head ({self.head_dim})")

    @property
    def value_head_dim(self) -> int:
        return self.value_dim if self.value_dim is not None else self.head_dim

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def q_proj_width(self) -> int:
        """Output features of the query projection."""
        return self.q_width * (2 if self.gated else 1)

    @property
    def k_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.value_head_dim

    def kv_width(self, tp: int) -> float:
        """Keys and values of one position on one rank."""
        return self.head_dim if self.compressed is not None else (self.k_width + self.v_width) / tp

    @property
    def out_width(self) -> int:
        """Input features of the output projection."""
        return self.heads * self.value_head_dim


MixerKind = Literal["ssd", "selective scan", "gated delta rule", "kda", "lightning attention", "short convolution"]


@dataclass(frozen=True)
class LinearSpec:
    """A linear beside attention, mixer and MLP, on every token. `role`: a key of `roles.toml`."""

    role: str
    inputs: int
    outputs: int
    bias: bool = False
    count: int = 1

    def __post_init__(self) -> None:
        name = role(self.role).name
        check_size(f"the input features of {name}", self.inputs, "intermediate_size")
        check_size(f"the output features of {name}", self.outputs, "intermediate_size")


@dataclass(frozen=True)
class MixerSpec(Checked):
    """A layer that mixes positions in linear time: a state-space scan, a delta rule, lightning attention, a short convolution.

    One description serves all of them, because they share a structure: projections of the hidden state, a short causal
    convolution, a recurrence over the sequence that is computed chunk by chunk, a gated norm, and an output projection. In the
    terms of linear attention a state-space model has keys (B), queries (C) and values (x): `groups` key heads of `key_dim`, the
    state's size, and `heads` value heads of `value_dim`. What a kind does not have is 0.

    `rank`: the width of the low-rank projections (Mamba's time step, KDA's gates). `stored`: how the checkpoint's own code
    splits the input projection, as sums of the names "q", "k", "v", "z" (output gate), "b" (write strength or B), "a" (decay
    or time step), for example ("qkvz", "ba"); frameworks run one GEMM.
    """

    kind: MixerKind
    heads: Annotated[int, Size("the mixer's number of heads", "intermediate_size")]
    value_dim: Annotated[int, Size("the mixer's head size", "intermediate_size")]
    groups: Annotated[int, Size("the mixer's number of groups (key heads)", "intermediate_size")] = 1
    key_dim: Annotated[int, Size("the mixer's state size (key head size)", "intermediate_size")] = 1
    conv_kernel: int = 0
    conv_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    chunk: Annotated[int, Size("the mixer's chunk size", "sequence_length")] = 64  # positions that the recurrence takes at once
    rank: int = 0
    gated: bool = True  # the output is multiplied by a gate, which the input projection makes too
    full_rank_gate: bool = False  # KDA's, which is not low-rank then
    norm: Literal["", "full", "group", "head"] = "full"  # before the output projection: one weight over all heads, or one for all
    stored: tuple[str, ...] = ()
    state_norm: Literal["", "plain", "weighted"] = ""  # of Mamba's time step, B and C: without or with weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divides(
            self.groups,
            self.heads,
            f"the mixer's {self.heads} heads are not a multiple of its {self.groups} groups (key heads)",
            f"numbers of groups that divide {self.heads}",
        )

    @property
    def name(self) -> str:
        return {"ssd": "Mamba-2", "selective scan": "Mamba", "kda": "KDA"}.get(self.kind, self.kind)

    @property
    def inner(self) -> int:
        """Width of the values: input features of the output projection."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of the keys, and of the queries."""
        return self.groups * self.key_dim


@dataclass(frozen=True)
class StreamsSpec(Checked):
    """Several residual streams of the hidden size instead of one.

    Hyper-connections (DeepSeek-V4, arXiv 2512.24880): before each of the two blocks of a layer the streams are collapsed into its
    input, after it they are mixed with each other and with its output. Alternating updates (AltUp, Gemma 3n, arXiv 2301.13310):
    the layer works on one stream; the others are predicted before it and corrected after it.
    """

    kind: Literal["hyper-connections", "alternating updates"]
    count: Annotated[int, Size("the number of residual streams", "streams")]


@dataclass(frozen=True)
class MlpSpec(Checked):
    """A feed-forward block: plain (up, activation, down) or gated (gate and up, activation and multiplication, down)."""

    intermediate_size: Annotated[int, Size("intermediate_size", "intermediate_size")]
    gated: bool
    activation: str = "gelu"
    up_bias: bool = False
    down_bias: bool = False
    stored_fused: bool = False  # the checkpoint's own code keeps gate and up in one weight
    sparse: bool = False  # only the largest values of the gate are kept, by their mean and deviation


@dataclass(frozen=True)
class MoeSpec(Checked):
    """A mixture of experts: a router sends each token to `top_k` of `experts`; a shared expert sees every token."""

    experts: Annotated[int, Size("the number of experts", "experts")]
    top_k: Annotated[int, Size("num_experts_per_tok", "experts")]
    expert: MlpSpec
    shared: MlpSpec | None = None
    zero_experts: int = 0  # that the router can choose beside the others, and that compute nothing (LongCat-Flash)
    shared_gate: bool = False  # the shared expert's output is scaled by a sigmoid of its own one-column linear
    router_bias: bool = False
    # the experts' width where it is not the hidden size: a linear before and after them (Nemotron-3)
    latent: Annotated[int | None, Size("moe_latent_size", "hidden_size")] = None
    latent_bias: bool = False
    latent_norm: bool = False  # of what the experts return, before the linear after them
    stored_dense: bool = False  # the checkpoint's own code runs every expert on every token; frameworks do not

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts + self.zero_experts:
            raise UserError(f"num_experts_per_tok = {self.top_k} is more than the number of experts, {self.experts}")

    def computed(self, copies: int) -> int:
        """How many of the `copies` that the router sends reach an expert that computes something."""
        return copies * self.experts // (self.experts + self.zero_experts)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention or another mixer (or both side by side), then a feed-forward block; hybrids may leave one of them out.

    `norms` counts its normalisations over the hidden size. `extra` are linears beside these; `extra_parameters` belong to none.
    Layers with the same `shared_block` use one set of weights for attention and feed-forward block, each with a norm before it
    (Zamba); mixer and `extra` are their own.
    """

    attention: AttentionSpec | None
    mlp: MlpSpec | MoeSpec | None
    norms: int = 2
    mixer: MixerSpec | None = None
    extra: tuple[LinearSpec, ...] = ()
    extra_parameters: int = 0
    shared_block: int | None = None
    streams: StreamsSpec | None = None
    input_width: int = 0  # of an input of its own, which a gate and a projection add to the output
    # Instead of the residual stream alone, each block reads a mean of it and so many earlier states (Kimi-K3); None: it does not.
    earlier_states: float | None = None

    @property
    def is_moe(self) -> bool:
        return isinstance(self.mlp, MoeSpec)

    @property
    def is_plain(self) -> bool:
        """Attention and a feed-forward block, nothing else."""
        return self.attention is not None and self.mlp is not None and self.mixer is None

    @property
    def kind(self) -> str:
        """What it consists of: `attention + MoE`, `Mamba-2`."""
        mlp = "" if self.mlp is None else "MoE" if self.is_moe else "MLP"
        names = ["attention" if self.attention is not None else "", self.mixer.name if self.mixer is not None else "", mlp]
        return " + ".join(filter(None, names))
