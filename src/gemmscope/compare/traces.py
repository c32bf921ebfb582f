"""Compares a recorded step with its BF16 twin, with what `step` or `bench` predicted for it, and with the model's own sizes.

With a twin, the parts sum to the step on both sides, and so do their differences.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from gemmscope.errors import UserError, option, shown
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.trace_view import HOST, IDLE
from gemmscope.explain.work_class import BF16, LOW
from gemmscope.findings import Finding, finding
from gemmscope.grouping import add_up, largest_sums
from gemmscope.interval import Interval
from gemmscope.parts import STEP_PARTS, StepPart
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.bench import BenchResult
from gemmscope.results.explain import PartComparison, StepComparison
from gemmscope.results.step import StepResult, StepTime

SAME_FLOPS = 0.1  # relative difference that two traces of one model and batch stay below
ALIASES: dict[StepPart, StepPart] = {"routing": "embedding"}  # a trace does not show which indexing is routing


def with_twin(slow: TraceDiagnosis, fast: TraceDiagnosis) -> StepComparison:
    """The same training recorded twice; `slow` is the baseline, usually in BF16."""
    flops = [step_flops(side) for side in (slow, fast)]
    if all(flops) and abs(flops[0] / flops[1] - 1) > SAME_FLOPS:  # apart from recomputation, they are the same
        rows = [_rows(side) for side in (slow, fast)]
        by_rows = _differ(rows) and abs(flops[0] / flops[1] * rows[1] / rows[0] - 1) < SAME_FLOPS
        batch = f", with {rows[0]:,} and {rows[1]:,} rows: a different batch or sequence length" if by_rows else ""
        raise UserError(
            f"{slow.trace.path} and {fast.trace.path} are not the same training: their GEMMs take "
            f"{flops[0] / 1e12:.2f} and {flops[1] / 1e12:.2f} TFLOP per step{batch}",
            "record both with the same model, batch and parallelism",
        )
    recordings = slow.evidence.recording, fast.evidence.recording
    slowed = [recording.trace.path.name for recording in recordings if recording.unknown]
    before, after = (recording.parts_ms for recording in recordings)
    sides = _parts(before, after)
    sums = zip(accumulate(part.expected_ms or 0.0 for part in sides), accumulate(part.trace_ms for part in sides), strict=True)
    speedups = [left / right if right else None for left, right in sums]
    unsure = (HOST, IDLE) if slowed else ()
    parts = [
        part.model_copy(update={"speedup": speedup if part.part not in unsure else None})
        for part, speedup in zip(sides, speedups, strict=True)
    ]
    before_ms, after_ms = (recording.step_ms for recording in recordings)
    busy, findings = (slow.account.busy_ms, fast.account.busy_ms), []
    if not slowed:
        findings = [finding("twin-speedup", speedup=before_ms / after_ms, before_ms=before_ms, after_ms=after_ms)]
    elif all(busy):
        findings = [finding("twin-recording", files=slowed, speedup=busy[0] / busy[1], before_ms=busy[0], after_ms=busy[1])]
    if after.get("GEMMs") and before.get("GEMMs"):
        findings.append(finding("twin-gemm-speedup", speedup=before["GEMMs"] / after["GEMMs"]))
    findings += _largest_difference(
        "twin-gpu-part-grew" if slowed else "twin-part-grew", [part for part in parts if part.part not in unsure], after_ms
    )
    findings += _not_comparable(slow, fast, all(flops))
    return StepComparison(
        title=f"Comparison with the {main_precision(slow) or 'other'} trace",
        expected=slow.trace.path.name,
        parts=tuple(parts),
        findings=tuple(findings),
    )


def _not_comparable(slow: TraceDiagnosis, fast: TraceDiagnosis, checked: bool) -> Iterator[Finding]:
    """What else differs between the traces, or could not be compared; what matters most comes first."""
    if (phases := [side.trace.phase for side in (slow, fast)])[0].without_optimizer != phases[1].without_optimizer:
        yield finding("twin-inference", file=(slow if phases[0].without_optimizer else fast).trace.path.name)
    compared: dict[str, tuple[int | str, int | str]] = {
        "twin-gpus-differ": (slow.trace.gpu_name, fast.trace.gpu_name),
        "twin-batches-differ": (_rows(slow), _rows(fast)),
        "twin-ranks-differ": (slow.trace.world_size, fast.trace.world_size),
        "twin-micro-batches-differ": (slow.account.micro_batches, fast.account.micro_batches),
    }
    for code, values in compared.items():
        if _differ(values):
            yield finding(code, before=values[0], after=values[1])
    before, after = main_precision(slow), main_precision(fast)
    if before and before == after:
        yield finding("twin-same-precision", precision=before)
    elif before not in ("", BF16):
        yield finding("twin-baseline-precision", precision=before, other=after or "unknown precision")
    if not checked:
        gemms = [[item.gemm for item in side.evidence.gemms] for side in (slow, fast)]
        known, counts = (
            [len(own) / side.view.count for own, side in zip(rows, (slow, fast), strict=True)]
            for rows in ([[one for one in own if one.sized] for own in gemms], gemms)
        )
        facts = {"gemms_before": counts[0], "gemms_after": counts[1]}
        yield finding("twin-not-checked", known_before=known[0], known_after=known[1], **facts)


def main_precision(diagnosis: TraceDiagnosis) -> str:
    """The precision in which most of the linears run: low precision counts wherever it is used; empty if unknown."""
    evidence = diagnosis.evidence
    return next(
        iter(largest_sums((item.gemm.precision, item.share) for item in (evidence.low if evidence.is_low else evidence.high))), ""
    )


def _rows(diagnosis: TraceDiagnosis) -> int:
    """Rows of most GEMMs of the forward pass, which are the tokens of a micro-batch; 0 if unknown."""
    rows = Counter(
        size[0]
        for size in [item.gemm.size for item in diagnosis.evidence.gemms if item.gemm.pass_name == "fprop" and item.gemm.size]
    )
    return rows.most_common(1)[0][0] if rows else 0


def _differ(values: Sequence[int | str]) -> bool:
    """Whether two values that are both known are different ones."""
    return all(values) and values[0] != values[1]


def _parts(expected: dict[StepPart, float], actual: dict[StepPart, float]) -> list[PartComparison]:
    return [
        PartComparison(part=part, expected_ms=expected.get(part, 0.0), trace_ms=actual.get(part, 0.0))
        for part in STEP_PARTS
        if part in expected or part in actual
    ]


def _largest_difference(code: str, parts: Sequence[PartComparison], step_ms: float) -> list[Finding]:
    """The part that exceeds its expected time the most, if that matters for the step."""
    worst = max(parts, key=lambda part: part.difference_ms or 0.0, default=None)
    if worst is None or (worst.difference_ms or 0.0) <= 0.02 * step_ms:
        return []
    return [finding(code, part=worst.part, difference_ms=worst.difference_ms)]


def step_flops(diagnosis: TraceDiagnosis) -> float:
    """FLOPs per step of linears and head, recomputation not counted; zero if sizes are unknown."""
    if not diagnosis.evidence.flops_known:
        return 0.0
    items = [item for item in diagnosis.evidence.items if item.scope.phase not in ("recomputed", "optimizer")]
    return sum(item.gemm.flops for item in items if "bmm" not in item.gemm.layer) / diagnosis.view.count


def with_prediction(diagnosis: TraceDiagnosis, run: StepResult | BenchResult, recipe: str | None, origin: str) -> StepComparison:
    """Compare a trace with the prediction for the recipe that it ran. `origin`: the name of the run file."""
    if isinstance(run, StepResult):
        return _with_step(diagnosis, run, recipe, origin)
    return _with_bench(diagnosis, run, recipe, origin)


def _recipe_of(diagnosis: TraceDiagnosis, known: Sequence[str], requested: str | None, origin: str) -> str:
    """Which of the known recipes the trace ran: the requested one, else by its GEMMs and casts."""
    if not known:
        raise UserError(f"{origin} has no times of any recipe: nothing was measured", "name a run file with results")
    if requested is not None:
        chosen = next((name for name in known if name.lower() == requested.lower()), None)
        if chosen is None:
            raise UserError(f"{origin} has no recipe {requested}", f"it has {', '.join(known)}")
        return chosen
    rows = [row for row in diagnosis.account.gemms if row.precision in LOW]
    if not rows:
        return BASELINE if BASELINE in known else known[0]
    precision = max(rows, key=lambda row: row.time_ms).precision
    delayed = any(item.work_class.facts.kernel_class == "update" for item in diagnosis.evidence.items)
    alike = [name for name, one in recipes().items() if one.precision("fprop").in_traces == precision]
    chosen = next(
        (name for name in [name for name in alike if len(alike) == 1 or recipe_named(name).delayed == delayed] if name in known),
        None,
    )
    if chosen is None:
        raise UserError(
            f"{origin} has no recipe that runs {precision} as this trace does", f"choose one: {option('recipe', known[-1])}"
        )
    return chosen


def _require_time(time: Interval, recipe: str, origin: str) -> None:
    if not time.value > 0:
        raise UserError(f"{origin} is damaged: its time of {recipe} is {shown(time.value)}", "measure again")


def _with_step(diagnosis: TraceDiagnosis, run: StepResult, requested: str | None, origin: str) -> StepComparison:
    name = _recipe_of(diagnosis, [time.recipe for time in run.step.recipes], requested, origin)
    predicted = run.step.of(name)
    assert predicted is not None
    _require_time(predicted.step_ms, name, origin)
    _require_same_step(diagnosis, run, predicted, origin)
    expected = add_up((ALIASES.get(level.part, level.part), level.recipe_ms) for level in predicted.waterfall)
    step_ms = diagnosis.account.step_ms
    parts = _parts(expected, add_up((ALIASES.get(part, part), time) for part, time in diagnosis.account.parts_ms.items()))
    if not expected:
        parts = [PartComparison(part="step", expected_ms=predicted.step_ms.value, trace_ms=step_ms)]
    error = step_ms / predicted.step_ms.value - 1
    findings = [finding("prediction-error", recipe=name, predicted_ms=predicted.step_ms.value, trace_ms=step_ms, error=error)]
    findings += _largest_difference("prediction-largest-difference", parts, step_ms)
    base = run.step.of(BASELINE)
    if base is not None and name != BASELINE:
        findings.append(
            finding(
                "prediction-speedup",
                speedup=base.step_ms.value / step_ms,
                predicted=(base.step_ms.value / predicted.step_ms.value),
            )
        )
    return StepComparison(
        title=f"Comparison with the prediction in {origin}",
        expected=f"predicted, {name}",
        parts=tuple(parts),
        findings=tuple(findings),
    )


def _require_same_step(diagnosis: TraceDiagnosis, run: StepResult, predicted: StepTime, origin: str) -> None:
    """Compare the hidden size, which is a side of most GEMMs, and the FLOPs; those of the prediction include attention."""
    sizes = {side for item in diagnosis.evidence.gemms for side in item.gemm.sides}
    hidden = run.model.hidden_size if run.model is not None else None
    if sizes and hidden and hidden not in sizes:
        raise UserError(
            f"{origin} is for a different model than {diagnosis.trace.path}: no GEMM of the trace has hidden size {hidden}",
            "predict with the model of the recorded run",
        )
    flops, planned = step_flops(diagnosis), predicted.model_tflops * predicted.step_ms.value * 1e9
    if flops and planned and not 0.25 < flops / planned < 1.15:
        raise UserError(
            f"{origin} is for a different training run than {diagnosis.trace.path}: the prediction has {planned / 1e12:.2f} "
            f"TFLOP per step, the GEMMs of the trace take {flops / 1e12:.2f}",
            "predict with the batch, sequence length and parallelism of the recorded run",
        )


def _with_bench(diagnosis: TraceDiagnosis, run: BenchResult, requested: str | None, origin: str) -> StepComparison:
    totals = {total.recipe: total for total in run.linears.totals if total.mode == "autocast"}
    if not totals:
        raise UserError(f"{origin} has no linears with quantization (autocast)", "run gemmscope bench with a model")
    if run.linears.as_te_benchmark:
        raise UserError(
            f"{origin} counts linears as Transformer Engine's benchmark script does, which is not what training runs",
            f"run gemmscope bench without {option('as_te_benchmark')}",
        )
    name = _recipe_of(diagnosis, list(totals), requested, origin)
    _require_same_linears(diagnosis, run, origin)
    _require_time(totals[name].total_ms, name, origin)
    total, micro_batches = totals[name], diagnosis.account.micro_batches
    actual = dict(diagnosis.account.parts_ms)
    gemms_ms, quantization_ms = actual.pop("GEMMs", 0.0), actual.pop("quantization", 0.0)
    bench_ms, expected_quantization = total.total_ms.value * micro_batches, total.quantize_ms * micro_batches
    parts = (
        PartComparison(part="GEMMs", expected_ms=bench_ms - expected_quantization, trace_ms=gemms_ms),
        PartComparison(part="quantization", expected_ms=expected_quantization, trace_ms=quantization_ms),
        *(PartComparison(part=part, expected_ms=None, trace_ms=time) for part, time in actual.items()),
    )
    trace_ms = gemms_ms + quantization_ms
    layers = str(run.linears.layers or "unknown")
    findings = [
        finding("linears-time", recipe=name, bench_ms=bench_ms, micro_batches=micro_batches, layers=layers, trace_ms=trace_ms,
                error=trace_ms / bench_ms - 1)
    ]  # fmt: skip
    base = totals.get(BASELINE)
    if base is not None and name != BASELINE:
        saved, step_ms = (base.total_ms.value - total.total_ms.value) * micro_batches, diagnosis.account.step_ms
        speedup = base.total_ms.value / total.total_ms.value
        findings.append(
            finding("linears-gain", speedup=speedup, saved_ms=saved, step_ms=step_ms, step_speedup=(step_ms + saved) / step_ms)
        )
    return StepComparison(
        title=f"Comparison with {origin}", expected=f"measured by bench, {name}", parts=parts, findings=tuple(findings)
    )


def _require_same_linears(diagnosis: TraceDiagnosis, run: BenchResult, origin: str) -> None:
    cases = run.linears.cases
    planned = {tuple(sorted((case.tokens, case.inputs, case.outputs))) for case in cases}
    linears = diagnosis.evidence.gemms
    ran = {item.gemm.sides for item in linears if item.gemm.size}
    if ran and planned and len(planned & ran) < 0.5 * len(planned):
        measured, traced = ("x".join(map(str, sorted(sizes)[0])) for sizes in (planned, ran))
        raise UserError(
            f"{origin} is for a different model or batch than {diagnosis.trace.path}: few of its GEMMs are in the trace "
            f"({measured} was measured, {traced} is in the trace)",
            "run gemmscope bench with the batch, sequence length and parallelism of the recorded run",
        )
    flops = sum(item.gemm.flops for item in linears if item.scope.phase != "recomputed") / diagnosis.view.count
    planned_flops = sum(3.0 * case.flops * case.count for case in cases) * diagnosis.account.micro_batches
    if flops and planned_flops and not 0.8 < flops / planned_flops < 1.25:
        raise UserError(
            f"{origin} is about {run.linears.layers or 'other'} layers: {planned_flops / 1e12:.2f} TFLOP per step, the linears "
            f"of the trace take {flops / 1e12:.2f}",
            "run gemmscope bench with the depth and batch of the recorded run",
        )


def check_model_flops(diagnosis: TraceDiagnosis, flops_per_step: float, model: str) -> Finding:
    """Whether the GEMMs of the trace add up to those of the model."""
    flops = step_flops(diagnosis)
    if not flops or not flops_per_step:
        return finding("model-flops-unknown", model=model)
    ratio = flops / flops_per_step
    code = "model-flops-equal" if 0.98 < ratio < 1.02 else "model-flops-more" if ratio > 1 else "model-flops-less"
    return finding(code, model=model, trace_tflop=flops / 1e12, model_tflop=flops_per_step / 1e12, ratio=ratio)
