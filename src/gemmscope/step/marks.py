"""Marks between the parts of a step, so that every kernel of a profiled one can be given to a part.

A mark is an identity in the computation that launches a tiny kernel when it is passed, forward and backward, and writes down its
label. The profiler sees the kernel; the label says what begins there. In backward a part's mark comes when its gradient is done:
what was before it belongs to it. Outside of a recording marks cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Direction = Literal["forward", "backward", "step"]


@dataclass
class Recording:
    """The marks passed so far, in order."""

    labels: list[tuple[str, Direction]] = field(default_factory=list)

    def passed(self, part: str, direction: Direction) -> None:
        self.labels.append((part, direction))
        if torch.cuda.is_available():
            torch.cuda._sleep(1)


_current: Recording | None = None


@contextmanager
def recording() -> Iterator[Recording]:
    """While this lasts, marks are written down."""
    global _current
    _current = Recording()
    try:
        yield _current
    finally:
        _current = None


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: str) -> torch.Tensor:
        ctx.part = part
        assert _current is not None
        _current.passed(part, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if _current is not None:
            _current.passed(ctx.part, "backward")
        return grads[0], None


def mark(x: torch.Tensor, part: str) -> torch.Tensor:
    """`part` begins here. In compiled layers a recording cuts fusions at the marks; without one they are not there."""
    return x if _current is None else _pass(x, part)


def _apply(x: torch.Tensor, part: str) -> torch.Tensor:
    return _Mark.apply(x, part)


_pass: Callable[[torch.Tensor, str], torch.Tensor] = torch._disable_dynamo(_apply)  # or each mark would be compiled on its own


def mark_step(part: str, direction: Direction = "step") -> None:
    """A part begins that gradients do not flow through: the optimizer, or a look at the embedding's table."""
    if _current is not None:
        _current.passed(part, direction)
