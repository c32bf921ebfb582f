"""The two operands of each pass, as the backends that run single GEMMs need them.

A linear Y = X·Wᵀ has three GEMMs. Each is written here as A·Bᵀ, with both operands as [rows, contraction]: the last dimension is
the one that is summed over, and along which values share a scale.

    fprop   Y  = X · Wᵀ      A = X   [tokens, in]    B = W   [out, in]
    dgrad   dX = dY · W      A = dY  [tokens, out]   B = Wᵀ  [in, out]
    wgrad   dW = dYᵀ · X     A = dYᵀ [out, tokens]   B = Xᵀ  [in, tokens]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmscope.measure.backends.reference import Operands

# pass -> (tensor, whether it is transposed) of each operand
FACTORS = {
    "fprop": (("X", False), ("W", False)),
    "dgrad": (("dY", False), ("W", True)),
    "wgrad": (("dY", True), ("X", True)),
}


@dataclass(frozen=True)
class Factor:
    """One operand of a GEMM: which tensor it is, and a view of its values as [rows, contraction]."""

    tensor: str
    values: torch.Tensor


def factors(operands: Operands, pass_name: str, expert: int = 0) -> tuple[Factor, Factor]:
    """A and B of a pass; for experts, all tokens and the weight of one expert."""
    tensors = {"X": operands.x, "W": operands.weights[expert], "dY": operands.grad}
    left, right = (
        Factor(tensor, tensors[tensor].t() if transposed else tensors[tensor]) for tensor, transposed in FACTORS[pass_name]
    )
    return left, right
