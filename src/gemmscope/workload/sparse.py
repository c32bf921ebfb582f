"""Sparse attention: an indexer scores the visible positions, the best of them are chosen, and attention runs over these.

Sources: "DeepSeek-V3.2" (arXiv 2512.02556) and Megatron's `experimental_attention_variant/dsa.py`.

* The indexer's heads share one key. A score is the sum over heads of relu(q·k), weighted by a linear of the hidden state. Forward
  scores every visible pair.
* In training, the indexer learns from the attention's own probabilities of the chosen pairs, apart from the rest of the model:
  its inputs are detached, so that its linears have no dgrad. Backward computes scores and probabilities of these pairs again.
  transformers runs the indexer without gradients.
* Megatron runs its linears in the recipe's precision. DeepSeek leaves the small one that makes the weights in high precision, and
  so does this file.
* Kernels of sparse attention over a latent (FlashMLA, TileLang) gather the latent itself, which all heads share, instead of each
  head's keys and values: more FLOPs for each pair, and far fewer bytes. For short sequences, dense attention with a mask is less
  work, and the paper's authors run it there: `SparseAttention` counts the cheaper of both.

Compressed attention (DeepSeek-V4) is below. It sees a window of positions, and entries that each stand for several positions.

From transformers' DeepseekV4Attention and the compressors beside it. Tensor parallelism splits the query heads and the groups of
the output projection; the one head of keys, the compressor and the indexer are the same on every rank, as in latent attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from gemmscope.model.layer_spec import AttentionSpec, CompressedSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.ops import (
    ELEMENT_BYTES,
    FP32_BYTES,
    PASSES,
    Attention,
    Direction,
    Elementwise,
    GroupedLinear,
    Linear,
    Norm,
    Op,
    Work,
)
from gemmscope.workload.rank_ops import bottleneck, latent_norm, linear, on_sequence_shard, visible_pairs

INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Attention):
    """Attention over `pairs` chosen pairs of the `visible` ones; kernels read keys and values of the latent's sizes."""

    visible: float
    latent_key: int
    latent_value: int

    def forward(self) -> Work:
        """Scores and context of the chosen pairs, or of all with a mask, whichever is less work."""
        chosen = self.pairs * (self.latent_key + self.latent_value)
        masked = self.visible * (self.head_dim + self.value_dim)
        return Work(2 * self.batch * self.heads * min(chosen, masked), super().forward().bytes_moved)


@dataclass(frozen=True, kw_only=True)
class IndexScores(Op):
    """The indexer's scores: `heads` queries of `dim` against one key, for `pairs` visible pairs; trained on `chosen` of them.

    `probabilities` are the FLOPs of the attention's own scores, from which it learns, for one sequence.

    >>> scores = IndexScores(role="index-scores", batch=1, heads=64, dim=128, queries=8, keys=8, pairs=36, chosen=20,
    ...                      probabilities=0)
    >>> scores.forward().flops == 2 * 36 * 64 * (128 + 1)
    True
    """

    kind: ClassVar[str] = "index scores"
    batch: int
    heads: int
    dim: int
    queries: int
    keys: int
    pairs: float
    chosen: float
    probabilities: float
    trained: bool = True
    weighted: bool = True  # the unfused indexer weights its heads by a GEMM
    block: int = 0  # each head chooses blocks of so many positions by itself

    def forward(self) -> Work:
        """Reads queries, keys and weights, writes one score for each visible pair."""
        flops = 2 * self.batch * self.pairs * self.heads * (self.dim + 1)
        return Work(flops, self._inputs() + self.batch * self.pairs * FP32_BYTES)

    def backward(self) -> Work:
        """Work on the chosen pairs: scores and probabilities again, the gradients of queries, keys and weights."""
        if not self.trained:
            return Work()
        flops = self.batch * (2 * self.chosen * self.heads * (3 * self.dim + 2) + self.probabilities)
        return Work(flops, 2 * self._inputs() + 2 * self.batch * self.chosen * FP32_BYTES)

    def _inputs(self) -> float:
        elements = self.queries * self.heads * self.dim + self.keys * self.dim
        return self.batch * (elements * ELEMENT_BYTES + self.queries * self.heads * FP32_BYTES)

    def kept_bytes(self) -> float:
        """What backward needs: its inputs, and which pairs were chosen."""
        return (self._inputs() if self.trained else 0.0) + self.batch * self.chosen * INDEX_BYTES

    def batched_gemms(self) -> Iterator[tuple[Direction, int, int, int, int]]:
        """(direction, m, k, n, batch) of the batched GEMMs of the unfused indexer, which has no backward pass."""
        rows = self.batch * self.queries
        if self.block:
            yield "forward", self.queries, self.dim, self.keys, self.batch * self.heads
        else:
            yield "forward", self.heads, self.dim, self.keys, rows
        if self.weighted:
            yield "forward", 1, self.heads, self.keys, rows


