"""What one operator of PyTorch reads and writes, as a `Traffic` counts it. Imports torch: for the trace worker only."""

from math import prod
from typing import Any

import torch

from gemmscope.workload.ops import ELEMENT_BYTES
from gemmscope.workload.traffic import Region, aten

REDUCTIONS = frozenset(
    {
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "var_mean",
        "std",
        "std_mean",
        "norm",
        "linalg_vector_norm",
        "prod",
        "any",
    }
    | {"all", "argmax", "argmin", "logsumexp", "nansum", "_softmax", "_log_softmax"}
)
OVERWRITING = frozenset({"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential", "trunc_normal"})
GATHERING = frozenset({"embedding", "index", "gather", "index_select", "take_along_dim"})  # read some of the first tensor
SCATTERING = frozenset({"index_put", "_index_put_impl", "index_add", "scatter", "scatter_add", "scatter_reduce", "index_copy"})
FREE, SEPARATE = frozenset(aten()["free"]["names"]), frozenset(aten()["separate"]["names"])


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, including those in lists. Sparse ones, which have no storage, are left out."""
    collected = []
    for value in values:
        if isinstance(value, torch.Tensor):
            collected += [value] if value.layout == torch.strided else []
        elif isinstance(value, (list, tuple)):
            collected += tensors(value)
    return collected


def storage_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


class Operand:
    """How many bytes a tensor has in training: `wide`, the type of the module's parameters, stands for BF16."""

    def __init__(self, wide: torch.dtype | None) -> None:
        self._wide = wide

    def element_bytes(self, tensor: torch.Tensor) -> int:
        return ELEMENT_BYTES if tensor.dtype == self._wide else tensor.element_size()

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """What reading or writing it moves: an element that is repeated by a stride of zero moves once."""
        sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        return prod(sizes) * self.element_bytes(tensor) if tensor.numel() else 0

    def region(self, tensor: torch.Tensor, most: float = float("inf")) -> Region:
        """A tensor as an operand, of which at most so many bytes move."""
        moved = min(self.bytes_of(tensor), most)
        return Region(storage_of(tensor), (tensor.storage_offset(), tensor.numel()), int(moved))


def is_free(name: str, operator: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operator moves nothing: it reserves memory, or creates a view of a tensor."""
    if name in FREE or not outputs:
        return True
    if operator._schema.is_mutable:
        return False
    known = {storage_of(tensor) for tensor in inputs}
    return all(storage_of(tensor) in known for tensor in outputs)


def operands(
    name: str, operand: Operand, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> tuple[list[Region], list[Region]]:
    """What an operator reads, and what it writes."""
    reads = [operand.region(tensor) for tensor in inputs if tensor.dim()]
    writes = [operand.region(tensor) for tensor in outputs if tensor.dim()]
    if name in OVERWRITING:
        written = {region.storage for region in writes}
        reads = [region for region in reads if region.storage not in written]
    elif name in GATHERING and inputs and outputs and inputs[0].dim():
        reads[0] = operand.region(inputs[0], operand.bytes_of(outputs[0]))
    elif name in SCATTERING and inputs and outputs and inputs[0].dim() and outputs[0].dim():
        values = max((operand.bytes_of(tensor) for tensor in inputs[1:]), default=0)
        kept = storage_of(outputs[0]) == storage_of(inputs[0])  # in place: the rest of the tensor stays as it is
        reads[0] = operand.region(inputs[0], values if kept else float("inf"))
        writes[0] = operand.region(outputs[0], values if kept else float("inf"))
    return reads, writes


def is_fusible(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: tuple[Any, ...]) -> bool:
    """Whether a compiler would fuse it with its neighbors: not if it reduces columns or a whole tensor."""
    if name in SEPARATE:
        return False
    if name not in REDUCTIONS or not inputs or not outputs or outputs[0].numel() >= inputs[0].numel():
        return True
    dims = next((value for value in args[1:] if isinstance(value, (int, list, tuple)) and not isinstance(value, bool)), None)
    listed = [dims] if isinstance(dims, int) else list(dims) if dims else []
    last = inputs[0].dim() - 1
    return any(isinstance(dim, int) and dim % max(inputs[0].dim(), 1) == last for dim in listed)


def flops_of(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """FLOPs for each element of its largest tensor (of copies: none)."""
    if name in ("copy", "clone", "_to_copy", "cat", "stack", "fill", "zero", "zeros", "ones", "full", "embedding", "index"):
        return 0.0
    most = max((tensor.numel() for tensor in (*inputs, *outputs)), default=0)
    return float(aten()["flops"].get(name, 1) * most)
