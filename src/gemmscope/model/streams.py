"""What some families have beside attention and MLP: several residual streams, inputs for each layer, compressed attention."""

from dataclasses import dataclass
from typing import Literal

from gemmscope.errors import UserError
from gemmscope.model.limits import check_size, divisors_text

StreamKind = Literal["hyper-connections", "alternating updates"]


@dataclass(frozen=True)
class StreamsSpec:
    """Several residual streams of the hidden size instead of one.

    Hyper-connections (DeepSeek-V4, arXiv 2512.24880): before each of the two blocks of a layer the streams are collapsed into its
    input, after it they are mixed with each other and with its output. Alternating updates (AltUp, Gemma 3n, arXiv 2301.13310):
    the layer works on one stream; the others are predicted before it and corrected after it.
    """

    kind: StreamKind
    count: int

    def __post_init__(self) -> None:
        check_size("the number of residual streams", self.count, "streams")


@dataclass(frozen=True)
class LayerInputsSpec:
    """A second embedding table that has, for every token, an input of `width` for each layer (Gemma 3n and 4)."""

    vocab_size: int
    width: int

    def __post_init__(self) -> None:
        check_size("vocab_size_per_layer_input", self.vocab_size, "vocab_size")
        check_size("hidden_size_per_layer_input", self.width, "hidden_size")


@dataclass(frozen=True)
class CompressedSpec:
    """DeepSeek-V4's attention: one head of keys, which are the values too, in a window of positions; and beside them entries that
    each stand for `rate` positions (0: none).

    A query sees all entries before it (heavily compressed attention), or the best of them by an indexer, whose entries overlap
    (compressed sparse attention). The output goes through `out_groups` projections to `out_rank`, each of a share of the heads,
    and one more to the hidden size.
    """

    q_rank: int
    rope_dim: int
    out_groups: int
    out_rank: int
    rate: int = 0
    overlaps: bool = False  # an entry also covers the positions of the entry before, by a second value of each position

    def __post_init__(self) -> None:
        check_size("q_lora_rank", self.q_rank, "hidden_size")
        check_size("o_groups", self.out_groups, "heads")
        check_size("o_lora_rank", self.out_rank, "hidden_size")
        if self.rate:
            check_size("compress_rates", self.rate, "sequence_length")

    def check_heads(self, width: int) -> None:
        """Raise a `UserError` if `width`, that of all heads, cannot be split into the groups of the output projection."""
        if width % self.out_groups:
            raise UserError(
                f"the attention's output, {width} wide, cannot be split into o_groups = {self.out_groups}",
                f"numbers of groups that divide it: {divisors_text(width)}",
            )

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
