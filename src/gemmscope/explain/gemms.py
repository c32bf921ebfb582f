"""The GEMMs in a trace: which ones ran, in which pass and precision, and of what size.

Sizes come from the operator that launched a GEMM. PyTorch's own operators (`aten::mm`, `aten::_scaled_mm`, …) record their
operands. Transformer Engine's functions record the input and the weights of a whole layer; their backward is found by its
sequence number, and runs two GEMMs for each GEMM of forward.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from gemmscope.explain.recorded_trace import GEMM_OPERATORS, Operator, RecordedTrace, Shape
from gemmscope.explain.scopes import Phase, Scope
from gemmscope.explain.work_class import LOW, WorkClass
from gemmscope.recipe.precisions import precision_in_traces

TracedPass = Literal["fprop", "dgrad", "wgrad", "recomputed", ""]
Size = tuple[int, int, int]  # rows, inner, columns


@dataclass(slots=True)
class TracedGemm:
    """One GEMM that ran. `size`: None where the trace does not have it; `layer`: the operator it came from; `reduces`: the second
    kernel of a GEMM, which sums up split-K or is its epilogue."""

    precision: str = ""
    pass_name: TracedPass = ""
    layer: str = ""
    reduces: bool = False
    size: Size | None = None
    flops: float = 0.0
    head: bool = False

    @property
    def low(self) -> bool:
        return self.precision in LOW

    @property
    def sized(self) -> bool:
        """Whether its FLOPs are known; those of a second kernel are with the first."""
        return self.flops > 0 or (self.reduces and self.size is not None)

    def bytes_in(self, precision: str) -> float:
        """Bytes that it has to move at least in a precision: both operands and the result."""
        m, k, n = self.size or (0, 0, 0)
        known, weights = precision_in_traces().get(precision), precision_in_traces().get(precision.removesuffix(WEIGHTS))
        operand, weight = (one.operand_bytes if one else HIGH_BYTES for one in (known, weights))
        batches = self.flops / (2.0 * m * k * n) if m * k * n else 0.0
        return batches * (m * k * operand + k * n * weight + m * n * max(operand, HIGH_BYTES))

    @property
    def sides(self) -> tuple[int, ...]:
        """The sizes in ascending order, which are the same in all passes; empty if they are unknown."""
        return tuple(sorted(self.size or ()))


HIGH_BYTES = 2.0  # per element, where the precision is not known
WEIGHTS = " weights"  # of fewer bits, in the name of a precision
NO_GEMM = TracedGemm()
LAYERS = re.compile(r"(?!aten::|autograd::|.*Backward).*(Linear|MLP|linear|mlp)", re.DOTALL)  # functions of frameworks
PASSES: dict[Phase, TracedPass] = {"forward": "fprop", "backward": "dgrad", "recomputed": "recomputed"}


def traced_gemms(trace: RecordedTrace, scopes: Sequence[Scope], work_classes: Sequence[WorkClass]) -> dict[int, TracedGemm]:
    """All GEMMs of the trace in order, by the index of their work."""
    by_external = trace.operators_by_id()
    layers = [operator for operator in reversed(trace.operators) if operator.sequence is not None and _layer_gemms(operator)]
    by_sequence = {layer.sequence: layer for layer in layers}
    groups: dict[int, tuple[Operator, list[TracedGemm]]] = {}
    gemms: dict[int, TracedGemm] = {}
    latest: dict[Any, TracedGemm] = {}  # on each stream
    finished: list[tuple[TracedGemm, TracedGemm]] = []  # second kernels, and the GEMMs that they belong to
    for number, (work, scope, kernel) in enumerate(zip(trace.work, scopes, work_classes, strict=True)):
        if not kernel.is_gemm:
            continue
        operator = _owner(by_external.get(work.external), scope)
        name, pass_name = operator.name if operator else "", PASSES.get(scope.phase, "")
        gemm = gemms[number] = TracedGemm(kernel.precision, pass_name, name, kernel.facts.finishes)
        if gemm.reduces:
            finished.append((gemm, latest.get(work.stream, gemm)))
        else:
            latest[work.stream] = gemm
            if operator is not None:
                groups.setdefault(id(operator), (operator, []))[1].append(gemm)
    for operator, group in groups.values():
        _give_sizes(operator, group, by_sequence)
    for second, first in finished:
        second.size = first.size
    _find_passes(gemms.values())
    _find_head(gemms, work_classes)
    return gemms


def _owner(operator: Operator | None, scope: Scope) -> Operator | None:
    """The innermost operator with sizes: one of PyTorch's own GEMM operators, or the function of a framework."""
    for opened in (operator, *reversed(scope.operators)):
        if opened is not None and (GEMM_OPERATORS.match(opened.name) or not opened.name.startswith(("aten::", "autograd::"))):
            return opened
    return None


