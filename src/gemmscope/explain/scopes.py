"""The operators that each piece of GPU work came from: those that were open on the launching thread at its launch.

They distinguish forward from backward and recomputed from first-time work, and they tell to which operation an anonymous
elementwise kernel belongs.
"""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from gemmscope.explain.trace import ATTENTION_FORWARD, Operator, RecordedTrace

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

    def inside(self, *texts: str) -> bool:
        """Whether the name of an operator contains one of the texts."""
        return any(text in operator.name for operator in self.operators for text in texts)

    def backward_node(self) -> Operator | None:
        """The node of the backward graph that was running."""
        return next((operator for operator in self.operators if operator.name.startswith(EVALUATES)), None)


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
        waiting = operators.get(thread, [])
        at = 0
        opened: tuple[Operator, ...] = ()
        for moment, number in launches:
            while at < len(waiting) and waiting[at].start <= moment:
                opened = (*(operator for operator in opened if operator.end > waiting[at].start), waiting[at])
                at += 1
            if any(operator.end < moment for operator in opened):
                opened = tuple(operator for operator in opened if operator.end >= moment)
            span = bisect_right(optimizing, (moment, inf)) - 1
            optimizes = span >= 0 and optimizing[span][1] >= moment
            result[number] = Scope(opened, moment, "optimizer" if optimizes else _phase(opened, trace))
    return _whole_layers(result)


def _whole_layers(result: list[Scope]) -> list[Scope]:
    """Mark a recomputed layer from its first function to its last, including work without a function of its own."""
    launches: dict[int, list[float]] = {}
    for scope in result:
        if scope.phase == "recomputed" and scope.launched is not None:
            launches.setdefault(id(scope.backward_node()), []).append(scope.launched)
    spans = {node: (min(moments), max(moments)) for node, moments in launches.items()}
    for number, scope in enumerate(result):
        if scope.phase == "backward" and scope.launched is not None:
            first, last = spans.get(id(scope.backward_node()), (inf, -inf))
            if first <= scope.launched <= last:
                result[number] = replace(scope, phase="recomputed")
    return result


def _phase(current: tuple[Operator, ...], trace: RecordedTrace) -> Phase:
    """Forward functions inside a node of backward are recomputed."""
    if not trace.operators:
        return ""
    names = [operator.name for operator in current]
    node = next((number for number, name in enumerate(names) if name.startswith(EVALUATES)), None)
    if node is None:
        return "backward" if any("Backward" in name for name in names) else "forward"
    return "recomputed" if any(map(is_forward_function, names[node + 1 :])) else "backward"


def is_forward_function(name: str) -> bool:
    """Operators that backward never calls itself: inside backward, they recompute a layer.

    >>> [is_forward_function(name) for name in ("_LayerNormLinear", "aten::linear", "aten::mm", "_LinearBackward")]
    [True, True, False, False]
    """
    if "Backward" in name or name.endswith("_backward"):
        return False
    return FORWARD_FUNCTIONS.search(name) is not None or ATTENTION_FORWARD.match(name) is not None


def optimizer_spans(trace: RecordedTrace) -> list[tuple[float, float]]:
    """When the CPU was in the optimizer: its annotations, merged where they overlap.

    Lightning passes forward and backward to `optimizer.step` as a closure: there the optimizer begins after the end of backward.
    """
    nodes = [operator for operator in trace.operators if operator.name.startswith(EVALUATES)]
    starts = [node.start for node in nodes]
    spans: list[tuple[float, float]] = []
    for mark in trace.marks:
        if mark.name.startswith(OPTIMIZER_MARKS):
            inside = nodes[bisect_left(starts, mark.start) : bisect_right(starts, mark.end)]
            spans.append((min(max((node.end for node in inside), default=mark.start), mark.end), mark.end))
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
