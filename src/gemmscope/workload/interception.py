"""Runs a module so that a `Recorder` sees everything it runs. Imports torch: only the trace worker imports this file.

Scaled-dot-product attention, FlexAttention, grouped GEMMs and the kernels of mixers (`stand_ins.py`) are replaced by
functions that only produce shapes, because the operators they dispatch on the meta device are not those that a GPU runs.

PyTorch computes the outputs of most operators on the meta device in Python, about half a millisecond each, which is most of the
time of a trace. The layers of a model run the same operators on the same shapes, so `RememberedShapes` computes each once.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from gemmscope.workload import stand_ins
from gemmscope.workload.ops import PASSES
from gemmscope.workload.recorder import Recorder
from gemmscope.workload.traced_ops import ALL_VISIBLE, TracedAttention, Unfused
from gemmscope.workload.traffic import tensors

_FUSED_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DETECT_CAUSAL = torch.nn.modules.transformer._detect_is_causal_mask
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_WITH_ADDEND = ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")
LARGEST_FLASH_HEAD = 256  # flash kernels pad head sizes up to this one; others need multiples of 8
_GEMMS = ("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm", *_WITH_ADDEND)


@contextlib.contextmanager
def record(module: torch.nn.Module, *, between_gemms: bool = True, longest_s: float = math.inf) -> Iterator[Recorder]:
    """Record every operation that runs inside this context; without `between_gemms`, only GEMMs, attention and convolutions.

    A `TimeoutError` after `longest_s`: with values, a large module would run for hours.
    """
    recorder, hooks = Recorder(module), torch.nn.modules.module
    functions, saving = _Functions(recorder), contextlib.nullcontext()
    if between_gemms:
        saving = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
    with (
        hooks.register_module_forward_pre_hook(lambda running, _: recorder.enter(running)),
        hooks.register_module_forward_hook(lambda *_: recorder.leave(), always_call=True),
        stand_ins.replaced(recorder),
        mock.patch.object(stand_ins, "attend", functions.flex_attention),
        _Dispatch(recorder, between_gemms, longest_s),
        functions,
        mock.patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", _is_causal),
        saving,
    ):
        yield recorder


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """nn.TransformerEncoder compares its mask with a causal one, unless it is told; a meta tensor has no values to compare."""
    return bool(is_causal) if mask is not None and mask.is_meta else bool(_DETECT_CAUSAL(mask, is_causal, size))


class _Dispatch(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator below autograd, forward and backward."""

    def __init__(self, recorder: Recorder, between_gemms: bool, longest_s: float) -> None:
        super().__init__()
        self._recorder, self._between_gemms, self._shapes = recorder, between_gemms, RememberedShapes()
        self._ends = time.monotonic() + longest_s

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.monotonic() > self._ends:
            raise TimeoutError("running the module takes too long")
        output = self._shapes.run(operator, args, kwargs or {})
        recorder, name = self._recorder, operator._schema.name
        if name == "aten::convolution":
            output = _in_layout_of(output, args[0], args[1])
        inputs, outputs = tensors((*args, *(kwargs or {}).values())), tensors((output,))
        is_barrier = True
        match name:
            case _ if name in _GEMMS and all(value.layout == torch.strided for value in args if isinstance(value, torch.Tensor)):
                first = 1 if name in _WITH_ADDEND else 0
                recorder.gemm(args[first], args[first + 1], outputs[0])
            case "aten::mv" | "aten::addmv":
                matrix, vector = args[-2:] if name == "aten::mv" else args[1:3]
                recorder.gemm(matrix, vector.unsqueeze(-1), outputs[0])
            case "aten::convolution":
                recorder.convolution(output, args[0], args[1], transposed=args[6])
            case "aten::convolution_backward":
                recorder.convolution(args[0], args[1], args[2], transposed=args[7], gradients=sum(args[10][:2]))
            case _:
                is_barrier = False
        if is_barrier:
            recorder.barrier(inputs, outputs)
        elif self._between_gemms:
            recorder.other(operator, args, inputs, outputs)
        recorder.derive_weight(inputs, outputs)
        return output


