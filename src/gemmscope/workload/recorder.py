"""Records every GEMM of a module's forward and backward pass, with its module and its pass.

How a GEMM is classified (this file imports torch, so only the trace worker imports it):

* **Is it a linear layer?** A GEMM with an operand that comes from parameters alone (a weight, its transpose, its cast, a slice of
  it) belongs to a linear layer. One without such an operand (attention scores, rotary angles) is a batched GEMM.
* **Which pass?** GEMMs that run while gradients are recorded are forward. Those that the autograd engine runs belong to the node
  with the sequence number of the forward GEMM: if they read the weight they are dgrad, if they read the activation, wgrad.
* **Which shape?** `gemm_size` of the tokens, input and output features, whichever side the weight is on.

Scaled-dot-product attention, grouped GEMMs and the kernels of mixers (`fused.py`) are replaced by functions that only produce
shapes, because the operators they dispatch on the meta device are not those that a GPU runs. GEMMs and convolutions without a
weight that still run inside a mixer are in the section `MIXER`: they belong to a fallback for its kernel.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gemmscope.workload import fused
from gemmscope.workload.ops import ALL_VISIBLE, BatchedGemm, Direction, Gemm, Pass, Remainder, attention_gemms, gemm_size
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.trace import MIXER

ROOT = "(root)"
_FUSED_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

_Place = tuple[int, int]
"""A tensor's location in memory. A transpose has the same location; Q, K and V cut from one tensor do not."""


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
    section: str


