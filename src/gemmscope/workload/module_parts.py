"""What is inside of modules and their inputs: tensors, layers, the output head, linears that can be converted. Imports torch: for
workers only."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

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
    match value:
        case torch.Tensor():
            return change(value)
        case Mapping():
            changed = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
            changed.update({key: with_tensors(item, change) for key, item in value.items()})
            return changed
        case list() | tuple():
            items = [with_tensors(item, change) for item in value]
            if type(value) in (list, tuple):
                return type(value)(items)
            return type(value)(*items) if hasattr(value, "_fields") else value
        case _ if _is_dataclass(value):
            changed = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(changed, field.name, with_tensors(getattr(value, field.name), change))
            return changed
    return value


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case Mapping():
            yield from ((str(key), item) for key, item in value.items())
        case list() | tuple():
            yield from zip(getattr(value, "_fields", ("",) * len(value)), value, strict=True)
        case _ if _is_dataclass(value):
            yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def find_layers(module: nn.Module) -> list[str]:
    """The paths of the repeated layers: the elements of every outermost list that has several modules of one class.

    Lists inside of layers (experts) are not looked at. A list of plain layers of PyTorch is an MLP, not a stack of layers.
    """
    layers: list[str] = []

    def visit(parent: nn.Module, prefix: str) -> None:
        stack = isinstance(parent, (nn.ModuleList, nn.Sequential)) and _repeats(parent)
        for name, child in parent.named_children():
            if stack:
                layers.append(prefix + name)
            else:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return layers


def _repeats(container: nn.Module) -> bool:
    classes = Counter(type(child) for child in container.children() if next(child.children(), None) is not None)
    return bool(classes) and max(classes.values()) > 1


def output_head(module: nn.Module, last_calls: Mapping[str, int], layers: Sequence[str]) -> str | None:
    """The path of the output head: as a Hugging Face model names it, else the last linear outside the layers.

    `last_calls`: every linear that was called, with the place of its last call among all calls.
    """
    declared = getattr(module, "get_output_embeddings", None)
    with suppress(Exception):  # a module that has something else of that name
        head = declared() if callable(declared) else None
        if head is not None:
            return next((path for path, child in module.named_modules() if child is head), None)
    last = max(last_calls, key=lambda path: last_calls[path], default=None)
    inside = last is None or len(last_calls) == 1 or any(last.startswith(f"{layer}.") for layer in layers)
    return None if inside else last


def why_not_converted(linear: nn.Linear) -> str:
    """Why frameworks cannot swap this linear for one in low precision; empty if they can."""
    if "weight" not in linear._parameters:
        return "its weight is computed in every step: a parametrization, or pruning"
    return "a subclass with its own forward pass" if type(linear).forward is not nn.Linear.forward else ""


def expert_weights(module: nn.Module) -> int:
    """Parameters in three dimensions: the weights of experts side by side, which are not `nn.Linear`."""
    others = (nn.Conv1d, nn.ConvTranspose1d, nn.Bilinear, ParametrizationList)
    inside = [part for part in module.modules() if not isinstance(part, others)]
    weights = [parameter for part in inside for parameter in part.parameters(recurse=False)]
    return sum(parameter.ndim == 3 and min(parameter.shape) > 1 for parameter in weights)
