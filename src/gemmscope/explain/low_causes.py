"""Causes within low precision itself: it does not run, or not everywhere, or its casts cost too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gemmscope.explain.account import forwards
from gemmscope.explain.cause import StepEvidence, sizes_of, spans_of
from gemmscope.explain.rates import gpu_rates
from gemmscope.explain.view import TimedWork
from gemmscope.findings import Finding, finding
from gemmscope.measure.kernels import CAST_SHARE
from gemmscope.results.explain import Cause

GAIN_LOST = 0.5  # of the GEMMs' gain
EAGER_KERNELS = 4.0  # PyTorch kernels per GEMM
COMPILED = 0.1  # share of the time of eager casts that is left when they are compiled, measured on an H200
SMALL_SHARE = 0.5


def low_causes(step: StepEvidence) -> Iterator[Cause]:
    """All causes, in no order."""
    if not step.gemms or not step.precision_known:
        return
    if not step.is_low:
        yield _not_low(step)
        return
    yield from _high_gemms(step)
    yield from _eager_casts(step)
    recast = list(_recast(step))
    yield from recast
    yield from _quantization(step, sum(cause.cost_ms for cause in recast))
    yield from _poor_kernel(step)


def _not_low(step: StepEvidence) -> Cause:
    saved = step.ms(step.gemms) * (1 - 1 / step.ratio)
    evidence = [finding("cause-no-low-gemms", counts={row.precision: row.count for row in step.account.gemms})]
    gpu = step.view.trace.gpu_name
    known = gpu_rates(gpu)
    if known is not None and "fp8" not in known.peaks:
        evidence.append(finding("cause-no-fp8-hardware", gpu=gpu))
        saved = 0.0
    if step.casts:
        evidence.append(finding("cause-casts-without-low-gemms", kernels=step.per_step(step.casts)))
    return step.cause("not-low", saved, evidence, step.gemms, "every layer")


def _high_gemms(step: StepEvidence) -> Iterator[Cause]:
    """Backward kept in high precision, or whole layers left out."""
    high = step.high
    total = step.weight(step.low) + step.weight(high)
    backward = [item for item in high if item.gemm and item.gemm.pass_name in ("dgrad", "wgrad")]
    low_forward = [item for item in step.low if item.gemm and item.gemm.pass_name in ("fprop", "recomputed")]
    low_sizes = {_key(item) for item in low_forward if _key(item)}
    kept = _unmatched([item for item in backward if _key(item) in low_sizes], high)
    if not kept and not step.flops_known and low_forward:  # by passes alone
        forward = [item for item in step.gemms if item.gemm and item.gemm.pass_name == "fprop"]
        kept = backward if step.weight(low_forward) > 0.9 * step.weight(forward) else []
    if kept and step.weight(kept) > 0.05 * total:
        passes: list[str] = sorted({item.gemm.pass_name for item in kept if item.gemm})
        share = step.weight(kept) / total
        evidence = [
            finding("cause-high-backward", passes=passes, share=share, share_of=step.share_of, precisions=_precisions(kept)),
            _sizes(kept),
        ]
        yield step.cause("backward-high", _saved(step, kept), evidence, kept, "backward", spans_of(kept, "in BF16"))
    counted = {item.index for item in kept}
    left = [item for item in high if item.index not in counted]
    if left and step.weight(left) > 0.05 * total:
        share = step.weight(left) / total
        evidence = [
            finding("cause-high-layers", share=share, share_of=step.share_of, precisions=_precisions(left)),
            _sizes(left),
        ]
        if odd := sorted({size for item in left for size in _odd_sizes(item)}):
            evidence.append(finding("cause-odd-sizes", sizes=list(map(str, odd))))
        names = sorted({item.gemm.layer for item in left if item.gemm and not item.gemm.layer.startswith("aten::")})
        where = ", ".join(name.lstrip("_") for name in names[:3])
        yield step.cause("left-out", _saved(step, left), evidence, left, where, spans_of(left, "in BF16"))


def _sizes(items: list[TimedWork]) -> Finding:
    sizes = sizes_of(items)
    return finding("cause-gemm-sizes", sizes=sizes) if sizes else finding("cause-sizes-unknown")


def _unmatched(backward: list[TimedWork], high: list[TimedWork]) -> list[TimedWork]:
    """Without the backward of layers whose forward is high already: two GEMMs of the same size for each of theirs."""
    forward = Counter(_key(item) for item in high if item.gemm and item.gemm.pass_name == "fprop")
    by_size: dict[tuple[int, ...], list[TimedWork]] = {}
    for item in backward:
        by_size.setdefault(_key(item), []).append(item)
    kept: list[TimedWork] = []
    for size, items in by_size.items():
        passes = Counter(item.gemm.pass_name for item in items if item.gemm)
        items.sort(key=lambda item: passes[item.gemm.pass_name] if item.gemm else 0)  # the pass with most is kept high
        kept += items[2 * forward[size] :]
    return kept


def _key(item: TimedWork) -> tuple[int, ...]:
    return tuple(sorted(item.gemm.size)) if item.gemm is not None and item.gemm.size else ()


def _odd_sizes(item: TimedWork) -> list[int]:
    return [size for size in (item.gemm.size if item.gemm is not None and item.gemm.size else ()) if size % 16]


def _precisions(items: list[TimedWork]) -> list[str]:
    return sorted({item.gemm.precision for item in items if item.gemm})


def _saved(step: StepEvidence, items: list[TimedWork]) -> float:
    """What low precision would save there, minus the casts that it would need in proportion."""
    casts_per_low = min(step.casting_ms / step.ms(step.low), 0.5) if step.low else 0.0
    time = step.ms(items)
    return max(time * (1 - 1 / step.ratio) - time / step.ratio * casts_per_low, 0.0)


def _eager_casts(step: StepEvidence) -> Iterator[Cause]:
    eager = [item for item in step.casts if item.placed.eager]
    time = step.ms(eager)
    per_gemm = len(eager) / max(len(step.low), 1)
    if time > 0.05 * step.step_ms and per_gemm >= EAGER_KERNELS:
        evidence = [
            finding("cause-eager-casts", kernels=step.per_step(eager), per_gemm=per_gemm),
            finding("cause-eager-cast-time", time_ms=time, share=time / step.step_ms, gemm_ms=step.ms(step.low)),
        ]
        yield step.cause("unfused", time * (1 - COMPILED), evidence, eager, "around every converted linear")


def _quantization(step: StepEvidence, repeated_ms: float) -> Iterator[Cause]:
    """Without the needlessly repeated part, which is a cause of its own."""
    compiled = [item for item in step.casts if not item.placed.eager]
    eager_ms = step.ms(item for item in step.casts if item.placed.eager)
    time = step.casting_ms - eager_ms - repeated_ms
    if not compiled or step.gain_ms <= 0 or time < GAIN_LOST * step.gain_ms or eager_ms > time:
        return
    per_gemm = len(compiled) / max(len(step.low), 1)
    evidence = [
        finding("cause-quantization-kernels", kernels=step.per_step(compiled), per_gemm=per_gemm, time_ms=time,
                gemm_ms=step.ms(step.low)),
        finding("cause-gain-lost", gain_ms=step.gain_ms, speedup=step.ratio, share=time / step.gain_ms),
    ]  # fmt: skip
    fused = step.ms(item for item in compiled if item.placed.fused)
    if fused:
        evidence.append(finding("cause-fused-casts", time_ms=fused, share=CAST_SHARE))
    small = [item for item in step.low if item.gemm and item.gemm.size and min(item.gemm.size) < 1024]
    cost = time - 0.25 * step.gain_ms
    if step.weight(small) > SMALL_SHARE * step.weight(step.low):
        evidence.append(finding("cause-small-gemms", sizes=sizes_of(small)))
        yield step.cause("small", cost, evidence, compiled)
    else:
        yield step.cause("quantization", cost, evidence, compiled, "around every converted linear")


def _recast(step: StepEvidence) -> Iterator[Cause]:
    """Every micro-batch's forward casts as much as the first one's, and more than its inputs."""
    stretches = [(casts, batches) for casts, batches in _forward_casts(step) if casts and batches]
    count = step.account.micro_batches
    if count < 2 or len(stretches) < 2 or sum(batches for _, batches in stretches) != count:
        return
    counts = [len(casts) / batches for casts, batches in stretches]
    forward = [item for item in step.low if item.gemm and item.gemm.pass_name == "fprop"]
    casts = [item for items, _ in stretches for item in items]
    per_gemm = sum(map(_ends_tensor, casts)) * step.view.count / max(len(forward), 1)
    if min(counts[1:]) < 0.9 * counts[0] or per_gemm < 1.2:
        return
    weights_ms = sum(item.share * _weight_share(item, forward) for item in casts) / 1000
    cost = weights_ms * (count - 1) / count
    kernels = ", ".join(f"{number:.0f}" for number in counts[:8])
    evidence = [
        finding("cause-casts-per-micro-batch", micro_batches=count, kernels=kernels),
        finding("cause-weight-casts", tensors=per_gemm, weights_ms=weights_ms, repeated_ms=cost),
    ]
    again = [item for items, _ in stretches[1:] for item in items]
    yield step.cause("recast", cost, evidence, again, "forward of micro-batches after the first", spans_of(again, "cast again"))


def _forward_casts(step: StepEvidence) -> list[tuple[list[TimedWork], int]]:
    """Of the first step: the casts of each stretch of forward, and how many micro-batches it holds."""
    stretches: list[tuple[list[TimedWork], list[TimedWork]]] = []
    before = ""
    first = next(iter(step.view.by_step()))
    launched = sorted((item for item in first if item.scope.launched is not None), key=lambda item: item.scope.launched or 0.0)
    for item in launched:
        phase = item.scope.phase
        if phase == "forward" and before != "forward":
            stretches.append(([], []))
        if phase in ("forward", "backward") and (item.gemm is not None or phase == "forward"):
            before = phase
        if phase == "forward" and item.placed.name == "quantization":
            stretches[-1][0].append(item)
        if phase == "forward" and item.gemm is not None:
            stretches[-1][1].append(item)
    batches = forwards([len(gemms) for _, gemms in stretches])
    return [(casts, count) for (casts, _), count in zip(stretches, batches, strict=True)]


def _ends_tensor(item: TimedWork) -> bool:
    """Whether this kernel finishes the quantization of one tensor."""
    return item.placed.facts.ends_tensor or "_scaled_mm" in item.work.name


def _weight_share(item: TimedWork, forward: list[TimedWork]) -> float:
    """Share of the weight among the elements that the layer of this cast quantizes in forward; a half if sizes are unknown."""
    layer = item.scope.operators[-1].name if item.scope.operators else ""
    gemms = [item.gemm for item in forward if item.gemm and item.gemm.size]
    sizes = [gemm.size for gemm in gemms if gemm.layer == layer and gemm.size] or [gemm.size for gemm in gemms if gemm.size]
    inputs, weights = sum(m * k for m, k, _ in sizes), sum(k * n for _, k, n in sizes)
    return weights / (inputs + weights) if sizes else 0.5


def _poor_kernel(step: StepEvidence) -> Iterator[Cause]:
    """Large low-precision GEMMs that are hardly faster than large BF16 GEMMs of the same trace."""
    rates = step.rates
    if "BF16" not in rates:
        return
    for precision in ("FP4", "MXFP8", "FP8 blocks", "FP8"):
        if precision in rates and rates[precision] < 1.25 * rates["BF16"]:
            items = [item for item in step.low if item.gemm and item.gemm.precision == precision]
            rate = finding("cause-low-rate", precision=precision, tflops=rates[precision], bf16_tflops=rates["BF16"])
            usual = 1.5 * rates["BF16"]
            yield step.cause("poor-kernel", step.ms(items) * (1 - rates[precision] / usual), [rate, _sizes(items)], items)