@dataclass
class Recorder:
    """What was recorded, each with the count 1 and how often it ran. Make one with `record`."""

    module: torch.nn.Module
    gemms: Counter[Gemm] = field(default_factory=Counter)  # with a weight
    batched_gemms: Counter[BatchedGemm] = field(default_factory=Counter)  # without one
    remainder: Counter[Remainder] = field(default_factory=Counter)
    scans: Counter[Scan | CausalConv] = field(default_factory=Counter)  # kernels of mixers
    masks: Counter[str] = field(default_factory=Counter)  # of the forward attentions: none, causal, explicit

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in self.module.named_modules()}
        self._running: list[str] = []
        self._sections: list[str] = []  # of the running modules: MIXER in a mixer and in all that it calls
        self._by_node: dict[int, list[_Forward]] = {}
        self._convolutions: dict[int, tuple[str, str]] = {}
        storages = [parameter.untyped_storage() for parameter in self.module.parameters()]
        self._weights = {storage._cdata: storage for storage in storages}
        self._kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no other storage gets the same address

    # --- context -----------------------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module) -> None:
        self._running.append(self._names.get(id(module), "?"))
        self._sections.append(MIXER if fused.is_mixer(module) else self.section())

    def leave(self) -> None:
        """The running module has ended, or raised."""
        if self._running:
            self._running.pop()
            self._sections.pop()

    def section(self) -> str:
        return self._sections[-1] if self._sections else ""

    def path(self) -> str:
        """The running module's path with layer numbers replaced by *: `model.layers.*.self_attn.q_proj`."""
        return _LAYER_INDEX.sub("*", self._running[-1] if self._running else "") or ROOT

    # --- recording ---------------------------------------------------------------------------------------------------

    def is_weight(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._weights

    def derive_weight(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """A tensor computed from weights alone is a weight."""
        if inputs and all(self.is_weight(tensor) for tensor in inputs):
            for tensor in outputs:
                storage = tensor.untyped_storage()
                self._weights[storage._cdata] = storage

    def gemm(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """One GEMM left @ right, forward or backward."""
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self._backward(left, right)
        else:
            self._forward(left, right)

    def _place(self, tensor: torch.Tensor) -> _Place:
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage
        return storage._cdata, tensor.storage_offset()

    def _forward(self, left: torch.Tensor, right: torch.Tensor) -> None:
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
        record = _Forward(self.path(), *places, weight_side, size, groups, batch, (m, k, n), self.section())
        # Without gradients, this runs inside a custom autograd.Function, whose node was just made.
        if not torch.is_grad_enabled() or left.requires_grad or right.requires_grad:
            self._by_node.setdefault(torch.autograd._get_sequence_nr() - 1, []).append(record)
        if weight_side is None:
            self.batched_gemm(record.path, "forward", record.shape, batch, section=record.section)
        else:
            self.linear(record.path, "fprop", size, groups)

    def linear(self, path: str, pass_name: Pass, size: tuple[int, int, int], groups: int) -> None:
        """One GEMM of a linear with these tokens, input and output features."""
        self.gemms[Gemm(path, pass_name, *gemm_size(*size, pass_name), groups)] += 1

    def batched_gemm(
        self, path: str, direction: Direction, shape: tuple[int, int, int], batch: int, visible: Fraction = ALL_VISIBLE,
        section: str = "",
    ) -> None:  # fmt: skip
        """One batched GEMM, M x K x N, of two activations."""
        m, k, n = shape
        gemm = BatchedGemm(name=path, direction=direction, m=m, k=k, n=n, batch=batch, visible=visible, section=section)
        self.batched_gemms[gemm] += 1

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
            shape = gemm_size(*record.shape, pass_name)
            self.batched_gemm(record.path, "backward", shape, record.batch, section=record.section)
        else:
            self.linear(record.path, pass_name, record.size, record.groups)

    def attention(self, path: str, direction: Direction, query: torch.Size, keys: int, value_dim: int, mask: str) -> None:
        """The batched GEMMs of one attention with queries of this shape: [.., heads, queries, head_dim]."""
        queries, head_dim = query[-2:]
        if direction == "forward" and queries > 1:  # a single query does not show causality
            self.masks[mask] += 1
        visible = _causal_share(queries, keys) if mask == "causal" else ALL_VISIBLE
        for shape in attention_gemms(queries, keys, head_dim, value_dim)[direction]:
            self.batched_gemm(path, direction, shape, query[:-2].numel(), visible)

    def scan(self, op: Scan | CausalConv) -> None:
        """One forward call of a mixer's kernel."""
        self.scans[replace(op, name=f"{self.path()}: {op.name}")] += 1

    def convolution(
        self, output: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *, transposed: bool, gradients: int | None = None
    ) -> None:
        """A convolution: the filters are applied at every output position (transposed: every input position).

        `gradients` is None forward. Backward, each requested gradient (of input and weight) is as much work as forward.
        """
        flops = 2 * (source if transposed else output).numel() * weight.shape[1:].numel()
        if gradients is None:
            path, section = self.path(), self.section()
            self._convolutions[torch.autograd._get_sequence_nr() - 1] = path, section
            self.remainder[Remainder(name=path, direction="forward", flops=flops, section=section)] += 1
        else:
            node = torch._C._current_autograd_node()
            path, section = self._convolutions.get(node._sequence_nr() if node is not None else -1, (ROOT, ""))
            self.remainder[Remainder(name=path, direction="backward", flops=flops * gradients, section=section)] += 1


@contextlib.contextmanager
def record(module: torch.nn.Module) -> Iterator[Recorder]:
    """Record every operation that runs inside this context."""
    recorder, hooks = Recorder(module), torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(lambda running, _: recorder.enter(running)),
        hooks.register_module_forward_hook(lambda *_: recorder.leave(), always_call=True),
    ]
    try:
        with fused.replaced(module, recorder.scan), _Dispatch(recorder), _Functions(recorder):
            yield recorder
    finally:
        for handle in handles:
            handle.remove()


class _Dispatch(TorchDispatchMode):
    """Sees every operator below autograd, forward and backward."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = operator(*args, **(kwargs or {}))
        recorder, name = self._recorder, operator._schema.name
        if name in ("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm"):
            recorder.gemm(args[0], args[1])
        elif name in ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation"):
            recorder.gemm(args[1], args[2])
        elif name in ("aten::mv", "aten::addmv"):
            matrix, vector = args[-2:] if name == "aten::mv" else args[1:3]
            recorder.gemm(matrix, vector.unsqueeze(-1))
        elif name == "aten::convolution":
            recorder.convolution(output, args[0], args[1], transposed=args[6])
        elif name == "aten::convolution_backward":
            recorder.convolution(args[0], args[1], args[2], transposed=args[7], gradients=sum(args[10][:2]))
        recorder.derive_weight(_tensors(args), _tensors((output,)))
        return output


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, including those in lists."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


class _Functions(TorchFunctionMode):
    """Replaces the functions that behave differently on the meta device than on a GPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        names = ((torch, "_grouped_mm"), (torch, "_scaled_grouped_mm"), (torch.nn.functional, "grouped_mm"))
        self._grouped = {getattr(place, name) for place, name in names if hasattr(place, name)}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _FUSED_ATTENTION:
            return self._attention(*args, **kwargs)
        if function is torch.nn.functional.multi_head_attention_forward:  # calls it where this mode does not see it
            with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", self._attention):
                return function(*args, **kwargs)
        if function in self._grouped:
            return _Grouped.apply(self._recorder, args[0], args[1])
        return function(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        explicit = named.get("attn_mask") is not None  # a meta tensor: its values are not known
        mask = "explicit" if explicit else "causal" if named.get("is_causal") else "none"
        return _Attention.apply(self._recorder, mask, named["query"], named["key"], named["value"])


def _causal_share(queries: int, keys: int) -> Fraction:
    """The share of all pairs that torch's `is_causal` allows: the first query sees the first key, and so on."""
    reach = min(queries, keys)
    pairs = reach * (reach + 1) // 2 + (queries - reach) * keys
    return Fraction(pairs, queries * keys) if pairs else ALL_VISIBLE


class _Attention(torch.autograd.Function):
    """Attention that only produces shapes.

    Query is [.., heads, queries, d], key [.., kv heads, keys, d], value [.., kv heads, keys, dv].
    """

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, mask: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.recorder, ctx.path = recorder, recorder.path()
        ctx.facts = (query.shape, key.shape[-2], value.shape[-1], mask)
        recorder.attention(ctx.path, "forward", *ctx.facts)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        ctx.recorder.attention(ctx.path, "backward", *ctx.facts)
        return None, None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class _Grouped(torch.autograd.Function):
    """A grouped GEMM that only produces shapes: rows [tokens, in] sorted by group, weights [groups, in, out]."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.recorder, ctx.path = recorder, recorder.path()
        groups, inputs, outputs = weights.shape
        ctx.size = (rows.shape[0], inputs, outputs)
        recorder.linear(ctx.path, "fprop", ctx.size, groups)
        return rows.new_empty((rows.shape[0], outputs))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.recorder.linear(ctx.path, "dgrad", ctx.size, weights.shape[0])
        if ctx.needs_input_grad[2]:
            ctx.recorder.linear(ctx.path, "wgrad", ctx.size, weights.shape[0])
        return None, torch.empty_like(rows), torch.empty_like(weights)
