"""The GEMMs in a trace: which ones ran, in which pass and precision, and of what size.

Sizes come from the operator that launched a GEMM. PyTorch's own operators (`aten::mm`, `aten::_scaled_mm`, …) record their
operands. Transformer Engine's functions record the input and the weights of a whole layer; their backward is found by its
sequence number, and runs two GEMMs for each GEMM of forward.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from gemmscope.explain.recorded_trace import GEMM_OPERATORS, Operator, RecordedTrace
from gemmscope.explain.scopes import Phase, Scope
from gemmscope.explain.work_class import LOW, WorkClass

TracedPass = Literal["fprop", "dgrad", "wgrad", "recomputed", ""]
MOST_DIMENSIONS = 12
LARGEST_SIZE = 2**40
Size = tuple[int, int, int]  # rows, inner, columns


@dataclass(slots=True)
class TracedGemm:
    """One GEMM that ran. `work`: its index; `size`: None where the trace does not have it; `layer`: the operator it came from."""

    work: int
    precision: str
    pass_name: TracedPass
    size: Size | None
    flops: float
    layer: str
    head: bool = False
    reduces: bool = False  # the second kernel of a GEMM: the sum of split-K, or an epilogue

    @property
    def low(self) -> bool:
        return self.precision in LOW

    @property
    def sized(self) -> bool:
        """Whether its FLOPs are known; those of a second kernel are with the first."""
        return self.flops > 0 or (self.reduces and self.size is not None)

    @property
    def sides(self) -> tuple[int, ...]:
        """The sizes in ascending order, which are the same in all passes; empty if they are unknown."""
        return tuple(sorted(self.size or ()))


NO_GEMM = TracedGemm(work=-1, precision="", pass_name="", size=None, flops=0.0, layer="")
PASSES: dict[Phase, TracedPass] = {"forward": "fprop", "backward": "dgrad", "recomputed": "recomputed"}


def traced_gemms(trace: RecordedTrace, scopes: Sequence[Scope], work_classes: Sequence[WorkClass]) -> list[TracedGemm]:
    """All GEMMs of the trace, in order."""
    by_external = trace.operators_by_id()
    layers = [operator for operator in reversed(trace.operators) if operator.sequence is not None and _layer_gemms(operator)]
    by_sequence = {layer.sequence: layer for layer in layers}
    groups: dict[int, tuple[Operator, list[TracedGemm]]] = {}
    gemms: list[TracedGemm] = []
    latest: dict[Any, TracedGemm] = {}  # on each stream
    finished: list[tuple[TracedGemm, TracedGemm | None]] = []  # second kernels, and the GEMMs that they belong to
    for number, (work, scope, kernel) in enumerate(zip(trace.work, scopes, work_classes, strict=True)):
        if not kernel.is_gemm:
            continue
        operator = _owner(by_external.get(work.external), scope)
        gemm = TracedGemm(number, kernel.precision, PASSES.get(scope.phase, ""), None, 0.0, operator.name if operator else "")
        gemm.reduces = kernel.facts.finishes
        gemms.append(gemm)
        if gemm.reduces:
            finished.append((gemm, latest.get(work.stream)))
        else:
            latest[work.stream] = gemm
            if operator is not None:
                groups.setdefault(id(operator), (operator, []))[1].append(gemm)
    for operator, group in groups.values():
        _give_sizes(operator, group, by_sequence)
    for second, first in finished:
        second.size = first.size if first is not None else None
    _find_passes(gemms)
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
        size = operand_size(operator.name, operator.shapes)
        for gemm in group:
            gemm.size = size
            gemm.flops = 2.0 * prod(size) * _batches(operator.shapes) / len(group) if size else 0.0
        return
    if "Backward" in operator.name:
        forward = by_sequence.get(operator.sequence)
        sizes = [size for size in reversed(_layer_gemms(forward) if forward else []) for _ in range(2)]
        passes: list[TracedPass] = ["dgrad", "wgrad"] * (len(sizes) // 2)
        if 2 * len(group) == len(sizes):  # only one of the two: the input needs no gradient, or the weight is frozen
            sizes, passes = sizes[::2], ["wgrad"] * len(group)
    else:
        sizes, passes = _layer_gemms(operator), []
    if len(sizes) == len(group):
        for number, (gemm, size) in enumerate(zip(group, sizes, strict=True)):
            gemm.size, gemm.flops = size, 2.0 * prod(size)
            gemm.pass_name = passes[number] if passes else gemm.pass_name
        return
    total = sum(2.0 * prod(size) for size in sizes)
    for gemm in group:
        gemm.flops = total / len(group)


def operand_size(name: str, shapes: Sequence[Any]) -> Size | None:
    """Size of a GEMM of one of PyTorch's own operators.

    >>> operand_size("aten::mm", [[8, 4], [4, 2]]), operand_size("aten::addmm", [[2], [8, 4], [4, 2], [], []])
    ((8, 4, 2), (8, 4, 2))
    >>> operand_size("aten::bmm", [[3, 8, 4], [3, 4, 2]]), operand_size("aten::mm", [])
    ((8, 4, 2), None)
    """
    matrices = [shape for shape in shapes if is_shape(shape) and len(shape) >= 2]
    if "add" in name and len(matrices) > 2 and len(matrices[0]) == len(matrices[1]):
        matrices = matrices[1:]
    if len(matrices) < 2:
        return None
    a, b = matrices[0], matrices[1]
    if "linear" in name:
        return prod(a[:-1]), a[-1], b[0]
    if "grouped" in name and len(a) == 2 and len(b) == 3:
        return a[0], a[1], b[2]
    if a[-1] != b[-2]:
        return None
    return prod(a[:-1]) if len(b) == 2 else a[-2], a[-1], b[-1]


def _batches(shapes: Sequence[Any]) -> int:
    matrices = [shape for shape in shapes if is_shape(shape) and len(shape) >= 2]
    three = matrices and len(matrices[0]) == 3 and len(matrices) > 1 and len(matrices[1]) == 3
    return int(matrices[0][0]) if three else 1


def _layer_gemms(operator: Operator) -> list[Size]:
    """The GEMMs of a framework's function: its input times each weight that fits, from the shapes of its arguments."""
    if operator.name.startswith(("aten::", "autograd::")) or "Backward" in operator.name:
        return []
    shapes = [shape for shape in operator.shapes if is_shape(shape) and len(shape) >= 2]
    if len(shapes) < 2 or not any(word in operator.name for word in ("Linear", "MLP", "linear", "mlp")):
        return []
    weights_first = operator.name.lstrip("_") in ("Linear", "_Linear")
    given, weights = (shapes[1], [shapes[0]]) if weights_first and shapes[0][-1] == shapes[1][-1] else (shapes[0], shapes[1:])
    rows, width = prod(given[:-1]), given[-1]
    if "MLP" in operator.name:
        up = next((shape for shape in weights if len(shape) == 2 and shape[1] == width), None)
        down = next((shape for shape in weights if len(shape) == 2 and shape[0] == width and shape is not up), None)
        return [(rows, width, up[0]), (rows, down[1], width)] if up and down else []
    fitting = [shape for shape in weights if len(shape) == 2 and shape[1] == width]
    if "Grouped" in operator.name and fitting:
        return [(rows // len(fitting), width, shape[0]) for shape in fitting]
    return [(rows, width, fitting[0][0])] if fitting else []


def is_shape(shape: Any) -> bool:
    """Whether these are the sizes of a tensor."""
    is_list = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS
    return is_list and all(isinstance(size, int) and 0 <= size <= LARGEST_SIZE for size in shape)


def _find_passes(gemms: Sequence[TracedGemm]) -> None:
    """In backward, a GEMM whose inner size is the number of tokens is wgrad."""
    rows = Counter(gemm.size[0] for gemm in gemms if gemm.size and gemm.pass_name in ("fprop", "recomputed"))
    tokens = {size for size, _ in rows.most_common(2)}
    for gemm in gemms:
        if gemm.pass_name == "dgrad" and gemm.size and gemm.layer.startswith("aten::"):
            m, k, _ = gemm.size
            gemm.pass_name = "wgrad" if k in tokens and m not in tokens else "dgrad"


def _find_head(gemms: Sequence[TracedGemm], work_classes: Sequence[WorkClass]) -> None:
    """The GEMMs of the output head: the last forward GEMM before the loss, and those of the same sizes."""
    by_work = {gemm.work: gemm for gemm in gemms}
    votes: Counter[tuple[int, ...]] = Counter()
    latest: TracedGemm | None = None
    after = 0  # GEMMs after the loss that still belong to the head: its dgrad and wgrad
    for number, work in enumerate(work_classes):
        gemm = by_work.get(number)
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
        for gemm in gemms:
            gemm.head = gemm.sides == sides and not gemm.low
