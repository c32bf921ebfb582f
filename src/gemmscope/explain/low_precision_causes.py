"""Causes within low precision itself: it does not run, or not everywhere, or its casts cost too much."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from math import prod

from gemmscope.engine.kernels import CAST_SHARE
from gemmscope.explain.step_evidence import StepEvidence, sizes_of, tflops
from gemmscope.explain.trace_view import TimedWork, forward_stretches
from gemmscope.explain.work_class import BF16, FP16, FP32, TF32
from gemmscope.findings import Fact, Finding, finding
from gemmscope.grouping import grouped
from gemmscope.results.explain import Cause

# Bytes that casts move per element of X, W and dY, each in two of three GEMMs: read twice (maximum, cast) and written in two
# layouts, as Transformer Engine does it; and with torchao, compiled (recorded on an H200)
CAST_BYTES, UNFUSED_CAST_BYTES = 6.0, 14.0
BYTES_LIKE_GEMMS = 30.0  # per element, where casts take as long as the GEMMs in FP8: 22 and 49 in two recorded models
# Of GEMMs in FP8 over BF16: in blocks, and the ratio of the peaks; kernels that cast per GEMM (192 for 48 with current scaling)
LEAST_RATIO, LARGEST_RATIO, CASTS_PER_GEMM = 1.5, 2.0, 4.0
GAIN_LOST = 0.5  # of the GEMMs' gain
EAGER_KERNELS = 4.0  # PyTorch kernels per GEMM
COMPILED = 0.1  # share of the time of eager casts that is left when they are compiled, measured on an H200
COMPILED_AS_WELL = ("elementwise", "norms", "activations")
SMALL_SHARE = 0.5
# Least share of busy time; gain of tensor cores over FP32 where sizes are not known (NVIDIA's guide to mixed precision: up to 3x)
FULL, ASSUMED_GAIN, GAINS = 0.05, 2.0, (1.5, 3.0)


def low_precision_causes(step: StepEvidence) -> Iterator[Cause]:
    """All causes, in no order."""
    full = list(_full_precision(step))
    yield from full
    if full or not step.gemms or not step.precision_known:
        return
    if not step.is_low:
        if step.low_is_certain and step.has_fp8:
            yield _not_low(step)
        return
    yield from _high_gemms(step)
    yield from _eager_casts(step)
    recast = list(_recast(step))
    yield from recast
    yield from _quantization(step, sum(cause.cost_ms for cause in recast))


def _full_precision(step: StepEvidence) -> Iterator[Cause]:
    """GEMMs and convolutions in FP32 on a GPU whose tensor cores multiply in TF32, BF16 or FP16."""
    gpu, items = step.gpu, [item for item in step.items if item.multiplies_in(FP32)]
    peaks = {name: gpu.peaks.get(name.lower(), 0.0) for name in (TF32, BF16, FP16)} if gpu is not None else {}
    faster = [name for name, peak in peaks.items() if gpu is not None and peak > gpu.peaks.get("fp32", 0.0)]
    time_ms = step.ms(items)
    if gpu is None or not faster or time_ms <= FULL * step.account.busy_ms:
        return
    best, sized = max(faster, key=lambda name: peaks[name]), [item for item in items if item.gemm.flops > 0]
    least = {item.index: gpu.least_us(best, item.gemm.flops, item.gemm.bytes_in(best)) for item in sized}
    left = [[min(least.get(item.index) or item.share / gain, item.share) for item in items] for gain in (ASSUMED_GAIN, *GAINS)]
    saved, low, high = (time_ms - sum(own) / 1000 / step.view.count for own in left)
    beside = 0.5 * step.ms(item for item in step.items if item.name in COMPILED_AS_WELL)  # half the bytes in mixed precision
    kinds = [
        name for name, own in (("GEMMs", True), ("convolutions", False)) if any(item.work_class.is_gemm == own for item in items)
    ]
    evidence = [finding("cause-full-precision", kinds=" and ".join(kinds), formats=faster, **step.time_facts(time_ms))]
    if sized:
        shown = {name: peaks[name] for name in faster}
        evidence.append(finding("cause-full-precision-rate", tflops=tflops(sized), peaks=shown))
    evidence += [finding("cause-full-precision-assumed", gain=ASSUMED_GAIN)] if len(sized) < len(items) else []
    yield step.cause("full-precision", saved, evidence, items, "", FP32, costs_ms=(low, high + beside))


def _not_low(step: StepEvidence) -> Cause:
    evidence = [finding("cause-no-low-gemms", counts={row.precision: row.count for row in step.account.gemms})]
    if step.casts:
        evidence.append(finding("cause-casts-without-low-gemms", kernels=step.per_step(step.casts)))
    return _converted(step, "not-low", evidence, step.gemms, "every layer", LEAST_RATIO, LARGEST_RATIO)


def _converted(
    step: StepEvidence, code: str, evidence: list[Finding], items: list[TimedWork], where: str, least: float, largest: float
) -> Cause:
    """What low precision would save in these GEMMs, minus the casts that it would need. `least`, `largest`: speedup of a GEMM."""
    time, fused, apart = step.ms(items), *(_casts_ms(step, items, cast) for cast in (CAST_BYTES, UNFUSED_CAST_BYTES))
    casts = fused if "transformer_engine" in step.view.trace.phase.frameworks else apart
    costs = (
        max(min(time * (1 - 1 / ratio) - cast for ratio, cast in ((least, fused), (step.ratio, apart))), 0.0),
        time * (1 - 1 / largest) - fused,
    )
    cost, count = max(time * (1 - 1 / step.ratio) - casts, 0.0), step.per_step([one for one in items if not one.gemm.reduces])
    return step.cause(code, cost, evidence, items, where, costs_ms=costs, more_launches=CASTS_PER_GEMM * count)


def _casts_ms(step: StepEvidence, items: list[TimedWork], cast_bytes: float) -> float:
    """Of the operands, by the bandwidth of the memory; without sizes, in proportion to the casts of the other GEMMs."""
    sizes = [item.gemm.size for item in items if item.gemm.size]
    if sizes and step.gpu is not None and step.gpu.bandwidth_tbps:
        elements = sum(sum(map(prod, combinations(size, 2))) / 3 for size in sizes)
        return cast_bytes * elements / step.gpu.bandwidth_tbps / 1e9 / step.view.count
    known = min(step.casting_ms / step.ms(step.low), 0.5) if step.low else cast_bytes / BYTES_LIKE_GEMMS
    return step.ms(items) / step.ratio * known


def _high_gemms(step: StepEvidence) -> Iterator[Cause]:
    """Backward kept in high precision, or whole layers left out."""
    backward = [item for item in step.high if item.gemm.pass_name in ("dgrad", "wgrad")]
    low_forward = [item for item in step.low if item.gemm.pass_name in ("fprop", "recomputed")]
    low_sizes = {item.gemm.sides for item in low_forward if item.gemm.size}
    kept = _unmatched([item for item in backward if item.gemm.sides in low_sizes], step.high)
    if not kept and not step.flops_known and low_forward:  # without sizes, by pass
        forward = [item for item in step.gemms if item.gemm.pass_name == "fprop"]
        kept = backward if step.weight(low_forward) > 0.9 * step.weight(forward) else []
    if kept and step.weight(kept) > 0.05 * step.known_weight:
        passes: list[str] = sorted({item.gemm.pass_name for item in kept})
        evidence = [finding("cause-high-backward", passes=passes, **_high_facts(step, kept)), _sizes(kept)]
        yield _converted(step, "backward-high", evidence, kept, "backward", step.ratio, step.ratio)
    counted = {item.index for item in kept}
    left = [item for item in step.high if item.index not in counted]
    if left and step.weight(left) > 0.05 * step.known_weight:
        evidence = [finding("cause-high-layers", **_high_facts(step, left)), _sizes(left)]
        if odd := sorted({size for item in left for size in item.gemm.sides if size % 16}):
            evidence.append(finding("cause-odd-sizes", sizes=list(map(str, odd))))
        names = sorted({item.gemm.layer for item in left if not item.gemm.layer.startswith("aten::")})
        where = ", ".join(name.lstrip("_") for name in names[:3])
        yield _converted(step, "left-out", evidence, left, where, step.ratio, step.ratio)


def _high_facts(step: StepEvidence, items: list[TimedWork]) -> dict[str, Fact]:
    precisions = sorted({item.gemm.precision for item in items})
    return {"share": step.weight(items) / step.known_weight, "share_of": step.share_of, "precisions": precisions}


def _sizes(items: list[TimedWork]) -> Finding:
    sizes = sizes_of(items)
    return finding("cause-gemm-sizes", sizes=sizes) if sizes else finding("cause-sizes-unknown")


def _unmatched(backward: list[TimedWork], high: list[TimedWork]) -> list[TimedWork]:
    """The backward GEMMs without those of layers whose forward already runs in high precision: two GEMMs of the same size per
    forward GEMM."""
    forward = Counter(item.gemm.sides for item in high if item.gemm.pass_name == "fprop")
    kept: list[TimedWork] = []
    for sides, items in grouped((item.gemm.sides, item) for item in backward).items():
        passes = Counter(item.gemm.pass_name for item in items)
        items.sort(key=lambda item: passes[item.gemm.pass_name])  # the pass with the most GEMMs is the one kept in high precision
        kept += items[2 * forward[sides] :]
    return kept


def _eager_casts(step: StepEvidence) -> Iterator[Cause]:
    eager = [item for item in step.casts if item.work_class.eager]
    time = step.ms(eager)
    per_gemm = len(eager) / max(len(step.low), 1)
    if time > 0.05 * step.step_ms and per_gemm >= EAGER_KERNELS:
        evidence = [
            finding("cause-eager-casts", kernels=step.per_step(eager), per_gemm=per_gemm),
            finding("cause-eager-cast-time", **step.time_facts(time), gemm_ms=step.ms(step.low)),
        ]
        cost, where = time * (1 - COMPILED), "around every converted linear"
        others = step.ms(item for item in step.items if item.name in COMPILED_AS_WELL)
        yield step.cause("unfused", cost, evidence, eager, where, removed=True, costs_ms=(cost, min(cost + others, time)))


def _quantization(step: StepEvidence, repeated_ms: float) -> Iterator[Cause]:
    """Quantization that costs much of the gain; casts that are repeated needlessly are a cause of their own."""
    compiled = [item for item in step.casts if not item.work_class.eager]
    eager_ms = step.ms(item for item in step.casts if item.work_class.eager)
    time = step.casting_ms - eager_ms - repeated_ms
    if not compiled or step.gain_ms <= 0 or time < GAIN_LOST * step.gain_ms or eager_ms > time:
        return
    kernels, per_gemm, gemm_ms = step.per_step(compiled), len(compiled) / max(len(step.low), 1), step.ms(step.low)
    evidence = [
        finding("cause-quantization-kernels", kernels=kernels, per_gemm=per_gemm, time_ms=time, gemm_ms=gemm_ms),
        finding("cause-gain-lost", gain_ms=step.gain_ms, speedup=step.ratio, share=time / step.gain_ms),
    ]
    fused = step.ms(item for item in compiled if item.work_class.fused)
    if fused:
        evidence.append(finding("cause-fused-casts", time_ms=fused, share=CAST_SHARE))
    small = [item for item in step.low if item.gemm.size and min(item.gemm.size) < 1024]
    least, largest = (time - _casts_ms(step, step.low, cast) for cast in (UNFUSED_CAST_BYTES, CAST_BYTES))
    cost = largest if "transformer_engine" in step.view.trace.phase.frameworks else least
    code, where = "quantization", "around every converted linear"
    if step.weight(small) > SMALL_SHARE * step.weight(step.low):
        evidence.append(finding("cause-small-gemms", sizes=sizes_of(small)))
        code, where = "small", ""
    yield step.cause(code, cost, evidence, compiled, where, costs_ms=(least, largest))


def _recast(step: StepEvidence) -> Iterator[Cause]:
    """Weights that are cast again for every micro-batch: each forward casts as much as the first, and more than its inputs."""
    every = forward_stretches(step.view.by_step[0])
    cast = (([item for item in items if item.name == "quantization"], batches) for items, batches in every)
    stretches = [(casts, batches) for casts, batches in cast if casts and batches]
    count = step.account.micro_batches
    if count < 2 or len(stretches) < 2 or sum(batches for _, batches in stretches) != count:
        return
    counts = [len(casts) / batches for casts, batches in stretches]
    forward = [item for item in step.low if item.gemm.pass_name == "fprop"]
    casts = [item for items, _ in stretches for item in items]
    tensors = sum(item.work_class.facts.ends_tensor or item.mentions("_scaled_mm") for item in casts)  # by their last kernel
    per_gemm = tensors * step.view.count / max(len(forward), 1)
    if min(counts[1:]) < 0.9 * counts[0] or per_gemm < 1.2:
        return
    shares = _weight_shares(forward)
    layers = [item.scope.operators[-1].name if item.scope.operators else "" for item in casts]
    weights_ms = sum(item.share * shares.get(layer, shares[""]) for item, layer in zip(casts, layers, strict=True)) / 1000
    cost = weights_ms * (count - 1) / count
    evidence = [
        finding("cause-casts-per-micro-batch", micro_batches=count, kernels=", ".join(f"{number:.0f}" for number in counts[:8])),
        finding("cause-weight-casts", tensors=per_gemm, weights_ms=weights_ms, repeated_ms=cost),
    ]
    forward = [item for item in step.casts if item.scope.phase == "forward"]
    where = "forward of micro-batches after the first"
    yield step.cause(
        "recast", cost, evidence, casts[len(stretches[0][0]) :], where, "cast again", shortened=forward, removed=True
    )


def _weight_shares(forward: list[TimedWork]) -> dict[str, float]:
    """Of each layer: the share of the weight among the elements that it quantizes in forward. "": of all layers together; a half
    if sizes are unknown."""
    inputs, weights = Counter[str](), Counter[str]()
    for item in forward:
        if item.gemm.size:
            m, k, n = item.gemm.size
            for layer in {item.gemm.layer, ""}:
                inputs[layer] += m * k
                weights[layer] += k * n
    return {"": 0.5} | {layer: weights[layer] / ((inputs[layer] + weights[layer]) or 1) for layer in weights}
