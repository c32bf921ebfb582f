"""Hooks that a training does not notice: torch may keep, copy, save or compile what they are attached to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gemmscope.training import Guard


class Hook:
    """Calls a function until it is ended; nothing refers to that function afterwards.

    A copy, or what `pickle` and `torch.save` keep of it, does nothing and needs no gemmscope. Compilers find nothing in it.
    """

    __slots__ = ("__weakref__", "_action", "_guard", "_quiet")

    def __init__(self, action: Callable[..., object], guard: Guard, *, quiet: bool = True) -> None:
        """`quiet`: nothing that the function computes is seen by modes of the training."""
        self._action: Callable[..., object] | None = action
        self._guard, self._quiet = guard, quiet

    def __call__(self, *arguments: Any) -> None:
        # the first condition is a constant to compilers
        if torch.compiler.is_compiling() or (action := self._action) is None or not _observable():
            return
        with unseen() if self._quiet else nullcontext():
            self._guard.run(action, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # which takes any arguments and returns None

    def end(self) -> None:
        """Release the function."""
        self._action = None


def _observable() -> bool:
    """Whether tensors have values of their own now: not while a graph is captured or traced, nor inside `torch.func`."""
    inside = torch.jit.is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None
    return not (inside or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()))


@contextmanager
def unseen() -> Iterator[None]:
    """Compute outside of the training's modes, such as a FLOP counter or selective checkpoints."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def unchanged(output: Tensor) -> Tensor:
    """The tensor whose node receives the gradient of an output even if it is changed in place, for example by an activation: the
    base of the output, if the output is a view of all of it."""
    base = output._base
    whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base if whole and base.requires_grad else output