@dataclass(frozen=True, kw_only=True)
class TopK(Op):
    """Chooses the best `top_k` of each query's visible positions: reads the scores, writes the positions."""

    kind: ClassVar[str] = "top-k"
    batch: int
    pairs: float
    chosen: float

    def forward(self) -> Work:
        return Work(self.batch * self.pairs, self.batch * (self.pairs * FP32_BYTES + self.chosen * INDEX_BYTES))

    def kept_bytes(self) -> float:
        return 0.0


def indexer_ops(model: ModelSpec, spec: AttentionSpec, run: RunSpec, pairs: float, chosen: float) -> Iterator[Op]:
    """The indexer, the same on every tensor-parallel rank. One of compressed attention has a compressor instead of keys."""
    assert spec.indexer is not None
    indexer, hidden, keys, heads = spec.indexer, model.hidden_size, run.sequence_length, 2 * spec.heads // run.tp
    latent = spec.compressed or spec.latent
    inputs = latent.q_rank if latent is not None and latent.q_rank is not None else hidden
    queries = linear("indexer-q", run, inputs, indexer.heads * indexer.dim, copies=run.tp)
    weights = linear("indexer-weights", run, hidden, indexer.heads, copies=run.tp)
    if spec.compressed is not None:
        ops: list[Op] = [*_compressor(model, run, "indexer", spec.compressed, indexer.dim), queries, weights]
        keys, probabilities = spec.compressed.entries(keys), heads * chosen * spec.head_dim
    else:
        own = Norm(role="indexer-norm", rows=run.tokens, width=indexer.dim, parameters=2 * indexer.dim, copies=run.tp)
        ops = [queries, linear("indexer-k", run, hidden, indexer.dim, copies=run.tp), *([] if indexer.block else [weights]), own]
        latent_key = spec.latent.kv_rank + spec.latent.rope_dim if spec.latent is not None else spec.head_dim
        probabilities = heads * min(chosen * latent_key, pairs * spec.head_dim)
    trained = not run.separate_projections  # transformers' code runs it without gradients
    for op in ops:
        yield replace(op, passes=("fprop", "wgrad") if trained else PASSES[:1]) if isinstance(op, Linear) else op
    yield IndexScores(
        role="index-scores", batch=run.micro_batch_size, heads=indexer.heads, dim=indexer.dim, pairs=pairs, chosen=chosen,
        queries=run.sequence_length // run.cp, keys=keys, trained=trained, copies=run.tp, block=indexer.block,
        weighted=not (spec.compressed or indexer.block),
        probabilities=probabilities,
    )  # fmt: skip
    yield TopK(role="index-top-k", batch=run.micro_batch_size, pairs=pairs, chosen=chosen, copies=run.tp)


def sparse(attention: Attention, spec: AttentionSpec, chosen: float) -> SparseAttention:
    """The same attention over the chosen pairs."""
    key, value = attention.head_dim, attention.value_dim
    if spec.latent is not None:
        key, value = spec.latent.kv_rank + spec.latent.rope_dim, spec.latent.kv_rank
    same = {part.name: getattr(attention, part.name) for part in fields(attention)}
    known = {**same, "role": "sparse-attention", "pairs": chosen}
    return SparseAttention(**known, visible=attention.pairs, latent_key=key, latent_value=value)


def compressed_attention(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """All operations of one attention on this rank, in the order they run."""
    assert spec.compressed is not None
    part, hidden, heads = spec.compressed, model.hidden_size, spec.heads // run.tp
    yield from bottleneck(model, run, "q", part.q_rank, heads * spec.head_dim)
    yield Norm(role="qk-norm", rows=run.tokens * heads, width=spec.head_dim)
    yield on_sequence_shard(linear("kv-proj", run, hidden, spec.head_dim), run)
    yield latent_norm(model, run, "kv-norm", spec.head_dim)
    rotated = part.rope_dim * (2 * heads + 1)  # queries, keys, and the output back
    yield Elementwise(
        role="rotary", rows=run.tokens, width=rotated, forward_tensors=2, backward_tensors=2, forward_flops=3, backward_flops=3
    )
    if part.rate:
        yield from _compressor(model, run, "compressor", part, spec.head_dim)
    sequence = run.sequence_length
    if spec.indexer is not None:
        pairs, chosen = (part.entry_pairs(sequence, top_k) / run.cp for top_k in (None, spec.top_k))
        yield from indexer_ops(model, spec, run, pairs, chosen)
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
