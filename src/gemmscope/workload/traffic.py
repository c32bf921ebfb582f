"""The memory traffic of the operators between GEMMs: one by one as they are launched, and fused as a compiler fuses them.

Launched one by one (eager), every operator is a kernel that reads its inputs and writes its outputs. A compiler fuses a
chain of them into one kernel, which moves only what enters and leaves the chain. The rule here, close to that of TorchInductor:

* Elementwise operators and reductions of rows are fused with those whose outputs they read. A GEMM, an attention, a convolution
  and the operators of `aten.toml` that are `separate` end a chain: an operator after one of these is never fused with one before
  it, whatever else connects them. A reduction over columns is a kernel of its own.
* A tensor is written if something outside its chain reads it, or nothing does (it is a result).
* What only the backward pass needs is written, or computed again from what its chain had read: whichever moves less.

`Traffic` is told what runs, in order, and knows tensors by numbers only. What an operator reads and writes is below it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from gemmscope.toml import load_data
from gemmscope.workload.ops import ELEMENT_BYTES, Direction
from gemmscope.workload.traced_ops import Moved

FLOATING = -1  # in place of a level: it can run at any time
IN_MEMORY = -1  # in place of the operator that wrote a tensor: it was there before, or a GEMM wrote it


@cache
def aten() -> dict[str, Any]:
    """The table of operators."""
    return load_data("gemmscope.workload", "aten.toml")


@cache
def kinds() -> dict[str, str]:
    """Operator → kind, for those that decide it."""
    return {name: kind for kind, names in aten()["kinds"].items() for name in names}


class Region(NamedTuple):
    """A part of a tensor's memory that an operator reads or writes: its storage, its place in it, and its bytes."""

    storage: int
    place: tuple[int, int]
    bytes_moved: int


class WorkGroup(NamedTuple):
    """What traffic is summed up by: the module's path, the kind of work, the direction."""

    path: str
    kind: str
    direction: Direction


@dataclass
class _Operator:
    group: WorkGroup
    level: int
    fusible: bool
    flops: float
    reads: list[tuple[Region, int]]  # with the operator that wrote it
    writes: list[Region]

    @property
    def bytes_moved(self) -> int:
        return sum(region.bytes_moved for region, _ in self.reads) + sum(region.bytes_moved for region in self.writes)


@dataclass
class _Chain:
    """Operators that are fused into one kernel: what it reads and what it writes."""

    members: list[int] = field(default_factory=list)
    reads: dict[Region, int] = field(default_factory=dict)  # with the operator that wrote it
    writes: dict[tuple[int, int], int] = field(default_factory=dict)  # (storage, operator) → bytes


class _Written(NamedTuple):
    """What wrote a storage last: the operator, its level, and whether that was in backward."""

    by: int = IN_MEMORY
    level: int = 0
    in_backward: bool = False


UNWRITTEN = _Written()


