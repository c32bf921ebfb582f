"""The operations of DeepSeek-V4's attention: a window of positions, and entries that each stand for several positions.

From transformers' DeepseekV4Attention and the compressors beside it. Tensor parallelism splits the query heads and the groups of
the output projection; the one head of keys, the compressor and the indexer are the same on every rank, as in latent attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemmscope.model.layer_spec import AttentionSpec, CompressedSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.ops import PASSES, Attention, Direction, Elementwise, GroupedLinear, Linear, Norm, Op, Pass
from gemmscope.workload.rank_ops import linear, norm, on_sequence_shard, visible_pairs
from gemmscope.workload.sparse import IndexScores, TopK


@dataclass(frozen=True, kw_only=True)
class EntryScores(IndexScores):
    """The indexer's scores of compressed entries, which are its keys."""

    def batched_gemms(self) -> Iterator[tuple[Direction, int, int, int, int]]:
        """(direction, m, k, n, batch) of the batched GEMM of the unfused indexer, which weights the heads without one."""
        yield "forward", self.heads, self.dim, self.keys, self.batch * self.queries


def compressed_attention(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """All operations of one attention on this rank, in the order they run."""
    assert spec.compressed is not None
    part, hidden, heads = spec.compressed, model.hidden_size, spec.heads // run.tp
    narrow = replace(run, sequence_parallel=run.sequence_parallel and run.sequence_parallel_linears)
    yield on_sequence_shard(linear("q-down", run, hidden, part.q_rank), run)
    yield norm(model, narrow, "q-latent-norm", part.q_rank)
    yield linear("q-up", run, part.q_rank, heads * spec.head_dim)
    yield Norm(role="qk-norm", rows=run.tokens * heads, width=spec.head_dim)
    yield on_sequence_shard(linear("kv-proj", run, hidden, spec.head_dim), run)
    yield norm(model, narrow, "kv-norm", spec.head_dim)
    rotated = part.rope_dim * (2 * heads + 1)  # queries, keys, and the output back
    yield Elementwise(
        role="rotary", rows=run.tokens, width=rotated, forward_tensors=2, backward_tensors=2, forward_flops=3, backward_flops=3
    )
    if part.rate:
        yield from _compressor(model, run, "compressor", part, spec.head_dim)
    if spec.indexer is not None:
        yield from _indexer(model, run, spec)
    sequence = run.sequence_length
    pairs = visible_pairs(sequence, causal=True, window=spec.window) + part.entry_pairs(sequence, spec.top_k)
    seen = min(part.entries(sequence), spec.top_k or sequence)  # entries that the last query sees beside its window
    yield Attention(
        role="attention", batch=run.micro_batch_size, heads=heads, kv_heads=1, queries=sequence // run.cp,
        keys=sequence + part.entries(sequence), head_dim=spec.head_dim, value_dim=spec.head_dim, pairs=pairs / run.cp,
        causal=True, window=(spec.window or sequence) + seen, values_are_keys=True, parameters=heads if spec.sinks else 0,
    )  # fmt: skip
    groups = part.out_groups // run.tp
    inputs = spec.out_width // part.out_groups
    yield GroupedLinear(
        role="attention-out-groups", tokens=groups * run.tokens, rows=(run.tokens,) * groups, inputs=inputs,
        outputs=part.out_rank, parameters=groups * inputs * part.out_rank,
    )  # fmt: skip
    yield linear("attention-out", run, groups * part.out_rank, hidden)


def _compressor(model: ModelSpec, run: RunSpec, owner: str, part: CompressedSpec, width: int) -> Iterator[Op]:
    """Values and their weights of every position; each entry is the weighted mean of its positions, normed."""
    wide = width * (2 if part.overlaps else 1)
    projections = ("kv", "gate") if run.separate_projections else ("kv-gate",)
    for projection in projections:
        op = on_sequence_shard(linear(f"{owner}-{projection}", run, model.hidden_size, 2 * wide // len(projections)), run)
        # A sequence shorter than one entry has no entries, so nothing depends on these projections.
        yield op if part.entries(run.sequence_length) else replace(op, passes=PASSES[:1])
    yield Elementwise(  # also adds a bias for each position of an entry
        role=f"{owner}-mean", rows=run.tokens, width=wide, forward_tensors=2, backward_tensors=4, forward_flops=6,
        backward_flops=12, kept_tensors=2, copies=run.tp, parameters=part.rate * wide,
    )  # fmt: skip
    entries = run.micro_batch_size * part.entries(run.sequence_length) // run.cp
    yield Norm(role=f"{owner}-norm", rows=entries, width=width, copies=run.tp, parameters=width)


def _indexer(model: ModelSpec, run: RunSpec, spec: AttentionSpec) -> Iterator[Op]:
    """Small heads with a compressor of their own, which learn and are split as those of sparse attention (`sparse.py`)."""
    assert spec.indexer is not None
    assert spec.compressed is not None
    part, indexer, sequence = spec.compressed, spec.indexer, run.sequence_length
    trained = not run.separate_projections  # transformers' code runs it without gradients
    passes: tuple[Pass, ...] = ("fprop", "wgrad") if trained else PASSES[:1]
    for op in _compressor(model, run, "indexer", part, indexer.dim):
        yield replace(op, passes=passes) if isinstance(op, Linear) else op
    queries = linear("indexer-q", run, part.q_rank, indexer.heads * indexer.dim)
    yield replace(queries, passes=passes, copies=run.tp)
    weights = linear("indexer-weights", run, model.hidden_size, indexer.heads)
    yield replace(weights, passes=passes, copies=run.tp)
    pairs, chosen = (part.entry_pairs(sequence, top_k) / run.cp for top_k in (None, spec.top_k))
    yield EntryScores(
        role="index-scores", batch=run.micro_batch_size, heads=indexer.heads, dim=indexer.dim, queries=sequence // run.cp,
        keys=part.entries(sequence), pairs=pairs, chosen=chosen, trained=trained, copies=run.tp,
        probabilities=2 * spec.heads // run.tp * chosen * spec.head_dim,
    )  # fmt: skip
    yield TopK(role="index-top-k", batch=run.micro_batch_size, pairs=pairs, chosen=chosen, copies=run.tp)
