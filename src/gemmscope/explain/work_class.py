"""Gives every piece of GPU work a class: GEMMs of a precision, quantization, attention, and so on.

The kernel name decides (`engine/kernel_names.toml`). Where it is not specific, the operators that launched the kernel decide
(`operators.toml`). Work that neither identifies is `other`, and listed by name.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.engine.kernels import KernelFacts, classify, is_softmax, work_in_step
from gemmscope.explain.recorded_trace import GpuWork, Operator, RecordedTrace
from gemmscope.explain.scopes import EVALUATES, Scope
from gemmscope.grouping import grouped
from gemmscope.recipe.precisions import precision_shown, precisions
from gemmscope.toml import FactTable, load_data

BF16, FP16, FP8, TF32, FP32 = (precisions()[name].in_traces for name in ("bf16", "fp16", "fp8", "tf32", "fp32"))
MULTIPLIED = [known for known in precisions().values() if known.rates]
LOW = tuple(known.in_traces for known in MULTIPLIED if known.low)
WEIGHT_ONLY = tuple(f"{known.in_traces} weights" for known in precisions().values() if known.weight_only)
UNKNOWN_PRECISION = "unknown precision"
PRECISIONS = (*LOW, *WEIGHT_ONLY, *(known.in_traces for known in MULTIPLIED if not known.low), UNKNOWN_PRECISION)
CLASSES: FactTable = load_data("gemmscope.explain", "classes.toml")["class"]
OPERATORS = load_data("gemmscope.explain", "operators.toml")
OPERATOR_RULES: list[dict[str, str]] = OPERATORS["operator"]
CLASS_NAMES = {kernel: name for name, facts in CLASSES.items() for kernel in facts["kernels"]}
ORDER = (*(f"GEMM {precision}" for precision in PRECISIONS), *CLASSES)
BESIDE, AFTER_ROOT = 40, 3  # most kernels between a softmax and its products or within an eager norm; and after its root
NORM_OPERATORS = ("pow", "mean", "add", "rsqrt", "mul", "copy_")
SCALED_GEMM = "_scaled_"  # in the names of Inductor's own GEMMs: triton_tem_fused__scaled_mm_0
ANONYMOUS = ("elementwise", "memory", "other")
OF_TORCH_TYPES = [known for known in MULTIPLIED if known.torch_type]


@dataclass(frozen=True, slots=True)
class WorkClass:
    """One piece of work with its class. `name`: as in `ORDER`; `eager`: by PyTorch's own elementwise kernels, a cast or a part of
    attention; `fused`: a cast in a kernel that also does a norm or an activation."""

    name: str
    facts: KernelFacts
    precision: str = ""
    eager: bool = False
    fused: bool = False
    copy: bool = False  # by a copy engine, or a memset
    multiplies: str = ""  # the precision of a convolution
    disagrees: str = ""  # the class by the kernel's name, where the operator that launched it says something else

    @property
    def is_gemm(self) -> bool:
        return bool(self.precision)

    @property
    def rank(self) -> int:
        """Priority where several run at the same time: 0 before 1 before 2. A kernel that copies is computation."""
        return 1 if self.name == "communication" else 2 if self.copy else 0


def classify_work(trace: RecordedTrace, scopes: list[Scope]) -> list[WorkClass]:
    """The class of every piece of work, in the same order."""
    by_external = trace.operators_by_id()
    work_classes: list[WorkClass] = []
    latest: dict[Any, WorkClass] = {}  # the previous GEMM on each stream: a split-K reduction or an epilogue belongs to it
    for work, scope in zip(trace.work, scopes, strict=True):
        result = _class_of(trace, work, scope, by_external.get(work.external))
        if result.is_gemm and result.facts.finishes:
            before = latest.get(work.stream, result)
            result = WorkClass(before.name, result.facts, before.precision)
        elif result.is_gemm:
            latest[work.stream] = result
        work_classes.append(result)
    _unfused_attention(trace, scopes, work_classes)
    _eager_norms(trace, work_classes)
    return work_classes


def _unfused_attention(trace: RecordedTrace, scopes: list[Scope], work_classes: list[WorkClass]) -> None:
    """A softmax between batched GEMMs is attention, and so are these, and the scale, the mask and the dropout between them.
    Backward has two on either side."""
    for places in grouped((work.stream, number) for number, work in enumerate(trace.work)).values():
        products = [at for at, number in enumerate(places) if work_classes[number].is_gemm]
        for at, number in enumerate(places):
            name = trace.work[number].name
            if work_classes[number].name not in ("loss", "attention", "activations") or not is_softmax(name):
                continue
            next_one, most = bisect_left(products, at), 2 if "ackward" in name else 1
            around = products[max(next_one - most, 0) : next_one], products[next_one : next_one + most]
            batched = [one for side in around for one in side if abs(one - at) <= BESIDE and _batched(trace, scopes, places[one])]
            if batched and min(batched) < at < max(batched):
                for one in range(min(batched), max(batched) + 1):
                    known, taken = work_classes[places[one]], one == at or one in batched
                    if taken or known.name == "elementwise":
                        work_classes[places[one]] = WorkClass("attention", known.facts, known.precision, eager=not taken)


def _batched(trace: RecordedTrace, scopes: list[Scope], number: int) -> bool:
    """Whether an operator that multiplies batches of matrices launched it."""
    launcher = trace.operator_names.get(trace.work[number].external, "")
    return "bmm" in launcher or any("bmm" in operator.name for operator in scopes[number].operators[-2:])


def _eager_norms(trace: RecordedTrace, work_classes: list[WorkClass]) -> None:
    """An RMSNorm of single operators: power, mean, sum, reciprocal root, products and conversions around the root."""
    launchers = [trace.operator_names.get(work.external, "").removeprefix("aten::") for work in trace.work]
    for number in (number for number, name in enumerate(launchers) if name == "rsqrt"):
        first = next((at for at in range(number - 1, max(number - BESIDE, -1), -1) if launchers[at] == "pow"), None)
        if first is None or "mean" not in launchers[first:number]:
            continue
        end = number + 1
        while end < len(launchers) and end <= number + AFTER_ROOT and launchers[end] in ("mul", "copy_"):
            end += 1
        for at in range(first, end):
            if work_classes[at].name == "elementwise" and launchers[at] in NORM_OPERATORS:
                work_classes[at] = WorkClass("norms", work_classes[at].facts)


def _class_of(trace: RecordedTrace, work: GpuWork, scope: Scope, operator: Operator | None) -> WorkClass:
    facts, done = classify(work.name), work_in_step(work.name)
    if work.message is not None or done.kernel_class == "communication":
        return WorkClass("communication", facts)
    kind: str = "memory" if work.copy else done.kernel_class
    if kind == "optimizer" and trace.phase.without_optimizer:  # multi_tensor_apply and the like are used elsewhere, too
        kind = "elementwise"
    if scope.phase == "optimizer" and kind not in ("attention", "linear attention", "memory"):
        return WorkClass("optimizer", facts)
    launcher = trace.operator_names.get(work.external, "")
    if kind == "gemm":
        precision = _precision(work.name, facts, operator)
        if _class_of_operators((*(opened.name for opened in scope.operators[-2:]), launcher)) == "convolution":
            return WorkClass("convolution", facts, multiplies=precision)
        return WorkClass(f"GEMM {precision}", facts, precision)
    eager = kind == "quantize" and "at::native" in work.name
    if kind in ANONYMOUS and not work.copy and not (kind == "elementwise" and work.name.startswith("triton_")):
        around = "Backward" if scope.phase == "recomputed" else EVALUATES  # these launch sums of gradients themselves
        by_operator = _class_of_operators((*(one.name for one in scope.operators if around not in one.name), launcher))
        if by_operator in ("convolution", "attention") and kind != "other":  # they fill, add and convert there
            by_operator = ""
        eager = by_operator == "quantize"
        kind = by_operator or ("known" if kind == "other" and facts.known else kind)
    elif kind in OPERATORS["first"] and (first := _class_of_operators([launcher])) in OPERATORS["first"] and first != kind:
        return WorkClass(CLASS_NAMES[first], facts, disagrees=CLASS_NAMES[kind])
    multiplies = _precision(work.name, facts, operator) if kind == "convolution" else ""
    return WorkClass(CLASS_NAMES[kind], facts, eager=eager, fused=done.beside is not None, copy=work.copy, multiplies=multiplies)


def _precision(name: str, facts: KernelFacts, operator: Operator | None) -> str:
    """Precision of the operands: from the kernel name, else from the input types of the operator."""
    if facts.operands is not None:
        operands = [(precision_shown(operand, None), operand) for operand in facts.operands]
        (narrow, operand), (wide, _) = sorted(operands, key=lambda pair: pair[0].bytes)
        if narrow != wide and not wide.low:
            return f"{narrow.in_traces} weights" if narrow.weight_only else wide.in_traces
        return precision_shown(operand, facts.scales).in_traces
    types = " ".join(map(str, operator.types[:3])) if operator else ""
    if "Float4" not in types and ("_scaled" in (operator.name if operator else "") or SCALED_GEMM in name):
        return FP8
    return next((known.in_traces for known in OF_TORCH_TYPES if known.torch_type in types), UNKNOWN_PRECISION)


def _class_of_operators(names: Iterable[str]) -> str:
    """The class that the operators give, by the first rule that fits any of them; empty if none does."""
    first = min(map(_first_rule, names), default=len(OPERATOR_RULES))
    return OPERATOR_RULES[first]["class"] if first < len(OPERATOR_RULES) else ""


@cache
def _first_rule(name: str) -> int:
    return next((number for number, rule in enumerate(OPERATOR_RULES) if re.search(rule["found"], name)), len(OPERATOR_RULES))
