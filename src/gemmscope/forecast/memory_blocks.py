"""What one layer, the embedding or the head holds in the memory of one rank: parameters, and what backward needs."""

from collections.abc import Iterable
from typing import NamedTuple

from gemmscope.model.spec import RunSpec
from gemmscope.workload.derive import EMBEDDING, HEAD
from gemmscope.workload.ops import ELEMENT_BYTES, Activation, Attention, Elementwise, GroupedLinear, Linear, Loss, Norm, Op
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.sparse import IndexScores
from gemmscope.workload.streams import StreamMix

FP32_BYTES = 4
ROUTER_BYTES = 9  # per token and expert: FP32 logits and probabilities, and the map of who goes where

# Linears that read the same tensor: it is kept once. Tensor parallelism with sequence parallelism keeps this rank's part of it.
_ATTENTION_INPUT = ("Mixer In", "QKV Proj", "QK Proj", "Q Proj", "K Proj", "V Proj", "Q Down Proj", "KV Down Proj", "KV Proj",
                    "Compressor KV+Gate", "Compressor KV Proj", "Compressor Gate", "Indexer KV+Gate", "Indexer KV Proj",
                    "Indexer Gate", "Indexer Weights", "Indexer K Proj", "Mixer Decay Gate Down",
                    "Mixer Output Gate Down", "QKV Adapter Down")  # fmt: skip
_MLP_INPUT = ("MLP Gate+Up", "MLP Gate", "MLP Up", "Router", "Shared Expert Gate+Up", "Shared Expert Gate", "Shared Expert Up",
              "Shared Expert Scale", "Latent Down Proj", "MLP Adapter Down")  # fmt: skip
_LATENT_INPUT = {"Q Up Proj": "Q Up Proj", "Indexer Q Proj": "Q Up Proj", "KV Up Proj": "KV Up Proj"}
_EXPERT_INPUT = ("Expert Gate+Up", "Expert Gate", "Expert Up")
_GATES = ("Attention Gate", "Mixer Gate")  # the other side is kept by attention and recurrence


class BlockMemory(NamedTuple):
    """One layer, the embedding or the head on one rank: parameters, and bytes that one micro-batch keeps for backward."""

    dense: int = 0  # parameters outside of the experts
    experts: int = 0
    quantized: int = 0  # weights of linears that recipes quantize, in and outside of experts
    quantized_experts: int = 0
    kept: float = 0.0  # by everything but linears
    context: float = 0.0  # of `kept`, what attention writes: recomputed where recomputation is selective
    inputs: float = 0.0  # of linears in high precision; a tensor that several read counts once
    plain: float = 0.0  # of `inputs`, those of linears that are never quantized
    elements: float = 0.0  # that quantized linears read: each keeps its own copy
    recomputable: float = 0.0  # of `inputs`, what norms and activations can compute again
    recomputable_elements: float = 0.0
    context_elements: float = 0.0  # of `elements`, what the output projection of attention reads
    activated_elements: float = 0.0  # and what the last linear of an MLP reads
    first: float = 0.0  # the input of the layer
    transient: float = 0.0  # gradients of activations at the widest point
    exchanged: float = 0.0  # buffers of dispatch, gathered inputs, received keys and values
    unfused: float = 0.0  # kept where kernels are not fused: outputs of experts, inputs of rotary positions
    logits: float = 0.0
    shared: int = 0  # of `dense`, weights that are the same in every layer of this kind

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


NOTHING = BlockMemory()


class Blocks(NamedTuple):
    """What one micro-batch keeps: of every kind of layer, of the embedding, of the head, of a prediction layer."""

    layers: list[BlockMemory]
    embedding: BlockMemory
    head: BlockMemory
    prediction: BlockMemory


