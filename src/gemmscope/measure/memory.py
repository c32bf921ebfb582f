"""What each precision does to memory: computed from sizes and the recipes' facts, not measured.

Weights stay in BF16, and low precisions hold quantized copies beside them. What forward keeps for backward is each linear's input
X: in BF16 as it is, in low precision its quantized copy, which is smaller. Norms, attention and activations keep more, the same
in every precision, and are not in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmscope.recipe.recipes import recipe
from gemmscope.workload.cases import Case

BF16_BYTES = 2
CASTS_AGAIN = ("torchao",)  # these keep X and W as they are, and quantize them once more in backward


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: the linears' weights, their quantized copies, and what one micro-batch keeps of their inputs."""

    weights: float
    copies: float
    kept: float


def memory(cases: Sequence[Case], name: str, backend: str = "transformer_engine", capability: str = "") -> Memory:
    """Add up the linears. On Blackwell one copy of a tensor-scaled weight serves both directions.

    >>> up = [Case("MLP Up", 1024, 4096, 16384, 24)]
    >>> memory(up, "FP8Block").copies / memory(up, "BF16").weights
    1.03
    """
    facts = recipe(name)
    copy_bytes, kept_bytes = facts.weight_copy_bytes, facts.kept_bytes
    if backend in CASTS_AGAIN:
        copy_bytes, kept_bytes = 0.0, BF16_BYTES
    elif facts.scales == "tensor" and capability.startswith("10."):
        copy_bytes /= 2
    weights = sum(case.weights * case.count for case in cases)
    inputs = sum(case.tokens * case.inputs * case.count for case in cases)
    return Memory(weights * BF16_BYTES, weights * copy_bytes, inputs * kept_bytes)
