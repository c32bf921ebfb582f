"""Self-attention of one layer, in all its forms: grouped queries, windows and chunks, latent, sparse and compressed attention."""

from dataclasses import dataclass
from typing import Literal

from gemmscope.errors import UserError
from gemmscope.model.limits import check_optional, check_size, divisors_text
from gemmscope.model.streams import CompressedSpec

QkNorm = Literal["head", "each_head", "full"]
"""Normalisation of queries and keys: one weight of a head's size shared by all heads; one per head; one over all heads."""


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek): queries and keys/values pass through a low-rank bottleneck."""

    q_rank: int | None  # None: queries are projected directly
    kv_rank: int
    rope_dim: int  # the part of a head that carries positions; its key is shared by all heads
    down_bias: bool = False

    def __post_init__(self) -> None:
        check_optional("q_lora_rank", self.q_rank, "hidden_size")
        check_size("kv_lora_rank", self.kv_rank, "hidden_size")
        check_size("qk_rope_head_dim", self.rope_dim, "head_dim")


@dataclass(frozen=True)
class IndexerSpec:
    """The lightning indexer of sparse attention (DeepSeek): small heads that share one key and score every visible position."""

    heads: int
    dim: int

    def __post_init__(self) -> None:
        check_size("index_n_heads", self.heads, "heads")
        check_size("index_head_dim", self.dim, "head_dim")


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one layer. `kv_heads` < `heads` is grouped-query attention; 1 is multi-query."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # a value head's size where it differs (latent attention)
    input_size: int | None = None  # where it is not the hidden size (Zamba: the hidden state beside the embedding)
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    out_bias: bool = False
    causal: bool = True
    window: int | None = None  # how many positions back a query sees; None: all
    chunk: int | None = None  # a query sees only its own chunk of this many positions; None: no chunks
    qk_norm: QkNorm | None = None
    qk_norm_bias: bool = False
    qk_norm_weight: bool = True
    v_norm: bool = False  # values are normalised too, without a weight
    temperature: bool = False  # queries are scaled by their position
    sinks: bool = False  # one learned logit per head
    rotary: bool = True  # positions enter by rotating queries and keys
    rotary_dim: int | None = None  # the part of a head that is rotated; None: all of it
    gated: bool = False  # the output is multiplied by a gate, which makes the query projection twice as wide
    stored_fused: bool = False  # the checkpoint's own code keeps Q, K and V in one weight
    latent: LatentSpec | None = None
    top_k: int | None = None  # sparse: how many of the visible positions a query attends to
    indexer: IndexerSpec | None = None  # chooses them; None with `top_k`: the choice of an earlier layer is used again
    values_are_keys: bool = False  # one projection makes both
    shares_kv: bool = False  # keys and values are those of an earlier layer
    compressed: CompressedSpec | None = None

    def __post_init__(self) -> None:
        check_size("num_attention_heads", self.heads, "heads")
        check_size("num_key_value_heads", self.kv_heads, "heads")
        check_size("head_dim", self.head_dim, "head_dim")
        check_optional("v_head_dim", self.value_dim, "head_dim")
        check_optional("sliding_window", self.window, "sequence_length")
        check_optional("index_topk", self.top_k, "sequence_length")
        check_optional("attention_chunk_size", self.chunk, "sequence_length")
        if self.compressed is not None:
            self.compressed.check_heads(self.out_width)
        if self.heads % self.kv_heads:
            raise UserError(
                f"num_attention_heads = {self.heads} is not a multiple of num_key_value_heads = {self.kv_heads}",
                f"numbers of key/value heads that divide {self.heads}: {divisors_text(self.heads)}",
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
