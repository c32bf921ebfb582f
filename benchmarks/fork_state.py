"""The state of a training, saved and put back in place: everything that can be reached from the objects of a training step.

Part of `fork_loop.py`, a prototype that has not run on a GPU.

Nothing is replaced: the same tensors, lists and dictionaries get their contents back, so that graphs, compiled code and the
user's own references stay valid. Reached are modules, optimizers, schedulers, scalers and whatever else has `load_state_dict`,
containers, tensors with their gradients, generators of random numbers, instances of the user's own classes, and the variables
that the user's own functions refer to. Objects of libraries (loggers, loaders, writers) are left alone, and what those hold.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import gemmscope
from gemmscope.errors import UserError
from gemmscope.process import free_memory_bytes
from gemmscope.signals import defer_signals

OWN = (sysconfig.get_path("stdlib"), str(Path(gemmscope.__file__).parent), str(Path(__file__).with_name("fork_")))
PLACES = tuple(map(re.escape, OWN))  # of Python, of gemmscope and of these scripts
LIBRARIES = re.compile("|".join([*PLACES, "<frozen", ".*/(site|dist)-packages/"]))
HOLDERS = (nn.Module, types.SimpleNamespace, argparse.Namespace)
LONGEST = 100_000  # longer lists and dictionaries are data
MOST_OBJECTS = 3_000_000
USED_SHARE = 0.8  # of the free memory
GENERATORS = {
    torch.Generator: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
    np.random.RandomState: ("get_state", "set_state"),
    np.random.BitGenerator: ("__getstate__", "__setstate__"),
}
REFERENCES = {
    types.MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
    np.random.Generator: ("bit_generator",),
}


class SavedState:
    """A context manager: what is reached from `roots` has its present contents again after `restore()`, and at the end."""

    def __init__(self, *roots: object) -> None:
        self._steps: list[Callable[[], object]] = []
        self._storages: dict[tuple[torch.device, int], torch.Tensor] = {}
        seen, waiting = dict[int, object](), [*roots, *_default_generators()]
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value  # which keeps it alive: no other object gets its number
                waiting += self._inside(value, opened=any(value is root for root in roots))
            if len(seen) > MOST_OBJECTS:
                raise UserError(f"the training step refers to more than {MOST_OBJECTS:,} objects", "pass a smaller function")
        sizes = [tensor.numel() for tensor in self._storages.values()]
        self.bytes = sum(sizes)
        free, disk = (USED_SHARE * size for size in (free_memory_bytes(), shutil.disk_usage(tempfile.gettempdir()).free))
        self.on_disk = self.bytes > free
        if self.bytes > max(free, disk):
            have = f"{free / 2**30:.1f} GiB of memory and {disk / 2**30:.1f} GiB in {tempfile.gettempdir()} are usable"
            size = f"the state of the training has {self.bytes / 2**30:.1f} GiB"
            raise UserError(f"{size}, and {have}", "set TMPDIR to a larger disk")
        with tempfile.TemporaryFile() as file:  # its mapping outlives it
            memory = np.memmap(file, np.uint8, "w+", shape=self.bytes) if self.on_disk else np.empty(self.bytes, np.uint8)
        self._saved = torch.from_numpy(memory).split(sizes) if sizes else ()
        for tensor, saved in zip(self._storages.values(), self._saved, strict=True):
            saved.copy_(tensor)

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back. Ctrl-C waits until that is done."""
        with defer_signals():
            for step in self._steps:
                step()
            for tensor, saved in zip(self._storages.values(), self._saved, strict=True):
                tensor.copy_(saved)

    def _inside(self, value: Any, *, opened: bool) -> Iterator[object]:
        """What this value refers to; how it gets its contents back is noted. `opened`: even if it belongs to a library."""
        names = next((names for kind, names in REFERENCES.items() if isinstance(value, kind)), ())
        yield from (getattr(value, name) for name in names)
        if isinstance(value, torch.Tensor):
            yield from self._tensor(value)
        elif isinstance(value, (dict, list, set, deque)) and len(value) <= LONGEST:
            contents = list(value.items() if isinstance(value, dict) else value)
            self._steps.append(partial(_refill, value, contents, _identity(value)))
            yield from [*value, *value.values()] if isinstance(value, dict) else list(value)
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif isinstance(value, tuple(GENERATORS)):
            get, put = next(names for kind, names in GENERATORS.items() if isinstance(value, kind))
            self._steps.append(partial(getattr(value, put), getattr(value, get)()))
        elif isinstance(value, np.ndarray) and value.size <= LONGEST and value.flags.writeable:
            self._steps.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, torch.profiler.profile):
            message = "the training step refers to a profiler, whose schedule cannot be put back"
            raise UserError(message, "call profiler.step() outside of the function")
        elif isinstance(value, types.FunctionType):
            yield from self._variables(value) if _is_own(value.__code__.co_filename) else ()
        elif not isinstance(value, (type, types.ModuleType)) and (opened or _is_opened(type(value))):
            yield getattr(value, "__dict__", None)

    def _tensor(self, value: torch.Tensor) -> Iterator[object]:
        yield vars(value)
        if is_traceable_wrapper_subclass(value):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif value.layout is not torch.strided:
            raise UserError("the training has sparse tensors, which cannot be saved", "use dense gradients: sparse=False")
        elif value.device.type != "meta" and (storage := value.untyped_storage()).nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self._storages.setdefault((value.device, storage.data_ptr()), whole)
            self._steps.append(partial(_same_storage, value, value.data))
        if value.is_leaf:
            self._steps.append(partial(_same_gradient, value, value.grad, value.requires_grad))
            yield value.grad

    def _variables(self, function: types.FunctionType) -> Iterator[object]:
        """The variables of the user that a function refers to: of the functions around it, of its module, and its defaults."""
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                self._steps.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                yield cell.cell_contents
        codes, names = [function.__code__], set[str]()
        for code in codes:
            names |= {*code.co_names}
            codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        used = {name: value for name, value in function.__globals__.items() if name in names}
        self._steps.append(partial(function.__globals__.update, used))
        yield from (*used.values(), function.__defaults__, function.__kwdefaults__)


def _default_generators() -> tuple[object, ...]:
    """The random numbers of Python, numpy and torch."""
    cuda = torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return (random.getstate.__self__, np.random.get_state.__self__, torch.default_generator, *cuda)  # type: ignore[attr-defined]


def _is_own(file: str) -> bool:
    """Whether code is the user's own, not that of a library, of Python or of gemmscope itself."""
    return bool(file) and LIBRARIES.match(file) is None


def _is_opened(kind: type) -> bool:
    """Whether objects of a type are saved with what they hold."""
    known = issubclass(kind, HOLDERS) or hasattr(kind, "load_state_dict")
    return known or _is_own(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _identity(container: Any) -> list[int]:
    return list(map(id, chain(container, container.values()) if isinstance(container, dict) else container))


def _refill(container: Any, contents: list[Any], identity: list[int]) -> None:
    """Give a container its contents back, if it has others."""
    if _identity(container) != identity:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(contents)


def _same_storage(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """The tensor has the memory again that it had: a step may have put other memory in its place."""
    if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (before.data_ptr(), before.shape, before.stride()):
        tensor.data = before


def _same_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None, requires: bool) -> None:
    tensor.requires_grad_(requires).grad = gradient
