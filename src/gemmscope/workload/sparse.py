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
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from gemmscope.model.layer_spec import AttentionSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.ops import ELEMENT_BYTES, FP32_BYTES, PASSES, Attention, Direction, Linear, Norm, Op, Pass, Work

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
        yield "forward", self.heads, self.dim, self.keys, rows
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
    """The indexer, the same on every tensor-parallel rank."""
    assert spec.indexer is not None
    assert spec.latent is not None
    indexer, latent, queries = spec.indexer, spec.latent, run.sequence_length // run.cp
    trained = not run.separate_projections  # transformers' code runs it without gradients
    passes: tuple[Pass, ...] = ("fprop", "wgrad") if trained else PASSES[:1]
    linears = [
        ("indexer-q", latent.q_rank or model.hidden_size, indexer.heads * indexer.dim),
        ("indexer-k", model.hidden_size, indexer.dim),
        ("indexer-weights", model.hidden_size, indexer.heads),
    ]
    for role, inputs, outputs in linears:
        yield Linear(
            role=role, tokens=run.tokens, inputs=inputs, outputs=outputs, parameters=inputs * outputs, copies=run.tp,
            passes=passes,
        )  # fmt: skip
    yield Norm(role="indexer-norm", rows=run.tokens, width=indexer.dim, parameters=2 * indexer.dim, copies=run.tp)
    yield IndexScores(
        role="index-scores", batch=run.micro_batch_size, heads=indexer.heads, dim=indexer.dim, queries=queries,
        keys=run.sequence_length, pairs=pairs, chosen=chosen, trained=trained, copies=run.tp,
        probabilities=2 * spec.heads // run.tp * min(chosen * (latent.kv_rank + latent.rope_dim), pairs * spec.head_dim),
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
