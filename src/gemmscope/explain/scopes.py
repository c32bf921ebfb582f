"""The operators that each piece of GPU work came from: those that were open on the launching thread at its launch.

They distinguish forward from backward and recomputed from first-time work, and they tell to which operation an anonymous
elementwise kernel belongs.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf
from typing import Literal

from gemmscope.explain.host_activity import merged
from gemmscope.explain.recorded_trace import (
    ATTENTION_FORWARD,
    CONVOLUTION_FORWARD,
    GEMM_OPERATORS,
    GRAPH_LAUNCH,
    Operator,
    RecordedTrace,
)
from gemmscope.grouping import grouped

Phase = Literal["forward", "backward", "recomputed", "optimizer", ""]
FORWARD_FUNCTIONS = re.compile(
    r"^aten::linear$|Linear|MLP|RMSNorm|LayerNorm|FlashAttn|FusedAttn|^CompiledFunction$|^matmul_with_hp_or"
)
EVALUATES = "autograd::engine::evaluate_function"
DEEPEST = 32  # operators inside each other that are kept from either end; real traces have fewer of them
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

    def backward_nodes(self) -> list[Operator]:
        """The nodes of the backward graph that were running, the outermost first."""
        return [operator for operator in self.operators if operator.name.startswith(EVALUATES)]


def find_scopes(trace: RecordedTrace) -> list[Scope]:
    """One scope for every piece of work, in the same order."""
    calls = ((number, work.call) for number, work in enumerate(trace.work))
    by_thread = grouped((call.thread, (call.start, number)) for number, call in calls if call is not None)
    operators = grouped((operator.thread, operator) for operator in trace.operators)
    optimizing = optimizer_spans(trace)
    result = [Scope()] * len(trace.work)
    for thread, launches in by_thread.items():
        launches.sort()
        waiting = operators.get(thread, [])
        at, opened = 0, list[Operator]()  # outermost first; they may overlap without being nested
        for moment, number in launches:
            while at < len(waiting) and waiting[at].start <= moment:
                opened = [*(operator for operator in opened if operator.end > waiting[at].start), waiting[at]]
                del opened[DEEPEST:-DEEPEST]
                at += 1
            opened = [operator for operator in opened if operator.end >= moment]
            span = bisect_right(optimizing, (moment, inf)) - 1
            optimizes = span >= 0 and optimizing[span][1] >= moment
            call = trace.work[number].call
            replayed = call is not None and GRAPH_LAUNCH in call.name  # its kernels are those of other operators
            around = () if replayed else tuple(opened)
            result[number] = Scope(around, moment, "optimizer" if optimizes else _phase(opened, trace))
    return _whole_layers(result, trace)


def _whole_layers(result: list[Scope], trace: RecordedTrace) -> list[Scope]:
    """Mark a recomputed layer from its first function to its last, including work without a function of its own.

    After the last function come norms, activations and sums, until the node that asked for the layer does its own work.
    """
    inside = [(number, scope) for number, scope in enumerate(result) if scope.phase in ("backward", "recomputed")]
    nodes = grouped((id(around[0]), number) for number, scope in inside if (around := scope.backward_nodes()))
    for numbers in nodes.values():
        numbers.sort(key=lambda number: result[number].launched or 0.0)
        again = [place for place, number in enumerate(numbers) if result[number].phase == "recomputed"]
        for place in range(again[0], len(numbers)) if again else ():
            number = numbers[place]
            if place > again[-1] and _is_backward(result[number], trace.operator_names.get(trace.work[number].external, "")):
                break
            if result[number].phase == "backward":
                result[number] = replace(result[number], phase="recomputed")
    return result


def _is_backward(scope: Scope, launcher: str) -> bool:
    """Whether work after a recomputed layer belongs to backward: to a node inside the node, or by its operator."""
    nested = len(scope.backward_nodes()) > 1
    return nested or not launcher.startswith("aten::") or "backward" in launcher or GEMM_OPERATORS.match(launcher) is not None


def _phase(current: Sequence[Operator], trace: RecordedTrace) -> Phase:
    """Forward functions inside a node of backward are recomputed."""
    if not trace.operators:
        return ""
    names = [operator.name for operator in current]
    node = next((number for number, name in enumerate(names) if name.startswith(EVALUATES)), None)
    if node is None:
        return "backward" if any("Backward" in name for name in names) else "forward"
    return "recomputed" if any(map(is_forward_function, names[node + 1 :])) else "backward"


@cache
def is_forward_function(name: str) -> bool:
    """Operators that backward never calls itself: inside backward, they recompute a layer.

    >>> [is_forward_function(name) for name in ("_LayerNormLinear", "aten::linear", "aten::mm", "_LinearBackward")]
    [True, True, False, False]
    >>> [is_forward_function(name) for name in ("aten::conv2d", "aten::convolution_backward")]
    [True, False]
    """
    if "Backward" in name or name.endswith("_backward"):
        return False
    return any((FORWARD_FUNCTIONS.search(name), ATTENTION_FORWARD.match(name), CONVOLUTION_FORWARD.match(name)))


def optimizer_spans(trace: RecordedTrace) -> list[tuple[float, float]]:
    """When the CPU was in the optimizer: its annotations, merged where they overlap.

    Lightning passes forward and backward to `optimizer.step` as a closure: there the optimizer begins after the end of backward.
    """
    nodes = [operator for operator in trace.operators if operator.name.startswith(EVALUATES)]
    starts = [node.start for node in nodes]
    latest = list(accumulate((node.end for node in nodes), max))  # end of all backward up to each node
    spans: list[tuple[float, float]] = []
    for mark in trace.marks:
        if mark.name.startswith(OPTIMIZER_MARKS):
            first, end = bisect_left(starts, mark.start), bisect_right(starts, mark.end)
            spans.append((min(latest[end - 1], mark.end) if first < end else mark.start, mark.end))
    return merged(spans)
