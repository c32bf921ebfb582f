"""What one layer, the embedding or the head holds in the memory of one rank: parameters, and what backward needs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gemmscope.model.spec import RunSpec, recomputed_facts
from gemmscope.workload.derive import EMBEDDING, HEAD, with_adapters
from gemmscope.workload.ops import ELEMENT_BYTES, FP32_BYTES, Activation, Attention, Elementwise, Linear, Loss, Op

ROUTER_BYTES = 9  # per token and expert: FP32 logits and probabilities, and the routing map


class BlockMemory(NamedTuple):
    """One layer, the embedding or the head on one rank: parameters, and bytes that one micro-batch keeps for backward.

    What backward computes again is not kept.
    """

    dense: float = 0  # parameters outside of the experts
    experts: float = 0
    trained: float = 0  # of `dense`
    trained_experts: float = 0
    quantized: float = 0  # weights of linears that recipes quantize, in and outside of experts
    kept: float = 0.0  # by everything but linears
    inputs: float = 0.0  # of linears in high precision; a tensor that several read counts once
    plain: float = 0.0  # of `inputs`, those of linears that are never quantized
    elements: float = 0.0  # that quantized linears read: each keeps its own copy
    context_elements: float = 0.0  # of `elements`, what the output projection of attention reads
    activated_elements: float = 0.0  # and what the last linear of an MLP reads
    first: float = 0.0  # the input of the layer
    transient: float = 0.0  # gradients of activations at the widest point
    exchanged: float = 0.0  # buffers of dispatch, gathered inputs, received keys and values
    unfused: float = 0.0  # kept where kernels are not fused: outputs of experts, inputs of rotary positions
    logits: float = 0.0
    shared: int = 0  # of `dense`, weights that are the same in every layer of this kind

    @property
    def parameters(self) -> float:
        return self.dense + self.experts

    @property
    def all_trained(self) -> float:
        return self.trained + self.trained_experts

    def nothing_kept(self) -> "BlockMemory":
        """The same where backward computes all of it again, from its input."""
        return self._replace(
            kept=self.first, inputs=0.0, plain=0.0, elements=0, context_elements=0, activated_elements=0, unfused=0.0
        )


NOTHING = BlockMemory()


def block_memory(ops: Iterable[Op], run: RunSpec, width: int) -> BlockMemory:
    """The memory that the ops of one layer (or the embedding, or the head) need. `width`: sum over all residual streams."""
    ops = tuple(with_adapters(ops, run))
    inputs, again = _inputs(ops, run), _again(ops)
    memories = [_op_memory(op, run, share) for op, share in zip(ops, again, strict=True)]
    written = any(isinstance(op, Attention) and not _repeated(op) for op in ops)  # the context is kept by attention
    quantized = [read for read in inputs if read.quantized]
    once, plain = _kept_once(inputs), _kept_once([read for read in inputs if not read.quantized])
    first = run.tokens / _sharded(run) * width * ELEMENT_BYTES
    return BlockMemory(
        dense=sum(op.all_parameters for op in ops if not _of_experts(op)),
        experts=sum(op.all_parameters for op in ops if _of_experts(op)),
        trained=sum(op.trained_parameters for op in ops if not _of_experts(op)),
        trained_experts=sum(op.trained_parameters for op in ops if _of_experts(op)),
        quantized=sum(read.weights for read in quantized),
        kept=sum(memory.kept for memory in memories),
        inputs=sum(size for tensor, size in once.items() if tensor != "context" or not written),
        plain=sum(size for tensor, size in plain.items() if tensor != "context" or not written),
        elements=sum(read.elements for read in quantized),
        context_elements=sum(read.elements for read in quantized if read.tensor == "context"),
        activated_elements=sum(read.elements for read in quantized if read.tensor.endswith("activated")),
        first=first,
        transient=max((memory.transient for memory in memories), default=0.0) + 2 * first,
        exchanged=sum(memory.exchanged for memory in memories) + (2 * run.tokens * width * ELEMENT_BYTES if run.tp > 1 else 0.0),
        unfused=sum(memory.unfused for memory in memories),
        logits=next((memory.logits for memory in reversed(memories) if memory.logits), 0.0),
        shared=sum(op.parameters for op in ops if op.shares_weights and not _of_experts(op)),
    )


def _repeated(op: Op) -> bool:
    """Whether backward runs the op again."""
    return op.forward_runs > 1


def _again(ops: Iterable[Op]) -> Iterable[float]:
    """For each op, the share of what the linears before it wrote that backward computes again."""
    written, repeated, reads = 0.0, 0.0, None
    for op in ops:
        if isinstance(op, Linear) and not op.beside:
            if op.facts.reads != reads:
                written, repeated, reads = 0.0, 0.0, op.facts.reads
            written, repeated = written + op.outputs, repeated + op.outputs * _repeated(op)
        yield repeated / written if written else 0.0


def _op_memory(op: Op, run: RunSpec, again: float) -> BlockMemory:
    """What one op keeps in addition to the inputs of linears. `again`: the share of its input that backward computes again."""
    if isinstance(op, Linear):
        return _linear_memory(op, run) if not _repeated(op) else BlockMemory(exchanged=_linear_memory(op, run).exchanged)
    if isinstance(op, Attention):
        return _attention_memory(op, run, again)
    if isinstance(op, Loss):
        return BlockMemory(logits=op.rows * op.width)
    kept = op.kept_bytes() * (1 - again if isinstance(op, Activation) else 1)
    size = op.rows * op.width * ELEMENT_BYTES if isinstance(op, Elementwise) else 0.0
    transient = kept + size if isinstance(op, Activation) else 0.0
    return BlockMemory(kept=kept * op.count, transient=transient, unfused=size if op.facts.kept_unfused else 0.0)


def _linear_memory(op: Linear, run: RunSpec) -> BlockMemory:
    if op.facts.routes:
        return BlockMemory(kept=op.tokens * op.outputs * ROUTER_BYTES)
    if op.facts.kept_unfused:
        returned = op.tokens * op.outputs * ELEMENT_BYTES
        return BlockMemory(unfused=returned, exchanged=2 * returned if run.ep > 1 else 0.0)
    return BlockMemory()


def _attention_memory(op: Attention, run: RunSpec, again: float) -> BlockMemory:
    """Queries, keys and values, the output, and one number for each row of the softmax."""
    rows, dims = op.batch * op.queries, op.head_dim + (0 if op.values_are_keys else op.value_dim)
    queries = rows * op.heads * op.head_dim * ELEMENT_BYTES
    keys = 0.0 if op.shares_kv else op.batch * op.keys / run.cp * op.kv_heads * dims * ELEMENT_BYTES
    written = rows * op.heads * (op.value_dim * ELEMENT_BYTES + FP32_BYTES) * (not _repeated(op))
    received = 2 * rows * op.kv_heads * dims * ELEMENT_BYTES if run.cp > 1 else 0.0
    return BlockMemory(kept=(keys + queries) * (1 - again) + written, exchanged=received)


class _Input(NamedTuple):
    """What one linear reads: which tensor, and how many of its elements this rank keeps."""

    tensor: str
    elements: float
    quantized: bool
    weights: int


def _inputs(ops: Sequence[Op], run: RunSpec) -> list[_Input]:
    inputs: list[_Input] = []
    for op in ops:
        if isinstance(op, Linear):
            tensor = op.tensor
            if tensor == "context" and any(read.tensor == "context" for read in inputs):  # after groups of compressed attention
                tensor = op.role
            writers = recomputed_facts()["written_by"].get(tensor, (op.role,))
            again = any(_repeated(other) for other in ops if other.role in writers)
            shards = _sharded(run) if op.reader.reads_shard else 1
            size = 0.0 if again or "wgrad" not in op.passes else op.tokens * op.inputs / shards
            quantized = op.quantized and op.section not in (EMBEDDING, HEAD)
            weights = op.groups * op.inputs * op.outputs * op.count
            inputs.append(_Input(tensor, size * op.count, quantized, weights))
    return inputs


def _kept_once(inputs: Iterable[_Input]) -> dict[str, float]:
    """The bytes of each tensor; one that several linears read is kept once."""
    sizes: dict[str, float] = {}
    for read in inputs:
        sizes[read.tensor] = max(sizes.get(read.tensor, 0.0), read.elements * ELEMENT_BYTES)
    return sizes


def _of_experts(op: Op) -> bool:
    return isinstance(op, Linear) and op.block == "experts"


def _sharded(run: RunSpec) -> int:
    """The number of ranks that tensors outside of the linears are divided among."""
    return run.tp if run.sequence_parallel else 1