def _give_sizes(operator: Operator, group: list[TracedGemm], by_sequence: dict[int | None, Operator]) -> None:
    if operator.name.startswith("aten::"):
        size, batches = operand_size(operator.name, operator.shapes)
        for gemm in group:
            gemm.size, gemm.flops = size, 2.0 * prod(size) * batches / len(group) if size else 0.0
        return
    backward = "Backward" in operator.name
    forward = by_sequence.get(operator.sequence) if backward else operator
    sizes = _layer_gemms(forward) if forward is not None else []
    passes: list[TracedPass] = ["dgrad", "wgrad"] if backward else [""]
    if backward and len(group) == len(sizes):  # only one of the two: the input needs no gradient, or the weight is frozen
        passes = ["wgrad"]
    runs = [(size, name) for size in (reversed(sizes) if backward else sizes) for name in passes]
    if len(runs) != len(group):
        for gemm in group:
            gemm.flops = sum(2.0 * prod(size) for size, _ in runs) / len(group)
        return
    for gemm, (size, name) in zip(group, runs, strict=True):
        gemm.size, gemm.flops, gemm.pass_name = size, 2.0 * prod(size), name or gemm.pass_name


def operand_size(name: str, shapes: Sequence[Shape]) -> tuple[Size | None, int]:
    """Size of a GEMM of one of PyTorch's own operators, and how many of them it runs.

    >>> operand_size("aten::mm", [[8, 4], [4, 2]]), operand_size("aten::addmm", [[2], [8, 4], [4, 2], [], []])
    (((8, 4, 2), 1), ((8, 4, 2), 1))
    >>> operand_size("aten::bmm", [[3, 8, 4], [3, 4, 2]]), operand_size("aten::mm", [])
    (((8, 4, 2), 3), (None, 1))
    """
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if "add" in name and len(matrices) > 2 and len(matrices[0]) == len(matrices[1]):
        matrices = matrices[1:]
    if len(matrices) < 2:
        return None, 1
    a, b = matrices[0], matrices[1]
    if "linear" in name:
        return (prod(a[:-1]), a[-1], b[0]), 1
    if "grouped" in name and len(a) == 2 and len(b) == 3:
        return (a[0], a[1], b[2]), 1
    if a[-1] != b[-2]:
        return None, 1
    rows = prod(a[:-1]) if len(b) == 2 else a[-2]
    return (rows, a[-1], b[-1]), a[0] if len(a) == len(b) == 3 else 1


def _layer_gemms(operator: Operator) -> list[Size]:
    """The GEMMs of a framework's function: its input times each weight that fits, from the shapes of its arguments."""
    shapes = [shape for shape in operator.shapes if len(shape) >= 2]
    if len(shapes) < 2 or not LAYERS.match(operator.name):
        return []
    weights_first = operator.name.lstrip("_") in ("Linear", "_Linear")
    given, weights = (shapes[1], [shapes[0]]) if weights_first and shapes[0][-1] == shapes[1][-1] else (shapes[0], shapes[1:])
    rows, width = prod(given[:-1]), given[-1]
    fitting = [shape for shape in weights if len(shape) == 2 and shape[1] == width]
    if not fitting:
        return []
    first = (rows, width, fitting[0][0])
    if "MLP" in operator.name:
        down = [shape for shape in weights if len(shape) == 2 and shape[0] == width and shape is not fitting[0]]
        return [first, (rows, down[0][1], width)] if down else []
    return [(rows // len(fitting), width, shape[0]) for shape in fitting] if "Grouped" in operator.name else [first]


def _find_passes(gemms: Collection[TracedGemm]) -> None:
    """In backward, a GEMM whose inner size is the number of tokens is wgrad."""
    rows = Counter(gemm.size[0] for gemm in gemms if gemm.size and gemm.pass_name in ("fprop", "recomputed"))
    tokens = {size for size, _ in rows.most_common(2)}
    for gemm in gemms:
        if gemm.pass_name == "dgrad" and gemm.size and gemm.layer.startswith("aten::"):
            m, k, _ = gemm.size
            gemm.pass_name = "wgrad" if k in tokens and m not in tokens else "dgrad"


def _find_head(gemms: dict[int, TracedGemm], work_classes: Sequence[WorkClass]) -> None:
    """The GEMMs of the output head: the last forward GEMM before the loss, and those of the same sizes."""
    votes: Counter[tuple[int, ...]] = Counter()
    latest: TracedGemm | None = None
    after = 0  # GEMMs after the loss that still belong to the head: its dgrad and wgrad
    for number, work in enumerate(work_classes):
        gemm = gemms.get(number)
        if gemm is not None and not gemm.reduces:
            latest = gemm if gemm.pass_name in ("fprop", "") else latest
            gemm.head = gemm.size is None and after > 0 and not gemm.low
            after -= 1
        elif work.name == "loss":
            if latest is not None and latest.size is not None:
                votes[latest.sides] += 1
            elif latest is not None:
                latest.head = not latest.low
            latest, after = None, 2
    for sides, _ in votes.most_common(1):
        for gemm in gemms.values():
            gemm.head = gemm.sides == sides and not gemm.low
