"""Compares a step with its BF16 twin part by part. Parts sum to the step on both sides, so do their differences."""

from __future__ import annotations

from gemmscope.errors import UserError
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.findings import finding
from gemmscope.parts import STEP_PARTS
from gemmscope.results.explain import PartComparison, StepComparison

SAME_FLOPS = 0.1  # relative difference that two traces of one model and batch stay below


def with_twin(slow: TraceDiagnosis, fast: TraceDiagnosis) -> StepComparison:
    """BF16 and low precision, recorded from the same training."""
    _require_same_training(slow, fast)
    before, after = slow.account.parts_ms, fast.account.parts_ms
    parts, left, right = [], 0.0, 0.0
    for part in STEP_PARTS:
        if part in before or part in after:
            left, right = left + before.get(part, 0.0), right + after.get(part, 0.0)
            speedup = left / right if right else None
            expected, actual = before.get(part, 0.0), after.get(part, 0.0)
            parts.append(PartComparison(part=part, expected_ms=expected, trace_ms=actual, speedup=speedup))
    before_ms, after_ms = slow.account.step_ms, fast.account.step_ms
    findings = [finding("twin-speedup", speedup=before_ms / after_ms, before_ms=before_ms, after_ms=after_ms)]
    if after.get("GEMMs") and before.get("GEMMs"):
        findings.append(finding("twin-gemm-speedup", speedup=before["GEMMs"] / after["GEMMs"]))
        worst = max((part for part in parts if part.part != "GEMMs"), key=lambda part: part.difference_ms or 0.0, default=None)
        if worst is not None and (worst.difference_ms or 0.0) > 0.02 * after_ms:
            findings.append(finding("twin-part-grew", part=worst.part, difference_ms=worst.difference_ms))
    if not (step_flops(slow) and step_flops(fast)):
        counts = [sum(row.count for row in side.account.gemms) for side in (slow, fast)]
        findings.append(finding("twin-not-checked", gemms_before=counts[0], gemms_after=counts[1]))
    if slow.trace.world_size != fast.trace.world_size:
        findings.append(finding("twin-ranks-differ", before=slow.trace.world_size, after=fast.trace.world_size))
    if slow.account.micro_batches != fast.account.micro_batches:
        batches = slow.account.micro_batches, fast.account.micro_batches
        findings.append(finding("twin-micro-batches-differ", before=batches[0], after=batches[1]))
    what = "other" if slow.evidence.is_low else "BF16"
    return StepComparison(
        title=f"Comparison with the {what} trace", expected=slow.trace.path.name, parts=tuple(parts), findings=tuple(findings)
    )


def _require_same_training(slow: TraceDiagnosis, fast: TraceDiagnosis) -> None:
    """Two traces of one model run the same FLOPs per step, apart from recomputation."""
    totals = [step_flops(side) for side in (slow, fast)]
    if all(totals) and abs(totals[0] / totals[1] - 1) > SAME_FLOPS:
        raise UserError(
            f"{slow.trace.path} and {fast.trace.path} are not the same training: their GEMMs take "
            f"{totals[0] / 1e12:.2f} and {totals[1] / 1e12:.2f} TFLOP per step",
            "record both with the same model, batch and parallelism",
        )


def step_flops(diagnosis: TraceDiagnosis) -> float:
    """FLOPs per step of linears and head, recomputation not counted; zero if sizes are unknown."""
    if not diagnosis.evidence.flops_known:
        return 0.0
    items = [item for item in diagnosis.evidence.items if item.scope.phase not in ("recomputed", "optimizer")]
    flops = sum(item.gemm.flops for item in items if item.gemm is not None and "bmm" not in item.gemm.layer)
    return flops / diagnosis.view.count
