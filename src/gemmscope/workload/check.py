"""Compares the closed form with the live model: every GEMM, every count, every parameter, every layer's mask."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention, Gemm
from gemmscope.workload.trace import ModuleTrace


@dataclass(frozen=True)
class Difference:
    """One difference: the number in the closed form, and the number in the trace."""

    what: str
    derived: int
    traced: int


def comparable_run(run: RunSpec) -> RunSpec:
    """The same micro-batch in one unsharded process, with projections stored as Hugging Face stores them."""
    return RunSpec(run.micro_batch_size, run.sequence_length, separate_projections=True)


def differences(model: ModelSpec, run: RunSpec, trace: ModuleTrace) -> list[Difference]:
    """Every difference between the closed form and the trace; empty when they are equal."""
    workload = derive(model, comparable_run(run))
    result = _unequal(_linear_counts(workload.gemms()), _linear_counts(trace.gemms))
    derived = [(gemm, op.count) for op in workload.ops if isinstance(op, Attention) for gemm in op.batched_gemms()]
    traced = [((op.direction, op.m, op.k, op.n, op.batch), op.count) for op in trace.batched_gemms]
    result += _unequal(_attention_counts(derived), _attention_counts(traced))
    if workload.parameters != trace.parameters:
        result.append(Difference("parameters", workload.parameters, trace.parameters))
    result += [Difference(f"{op.kind} in {op.name}", 0, op.count) for op in trace.remainder]
    return result + _masks(model, trace)


def _masks(model: ModelSpec, trace: ModuleTrace) -> list[Difference]:
    """Causality and sliding windows, layer by layer, as far as the live model shows them."""
    result = []
    causal = [attention.causal for attention in model.attentions]
    if trace.causal is not None and set(causal) != {trace.causal}:
        result.append(Difference("layers with causal attention", sum(causal), len(causal) if trace.causal else 0))
    unequal: dict[tuple[int, int], list[int]] = {}
    for index, (layer, traced) in enumerate(zip(model.layers, trace.windows or (), strict=False)):
        if layer.attention is not None and layer.attention.window != traced:
            unequal.setdefault((layer.attention.window or 0, traced or 0), []).append(index)
    for (derived, traced), layers in unequal.items():
        numbers = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
        result.append(Difference(f"sliding window (0: none) of {len(layers)} layers ({numbers})", derived, traced))
    return result


def _linear_counts(gemms: Iterable[Gemm]) -> Counter[str]:
    """How often each GEMM with a weight runs, by its text in a difference."""
    counts: Counter[str] = Counter()
    for gemm in gemms:
        counts[f"{gemm.pass_name} {gemm.shape}" + (f" in {gemm.groups} groups" if gemm.groups > 1 else "")] += gemm.count
    return counts


def _attention_counts(gemms: Iterable[tuple[tuple[str, int, int, int, int], int]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (direction, m, k, n, batch), count in gemms:
        counts[f"attention {direction} {batch} x {m}x{k}x{n}"] += count
    return counts


def _unequal(derived: Counter[str], traced: Counter[str]) -> list[Difference]:
    names = dict.fromkeys([*derived, *traced])
    return [Difference(name, derived[name], traced[name]) for name in names if derived[name] != traced[name]]
