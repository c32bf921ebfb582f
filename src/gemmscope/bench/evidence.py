"""Whether a GEMM ran in the precision requested, as kernel names prove it.

A GEMM that ran in another precision is a fallback, and is never counted as a speedup. Workers do not import this file, because
loading the result types takes a moment.
"""

from collections.abc import Sequence

from gemmscope.engine.kernels import classify
from gemmscope.recipe.recipes import Recipe
from gemmscope.results.linears import Evidence
from gemmscope.workload.ops import Pass


def evidence(recipe: Recipe, pass_name: Pass, names: Sequence[str]) -> Evidence:
    """Compare the GEMMs that ran in a pass with what the recipe asks for there.

    >>> from gemmscope.recipe.recipes import recipe
    >>> proof = evidence(recipe("FP8Rowwise"), "fprop", ["nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN"])
    >>> proof.verdict, proof.requested, proof.ran
    ('fallback', 'e4m3 x e4m3, scales: row', 'bf16 x bf16')
    """
    gemms = tuple(dict.fromkeys(name for name in names if classify(name).kernel_class == "gemm"))
    operands, (own, *instead) = recipe.operands[pass_name], recipe.scales_of(pass_name)
    requested = _format(operands, own)
    ran = [classify(name) for name in gemms if "reduce" not in name.lower()]
    if not gemms or any(facts.operands is None for facts in ran):
        return Evidence(verdict="unproven", requested=requested, ran="", kernels=gemms)
    wrong = next((facts for facts in ran if sorted(facts.operands or ()) != sorted(operands)), None)
    if wrong is not None:
        return Evidence(verdict="fallback", requested=requested, ran=_format(wrong.operands or (), wrong.scales), kernels=gemms)
    other = next((facts.scales for facts in ran if facts.scales not in (None, own, *instead)), None)
    if other is not None:
        return Evidence(verdict="emulated", requested=requested, ran=_format(operands, other), kernels=gemms)
    outside = ", applied outside of the GEMM" if any(facts.scales in instead for facts in ran) else ""
    return Evidence(verdict="as requested", requested=requested, ran=requested + outside, kernels=gemms)


def _format(operands: Sequence[str], scales: str | None) -> str:
    return " x ".join(operands) + (f", scales: {scales}" if scales not in (None, "none") else "")
