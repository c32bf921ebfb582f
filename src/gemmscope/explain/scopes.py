"""The operators that each piece of GPU work came from: those that were open on the launching thread at its launch.

They distinguish forward from backward and recomputed from first-time work, and they tell to which operation an anonymous
elementwise kernel belongs.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any, Literal

from gemmscope.explain.trace import ATTENTION_FORWARD, GpuWork, Operator, RecordedTrace

Phase = Literal["forward", "backward", "recomputed", "optimizer", ""]
FORWARD_FUNCTIONS = re.compile(
    r"^aten::linear$|Linear|MLP|RMSNorm|LayerNorm|FlashAttn|FusedAttn|^CompiledFunction$|^matmul_with_hp_or"
)
EVALUATES = "autograd::engine::evaluate_function"
OPTIMIZER_MARKS = ("Optimizer.step", "optimizer.step", "optimizer_step", "optimizer")


@dataclass(frozen=True)
class Scope:
    """Where a piece of work came from. `operators`: outermost first; `launched`: None if the launch is not known."""

    operators: tuple[Operator, ...] = ()
    launched: float | None = None
    phase: Phase = ""

    def inside(self, *words: str) -> bool:
        return any(word in each.name for each in self.operators for word in words)


def scopes(trace: RecordedTrace) -> list[Scope]:
    """One scope for every piece of work, in the same order."""
    by_thread: dict[Any, list[tuple[float, int]]] = {}
    for number, work in enumerate(trace.work):
        call = trace.launches.get(work.correlation)
        if call is not None:
            by_thread.setdefault(call.thread, []).append((call.start, number))
    operators: dict[Any, list[Operator]] = {}
    for operator in trace.operators:
        operators.setdefault(operator.thread, []).append(operator)
    optimizing = optimizer_spans(trace)
    result = [Scope()] * len(trace.work)
    for thread, launches in by_thread.items():
        launches.sort()
        opened: list[Operator] = []
        waiting = operators.get(thread, [])
        at = 0
        current: tuple[Operator, ...] = ()
        for moment, number in launches:
            changed = False
            while at < len(waiting) and waiting[at].start <= moment:
                opened = [each for each in opened if each.end > waiting[at].start]
                opened.append(waiting[at])
                at, changed = at + 1, True
            if changed or any(each.end < moment for each in opened):
                opened = [each for each in opened if each.end >= moment]
                current = tuple(opened)
            phase = _phase(current, trace) if not _within(optimizing, moment) else "optimizer"
            result[number] = Scope(current, moment, phase)
    return _whole_layers(result)


def _whole_layers(result: list[Scope]) -> list[Scope]:
    """Mark a recomputed layer from its first function to its last, including work without a function of its own."""
    spans: dict[int, tuple[float, float]] = {}
    for scope in result:
        if scope.phase == "recomputed" and scope.launched is not None:
            node = id(_node(scope))
            first, last = spans.get(node, (scope.launched, scope.launched))
            spans[node] = min(first, scope.launched), max(last, scope.launched)
    return [
        replace(scope, phase="recomputed")
        if scope.phase == "backward" and _between(spans.get(id(_node(scope))), scope)
        else scope
        for scope in result
    ]


def _node(scope: Scope) -> Operator | None:
    return next((each for each in scope.operators if each.name.startswith(EVALUATES)), None)


def _between(span: tuple[float, float] | None, scope: Scope) -> bool:
    return span is not None and scope.launched is not None and span[0] <= scope.launched <= span[1]


def _phase(current: tuple[Operator, ...], trace: RecordedTrace) -> Phase:
    """Forward functions inside a node of backward are recomputed."""
    if not trace.operators:
        return ""
    node = next((number for number, each in enumerate(current) if each.name.startswith(EVALUATES)), None)
    if node is None:
        return "backward" if any(_is_backward(each.name) for each in current) else "forward"
    return "recomputed" if any(is_forward_function(each.name) for each in current[node + 1 :]) else "backward"


def is_forward_function(name: str) -> bool:
    """Operators that backward never calls itself: inside backward, they recompute a layer.

    >>> [is_forward_function(name) for name in ("_LayerNormLinear", "aten::linear", "aten::mm", "_LinearBackward")]
    [True, True, False, False]
    """
    if _is_backward(name) or name.endswith("_backward"):
        return False
    return FORWARD_FUNCTIONS.search(name) is not None or ATTENTION_FORWARD.match(name) is not None


def _is_backward(name: str) -> bool:
    return "Backward" in name


def optimizer_spans(trace: RecordedTrace) -> list[tuple[float, float]]:
    """When the CPU was in the optimizer: its annotations, merged where they overlap.

    Lightning passes forward and backward to `optimizer.step` as a closure: there the optimizer begins after the end of backward.
    """
    nodes = [each for each in trace.operators if each.name.startswith(EVALUATES)]
    starts = [each.start for each in nodes]
    joined: list[tuple[float, float]] = []
    for mark in trace.marks:
        if not mark.name.startswith(OPTIMIZER_MARKS):
            continue
        inside = nodes[bisect_left(starts, mark.start) : bisect_right(starts, mark.end)]
        begin = min(max((each.end for each in inside), default=mark.start), mark.end)
        joined.append((begin, mark.end))
    return _joined(sorted(joined))


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping spans.

    >>> _joined([(0, 9), (2, 3), (8, 12), (20, 21)])
    [(0, 12), (20, 21)]
    """
    made: list[tuple[float, float]] = []
    for begin, end in spans:
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((begin, end))
    return made


def _within(spans: list[tuple[float, float]], moment: float) -> bool:
    at = bisect_right(spans, (moment, float("inf"))) - 1
    return at >= 0 and spans[at][1] >= moment


def launched_by(trace: RecordedTrace, work: GpuWork) -> str:
    """The name of the operator that launched it, if the trace has it."""
    return trace.operator_names.get(work.external, "") if work.external is not None else ""
