"""Emulation with quantizers that `torch.compile` compiled: several times faster on a GPU."""

from functools import cache
from typing import Any

import torch

from gemmscope.numerics.evaluation.emulate import quantized_factors

MOST_SHAPES = 512  # of operands and quantizers that are compiled


@cache
def compiled() -> dict[str, Any]:
    """The arguments of `Emulation`. Compiled code draws random numbers from PyTorch's default generator.

    Quantizers are compiled for every shape that occurs: a model has dozens of them, more than PyTorch compiles by default.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MOST_SHAPES)
    options = {"emulate_precision_casts": True}  # else it leaves out roundings to BF16 inside
    return {"quantize": torch.compile(quantized_factors, dynamic=False, options=options), "seed": None}
