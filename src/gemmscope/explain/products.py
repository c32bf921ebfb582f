"""The census of products: which matrix products ran, in which pass and precision, of what size, and how fast.

Sizes come from the operator that launched a product. PyTorch's own (`aten::mm`, `aten::_scaled_mm`, …) are given their operands.
Transformer Engine's functions are given the input and the weights of a whole layer; their backward is found by its sequence
number, and runs two products for each of the forward's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from gemmscope.explain.place import LOW, Placed
from gemmscope.explain.scopes import Scope
from gemmscope.explain.trace import PRODUCT_OPERATORS, Operator, Trace

Pass = Literal["fprop", "dgrad", "wgrad", "again", ""]
Size = tuple[int, int, int]  # rows, inner, columns


@dataclass(slots=True)
class Product:
    """One product that ran. `work`: its index; `size` None where the trace does not tell; `layer`: whose it is."""

    work: int
    precision: str
    pass_name: Pass
    size: Size | None
    flops: float
    layer: str
    head: bool = False
    reduces: bool = False  # the second kernel of a product whose sum was split

    @property
    def low(self) -> bool:
        return self.precision in LOW


def census(trace: Trace, found: Sequence[Scope], placed: Sequence[Placed]) -> list[Product]:
    """All products of the trace, in their order."""
    by_external = {each.external: each for each in trace.operators if each.external is not None}
    by_sequence = {
        each.sequence: each for each in reversed(trace.operators) if each.sequence is not None and _layer_products(each)
    }
    groups: dict[int, list[Product]] = {}
    owners: dict[int, Operator] = {}
    made: list[Product] = []
    for number, (work, scope, each) in enumerate(zip(trace.work, found, placed, strict=True)):
        if not each.is_product:
            continue
        operator = _owner(by_external.get(work.external), scope)
        product = Product(number, each.precision, _pass(scope), None, 0.0, operator.name if operator else "")
        product.reduces = "splitk" in work.name.lower() and "reduce" in work.name.lower()
        made.append(product)
        if operator is not None and not product.reduces:
            groups.setdefault(id(operator), []).append(product)
            owners[id(operator)] = operator
    for key, group in groups.items():
        _give_sizes(owners[key], group, by_sequence)
    _tell_passes(made)
    _tell_head(made, placed)
    return made


def _owner(operator: Operator | None, scope: Scope) -> Operator | None:
    """The innermost operator that knows sizes, or the function of a framework that does."""
    for each in (operator, *reversed(scope.operators)):
        if each is not None and (PRODUCT_OPERATORS.match(each.name) or not each.name.startswith(("aten::", "autograd::"))):
            return each
    return None


def _pass(scope: Scope) -> Pass:
    return {"forward": "fprop", "backward": "dgrad", "again": "again"}.get(scope.phase, "")  # type: ignore[return-value]


def _give_sizes(operator: Operator, group: list[Product], by_sequence: dict[int, Operator]) -> None:
    if operator.name.startswith("aten::"):
        size = operand_size(operator.name, operator.shapes)
        for product in group:
            product.size = size
            product.flops = 2.0 * prod(size) * _batches(operator.shapes) / len(group) if size else 0.0
        return
    if "Backward" in operator.name:
        forward = by_sequence.get(operator.sequence) if operator.sequence is not None else None
        sizes = [size for size in reversed(_layer_products(forward) if forward else []) for _ in range(2)]
        passes: list[Pass] = ["dgrad", "wgrad"] * (len(sizes) // 2)
        if 2 * len(group) == len(sizes):  # one of the two: the input needs no gradient, or the weight is frozen
            sizes, passes = sizes[::2], ["wgrad"] * len(group)
    else:
        sizes, passes = _layer_products(operator), []
    if len(sizes) == len(group):
        for number, (product, size) in enumerate(zip(group, sizes, strict=True)):
            product.size, product.flops = size, 2.0 * prod(size)
            product.pass_name = passes[number] if passes else product.pass_name
    elif sizes:
        total = sum(2.0 * prod(size) for size in sizes)
        for product in group:
            product.flops = total / len(group)


def operand_size(name: str, shapes: Sequence[Any]) -> Size | None:
    """Of PyTorch's own products.

    >>> operand_size("aten::mm", [[8, 4], [4, 2]]), operand_size("aten::addmm", [[2], [8, 4], [4, 2], [], []])
    ((8, 4, 2), (8, 4, 2))
    >>> operand_size("aten::bmm", [[3, 8, 4], [3, 4, 2]]), operand_size("aten::mm", [])
    ((8, 4, 2), None)
    """
    matrices = [shape for shape in shapes if _is_shape(shape) and len(shape) >= 2]
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
    matrices = [shape for shape in shapes if _is_shape(shape) and len(shape) >= 2]
    three = matrices and len(matrices[0]) == 3 and len(matrices) > 1 and len(matrices[1]) == 3
    return int(matrices[0][0]) if three else 1


def _layer_products(operator: Operator) -> list[Size]:
    """Of a framework's function: input times each weight that fits, from the shapes of its arguments."""
    if operator.name.startswith(("aten::", "autograd::")) or "Backward" in operator.name:
        return []
    shapes = [shape for shape in operator.shapes if _is_shape(shape) and len(shape) >= 2]
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


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(isinstance(size, int) for size in shape)


def _tell_passes(made: Sequence[Product]) -> None:
    """In backward, a product whose inner size is the tokens is of the weight's gradient."""
    rows = Counter(product.size[0] for product in made if product.size and product.pass_name in ("fprop", "again"))
    tokens = {size for size, _ in rows.most_common(2)}
    for product in made:
        if product.pass_name == "dgrad" and product.size and product.layer.startswith("aten::"):
            m, k, _ = product.size
            product.pass_name = "wgrad" if k in tokens and m not in tokens else "dgrad"


def _tell_head(made: Sequence[Product], placed: Sequence[Placed]) -> None:
    """The last forward product before the loss, in most cases, and those of the same sizes."""
    by_work = {product.work: product for product in made}
    votes: Counter[Size] = Counter()
    latest: Product | None = None
    after = 0  # products behind the loss that are still the head's: of its input's and its weight's gradient
    for number, each in enumerate(placed):
        product = by_work.get(number)
        if product is not None and not product.reduces:
            latest = product if product.pass_name in ("fprop", "") else latest
            product.head = product.size is None and after > 0 and not product.low
            after -= 1
        elif each.name == "loss":
            if latest is not None and latest.size is not None:
                votes[_sorted(latest)] += 1
            elif latest is not None:
                latest.head = not latest.low
            latest, after = None, 2
    if not votes:
        return
    sizes = votes.most_common(1)[0][0]
    for product in made:
        product.head = product.size is not None and _sorted(product) == sizes and not product.low


def _sorted(product: Product) -> Size:
    a, b, c = sorted(product.size or (0, 0, 0))
    return a, b, c