def _in_layout_of(output: torch.Tensor, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The output of a convolution, with channels last where its input or weight has them. On the meta device, it has not."""
    layouts = [suggest_memory_format(tensor) for tensor in (source, weight)]
    wanted = next((layout for layout in layouts if layout != torch.contiguous_format), None)
    return output.contiguous(memory_format=wanted) if wanted is not None else output


class _Functions(TorchFunctionMode):  # type: ignore[misc]
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
            return _grouped(self._recorder, args[0], args[1])
        return function(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        explicit = named.get("attn_mask") is not None  # a meta tensor: its values are not known
        mask = "explicit" if explicit else "causal" if named.get("is_causal") else "none"
        operands = named["query"], named["key"], named["value"], named.get("attn_mask")
        grouped = bool(named.get("enable_gqa"))
        _check_sizes(*operands[:3], grouped=grouped)
        unfused = _why_unfused(*operands, grouped=grouped)
        computed = None
        if not operands[0].is_meta:
            with torch.no_grad(), _disable_current_modes():
                computed = _FUSED_ATTENTION(*args, **kwargs)
        return _attention(self._recorder, *operands, mask, unfused=unfused, computed=computed)

    def flex_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: Fraction | None) -> torch.Tensor:
        """Attention of which a block mask shows this share of all pairs (None: not known). Its values are not computed."""
        _check_sizes(query, key, value, grouped=True)
        mask = "explicit" if share is None else "none" if share == ALL_VISIBLE else "blocks"
        computed = None if query.is_meta else stand_ins.blank(query, (*query.shape[:-1], value.shape[-1]))
        return _attention(self._recorder, query, key, value, None, mask, share or ALL_VISIBLE, computed=computed)


def _check_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grouped: bool) -> None:
    """Raise where the real function would: heads of other sizes, or key/value heads that do not fit the query heads."""
    heads, kv_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key))
    fits = kv_heads in (1, heads) or (grouped and kv_heads > 0 and heads % kv_heads == 0)
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2] or not fits:
        sizes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in (("query", query), ("key", key), ("value", value)))
        raise RuntimeError(f"the sizes of attention do not fit each other: {sizes}")


def _why_unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, grouped: bool
) -> Unfused:
    """Why no fused CUDA kernel of PyTorch accepts these tensors (`sdp_utils_cpp.h`); empty where one does."""
    inputs, sizes = (query, key, value), {query.shape[-1], value.shape[-1]}
    same_batch = len({tensor.shape[0] for tensor in inputs}) == 1
    same_heads = grouped or len({tensor.shape[-3] for tensor in inputs if tensor.dim() > 2}) == 1
    aligned = (mask is None and len(sizes) == 1 and max(sizes) <= LARGEST_FLASH_HEAD) or not any(size % 8 for size in sizes)
    if any(tensor.dim() != 4 for tensor in inputs) or not (same_batch and same_heads and aligned):
        return ("sizes",)
    named: dict[Any, torch.Tensor | None] = {"query": query, "key": key, "value": value, "mask": mask}
    return tuple(name for name, tensor in named.items() if tensor is not None and tensor.dim() and tensor.stride(-1) != 1)


def causal_share(queries: int, keys: int) -> Fraction:
    """The share of all pairs that torch's `is_causal` allows: the first query sees the first key, and so on."""
    reach = min(queries, keys)
    pairs = reach * (reach + 1) // 2 + (queries - reach) * keys
    return Fraction(pairs, queries * keys) if pairs else ALL_VISIBLE


def _attention(
    recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: str, share: Fraction = ALL_VISIBLE,
    *, unfused: Unfused = (), computed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention that only produces shapes, or the values that were computed already.

    Query is [.., heads, queries, d], key [.., kv heads, keys, d], value [.., kv heads, keys, dv]. `mask` is its kind, `share` the
    part of all pairs that it shows, `unfused` why the attention runs unfused: then the probabilities are kept for backward.
    """
    *batch, queries, head_dim = query.shape
    keys, visible = key.shape[-2], causal_share(queries, key.shape[-2]) if mask == "causal" else share
    op = TracedAttention(
        label=recorder.path, batch=math.prod(batch[:-1]), heads=batch[-1] if batch else 1, queries=queries, keys=keys,
        kv_heads=key.shape[-3] if key.dim() > 2 else 1, head_dim=head_dim, value_dim=value.shape[-1],
        pairs=float(queries * keys * visible), causal=mask == "causal", unfused=unfused,
        mask_bytes=recorder.operand.bytes_of(bias) if bias is not None else 0,
        mask_gradient=bias is not None and bias.requires_grad,
    )  # fmt: skip
    if queries > 1:  # a single query does not show causality
        recorder.masks[mask] += 1
    recorder.attentions[op]["forward"] += 1
    # 4 bytes each, also in a module whose FP32 tensors count as BF16
    return stand_ins.shapes_only(
        recorder,
        (query, key, value, bias),
        lambda: query.new_empty((*query.shape[:-1], value.shape[-1])) if computed is None else computed,
        lambda _: recorder.attentions[op].update(["backward"]),
        [query.new_empty((*query.shape[:-1], keys), dtype=torch.int32)] if unfused and query.is_meta else [],
    )


def _grouped(recorder: Recorder, rows: Tensor, weights: Tensor) -> Tensor:
    """A grouped GEMM that only produces shapes: rows [tokens, in] sorted by group, weights [groups, in, out]."""
    groups, inputs, outputs = weights.shape
    path, size = recorder.path, (len(rows), inputs, outputs)

    def backward(needed: Sequence[bool]) -> None:
        for pass_name, needs in zip(PASSES[1:], needed, strict=True):
            if needs:
                recorder.linear(path, pass_name, size, groups)

    recorder.linear(path, "fprop", size, groups)
    recorder.linear_paths.add(path)
    return stand_ins.shapes_only(recorder, (rows, weights), lambda: stand_ins.blank(rows, (len(rows), outputs)), backward)


_PLAIN = (Tensor, torch.nn.Parameter)
_HASHABLE = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None))


class _UnknownError(Exception):
    """The outputs of this call cannot be remembered."""


class RememberedShapes:
    """`run(operator, args, kwargs)` returns outputs like those of `operator(*args, **kwargs)`, without values."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if operator._schema.is_mutable:
            return operator(*args, **kwargs)
        try:
            inputs: list[Tensor] = []
            key = (operator, *_key(args, inputs), *((name, *_key((value,), inputs)) for name, value in kwargs.items()))
        except _UnknownError:
            return operator(*args, **kwargs)
        if key in self._known:
            return tree_map(lambda make: make(), self._known[key])
        output = operator(*args, **kwargs)
        with contextlib.suppress(_UnknownError):
            self._known[key] = tree_map(partial(_maker, {tensor.untyped_storage()._cdata for tensor in inputs}), output)
        return output


def _key(values: tuple[Any, ...] | list[Any], inputs: list[Tensor]) -> tuple[Any, ...]:
    """Everything that the shapes of the outputs depend on."""
    key: list[Any] = []
    for value in values:
        match value:
            case Tensor():
                if type(value) not in _PLAIN or not _is_plain_meta(value):
                    raise _UnknownError
                inputs.append(value)
                key.append((value.shape, value.stride(), value.dtype))
            case list() | tuple():
                key.append((len(value), *_key(value, inputs)))
            case _ if isinstance(value, (int, float)) or type(value) in _HASHABLE:
                key.append((type(value), value))  # 1, 1.0 and True are equal
            case _:
                raise _UnknownError
    return tuple(key)


def _is_plain_meta(tensor: Tensor) -> bool:
    return tensor.is_meta and tensor.layout == torch.strided and not tensor.is_complex()


def _maker(storages: set[int], output: Any) -> Callable[[], Any]:
    """Makes new meta tensors like this one. Views of inputs (`storages`) are not remembered: they must stay views."""
    if output is None:
        return lambda: None
    plain = type(output) is Tensor and _is_plain_meta(output)
    if not plain or output.storage_offset() or output.untyped_storage()._cdata in storages:
        raise _UnknownError
    return partial(torch.empty_strided, output.shape, output.stride(), dtype=output.dtype, device="meta")
