"""Records everything that a module's forward and backward pass run, with its module: GEMMs with their pass, attention,
convolutions, and the operators between them.

How a GEMM is classified (this file imports torch, so only the trace worker imports it):

* **Is it a linear layer?** A GEMM with an operand that comes from parameters alone (a weight, its transpose, its cast, a slice of
  it, a pruned one) belongs to a linear layer. One without such an operand (attention scores, rotary angles) is a batched GEMM.
* **Which pass?** GEMMs that run while gradients are recorded are forward. Those that the autograd engine runs belong to the node
  with the sequence number of the forward GEMM: if they read the weight they are dgrad, if they read the activation, wgrad.
* **Which shape?** `gemm_size` of the tokens, input and output features, whichever side the weight is on.

* **Is it attention?** Scaled-dot-product attention is. So is a batched GEMM whose result reaches a softmax, or that reads one.
  Others (a recurrence in chunks, for example) are batched GEMMs and nothing more.

`interception.py` calls the recorder for everything that runs. GEMMs and convolutions without a weight that run inside a mixer are
in the section `MIXER`: they belong to a fallback for its kernel.
"""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from gemmscope.workload.module_parts import why_not_converted
from gemmscope.workload.ops import BatchedGemm, Convolution, Direction, Gemm, Pass, gemm_size
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.trace import MIXER
from gemmscope.workload.traced_ops import TracedAttention
from gemmscope.workload.traffic import (
    Operand,
    Traffic,
    WorkGroup,
    flops_of,
    is_free,
    is_fusible,
    kinds,
    operands,
    storage_of,
    tensors,
)

ROOT, LOSS, GRADIENTS = "(root)", "(loss)", "(gradients)"
MOST_FOLLOWED = 8  # batched GEMMs whose results one tensor may come from
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
MIXER_CLASS = re.compile(
    r"(?:Mamba\d?Mixer|MambaLayer|BambaMixer|FalconH1Mixer|Delta(?:Net|Attention)|LightningAttention|TextLinearAttention"
    r"|ShortConv(?:olution)?|RecurrentBlock)$"
)
"""Classes of transformers that are mixers: what runs inside them is a recurrence or its convolution, not attention."""

_Place = tuple[int, int]
"""A tensor's location in memory. A transpose has the same location; Q, K and V cut from one tensor do not."""


class _RunningModule(NamedTuple):
    """A running module: its path, the kind of what it runs itself, and `MIXER` in a mixer and in all that it calls."""

    path: str = ROOT
    kind: str = "elementwise"
    section: str = ""
    convertible: bool = False  # a linear that can run in low precision


@dataclass
class _Forward:
    """One forward GEMM, kept until its backward pass runs."""

    path: str
    left: _Place
    right: _Place
    weight_side: str | None  # "left", "right", or None for a GEMM of two activations
    size: tuple[int, int, int]  # tokens, input and output features, where it has a weight
    groups: int
    batch: int
    shape: tuple[int, int, int]
    section: str = ""
    role: str = "batched-gemm"


