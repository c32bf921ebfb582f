"""Gives every piece of GPU work a class that people know: which products in which precision, quantization, attention, …

The kernel's name decides (`measure/kernel_names.toml`). Where it does not tell, the operators that launched it do
(`operators.toml`); where they do not either, the work is `other`, and listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.explain.scopes import Scope, launched_by
from gemmscope.explain.trace import Operator, Trace, Work
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
CHAIN = 14  # kernels that an eager cast takes at most
SCALED_PRODUCT = "_scaled_"  # of Inductor's own products: triton_tem_fused__scaled_mm_0
ANONYMOUS = ("elementwise", "memory", "other")
DTYPES = {"e4m3": "FP8", "e5m2": "FP8", "e2m1": "FP4", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}
TORCH_TYPES = (("Float4", "FP4"), ("Float8", "FP8"), ("BFloat16", "BF16"), ("Half", "FP16"), ("float", "FP32"))


@dataclass(frozen=True, slots=True)
class Placed:
    """One piece of work with its class. `name`: as in `ORDER`; `unfused`: a cast by PyTorch's own elementwise kernels;
    `rides`: a cast in a kernel that does a norm or an activation as well.
    """

    name: str
    facts: KernelFacts
    precision: str = ""
    unfused: bool = False
    rides: bool = False

    @property
    def is_product(self) -> bool:
        return bool(self.precision)

    @property
    def rank(self) -> int:
        """Who owns a moment in which several run: 0 before 1 before 2."""
        return 2 if self.name == "communication" else 1 if self.name == "copies" else 0


def place(trace: Trace, found: list[Scope]) -> list[Placed]:
    """Every piece of work, in its order."""
    by_external = {each.external: each for each in trace.operators if each.external is not None}
    placed: list[Placed] = []
    latest: dict[Any, Placed] = {}  # the product before, on each stream: what a split-K reduction belongs to
    for work, scope in zip(trace.work, found, strict=True):
        made = _place(trace, work, scope, by_external.get(work.external))
        if made.is_product:
            if made.precision == UNKNOWN_PRECISION and "reduce" in work.name.lower() and work.stream in latest:
                made = latest[work.stream]
            latest[work.stream] = made
        placed.append(made)
    return placed if any(scope.operators for scope in found) else _cast_chains(trace, placed)


def _cast_chains(trace: Trace, placed: list[Placed]) -> list[Placed]:
    """Where no operator leads to a kernel: PyTorch's small kernels that lead up to a copy into FP8 are that cast."""
    made = list(placed)
    for number, work in enumerate(trace.work):
        if "float8_copy" not in work.name:
            continue
        for before in range(number - 1, max(number - CHAIN, -1), -1):
            each = trace.work[before]
            if made[before].name not in ("elementwise", "quantization", "copies") or not (each.copy or "at::native" in each.name):
                break
            if made[before].name == "elementwise":
                made[before] = Placed("quantization", made[before].facts, unfused=True)
    return made


def _place(trace: Trace, work: Work, scope: Scope, operator: Operator | None) -> Placed:
    facts, done = classify(work.name), work_in_step(work.name)
    kind: str = "memory" if work.copy and done.kernel_class != "communication" else done.kernel_class
    if work.collective:
        kind = "communication"
    if kind == "communication":
        return Placed("communication", facts)
    if scope.phase == "optimizer" and kind not in ("attention", "memory"):
        return Placed("optimizer", facts)
    if kind == "gemm":
        precision = _precision(work.name, facts, operator)
        return Placed(f"GEMM {precision}", facts, precision)
    unfused = False
    if kind in ANONYMOUS and not work.copy and not (kind == "elementwise" and work.name.startswith("triton_")):
        told = _told((*(each.name for each in scope.operators), launched_by(trace, work)))
        unfused = told == "quantize"
        kind = told or kind
    elif kind == "loss" and "LogSoftMax" not in work.name and launched_by(trace, work).startswith("aten::_softmax"):
        kind = "attention"
    unfused = unfused or (kind == "quantize" and "at::native" in work.name)
    return Placed(CLASS_NAMES[kind], facts, unfused=unfused, rides=done.rides)


def _precision(name: str, facts: KernelFacts, operator: Operator | None) -> str:
    """What the operands are: by the kernel's name, else by the types that its operator was given."""
    if facts.operands is not None:
        found = DTYPES[facts.operands[0]]
        if found == "FP8" and facts.scales == "block32":
            return "MXFP8"
        return "FP8 blocks" if found == "FP8" and facts.scales == "block128" else found
    types = " ".join(str(each) for each in (operator.types if operator else ())[:3])
    if "Float4" not in types and ("_scaled" in (operator.name if operator else "") or SCALED_PRODUCT in name):
        return "FP8"
    return next((name for word, name in TORCH_TYPES if word in types), UNKNOWN_PRECISION)


@cache
def _told(names: tuple[str, ...]) -> str:
    """By the operators, innermost first."""
    for rule in _rules()["operator"]:
        if any(re.search(rule["found"], name) for name in reversed(names)):
            return str(rule["class"])
    return ""


@cache
def _rules() -> dict[str, Any]:
    return load_data("gemmscope.explain", "operators.toml")
