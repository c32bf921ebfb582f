"""The random Hadamard transform of NVFP4: blocks of 16 values along the reduced dimension, rotated so that outliers spread out.

Both operands of wgrad are rotated by the same matrix, so the GEMM's result does not change: (X R)(dY R)ᵀ = X dYᵀ.
"""

from functools import cache

import torch
from torch import Tensor

SIZE = 16


@cache
def _built(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """diag(signs) · H / 4, with Sylvester's Hadamard matrix H: its values are ±1/4, and it is orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (torch.tensor(signs)[:, None] * matrix / 4).to(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rotation(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """The matrix. Compiled code takes it as a constant; it would otherwise build it, and copy it to the GPU, in every call."""
    return _built(signs, device)


def rotate(values: Tensor, signs: tuple[int, ...]) -> Tensor:
    """The transform of every block of 16 of the last dimension, of bfloat16 values and rounded to bfloat16 as the kernels do.

    In float64 the sum is exact, so that it does not depend on the order of the terms; kernels add in float32.
    """
    exact = values.bfloat16().double().reshape(-1, SIZE) @ _rotation(signs, values.device)
    return exact.bfloat16().float().reshape(values.shape)


def rotate_back(values: Tensor, signs: tuple[int, ...]) -> Tensor:
    """The inverse transform, of float32 values."""
    return (values.double().reshape(-1, SIZE) @ _rotation(signs, values.device).T).float().reshape(values.shape)
