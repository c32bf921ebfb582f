"""Runs operators on the meta device, and remembers the shapes of their outputs. Imports torch: only worker processes import this.

PyTorch computes the outputs of most operators on the meta device in Python, about half a millisecond each, which is most of the
time of a trace. The layers of a model run the same operators on the same shapes, so each is computed once.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
            return _rebuilt(self._known[key])
        output = operator(*args, **kwargs)
        try:
            described = _described(output, {tensor.untyped_storage()._cdata for tensor in inputs})
        except _UnknownError:
            return output
        self._known[key] = described
        return output


def _key(values: tuple[Any, ...] | list[Any], inputs: list[Tensor]) -> tuple[Any, ...]:
    """Everything that the shapes of the outputs depend on."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN or value.device.type != "meta" or value.layout != torch.strided or value.is_complex():
                raise _UnknownError
            inputs.append(value)
            key.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            key.append((len(value), *_key(value, inputs)))
        elif isinstance(value, (int, float)) or type(value) in _HASHABLE:
            key.append((type(value), value))  # 1, 1.0 and True are equal
        else:
            raise _UnknownError
    return tuple(key)


def _described(output: Any, storages: set[int]) -> Any:
    """Sizes and type of each tensor. Views of inputs are not remembered: they must stay views."""
    if isinstance(output, (list, tuple)):
        return type(output), [_described(item, storages) for item in output]
    if output is None:
        return None
    plain = type(output) is Tensor and output.device.type == "meta" and output.layout == torch.strided and not output.is_complex()
    if not plain or output.storage_offset() or output.untyped_storage()._cdata in storages:
        raise _UnknownError
    return output.shape, output.stride(), output.dtype


def _rebuilt(described: Any) -> Any:
    """New meta tensors with the described sizes and types."""
    if described is None:
        return None
    if isinstance(described[0], type):
        return described[0](map(_rebuilt, described[1]))
    shape, stride, dtype = described
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
