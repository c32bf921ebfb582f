"""Compares the closed form with the live model: every GEMM, every count, every parameter, every layer's mask."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention
from gemmscope.workload.trace import ModuleTrace, gemm_counts


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
    result = [
        Difference(f"{which} {m}x{k}x{n}" + (f" in {groups} groups" if groups > 1 else ""), derived, traced)
        for (which, m, k, n, groups), derived, traced in _unequal(gemm_counts(workload.gemms()), gemm_counts(trace.gemms))
    ]
    expected: Counter[tuple[str, int, int, int, int]] = Counter()
    for op in workload.ops:
        if isinstance(op, Attention):
            for gemm in op.batched_gemms():
                expected[gemm] += op.count
    traced_gemms: Counter[tuple[str, int, int, int, int]] = Counter()
    for batched in trace.batched_gemms:
        traced_gemms[(batched.direction, batched.m, batched.k, batched.n, batched.batch)] += batched.count
    result += [
        Difference(f"attention {direction} {batch} x {m}x{k}x{n}", derived, traced)
        for (direction, m, k, n, batch), derived, traced in _unequal(expected, traced_gemms)
    ]
    if workload.parameters != trace.parameters:
        result.append(Difference("parameters", workload.parameters, trace.parameters))
    result += [Difference(f"{op.kind} in {op.name}", 0, op.count) for op in trace.remainder]
    return result + _masks(model, trace)


def _masks(model: ModelSpec, trace: ModuleTrace) -> list[Difference]:
    """Causality and sliding windows, layer by layer, as far as the live model shows them."""
    result = []
    causal = [layer.attention.causal for layer in model.layers]
    if trace.causal is not None and set(causal) != {trace.causal}:
        result.append(Difference("layers with causal attention", sum(causal), len(causal) if trace.causal else 0))
    unequal: dict[tuple[int, int], list[int]] = {}
    for index, (layer, traced) in enumerate(zip(model.layers, trace.windows or (), strict=False)):
        if layer.attention.window != traced:
            unequal.setdefault((layer.attention.window or 0, traced or 0), []).append(index)
    for (derived, traced), layers in unequal.items():
        numbers = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
        result.append(Difference(f"sliding window (0: none) of {len(layers)} layers ({numbers})", derived, traced))
    return result


def _unequal(
    derived: Counter[tuple[str, int, int, int, int]], traced: Counter[tuple[str, int, int, int, int]]
) -> list[tuple[tuple[str, int, int, int, int], int, int]]:
    keys = dict.fromkeys([*derived, *traced])
    return [(key, derived[key], traced[key]) for key in keys if derived[key] != traced[key]]
