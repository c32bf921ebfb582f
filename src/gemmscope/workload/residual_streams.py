"""The operations of layers with several residual streams, and of layers with inputs of their own.

Tensor parallelism does not split them: they run on every rank, or on its share of the sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gemmscope.model.layer_spec import LayerSpec, StreamsSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.ops import Activation, Direction, Elementwise, Linear, Op, gemm_size
from gemmscope.workload.rank_ops import linear, norm, on_sequence_shard, residual, shard_rows


@dataclass(frozen=True, kw_only=True)
class StreamMix(Elementwise):
    """Every token's streams (together `width` elements) are multiplied by a small matrix of its own. Kernels do this while they
    read and write the streams.

    `stacked`: the streams are the rows of a matrix whose columns are the hidden size; else its columns.
    """

    kind: ClassVar[str] = "stream mixing"
    streams: int
    stacked: bool
    forward_tensors: float = 2  # reads the streams, writes new ones
    backward_tensors: float = 3  # reads the streams and the gradients of the new ones, writes those of the old ones

    def batched_gemms(self) -> Iterator[tuple[Direction, int, int, int, int]]:
        """(direction, m, k, n, batch) as batched GEMMs, one matrix for each token."""
        streams, hidden = self.streams, self.width // self.streams
        sizes = (streams, streams, hidden) if self.stacked else (hidden, streams, streams)
        yield "forward", *sizes, self.rows
        yield "backward", *gemm_size(*sizes, "dgrad"), self.rows
        yield "backward", *gemm_size(*sizes, "wgrad"), self.rows


def stream_ops(model: ModelSpec, spec: StreamsSpec, run: RunSpec) -> Iterator[Op]:
    """What one layer does with its streams."""
    return (_hyper_connections if spec.kind == "hyper-connections" else _alternating_updates)(model, spec, run)


def _hyper_connections(model: ModelSpec, spec: StreamsSpec, run: RunSpec) -> Iterator[Op]:
    """For each of the two blocks: all streams are normed and give the weights that collapse, expand and mix them."""
    count, hidden = spec.count, model.hidden_size
    weights = (2 + count) * count
    yield replace(norm(model, run, "stream-norm", count * hidden), count=2, parameters=0)
    # Their bias for each weight, and one scale each for collapsing, expanding and mixing.
    yield replace(_small("stream-weights", run, count * hidden, weights, 2), parameters=count * hidden * weights + weights + 3)
    yield replace(_elementwise("stream-collapse", run, hidden, reads=count, writes=1), count=2)
    yield replace(_mix(run, hidden, count, stacked=True), count=2)
    yield replace(_elementwise("stream-expand", run, hidden, reads=1, writes=0), count=2)


def _alternating_updates(model: ModelSpec, spec: StreamsSpec, run: RunSpec) -> Iterator[Op]:
    """A router of the active stream gives the weights that predict the other streams, and those that correct them."""
    count, hidden = spec.count, model.hidden_size
    router_norm = norm(model, run, "stream-norm", hidden)
    yield router_norm
    yield replace(router_norm, parameters=0)  # once more, by the same weight
    router = _small("stream-router", run, hidden, count)
    yield router
    yield replace(router, parameters=0)
    yield _small("stream-prediction", run, count, count * count)
    yield _small("stream-correction", run, count, count)
    yield _mix(run, hidden, count, stacked=False)
    # Also scales the active one by a vector of the hidden size.
    yield replace(_elementwise("stream-update", run, hidden, reads=count + 1, writes=count), parameters=hidden)


def layer_input_ops(model: ModelSpec, layer: LayerSpec, run: RunSpec) -> Iterator[Op]:
    """A layer's own input, gated by its output, is projected, normed (counted with the layer's norms) and added."""
    if not layer.input_width:
        return
    rows, copies = shard_rows(run)
    yield on_sequence_shard(linear("layer-input-gate", run, model.hidden_size, layer.input_width), run)
    yield Activation(
        role="layer-input-activation", rows=rows, width=layer.input_width, copies=copies,
        forward_tensors=3, backward_tensors=5, forward_flops=9, backward_flops=15,
    )  # fmt: skip
    yield on_sequence_shard(linear("layer-input", run, layer.input_width, model.hidden_size), run)
    yield residual(model, run)


def _small(role: str, run: RunSpec, inputs: int, outputs: int, count: int = 1) -> Linear:
    """A linear with so few outputs that frameworks leave it in BF16."""
    return replace(on_sequence_shard(linear(role, run, inputs, outputs), run), count=count)


def _mix(run: RunSpec, hidden: int, count: int, *, stacked: bool) -> StreamMix:
    rows, copies = shard_rows(run)
    return StreamMix(
        role="stream-mix", rows=rows, width=count * hidden, streams=count, stacked=stacked, copies=copies,
        forward_flops=2 * count, backward_flops=4 * count, kept_tensors=0 if stacked else 1,  # the norm before it keeps a stack
    )  # fmt: skip


def _elementwise(role: str, run: RunSpec, width: int, *, reads: int, writes: int) -> Elementwise:
    rows, copies = shard_rows(run)
    return Elementwise(
        role=role, rows=rows, width=width, copies=copies, forward_tensors=reads + writes, backward_tensors=2 * reads + writes,
        forward_flops=2 * max(reads, writes), backward_flops=4 * max(reads, writes),
    )  # fmt: skip