def block_memory(ops: Iterable[Op], run: RunSpec, width: int) -> BlockMemory:
    """What the ops of one layer (or the embedding, or the head) hold. `width`: of all residual streams together."""
    dense = experts = quantized = quantized_experts = shared = 0
    kept = context = elements = recomputable_elements = transient = unfused = logits = exchanged = 0.0
    attended = activated = 0.0
    inputs: dict[str, float] = {}
    plain: dict[str, float] = {}
    sharded = run.tp if run.sequence_parallel else 1
    first = run.tokens / sharded * width * ELEMENT_BYTES
    for op in ops:
        if isinstance(op, GroupedLinear) and op.experts:
            experts += op.all_parameters
        else:
            dense += op.all_parameters
            shared += op.parameters if op.shares_weights else 0
        if isinstance(op, Linear):
            key, size = _input(op, sharded)
            if op.name == "Attn Out" and "context" in inputs:  # after the groups of compressed attention
                key = op.name
            inputs[key] = max(inputs.get(key, 0.0), size * op.count)
            if not op.quantized or op.section in (EMBEDDING, HEAD):
                plain[key] = max(plain.get(key, 0.0), size * op.count)
            else:
                elements += size * op.count
                attended += size * op.count if key == "context" else 0.0
                activated += size * op.count if key.endswith("activated") else 0.0
                weights = op.groups * op.inputs * op.outputs * op.count
                quantized += weights
                if isinstance(op, GroupedLinear) and op.experts:
                    quantized_experts += weights
                if key in ("attention", "mlp", "activated", "expert activated"):
                    recomputable_elements += size * op.count
            if op.name == "Router":
                kept += op.tokens * op.outputs * ROUTER_BYTES
            if op.name == "Expert Down":
                returned = op.tokens * op.outputs * ELEMENT_BYTES
                unfused += returned
                exchanged += 2 * returned if run.ep > 1 else 0.0
        elif isinstance(op, Attention):
            rows, dims = op.batch * op.queries, op.head_dim + (0 if op.values_are_keys else op.value_dim)
            if not op.shares_kv:
                kept += op.batch * op.keys / run.cp * op.kv_heads * dims * ELEMENT_BYTES
            kept += rows * op.heads * op.head_dim * ELEMENT_BYTES
            context = rows * op.heads * op.value_dim * ELEMENT_BYTES
            kept += context + rows * op.heads * FP32_BYTES
            exchanged += 2 * rows * op.kv_heads * dims * ELEMENT_BYTES if run.cp > 1 else 0.0
        elif isinstance(op, StreamMix) and not op.stacked:  # else the norm before it keeps the streams
            kept += op.rows * op.width * op.streams * ELEMENT_BYTES * op.count
        elif isinstance(op, (Scan, CausalConv, IndexScores)):
            kept += op.kept_bytes() * op.count
        elif isinstance(op, Loss):
            logits = op.rows * op.width
        elif isinstance(op, Activation):
            read = (op.forward_tensors - 1) * op.rows * op.width * ELEMENT_BYTES
            kept += read * op.count
            transient = max(transient, read + op.rows * op.width * ELEMENT_BYTES)
        elif op.name == "Rotary" and isinstance(op, Elementwise):
            unfused += op.rows * op.width * ELEMENT_BYTES
        elif op.name.endswith(" Mean") and isinstance(op, Elementwise):  # values and their weights
            kept += 2 * op.rows * op.width * ELEMENT_BYTES * op.count
        elif isinstance(op, Elementwise) and (isinstance(op, Norm) or op.name in _GATES):
            kept += op.rows * op.width * ELEMENT_BYTES * op.count
    if run.tp > 1:
        exchanged += 2 * run.tokens * width * ELEMENT_BYTES
    return BlockMemory(
        dense, experts, quantized, quantized_experts, kept, context,
        sum(size * ELEMENT_BYTES for key, size in inputs.items() if key != "context"),
        sum(size * ELEMENT_BYTES for key, size in plain.items()),
        elements,
        sum(size * ELEMENT_BYTES for key, size in inputs.items() if key in ("attention", "mlp", "activated", "expert activated")),
        recomputable_elements, attended, activated, first, transient + 2 * first, exchanged, unfused, logits, shared,
    )  # fmt: skip


def _input(op: Linear, sharded: int) -> tuple[str, float]:
    """Which tensor a linear reads, and how many elements of it this rank keeps."""
    size = float(op.tokens * op.inputs)
    if op.name in ("Attn Out", "Attn Out Groups"):
        return "context", size  # what attention keeps anyway
    if op.name in _ATTENTION_INPUT:
        return "attention", size / (sharded if "Down" not in op.name else 1)
    if op.name in _MLP_INPUT:
        return "mlp", size / (sharded if op.name not in ("Router", "Shared Expert Scale", "Latent Down Proj") else 1)
    if op.name in _LATENT_INPUT:
        return _LATENT_INPUT[op.name], size / sharded
    if op.name in _EXPERT_INPUT:
        return "expert", size
    if op.name.endswith(" Down"):
        return "expert activated" if op.name == "Expert Down" else "activated", size
    return op.name, size / (sharded if op.name == "LM Head" else 1)
