"""Counts the GEMMs of every variant of a measured step by precision: what a mix keeps in BF16 must run in BF16, and nothing else.

python benchmarks/mix_kernels.py step.json
"""

from __future__ import annotations

import sys
from collections import Counter

from gemmscope.engine.kernels import classify
from gemmscope.recipe.recipes import recipe
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult
from gemmscope.step.stack_plan import kept_parts
from gemmscope.step.waterfall import LINEARS, place

PARTS = ("qkv", "attn out", "mlp up", "mlp down")  # of a dense layer: a GEMM each in fprop, dgrad and wgrad


def expected(name: str, layers: int) -> tuple[int, int]:
    """GEMMs in BF16 and in low precision of a dense model."""
    every, chosen = 3 * len(PARTS) * layers, recipe(name)
    if not chosen.quantizes:
        return every, 0
    if chosen.kept is None:
        return 0, every
    ends = min(chosen.kept.first_layers + chosen.kept.last_layers, layers)
    kept = 3 * (len(PARTS) * ends + len(kept_parts(chosen.kept) & set(PARTS)) * (layers - ends))
    return kept, every - kept


def main(path: str) -> int:
    """Print the counts; 1 if one of them is not as expected."""
    result = read_result(path, ["step"])
    assert isinstance(result, StepResult)
    wrong = 0
    print(f"{'variant':60} {'BF16 GEMMs':>12} {'low precision':>14}  expected")
    for variant in result.variants:
        if not variant.parts or variant.variant.left_out:
            continue
        gemms = [classify(kernel.name) for kernel in place(variant.parts) if kernel.block in LINEARS]
        counts = Counter(facts.operands == ("bf16", "bf16") for facts in gemms if facts.kernel_class == "gemm")
        wanted = expected(variant.variant.recipe, variant.variant.depth)
        seen = (counts[True], counts[False])
        wrong += seen != wanted
        print(f"{variant.variant.name:60} {seen[0]:12} {seen[1]:14}  {wanted}{'' if seen == wanted else '  <- differs'}")
    for time in result.step.recipes:
        print(f"{time.recipe:60} {time.step_ms.value:9.2f} ms  {time.speedup}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
