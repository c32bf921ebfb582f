"""Tensors inside inputs and outputs: in dicts, lists, named tuples and dataclasses. Imports torch: for workers only."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

Named = tuple[str, torch.Tensor]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors among arguments, inputs or outputs."""
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, name: str = "") -> Iterator[Named]:
    """The tensors of a value, each with its name: keys and fields joined by dots, items of lists by the name of the list.

    >>> [name for name, _ in named_tensors({"image": {"x": torch.zeros(1)}, "text": [torch.zeros(1)], "scale": 2.0})]
    ['image.x', 'text']
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    for key, item in _items(value):
        yield from named_tensors(item, ".".join(filter(None, (name, key))))


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with every tensor changed; values without tensors stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            changed[key] = with_tensors(item, change)
        return changed
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item, change) for item in value]
        if type(value) in (list, tuple):
            return type(value)(items)
        return type(value)(*items) if hasattr(value, "_fields") else value
    if _is_dataclass(value):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, with_tensors(getattr(value, field.name), change))
        return changed
    return value


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", ("",) * len(value))
        yield from zip(names, value, strict=True)
    elif _is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
