"""Does the closed form say what the live model does? Every product, every count, every parameter, every layer's mask."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention
from gemmscope.workload.trace import Trace, gemm_counts


@dataclass(frozen=True)
class Difference:
    """One disagreement: how often the closed form says it happens, and how often it was seen."""

    what: str
    derived: int
    traced: int


def comparable_run(run: RunSpec) -> RunSpec:
    """The same micro-batch as one unsharded process runs it with projections stored as Hugging Face does."""
    return RunSpec(run.micro_batch_size, run.sequence_length, separate_projections=True)


def differences(model: ModelSpec, run: RunSpec, trace: Trace) -> list[Difference]:
    """Everything on which the closed form and the trace disagree; empty when they are equal."""
    workload = derive(model, comparable_run(run))
    found = [
        Difference(f"{which} {m}x{k}x{n}" + (f" in {groups} groups" if groups > 1 else ""), derived, traced)
        for (which, m, k, n, groups), derived, traced in _unequal(gemm_counts(workload.gemms()), gemm_counts(trace.gemms))
    ]
    expected: Counter[tuple[str, int, int, int, int]] = Counter()
    for op in workload.ops:
        if isinstance(op, Attention):
            for product in op.products():
                expected[product] += op.count
    seen: Counter[tuple[str, int, int, int, int]] = Counter()
    for traced_product in trace.products:
        key = (traced_product.direction, traced_product.m, traced_product.k, traced_product.n, traced_product.batch)
        seen[key] += traced_product.count
    found += [
        Difference(f"attention {direction} {batch} x {m}x{k}x{n}", derived, traced)
        for (direction, m, k, n, batch), derived, traced in _unequal(expected, seen)
    ]
    if workload.parameters != trace.parameters:
        found.append(Difference("parameters", workload.parameters, trace.parameters))
    found += [Difference(f"{op.kind} in {op.name}", 0, op.count) for op in trace.remainder]
    return found + _masks(model, trace)


def _masks(model: ModelSpec, trace: Trace) -> list[Difference]:
    """Causality and sliding windows, layer by layer, as far as the live model tells."""
    found = []
    causal = [layer.attention.causal for layer in model.layers]
    if trace.causal is not None and set(causal) != {trace.causal}:
        found.append(Difference("layers with causal attention", sum(causal), len(causal) if trace.causal else 0))
    unequal: dict[tuple[int, int], list[int]] = {}
    for index, (layer, traced) in enumerate(zip(model.layers, trace.windows or (), strict=False)):
        if layer.attention.window != traced:
            unequal.setdefault((layer.attention.window or 0, traced or 0), []).append(index)
    for (derived, traced), layers in unequal.items():
        shown = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
        found.append(Difference(f"sliding window (0: none) of {len(layers)} layers ({shown})", derived, traced))
    return found


def _unequal(
    derived: Counter[tuple[str, int, int, int, int]], traced: Counter[tuple[str, int, int, int, int]]
) -> list[tuple[tuple[str, int, int, int, int], int, int]]:
    keys = dict.fromkeys([*derived, *traced])
    return [(key, derived[key], traced[key]) for key in keys if derived[key] != traced[key]]