class Traffic:
    """What ran, and what it moved. Call `operator` and `barrier` in the order in which things run, then `sums`.

    The level of an operator is how many barriers (what is never fused) lie before it, at most. Operators of one level that read
    each other are a chain, and so no chain waits for itself. A backward operator that reads only what forward kept could run at
    any time: it gets the level of the first one that reads its result.
    """

    def __init__(self) -> None:
        self._operators: list[_Operator] = []
        self._written: dict[int, _Written] = {}  # by storage
        self._needed: set[tuple[int, int]] = set()  # (storage, operator) that something which is never fused reads

    def operator(
        self, group: WorkGroup, reads: Iterable[Region], writes: Iterable[Region], flops: float, *, fusible: bool
    ) -> None:
        """One operator that is not a GEMM, attention or convolution."""
        seen = [(region, self._written.get(region.storage, UNWRITTEN)) for region in dict.fromkeys(reads)]
        backward = group.direction == "backward"
        waits = not backward or not fusible or any(written.in_backward and written.level != FLOATING for _, written in seen)
        level = max((written.level for _, written in seen), default=0) if waits else FLOATING
        number, regions = len(self._operators), list(dict.fromkeys(writes))
        if not fusible:
            self._needed.update((region.storage, written.by) for region, written in seen)
        operands = [(region, written.by) for region, written in seen]
        self._operators.append(_Operator(group, level, fusible, flops, operands, regions))
        if level != FLOATING:
            self._settle(number, level)
        for region in regions:
            self._written[region.storage] = _Written(number, level if fusible else level + 1, backward)

    def _settle(self, number: int, level: int) -> None:
        """Give operators that could run at any time the level of the operator that reads their results."""
        waiting = [number]
        while waiting:
            for _, writer in self._operators[waiting.pop()].reads:
                if writer != IN_MEMORY and self._operators[writer].level == FLOATING:
                    self._operators[writer].level = level
                    waiting.append(writer)

    def barrier(self, reads: Iterable[int], writes: Iterable[int], *, backward: bool) -> None:
        """A GEMM, an attention or a convolution: the storages that it reads and writes are in memory."""
        seen = [(storage, self._written.get(storage, UNWRITTEN)) for storage in reads]
        self._needed.update((storage, written.by) for storage, written in seen)
        level = max((written.level for _, written in seen), default=0) + 1
        for storage in writes:
            self._written[storage] = _Written(level=max(level, 1), in_backward=backward)

    def sums(self) -> dict[WorkGroup, Moved]:
        """All traffic by path, kind and direction. The bytes of a fused kernel are shared out by what its members would move."""
        sums: dict[WorkGroup, Moved] = defaultdict(Moved)
        for operator in self._operators:
            sums[operator.group] += Moved(operator.flops, operator.bytes_moved, launches=1)
        for chain in self._chains():
            members = [self._operators[number] for number in chain.members]
            alone = sum(operator.bytes_moved for operator in members)
            moved = sum(region.bytes_moved for region in chain.reads) + sum(chain.writes.values())
            for operator in members:
                sums[operator.group] += Moved(fused_bytes=min(moved, alone) * operator.bytes_moved / alone if alone else 0.0)
            sums[max(members, key=lambda one: one.bytes_moved).group] += Moved(kernels=1)
        return dict(sums)

    def _chains(self) -> list[_Chain]:
        heads = self._heads()
        chains: dict[int, _Chain] = defaultdict(_Chain)
        readers: dict[tuple[int, int], set[int]] = defaultdict(set)  # (storage, operator) → chains that read it
        for number, operator in enumerate(self._operators):
            chain = chains[heads[number]]
            chain.members.append(number)
            for region, writer in operator.reads:
                readers[region.storage, writer].add(heads[number])
                if writer == IN_MEMORY or heads[writer] != heads[number]:
                    chain.reads[region] = writer
        for number, operator in enumerate(self._operators):
            for region in operator.writes:
                key = (region.storage, number)
                outside = readers[key] - {heads[number]}
                if key in self._needed or outside or not readers[key] or not operator.fusible:
                    chain = chains[heads[number]]
                    chain.writes[key] = chain.writes.get(key, 0) + region.bytes_moved
        self._recompute(chains, readers)
        return list(chains.values())

    def _heads(self) -> list[int]:
        """The chain of every operator, by the number of one of its members."""
        heads = list(range(len(self._operators)))

        def head(number: int) -> int:
            while heads[number] != number:
                heads[number] = heads[heads[number]]
                number = heads[number]
            return number

        for number, operator in enumerate(self._operators):
            for _, writer in operator.reads if operator.fusible else ():
                if writer != IN_MEMORY and self._joins(self._operators[writer], operator):
                    heads[head(number)] = head(writer)
        return [head(number) for number in range(len(heads))]

    def _joins(self, writer: _Operator, reader: _Operator) -> bool:
        return writer.fusible and writer.level == reader.level and writer.group.direction == reader.group.direction

    def _recompute(self, chains: dict[int, _Chain], readers: dict[tuple[int, int], set[int]]) -> None:
        """Let backward recompute what forward would write only for it, where that moves fewer bytes."""
        for number, chain in chains.items():
            if self._operators[chain.members[0]].group.direction != "forward":
                continue
            outside = {key: readers[key] - {number} for key in chain.writes if key not in self._needed}
            for_backward = {
                key: chain.writes[key]
                for key, others in outside.items()
                if others and all(self._operators[other].group.direction == "backward" for other in others)
            }
            used_by = {other for key in for_backward for other in outside[key]}
            kept = sum(size + size * len(outside[key]) for key, size in for_backward.items())
            sources = self._sources(for_backward, chain)
            again = sum(region.bytes_moved for reader in used_by for region in sources if region not in chains[reader].reads)
            if not for_backward or again >= kept:
                continue
            for key in for_backward:
                del chain.writes[key]
            for reader in used_by:
                reading = chains[reader].reads
                chains[reader].reads = {
                    region: writer for region, writer in reading.items() if (region.storage, writer) not in for_backward
                } | sources

    def _sources(self, wanted: Iterable[tuple[int, int]], chain: _Chain) -> dict[Region, int]:
        """The regions in memory that these results of a chain can be recomputed from."""
        wanted, members = set(wanted), set(chain.members)
        sources: dict[Region, int] = {}
        waiting, seen = [number for _, number in wanted], set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            for region, writer in self._operators[number].reads:
                written = (region.storage, writer) in chain.writes and (region.storage, writer) not in wanted
                if writer in members and not written:
                    waiting.append(writer)
                else:
                    sources[region] = writer
        return sources


@cache
def named(group: str) -> frozenset[str]:
    """The operators of a group of the table."""
    return frozenset(aten()[group]["names"])


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
    if name in named("free") or not outputs:
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
    if name in named("overwriting"):
        written = {region.storage for region in writes}
        reads = [region for region in reads if region.storage not in written]
    elif name in named("gathering") and inputs and outputs and inputs[0].dim():
        reads[0] = operand.region(inputs[0], operand.bytes_of(outputs[0]))
    elif name in named("scattering") and inputs and outputs and inputs[0].dim() and outputs[0].dim():
        values = max((operand.bytes_of(tensor) for tensor in inputs[1:]), default=0)
        kept = storage_of(outputs[0]) == storage_of(inputs[0])  # in place: the rest of the tensor stays as it is
        reads[0] = operand.region(inputs[0], values if kept else float("inf"))
        writes[0] = operand.region(outputs[0], values if kept else float("inf"))
    return reads, writes


def is_fusible(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: tuple[Any, ...]) -> bool:
    """Whether a compiler would fuse it with its neighbors: not if it reduces columns or a whole tensor."""
    if name in named("separate"):
        return False
    if name not in named("reductions") or not inputs or not outputs or outputs[0].numel() >= inputs[0].numel():
        return True
    dims = next((value for value in args[1:] if isinstance(value, (int, list, tuple)) and not isinstance(value, bool)), None)
    listed = [dims] if isinstance(dims, int) else list(dims) if dims else []
    last = inputs[0].dim() - 1
    return any(isinstance(dim, int) and dim % max(inputs[0].dim(), 1) == last for dim in listed)


def flops_of(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """FLOPs for each element of its largest tensor."""
    most = max((tensor.numel() for tensor in (*inputs, *outputs)), default=0)
    return float(aten()["flops"].get(name, 1) * most)
