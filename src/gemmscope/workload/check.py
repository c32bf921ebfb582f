"""Compares the closed form with the live model: every GEMM, every count, every parameter, every layer's mask.

Of mixers (state-space scans, delta rules), the linears, the convolutions and the sizes that the model hands to the kernel of the
recurrence are compared. GEMMs inside a recurrence are not: the closed form has those of the fused kernels, and transformers'
PyTorch fallback is another algorithm.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gemmscope.grouping import grouped
from gemmscope.model.layer_spec import LayerSpec, MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention, Gemm, Op
from gemmscope.workload.residual_streams import StreamMix
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.sparse import IndexScores
from gemmscope.workload.trace import MIXER, ModuleTrace


@dataclass(frozen=True)
class Difference:
    """One difference: the number in the closed form, and the number in the trace."""

    what: str
    derived: int
    traced: int


def comparable_run(run: RunSpec) -> RunSpec:
    """The same micro-batch in one unsharded process, with projections stored as Hugging Face stores them."""
    batch = run.micro_batch_size, run.sequence_length
    return RunSpec(*batch, separate_projections=True, lora=run.lora, lora_linears=run.lora_linears)


def differences(model: ModelSpec, run: RunSpec, trace: ModuleTrace) -> list[Difference]:
    """Every difference between the closed form and the trace; empty when they are equal.

    Prediction layers are left out: Hugging Face's classes have none.
    """
    workload = derive(as_live(model), comparable_run(run))
    result = _unequal(_linears(workload.gemms()), _linears(trace.gemms))
    batched = [op for op in workload.ops if isinstance(op, (Attention, IndexScores, StreamMix))]
    derived = [(gemm, op.count) for op in batched for gemm in op.batched_gemms()]
    traced = [((op.direction, op.m, op.k, op.n, op.batch), op.count) for op in trace.batched_gemms if op.section != MIXER]
    for op in trace.attentions:
        runs = {"forward": round(op.count * op.forward_runs), "backward": op.count * op.backward_runs}
        traced += [(gemm, runs[gemm[0]]) for gemm in op.batched_gemms()]
    result += _unequal(_attention(derived), _attention(traced))
    if not has_fallback(trace):
        result += _unequal(_kernels(workload.ops), _kernels((*trace.scans, *trace.causal_convolutions)))
    if workload.parameters != trace.parameters:
        result.append(Difference("parameters", workload.parameters, trace.parameters))
    result += [Difference(f"{op.kind} in {op.name}", 0, op.count) for op in trace.convolutions if op.section != MIXER]
    return result + _masks(model, trace)


def as_live(model: ModelSpec) -> ModelSpec:
    """The model as transformers' class runs it: without prediction layers, and with every expert on every token if it does so."""

    def dense(layer: LayerSpec) -> LayerSpec:
        moe = layer.mlp
        return replace(layer, mlp=replace(moe, top_k=moe.experts)) if isinstance(moe, MoeSpec) and moe.stored_dense else layer

    return replace(model, prediction_layers=0, layers=tuple(map(dense, model.layers)))


def has_fallback(trace: ModuleTrace) -> bool:
    """Whether a mixer ran in plain PyTorch, not by a function that stands for its kernel."""
    return any(op.section == MIXER for op in (*trace.batched_gemms, *trace.convolutions))


def recurrences(trace: ModuleTrace) -> int:
    """How many recurrences the live model handed to a kernel."""
    return sum(op.count for op in trace.scans)


Counts = Iterable[tuple[str, int]]
"""What runs, as texts of differences, and how often; a text may occur several times."""


def _kernels(ops: Iterable[Op]) -> Counts:
    """The kernels of mixers."""
    for op in ops:
        match op:
            case Scan():
                # others than SSD repeat the keys for each head before the kernel, and have its chunks
                of_ssd = f", {op.groups} groups, chunks of {op.chunk}" if op.rule == "ssd" else ""
                sizes = f"{op.heads} heads of {op.value_dim}, keys of {op.key_dim}{of_ssd}"
                yield f"{op.rule} on {op.batch} x {op.sequence}: {sizes}", op.count
            case CausalConv():
                yield f"channels of causal convolutions on {op.rows} tokens, kernel {op.kernel}", op.width * op.count


def _masks(model: ModelSpec, trace: ModuleTrace) -> list[Difference]:
    """Causality and sliding windows, layer by layer, as far as the live model shows them."""
    result = []
    causal = [attention.causal for attention in model.attentions]
    if causal and trace.causal is not None and set(causal) != {trace.causal}:
        result.append(Difference("layers with causal attention", sum(causal), len(causal) if trace.causal else 0))
    reaches = [
        ((layer.attention.window or layer.attention.chunk or 0, traced or 0), index)
        for index, (layer, traced) in enumerate(zip(model.layers, trace.windows or (), strict=False))
        if layer.attention is not None
    ]
    for (derived, traced), layers in grouped(reaches).items():
        if derived == traced:
            continue
        numbers = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
        result.append(Difference(f"sliding window (0: none) of {len(layers)} layers ({numbers})", derived, traced))
    return result


def _linears(gemms: Iterable[Gemm]) -> Counts:
    """The GEMMs with a weight, without those of empty tensors."""
    for gemm in gemms:
        if gemm.flops:
            yield f"{gemm.pass_name} {gemm.shape}" + (f" in {gemm.groups} groups" if gemm.groups > 1 else ""), gemm.count


def _attention(gemms: Iterable[tuple[tuple[str, int, int, int, int], int]]) -> Counts:
    return ((f"attention {direction} {batch} x {m}x{k}x{n}", count) for (direction, m, k, n, batch), count in gemms)


def _unequal(derived: Counts, traced: Counts) -> list[Difference]:
    here, there = ({text: sum(counts) for text, counts in grouped(side).items()} for side in (derived, traced))
    pairs = {text: (here.get(text, 0), there.get(text, 0)) for text in {**here, **there}}
    return [Difference(text, *pair) for text, pair in pairs.items() if pair[0] != pair[1]]
