"""Sequence parallelism on one rank: outside the blocks that tensor parallelism splits, a rank holds its share of the tokens.

Nothing is exchanged. What other ranks would send, in forward and in backward, lies in memory beforehand, as random numbers: so
every operation has the sizes that it has in training, and communication takes no time.
"""

from typing import Any

import torch

from gemmscope.step.kits.plain import Kit

GRADIENT = 1e-3  # about what gradients of activations are


class Shards:
    """Goes from this rank's tokens to those of several ranks, and back."""

    def __init__(self, kit: Kit, parts: int) -> None:
        """`parts`: of how many shares this rank has one; 1: it has all tokens."""
        self.parts = parts
        self._device = kit.device
        self._memory: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}

    def gathered(self, x: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        """This rank's tokens together with those of the others; of all ranks, or of `parts`."""
        parts = self.parts if parts is None else parts
        if parts == 1:
            return x
        received = self._received("values", x.shape[0] * parts, x, 1.0)
        return _Gathered.apply(x, received)

    def kept(self, x: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        """This rank's tokens of a sum over ranks, as after a reduce-scatter."""
        parts = self.parts if parts is None else parts
        if parts == 1:
            return x
        received = self._received("gradients", x.shape[0], x, GRADIENT)
        return _Kept.apply(x, received, x.shape[0] // parts)

    def _received(self, what: str, rows: int, like: torch.Tensor, scale: float) -> torch.Tensor:
        key = (what, rows, like.shape[1], like.dtype)
        if key not in self._memory:
            self._memory[key] = torch.randn(rows, like.shape[1], device=self._device, dtype=like.dtype) * scale
        return self._memory[key]


class _Gathered(torch.autograd.Function):
    """Forward: what was received. Backward: of the gradient, this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ctx.rows = x.shape[0]
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[: ctx.rows], None


class _Kept(torch.autograd.Function):
    """Forward: this rank's tokens. Backward: the gradient that was received."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(received)
        return x[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ARG004
        return ctx.saved_tensors[0], None, None
