"""The operations of DeepSeek-V4's attention: a window of positions, and entries that each stand for several positions.

From transformers' DeepseekV4Attention and the compressors beside it. Tensor parallelism splits the query heads and the groups of
the output projection; the one head of keys, the compressor and the indexer are the same on every rank, as in latent attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gemmscope.model.spec import AttentionSpec, IndexerSpec, ModelSpec, RunSpec
from gemmscope.model.streams import CompressedSpec
from gemmscope.workload.ops import ELEMENT_BYTES, Attention, Direction, Elementwise, GroupedLinear, Linear, Norm, Op, Work
from gemmscope.workload.rank_ops import linear, norm, on_sequence_shard, visible_pairs


@dataclass(frozen=True, kw_only=True)
class EntryScores(Op):
    """The indexer scores every entry for every query, and the best `top_k` are chosen. The choice has no gradient."""

    kind: ClassVar[str] = "indexer"
    batch: int
    queries: int
    entries: int
    heads: int
    head_dim: int
    pairs: float  # (query, entry) pairs that causality allows in one sequence

    def forward(self) -> Work:
        """Reads queries and entries once, writes one score for each pair."""
        read = self.batch * (self.queries * self.heads + self.entries) * self.head_dim
        return Work(
            2 * self.batch * self.heads * self.pairs * self.head_dim, (read + self.batch * self.pairs) * ELEMENT_BYTES
        )

    def batched_gemms(self) -> Iterator[tuple[Direction, int, int, int, int]]:
        """(direction, m, k, n, batch) as batched GEMMs that apply causality afterwards."""
        yield "forward", self.heads, self.head_dim, self.entries, self.batch * self.queries


def compressed_attention(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """All operations of one attention on this rank, in the order they run."""
    assert spec.compressed is not None
    part, hidden, heads = spec.compressed, model.hidden_size, spec.heads // run.tp
    narrow = replace(run, sequence_parallel=run.sequence_parallel and run.sequence_parallel_linears)
    yield on_sequence_shard(linear("Q Down Proj", run, hidden, part.q_rank), run)
    yield norm(model, narrow, "Q Latent Norm", part.q_rank)
    yield linear("Q Up Proj", run, part.q_rank, heads * spec.head_dim)
    yield Norm(name="QK Norm", rows=run.tokens * heads, width=spec.head_dim)
    yield on_sequence_shard(linear("KV Proj", run, hidden, spec.head_dim), run)
    yield norm(model, narrow, "KV Norm", spec.head_dim)
    rotated = part.rope_dim * (2 * heads + 1)  # queries, keys, and the output back
    yield Elementwise(
        name="Rotary", rows=run.tokens, width=rotated, forward_tensors=2, backward_tensors=2, forward_flops=3, backward_flops=3
    )
    if part.rate:
        yield from _compressor(model, run, "Compressor", part, spec.head_dim)
    if spec.indexer is not None:
        yield from _indexer(model, run, part, spec.indexer)
    sequence = run.sequence_length
    pairs = visible_pairs(sequence, causal=True, window=spec.window) + part.entry_pairs(sequence, spec.top_k)
    yield Attention(
        name="Attention", batch=run.micro_batch_size, heads=heads, kv_heads=1, queries=sequence // run.cp,
        keys=sequence + part.entries(sequence), head_dim=spec.head_dim, value_dim=spec.head_dim, pairs=pairs / run.cp, causal=True,
        window=spec.window, values_are_keys=True, parameters=heads if spec.sinks else 0,
    )  # fmt: skip
    groups = part.out_groups // run.tp
    inputs = spec.out_width // part.out_groups
    yield GroupedLinear(
        name="Attn Out Groups", tokens=groups * run.tokens, rows=(run.tokens,) * groups, inputs=inputs, outputs=part.out_rank,
        parameters=groups * inputs * part.out_rank, experts=False,
    )  # fmt: skip
    yield linear("Attn Out", run, groups * part.out_rank, hidden)


def _compressor(model: ModelSpec, run: RunSpec, name: str, part: CompressedSpec, width: int) -> Iterator[Op]:
    """Values and their weights of every position; each entry is the weighted mean of its positions, normed."""
    wide = width * (2 if part.overlaps else 1)
    linears = ("KV Proj", "Gate") if run.separate_projections else ("KV+Gate",)
    for each in linears:
        op = _kept_precise(linear(f"{name} {each}", run, model.hidden_size, 2 * wide // len(linears)), run)
        # A sequence shorter than an entry has none, and nothing depends on these.
        yield op if part.entries(run.sequence_length) else _forward_only(op)
    yield Elementwise(  # also adds a bias for each position of an entry
        name=f"{name} Mean", rows=run.tokens, width=wide, forward_tensors=2, backward_tensors=4, forward_flops=6,
        backward_flops=12, copies=run.tp, parameters=part.rate * wide,
    )  # fmt: skip
    entries = run.micro_batch_size * part.entries(run.sequence_length) // run.cp
    yield Norm(name=f"{name} Norm", rows=entries, width=width, copies=run.tp, parameters=width)


def _indexer(model: ModelSpec, run: RunSpec, part: CompressedSpec, spec: IndexerSpec) -> Iterator[Op]:
    """Small heads with a compressor of their own. What they choose has no gradient: the loss of the model does not train them."""
    for op in _compressor(model, run, "Indexer", part, spec.dim):
        yield _forward_only(op) if isinstance(op, Linear) else op
    queries = linear("Indexer Q Up", run, part.q_rank, spec.heads * spec.dim)
    yield _forward_only(on_sequence_shard(queries, run))
    yield _forward_only(_kept_precise(linear("Indexer Weights", run, model.hidden_size, spec.heads), run))
    sequence = run.sequence_length
    yield EntryScores(
        name="Indexer Scores", batch=run.micro_batch_size, queries=sequence // run.cp, entries=part.entries(sequence),
        heads=spec.heads, head_dim=spec.dim, pairs=part.entry_pairs(sequence) / run.cp, copies=run.tp,
    )  # fmt: skip


def _forward_only(op: Linear) -> Linear:
    return replace(op, passes=("fprop",))


def _kept_precise(op: Linear, run: RunSpec) -> Linear:
    """Left in BF16, as in the published FP8 checkpoints."""
    return replace(on_sequence_shard(op, run), quantized=False)
