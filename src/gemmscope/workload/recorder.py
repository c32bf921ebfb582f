"""Records every GEMM of a module's forward and backward pass, with its module and its pass.

How a GEMM is classified (this file imports torch, so only the trace worker imports it):

* **Is it a linear layer?** A GEMM with an operand that comes from parameters alone (a weight, its transpose, its cast, a slice of
  it) belongs to a linear layer. One without such an operand (attention scores, rotary angles) is a batched GEMM.
* **Which pass?** GEMMs that run while gradients are recorded are forward. Those that the autograd engine runs belong to the node
  with the sequence number of the forward GEMM: if they read the weight they are dgrad, if they read the activation, wgrad.
* **Which shape?** `gemm_size` of the tokens, input and output features, whichever side the weight is on.

Scaled-dot-product attention and grouped GEMMs are replaced by functions that only produce shapes, because the operators they
dispatch on the meta device are not those that a GPU runs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gemmscope.workload.ops import Pass, gemm_size

_ALL = Fraction(1)
_FUSED_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class _Place:
    """A tensor's location in memory, kept alive. A transpose has the same location; Q, K and V cut from one tensor do not."""

    storage: torch.UntypedStorage
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        return cls(tensor.untyped_storage(), tensor.storage_offset())

    def same_as(self, other: _Place) -> bool:
        return self.storage._cdata == other.storage._cdata and self.offset == other.offset


@dataclass
class _Forward:
    """One forward GEMM, kept until its backward pass runs."""

    path: str
    left: _Place
    right: _Place
    weight_side: str | None  # "left", "right", or None for a GEMM of two activations
    tokens: int
    inputs: int
    outputs: int
    groups: int
    batch: int
    shape: tuple[int, int, int]


