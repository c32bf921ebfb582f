"""Marks between the parts of a step, so that every kernel of a profiled step can be assigned to a part.

A mark is an identity operation that launches a tiny kernel when it runs, forward and backward, and records its label. The
profiler shows the kernel; the label says which part begins there. In backward, the mark of a part comes when its gradient is
complete: the kernels before it belong to the part. Without a recording, marks cost nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Direction = Literal["forward", "backward", "step"]


_current: list[tuple[str, Direction]] | None = None  # the labels of the marks that have run so far, in order
_inner = False  # whether marks inside of the model are recorded, too


@contextmanager
def recording(*, inner: bool = True) -> Iterator[list[tuple[str, Direction]]]:
    """In this context, marks are recorded; without `inner`, only those between the model and the optimizer."""
    global _current, _inner
    _current, _inner = [], inner
    try:
        yield _current
    finally:
        _current, _inner = None, False


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: str) -> torch.Tensor:
        ctx.part = part
        mark_step(part, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if _inner:
            mark_step(ctx.part, "backward")
        return grads[0], None


def mark(x: torch.Tensor, part: str) -> torch.Tensor:
    """`part` begins here. In compiled layers, marks break fusions, but they only exist while recording."""
    return _pass(x, part) if _inner else x


@torch._disable_dynamo  # type: ignore[untyped-decorator]  # otherwise each mark would be compiled separately
def _pass(x: torch.Tensor, part: str) -> torch.Tensor:
    return _Mark.apply(x, part)


def mark_step(part: str, direction: Direction = "step") -> None:
    """A part begins here. Gradients do not flow through this mark: that of the optimizer, or the embedding lookup."""
    if _current is not None:
        _current.append((part, direction))
        if torch.cuda.is_available():
            torch.cuda._sleep(1)
