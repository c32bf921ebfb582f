"""Gives every piece of GPU work a class: GEMMs of a precision, quantization, attention, and so on.

The kernel name decides (`measure/kernel_names.toml`). Where it is not specific, the operators that launched the kernel decide
(`operators.toml`). Work that neither identifies is `other`, and listed by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.explain.scopes import Scope, launched_by
from gemmscope.explain.trace import GpuWork, Operator, RecordedTrace
from gemmscope.measure.kernels import KernelFacts, classify, work_in_step
from gemmscope.toml import load_data

LOW = ("FP8", "MXFP8", "FP8 blocks", "FP4")
UNKNOWN_PRECISION = "unknown precision"
PRECISIONS = (*LOW, "BF16", "FP16", "FP32", UNKNOWN_PRECISION)
CLASS_NAMES = {
    "quantize": "quantization", "update": "quantization", "memory": "copies", "attention": "attention", "norm": "norms",
    "activation": "activations", "loss": "loss", "embedding": "embedding and indexing", "optimizer": "optimizer",
    "elementwise": "elementwise", "communication": "communication", "other": "other",
}  # fmt: skip
ORDER = (
    *(f"GEMM {precision}" for precision in PRECISIONS), "quantization", "attention", "norms", "activations", "elementwise",
    "loss", "embedding and indexing", "optimizer", "communication", "copies", "other",
)  # fmt: skip
CHAIN = 14  # most kernels of one eager cast
SCALED_GEMM = "_scaled_"  # in the names of Inductor's own GEMMs: triton_tem_fused__scaled_mm_0
ANONYMOUS = ("elementwise", "memory", "other")
DTYPES = {"e4m3": "FP8", "e5m2": "FP8", "e2m1": "FP4", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}
TORCH_TYPES = (("Float4", "FP4"), ("Float8", "FP8"), ("BFloat16", "BF16"), ("Half", "FP16"), ("float", "FP32"))


@dataclass(frozen=True, slots=True)
class PlacedWork:
    """One piece of work with its class. `name`: as in `ORDER`; `eager`: a cast by PyTorch's own elementwise kernels; `fused`: a
    cast in a kernel that also does a norm or an activation."""

    name: str
    facts: KernelFacts
    precision: str = ""
    eager: bool = False
    fused: bool = False

    @property
    def is_gemm(self) -> bool:
        return bool(self.precision)

    @property
    def rank(self) -> int:
        """Priority where several run at the same time: 0 before 1 before 2."""
        return 2 if self.name == "communication" else 1 if self.name == "copies" else 0


def place(trace: RecordedTrace, scopes: list[Scope]) -> list[PlacedWork]:
    """The class of every piece of work, in the same order."""
    by_external = {each.external: each for each in trace.operators if each.external is not None}
    placed: list[PlacedWork] = []
    latest: dict[Any, PlacedWork] = {}  # the previous GEMM on each stream: a split-K reduction belongs to it
    for work, scope in zip(trace.work, scopes, strict=True):
        made = _place(trace, work, scope, by_external.get(work.external))
        if made.is_gemm:
            if made.precision == UNKNOWN_PRECISION and "reduce" in work.name.lower() and work.stream in latest:
                made = latest[work.stream]
            latest[work.stream] = made
        placed.append(made)
    return placed if any(scope.operators for scope in scopes) else _cast_chains(trace, placed)


def _cast_chains(trace: RecordedTrace, placed: list[PlacedWork]) -> list[PlacedWork]:
    """Without operators: the small PyTorch kernels that precede a copy into FP8 belong to that cast."""
    made = list(placed)
    for number, work in enumerate(trace.work):
        if "float8_copy" not in work.name:
            continue
        for before in range(number - 1, max(number - CHAIN, -1), -1):
            each = trace.work[before]
            if made[before].name not in ("elementwise", "quantization", "copies") or not (each.copy or "at::native" in each.name):
                break
            if made[before].name == "elementwise":
                made[before] = PlacedWork("quantization", made[before].facts, eager=True)
    return made


def _place(trace: RecordedTrace, work: GpuWork, scope: Scope, operator: Operator | None) -> PlacedWork:
    facts, done = classify(work.name), work_in_step(work.name)
    kind: str = "memory" if work.copy and done.kernel_class != "communication" else done.kernel_class
    if work.collective:
        kind = "communication"
    if kind == "communication":
        return PlacedWork("communication", facts)
    if scope.phase == "optimizer" and kind not in ("attention", "memory"):
        return PlacedWork("optimizer", facts)
    if kind == "gemm":
        precision = _precision(work.name, facts, operator)
        return PlacedWork(f"GEMM {precision}", facts, precision)
    eager = False
    if kind in ANONYMOUS and not work.copy and not (kind == "elementwise" and work.name.startswith("triton_")):
        by_operator = _class_of_operators((*(each.name for each in scope.operators), launched_by(trace, work)))
        eager = by_operator == "quantize"
        kind = by_operator or kind
    elif kind == "loss" and "LogSoftMax" not in work.name and launched_by(trace, work).startswith("aten::_softmax"):
        kind = "attention"
    eager = eager or (kind == "quantize" and "at::native" in work.name)
    return PlacedWork(CLASS_NAMES[kind], facts, eager=eager, fused=done.beside is not None)


def _precision(name: str, facts: KernelFacts, operator: Operator | None) -> str:
    """Precision of the operands: from the kernel name, else from the input types of the operator."""
    if facts.operands is not None:
        found = DTYPES[facts.operands[0]]
        if found == "FP8" and facts.scales == "block32":
            return "MXFP8"
        return "FP8 blocks" if found == "FP8" and facts.scales == "block128" else found
    types = " ".join(str(each) for each in (operator.types if operator else ())[:3])
    if "Float4" not in types and ("_scaled" in (operator.name if operator else "") or SCALED_GEMM in name):
        return "FP8"
    return next((name for word, name in TORCH_TYPES if word in types), UNKNOWN_PRECISION)


@cache
def _class_of_operators(names: tuple[str, ...]) -> str:
    """The class that the operators give, innermost first; empty if none does."""
    for rule in _rules()["operator"]:
        if any(re.search(rule["found"], name) for name in reversed(names)):
            return str(rule["class"])
    return ""


@cache
def _rules() -> dict[str, Any]:
    return load_data("gemmscope.explain", "operators.toml")