@dataclass
class Recorder:
    """A context manager that records every operation inside it. See `as_json` for the result."""

    module: torch.nn.Module
    gemms: Counter[tuple[str, str, int, int, int, int]] = field(default_factory=Counter)
    batched_gemms: Counter[tuple[str, str, int, int, int, int, Fraction]] = field(default_factory=Counter)
    remainder: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    masks: Counter[str] = field(default_factory=Counter)  # of the forward attentions: none, causal, explicit

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in self.module.named_modules()}
        self._stack: list[str] = []
        self._by_node: dict[int, list[_Forward]] = {}
        self._convolutions: dict[int, str] = {}
        self._weights = {
            parameter.untyped_storage()._cdata: parameter.untyped_storage() for parameter in self.module.parameters()
        }

    # --- context -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(lambda module, _: self._stack.append(self._names.get(id(module), "?"))),
            hooks.register_module_forward_hook(lambda *_: self._pop(), always_call=True),
        ]
        self._modes = (_Dispatch(self), _Functions(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, tb)
        for handle in self._handles:
            handle.remove()

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()

    def path(self) -> str:
        """The running module's path with layer numbers replaced by *: `model.layers.*.self_attn.q_proj`."""
        return _LAYER_INDEX.sub("*", self._stack[-1]) if self._stack else ""

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
        record = _Forward(
            self.path(), _Place.of(left), _Place.of(right), weight_side, tokens, inputs, outputs, groups, batch, (m, k, n)
        )
        if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            self._by_node.setdefault(torch.autograd._get_sequence_nr() - 1, []).append(record)
        elif not torch.is_grad_enabled():
            node = torch.autograd._get_sequence_nr() - 1  # inside a custom autograd.Function, whose node was just made
            self._by_node.setdefault(node, []).append(record)
        if weight_side is None:
            self.batched_gemms[(record.path, "forward", m, k, n, batch, _ALL)] += 1
        else:
            self.linear(record.path, "fprop", (tokens, inputs, outputs), groups)

    def linear(self, path: str, pass_name: Pass, size: tuple[int, int, int], groups: int) -> None:
        """One GEMM of a linear with these tokens, input and output features."""
        m, k, n = gemm_size(*size, pass_name)
        self.gemms[(path, pass_name, m, k, n, groups)] += 1

    def _backward(self, left: torch.Tensor, right: torch.Tensor) -> None:
        node = torch._C._current_autograd_node()
        candidates = self._by_node.get(node._sequence_nr(), []) if node is not None else []
        operands = (_Place.of(left), _Place.of(right))
        for record in candidates:
            for side, place in (("left", record.left), ("right", record.right)):
                if any(place.same_as(operand) for operand in operands):
                    self._count_backward(record, side)
                    return
        if candidates:  # recomputed: it reads a new copy of the activation that was recorded
            self._count_backward(candidates[0], self._side_read(candidates[0], left, right))
            return
        m, k, n, batch = left.shape[-2], left.shape[-1], right.shape[-1], left.shape[0] if left.dim() == 3 else 1
        name = f"({node.name()})" if node is not None else ""  # the gradient of an operation that is not a GEMM itself
        self.batched_gemms[(name, "backward", m, k, n, batch, _ALL)] += 1

    def _side_read(self, record: _Forward, left: torch.Tensor, right: torch.Tensor) -> str:
        """Which operand of the forward GEMM a backward one reads, decided by its kind instead of its location."""
        if record.weight_side is not None:
            reads_weight = self.is_weight(left) or self.is_weight(right)
            return record.weight_side if reads_weight else {"left": "right", "right": "left"}[record.weight_side]
        return "right" if left.shape[-1] == record.shape[2] else "left"  # dA = dC Bᵀ sums over n, dB = Aᵀ dC over m

    def _count_backward(self, record: _Forward, operand_read: str) -> None:
        if record.weight_side is None:
            m, k, n = gemm_size(*record.shape, "dgrad" if operand_read == "right" else "wgrad")
            self.batched_gemms[(record.path, "backward", m, k, n, record.batch, _ALL)] += 1
        else:
            pass_name: Pass = "dgrad" if operand_read == record.weight_side else "wgrad"
            self.linear(record.path, pass_name, (record.tokens, record.inputs, record.outputs), record.groups)

    def attention(self, path: str, direction: str, shape: tuple[int, int, int, int, int], *, mask: str) -> None:
        """The batched GEMMs of one attention: scores and context forward; four gradients backward."""
        batch, queries, keys, head_dim, value_dim = shape
        visible = _causal_share(queries, keys) if mask == "causal" else _ALL
        if direction == "forward" and queries > 1:  # a single query does not show causality
            self.masks[mask] += 1
        forward = [(queries, head_dim, keys), (queries, keys, value_dim)]
        backward = [(queries, keys, head_dim), (head_dim, queries, keys), (queries, value_dim, keys), (keys, queries, value_dim)]
        for m, k, n in forward if direction == "forward" else backward:
            self.batched_gemms[(path, direction, m, k, n, batch, visible)] += 1

    def convolution(self, output: torch.Tensor, weight: torch.Tensor, source: torch.Tensor, *, transposed: bool) -> None:
        """One forward convolution: the filters are applied at every output position (transposed: every input position)."""
        path = self.path()
        self._convolutions[torch.autograd._get_sequence_nr() - 1] = path
        flops = 2 * (source if transposed else output).numel() * weight.shape[1:].numel()
        self.remainder[(path, "convolution", "forward", flops)] += 1

    def convolution_backward(self, output: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, **how: Any) -> None:
        """The requested gradients of input and weight, each as much work as the forward pass."""
        node = torch._C._current_autograd_node()
        path = self._convolutions.get(node._sequence_nr(), "") if node is not None else ""
        one = 2 * (source if how["transposed"] else output).numel() * weight.shape[1:].numel()
        self.remainder[(path, "convolution", "backward", one * sum(how["wanted"]))] += 1

    def as_json(self) -> dict[str, Any]:
        """Plain lists. `gemms` have a weight, `batched_gemms` have none, `remainder` is other work.

        `visible` is the share of a batched GEMM that the mask of its attention allows, as a fraction.
        """
        gemms = [
            {"module": path, "pass": which, "m": m, "k": k, "n": n, "groups": groups, "count": count}
            for (path, which, m, k, n, groups), count in self.gemms.items()
        ]
        batched_gemms = [
            {"module": path, "pass": which, "m": m, "k": k, "n": n, "batch": batch, "visible": str(visible), "count": count}
            for (path, which, m, k, n, batch, visible), count in self.batched_gemms.items()
        ]
        remainder = [
            {"module": path, "kind": kind, "pass": which, "flops": flops, "count": count}
            for (path, kind, which, flops), count in self.remainder.items()
        ]
        return {"gemms": gemms, "batched_gemms": batched_gemms, "remainder": remainder, "masks": dict(self.masks)}


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
            recorder.convolution(output, args[1], args[0], transposed=args[6])
        elif name == "aten::convolution_backward":
            recorder.convolution_backward(args[0], args[1], args[2], transposed=args[7], wanted=args[10][:2])
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
    return Fraction(pairs, queries * keys) if pairs else _ALL


class _Attention(torch.autograd.Function):
    """Attention that only produces shapes.

    Query is [.., heads, queries, d], key [.., kv heads, keys, d], value [.., kv heads, keys, dv].
    """

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, mask: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.recorder, ctx.path, ctx.mask = recorder, recorder.path(), mask
        ctx.shape = (query.shape[:-2].numel(), query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])
        recorder.attention(ctx.path, "forward", ctx.shape, mask=mask)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        ctx.recorder.attention(ctx.path, "backward", ctx.shape, mask=ctx.mask)
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
