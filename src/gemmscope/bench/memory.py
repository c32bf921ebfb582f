"""The memory of each precision's linears: computed from sizes and the recipes' facts, not measured.

Weights stay in BF16, and low precisions keep quantized copies beside them. Forward keeps each linear's input X for backward: in
BF16 as it is, in low precision its quantized copy, which is smaller. Norms, attention and activations keep more, the same in
every precision, and are not counted here.
"""

from collections.abc import Sequence

from gemmscope.recipe.frameworks import frameworks
from gemmscope.recipe.recipes import recipe
from gemmscope.results.linears import Memory
from gemmscope.workload.cases import Case

BF16_BYTES = 2


def memory(cases: Sequence[Case], name: str, backend: str = "transformer_engine", capability: str = "") -> Memory:
    """Add up the linears. On Blackwell one copy of a tensor-scaled weight serves both directions.

    >>> up = [Case("MLP Up", 1024, 4096, 16384, 24)]
    >>> memory(up, "FP8Block").copies_bytes / memory(up, "BF16").weights_bytes
    1.03
    """
    facts = recipe(name)
    copy_bytes, kept_bytes = facts.weight_copy_bytes, facts.kept_bytes
    if frameworks()[backend].casts_again:
        copy_bytes, kept_bytes = 0.0, BF16_BYTES
    elif facts.scales == "tensor" and capability.startswith("10."):
        copy_bytes /= 2
    weights = sum(case.weights * case.count for case in cases)
    inputs = sum(case.tokens * case.inputs * case.count for case in cases)
    return Memory(
        recipe=name, weights_bytes=weights * BF16_BYTES, copies_bytes=weights * copy_bytes, kept_bytes=inputs * kept_bytes
    )