@dataclass
class Recorder:
    """What was recorded, each with the count 1 and how often it ran. Make one with `record`."""

    module: torch.nn.Module
    gemms: Counter[Gemm] = field(default_factory=Counter)  # with a weight
    convolutions: Counter[Convolution] = field(default_factory=Counter)
    scans: Counter[Scan | CausalConv] = field(default_factory=Counter)  # kernels of mixers
    recomputed: Counter[Scan | CausalConv] = field(default_factory=Counter)  # those that backward runs forward again
    masks: Counter[str] = field(default_factory=Counter)  # of the forward attentions: none, causal, explicit
    attentions: defaultdict[TracedAttention, Counter[Direction]] = field(default_factory=lambda: defaultdict(Counter))
    traffic: Traffic = field(default_factory=Traffic)
    linear_paths: set[str] = field(default_factory=set)  # of GEMMs of every nn.Linear that can be converted
    saved: dict[int, int] = field(default_factory=dict)  # bytes that backward needs, by storage

    def __post_init__(self) -> None:
        self._names = {id(module): _LAYER_INDEX.sub("*", name) or ROOT for name, module in self.module.named_modules()}
        self._running = [_RunningModule()]
        self._by_node: dict[int, list[_Forward]] = {}
        self._ran: dict[int, _RunningModule] = {}  # where the forward operator ran, by its node's number
        self._batched: list[tuple[_Forward | None, BatchedGemm]] = []
        self._scores: dict[int, tuple[_Forward, ...]] = {}  # batched GEMMs whose results reached a storage
        self._weighted: set[int] = set()  # storages that results of a softmax reached
        self._weights = {storage_of(parameter): parameter.untyped_storage() for parameter in self.module.parameters()}
        self._buffers = {storage_of(buffer): buffer.untyped_storage() for buffer in tensors(self.module.buffers())}
        self._kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no other storage gets the same address
        floats = Counter(parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point())
        self.operand = Operand(floats.most_common(1)[0][0] if floats else None)

    @property
    def batched_gemms(self) -> Counter[BatchedGemm]:
        """Batched GEMMs of two activations."""
        return Counter(replace(gemm, role=record.role if record else gemm.role) for record, gemm in self._batched)

    # --- context -----------------------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module) -> None:
        """A module starts to run. One that is registered nowhere belongs to its caller."""
        linear = isinstance(module, torch.nn.Linear) and not why_not_converted(module)
        section = MIXER if MIXER_CLASS.search(type(module).__name__) else self._running[-1].section
        path = self._names.get(id(module), self.path)
        self._running.append(_RunningModule(path, _kind_of(type(module)), section, linear))

    @contextlib.contextmanager
    def in_loss(self) -> Iterator[None]:
        """What runs inside belongs to the loss."""
        self._running.append(_RunningModule(LOSS, "loss"))
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """The running module has ended, or raised."""
        if len(self._running) > 1:
            self._running.pop()

    @property
    def path(self) -> str:
        """The running module's path with layer numbers replaced by *: `model.layers.*.self_attn.q_proj`."""
        return self._running[-1].path

    def is_backward(self) -> bool:
        """Whether the autograd engine runs, and does not run forward again."""
        return not torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1

    def _ran_forward(self) -> _RunningModule:
        """Where the forward operator ran whose gradient the autograd engine computes."""
        node = torch._C._current_autograd_node()
        return self._ran.get(node._sequence_nr() if node is not None else -1, _RunningModule(GRADIENTS))

    # --- recording ---------------------------------------------------------------------------------------------------

    def is_weight(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._weights

    def derive_weight(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """A tensor computed from weights alone is a weight. So is a weight that a buffer masks, or that a number scales."""
        others = [tensor for tensor in inputs if not self.is_weight(tensor)]
        if len(others) == len(inputs):
            return
        if others:
            shapes = [tensor.shape for tensor in inputs if self.is_weight(tensor)]
            constant = all(not tensor.dim() or storage_of(tensor) in self._buffers for tensor in others)
            if not constant or any(tensor.shape not in shapes for tensor in outputs):
                return
        self._weights |= {storage_of(tensor): tensor.untyped_storage() for tensor in outputs}

    def gemm(self, left: torch.Tensor, right: torch.Tensor, output: torch.Tensor) -> None:
        """One GEMM left @ right, forward or backward."""
        if self.is_backward():
            self._backward(left, right)
        else:
            self._forward(left, right, output)

    def _place(self, tensor: torch.Tensor) -> _Place:
        self.keep([tensor])
        return storage_of(tensor), tensor.storage_offset()

    def _forward(self, left: torch.Tensor, right: torch.Tensor, output: torch.Tensor) -> None:
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        batch = left.shape[0] if left.dim() == 3 and right.dim() == 3 else 1
        weight_side = "right" if self.is_weight(right) else "left" if self.is_weight(left) else None
        weight = {"left": left, "right": right, None: None}[weight_side]
        tokens, inputs, outputs = (n, k, m) if weight_side == "left" else (m, k, n)
        groups = 1
        if weight is not None and batch > 1:
            # A batch of weights is a grouped GEMM of equal groups; one weight broadcast over a batch is just more tokens.
            groups = 1 if weight.stride(0) == 0 else batch
            tokens *= batch
        size, places = (tokens, inputs, outputs), (self._place(left), self._place(right))
        record = _Forward(self.path, *places, weight_side, size, groups, batch, (m, k, n), self._running[-1].section)
        # Without gradients, this runs inside a custom autograd.Function, whose node was just made.
        if not torch.is_grad_enabled() or left.requires_grad or right.requires_grad:
            self._by_node.setdefault(torch.autograd._get_sequence_nr() - 1, []).append(record)
        if weight_side is None:
            self.batched_gemm(record.path, "forward", record.shape, batch, record=record)
            if storage_of(left) in self._weighted or storage_of(right) in self._weighted:
                record.role = "attention-gemm"
            self._scores[storage_of(output)] = (record,)
        else:
            if self._running[-1].convertible:
                self.linear_paths.add(record.path)
            self.linear(record.path, "fprop", size, groups)

    def linear(self, path: str, pass_name: Pass, size: tuple[int, int, int], groups: int) -> None:
        """One GEMM of a linear with these tokens, input and output features."""
        self.gemms[Gemm(path, pass_name, *gemm_size(*size, pass_name), groups)] += 1

    def batched_gemm(
        self, path: str, direction: Direction, shape: tuple[int, int, int], batch: int, record: _Forward | None = None
    ) -> None:
        """One batched GEMM, M x K x N, of two activations; `record` is the forward one that it belongs to."""
        m, k, n = shape
        section = record.section if record is not None else ""
        gemm = BatchedGemm(role="batched-gemm", label=path, section=section, direction=direction, m=m, k=k, n=n, batch=batch)
        self._batched.append((record, gemm))

    def _backward(self, left: torch.Tensor, right: torch.Tensor) -> None:
        node = torch._C._current_autograd_node()
        candidates = self._by_node.get(node._sequence_nr(), []) if node is not None else []
        operands = (self._place(left), self._place(right))
        for record in candidates:
            for side, place in (("left", record.left), ("right", record.right)):
                if place in operands:
                    self._count_backward(record, side)
                    return
        if candidates:  # recomputed: it reads a new copy of the activation that was recorded
            self._count_backward(candidates[0], self._side_read(candidates[0], left, right))
            return
        name = f"({node.name()})" if node is not None else ROOT  # the gradient of an operation that is not a GEMM itself
        shape, batch = (left.shape[-2], left.shape[-1], right.shape[-1]), left.shape[0] if left.dim() == 3 else 1
        self.batched_gemm(name, "backward", shape, batch)

    def _side_read(self, record: _Forward, left: torch.Tensor, right: torch.Tensor) -> str:
        """Which operand of the forward GEMM a backward one reads, decided by its kind instead of its location."""
        if record.weight_side is not None:
            reads_weight = self.is_weight(left) or self.is_weight(right)
            return record.weight_side if reads_weight else {"left": "right", "right": "left"}[record.weight_side]
        return "right" if left.shape[-1] == record.shape[2] else "left"  # dA = dC Bᵀ sums over n, dB = Aᵀ dC over m

    def _count_backward(self, record: _Forward, operand_read: str) -> None:
        pass_name: Pass = "dgrad" if operand_read == (record.weight_side or "right") else "wgrad"
        if record.weight_side is None:
            self.batched_gemm(record.path, "backward", gemm_size(*record.shape, pass_name), record.batch, record=record)
        else:
            self.linear(record.path, pass_name, record.size, record.groups)

    def scan(self, op: Scan | CausalConv) -> None:
        """One forward call of a mixer's kernel."""
        calls = self.scans if torch._C._current_graph_task_id() == -1 else self.recomputed
        calls[replace(op, label=f"{self.path}: {op.name}")] += 1

    def convolution(
        self, output: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *, transposed: bool, gradients: int | None = None
    ) -> None:
        """A convolution: the filters are applied at every output position (transposed: every input position).

        `gradients` is None forward. Backward, each requested gradient (of input and weight) is as much work as forward.
        """
        flops = 2 * (source if transposed else output).numel() * weight.shape[1:].numel()
        moved = sum(map(self.operand.bytes_of, (output, source, weight)))
        runs, times = (self._running[-1], 1) if gradients is None else (self._ran_forward(), gradients)
        op = Convolution(
            role="convolution", label=runs.path, section=runs.section, flops=flops * times, bytes_moved=moved * times,
            direction="forward" if gradients is None else "backward",
        )  # fmt: skip
        self.convolutions[op] += 1

    def other(self, operator: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """An operator between GEMMs."""
        name = operator._schema.name.rpartition("::")[2].rstrip("_")
        if is_free(name, operator, inputs, outputs):
            return
        self.keep(outputs)
        fusible = is_fusible(name, inputs, outputs, args)
        group = self._group(name)
        reads, writes = operands(name, self.operand, inputs, outputs)
        self.traffic.operator(group, reads, writes, flops_of(name, inputs, outputs), fusible=fusible)
        if group.direction == "forward":
            self._follow(name, inputs, outputs)

    def _group(self, name: str) -> WorkGroup:
        """Where an operator belongs: backward to the module and kind of its forward operator."""
        if self.is_backward():
            path, kind, *_ = self._ran_forward()
            return WorkGroup(path, kinds().get(name, kind), "backward")
        running = self._running[-1]
        kind = "loss" if running.kind == "loss" else kinds().get(name, running.kind)
        self._ran.setdefault(torch.autograd._get_sequence_nr() - 1, running._replace(kind=kind))
        return WorkGroup(running.path, kind, "forward")

    def _follow(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Follow results of batched GEMMs to a softmax, and those of a softmax to batched GEMMs."""
        sources = [storage_of(tensor) for tensor in inputs]
        records = [record for source in sources for record in self._scores.get(source, ())][:MOST_FOLLOWED]
        weighted = any(source in self._weighted for source in sources)
        if kinds().get(name) == "softmax":
            for record in records:
                record.role = "attention-gemm"
            records, weighted = [], True
        if records:
            self._scores |= {storage_of(tensor): tuple(records) for tensor in outputs}
        if weighted:
            self._weighted |= set(map(storage_of, outputs))

    def keep(self, outputs: list[torch.Tensor]) -> None:
        """Keep storages alive, so that no other gets the same number."""
        self._kept |= {storage_of(tensor): tensor.untyped_storage() for tensor in outputs}

    def barrier(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """A GEMM, an attention or a convolution read and wrote these."""
        self.keep(outputs)
        self._ran.setdefault(torch.autograd._get_sequence_nr() - 1, self._running[-1]._replace(kind="elementwise"))
        self.traffic.barrier(map(storage_of, inputs), map(storage_of, outputs), backward=self.is_backward())

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that backward needs: counted once, with all of its storage; weights and sparse tensors are not counted."""
        if tensor.layout != torch.strided:
            return tensor
        if not self.is_weight(tensor) and not self.is_backward():
            scale = self.operand.element_bytes(tensor) / tensor.element_size()
            self.keep([tensor])
            self.saved[storage_of(tensor)] = int(tensor.untyped_storage().nbytes() * scale)
        return tensor.detach()


def _kind_of(module: type[torch.nn.Module]) -> str:
    """The kind of the operators that a module of this class runs itself."""
    if "norm" in module.__name__.lower():
        return "norm"
    if module.__module__ == "torch.nn.modules.activation" or module.__name__.endswith(("Activation", "GELU", "SiLU")):
        return "activation"
    return "embedding" if issubclass(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) else "elementwise"
