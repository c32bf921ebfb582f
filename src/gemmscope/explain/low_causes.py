"""Causes within low precision itself: it does not run, or not everywhere, or its casts cost too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gemmscope.explain.account import Item, forwards
from gemmscope.explain.cause import Cause, Evidence, main_kernels, sizes_of
from gemmscope.explain.rates import chip
from gemmscope.measure.kernels import CAST_SHARE

EATEN = 0.5  # of the products' gain
UNFUSED_KERNELS = 4.0  # PyTorch kernels per product
COMPILED = 0.1  # of eager casts' time is left when they are compiled, as seen on an H200
SMALL_SHARE = 0.5


def low_causes(found: Evidence) -> Iterator[Cause]:
    """In no order."""
    if not found.products:
        return
    if not found.told:
        return
    if found.low_share < 0.01:
        yield _not_low(found)
        return
    yield from _high_products(found)
    yield from _unfused(found)
    recast = list(_recast(found))
    yield from recast
    yield from _quantization(found, sum(cause.cost_ms for cause in recast))
    yield from _poor_kernel(found)


def _not_low(found: Evidence) -> Cause:
    precisions = ", ".join(f"{row.count:.0f} in {row.precision}" for row in found.account.census)
    saved = found.ms(found.products) * (1 - 1 / found.ratio)
    evidence = [f"products per step: {precisions}; none in FP8 or below"]
    known = chip(found.seen.trace.gpu_name)
    if known is not None and "fp8" not in known.peaks:
        evidence.append(f"{found.seen.trace.gpu_name} has no FP8 units: nothing is to be gained on it")
        saved = 0.0
    if found.casts:
        evidence.append(f"yet {found.per_step(found.casts):.0f} quantization kernels run")
    return Cause("not_low", saved, tuple(evidence), main_kernels(found.products), "every layer")


def _high_products(found: Evidence) -> Iterator[Cause]:
    """Backward kept high, or whole layers left out."""
    high = found.high
    whole = found.weight(found.low) + found.weight(high)
    backward = [item for item in high if item.product and item.product.pass_name in ("dgrad", "wgrad")]
    low_forward = [item for item in found.low if item.product and item.product.pass_name in ("fprop", "again")]
    low_sizes = {_key(item) for item in low_forward if _key(item)}
    kept = _unmatched([item for item in backward if _key(item) in low_sizes], high)
    if not kept and not found.flops_known and low_forward:  # by passes alone
        forward = [item for item in found.products if item.product and item.product.pass_name == "fprop"]
        kept = backward if found.weight(low_forward) > 0.9 * found.weight(forward) else []
    if kept and found.weight(kept) > 0.05 * whole:
        passes = sorted({item.product.pass_name for item in kept if item.product})
        evidence = [
            f"{' and '.join(passes)} of layers whose forward runs low are {found.weight(kept) / whole:.0%} {found.counted_in}, "
            f"and run in {_precisions(kept)}",
            f"sizes: {sizes_of(kept)}",
        ]
        yield Cause(
            "backward_high", _saved(found, kept), tuple(evidence), main_kernels(kept), "backward", _spans(kept, "in BF16")
        )
    counted = {item.index for item in kept}
    left = [item for item in high if item.index not in counted]
    if left and found.weight(left) > 0.05 * whole:
        odd = sorted({size for item in left for size in _odd_sizes(item)})
        evidence = [
            f"{found.weight(left) / whole:.0%} {found.counted_in} of all linears run in {_precisions(left)}",
            f"sizes: {sizes_of(left)}" if sizes_of(left) else "sizes were not recorded",
        ]
        if odd:
            evidence.append(f"not a multiple of 16: {', '.join(map(str, odd))}")
        names = sorted({item.product.layer for item in left if item.product and not item.product.layer.startswith("aten::")})
        where = ", ".join(name.lstrip("_") for name in names[:3])
        yield Cause("left_out", _saved(found, left), tuple(evidence), main_kernels(left), where, _spans(left, "in BF16"))


def _unmatched(backward: list[Item], high: list[Item]) -> list[Item]:
    """Without the backward of layers that are high in forward already: two products for each of theirs, of the same size."""
    forward = Counter(_key(item) for item in high if item.product and item.product.pass_name == "fprop")
    by_size: dict[tuple[int, ...], list[Item]] = {}
    for item in backward:
        by_size.setdefault(_key(item), []).append(item)
    kept: list[Item] = []
    for size, items in by_size.items():
        passes = Counter(item.product.pass_name for item in items if item.product)
        items.sort(key=lambda item: passes[item.product.pass_name] if item.product else 0)  # the pass with most is kept high
        kept += items[2 * forward[size] :]
    return kept


def _key(item: Item) -> tuple[int, ...]:
    return tuple(sorted(item.product.size)) if item.product is not None and item.product.size else ()


def _odd_sizes(item: Item) -> list[int]:
    return [size for size in (item.product.size if item.product is not None and item.product.size else ()) if size % 16]


def _precisions(items: list[Item]) -> str:
    return ", ".join(sorted({item.product.precision for item in items if item.product}))


def _saved(found: Evidence, items: list[Item]) -> float:
    """What low precision would save there, less the casts it would need in proportion."""
    casts_per_low = min(found.casting_ms / found.ms(found.low), 0.5) if found.low else 0.0
    time = found.ms(items)
    return max(time * (1 - 1 / found.ratio) - time / found.ratio * casts_per_low, 0.0)


def _unfused(found: Evidence) -> Iterator[Cause]:
    loose = [item for item in found.casts if item.placed.unfused]
    time = found.ms(loose)
    per_product = len(loose) / max(len(found.low), 1)
    if time > 0.05 * found.step_ms and per_product >= UNFUSED_KERNELS:
        evidence = (
            f"{found.per_step(loose):.0f} elementwise kernels per step do casts: {per_product:.0f} for each product; "
            "compiled, it is one to four",
            f"they take {time:.1f} ms ({time / found.step_ms:.0%} of the step), the products {found.ms(found.low):.1f} ms",
        )
        yield Cause("unfused", time * (1 - COMPILED), evidence, main_kernels(loose), "around every converted linear")


def _quantization(found: Evidence, repeated_ms: float) -> Iterator[Cause]:
    """Beyond what is repeated for no reason, which has a name of its own."""
    fused = [item for item in found.casts if not item.placed.unfused]
    loose_ms = found.ms(item for item in found.casts if item.placed.unfused)
    time = found.casting_ms - loose_ms - repeated_ms
    if not fused or found.gain_ms <= 0 or time < EATEN * found.gain_ms or loose_ms > time:
        return
    low_ms = found.ms(found.low)
    evidence = [
        f"{found.per_step(fused):.0f} kernels per step quantize, {len(fused) / max(len(found.low), 1):.1f} for each product: "
        f"{time:.1f} ms beside {low_ms:.1f} ms of products",
        f"the products save about {found.gain_ms:.1f} ms against BF16 ({found.ratio:.2f}x), quantization takes "
        f"{time / found.gain_ms:.0%} of it back",
    ]
    riding = found.ms(item for item in fused if item.placed.rides)
    if riding:
        evidence.append(f"{riding:.1f} ms are in kernels that do norms or activations as well, counted by {CAST_SHARE:.0%}")
    small = [item for item in found.low if item.product and item.product.size and min(item.product.size) < 1024]
    cost = time - 0.25 * found.gain_ms
    if found.weight(small) > SMALL_SHARE * found.weight(found.low):
        evidence.append(f"products are small: {sizes_of(small)}")
        yield Cause("small", cost, tuple(evidence), main_kernels(fused), "")
    else:
        yield Cause("quantization", cost, tuple(evidence), main_kernels(fused), "around every converted linear")


def _recast(found: Evidence) -> Iterator[Cause]:
    """Every micro-batch's forward casts as much as the first one's, and more than its inputs."""
    stretches = [(casts, batches) for casts, batches in _forward_casts(found) if casts and batches]
    count = found.account.micro_batches
    if count < 2 or len(stretches) < 2 or sum(batches for _, batches in stretches) != count:
        return
    counts = [len(casts) / batches for casts, batches in stretches]
    forward = [item for item in found.low if item.product and item.product.pass_name == "fprop"]
    every = [item for casts, _ in stretches for item in casts]
    per_product = sum(map(_ends, every)) * found.steps / max(len(forward), 1)
    if min(counts[1:]) < 0.9 * counts[0] or per_product < 1.2:
        return
    weights_ms = sum(item.share * _weight_part(item, forward) for item in every) / 1000
    cost = weights_ms * (count - 1) / count
    evidence = (
        f"{count} micro-batches per step, and each casts as much as the first: {', '.join(f'{each:.0f}' for each in counts[:8])} "
        "kernels in forward",
        f"{per_product:.1f} tensors are cast per forward product: its input and its weight; of {weights_ms:.1f} ms of casting "
        f"weights, {cost:.1f} ms repeat what the step's first micro-batch did",
    )
    again = [item for casts, _ in stretches[1:] for item in casts]
    yield Cause(
        "recast", cost, evidence, main_kernels(again), "forward of micro-batches after the first", _spans(again, "cast again")
    )


def _forward_casts(found: Evidence) -> list[tuple[list[Item], int]]:
    """Of one step: the casts of each stretch of forward, and how many micro-batches it holds."""
    made: list[tuple[list[Item], list[Item]]] = []
    before = ""
    step = next(iter(found.seen.items()))
    launched = sorted((item for item in step if item.scope.launched is not None), key=lambda item: item.scope.launched or 0.0)
    for item in launched:
        phase = item.scope.phase
        if phase == "forward" and before != "forward":
            made.append(([], []))
        if phase in ("forward", "backward") and (item.product is not None or phase == "forward"):
            before = phase
        if phase == "forward" and item.placed.name == "quantization":
            made[-1][0].append(item)
        if phase == "forward" and item.product is not None:
            made[-1][1].append(item)
    batches = forwards([len(products) for _, products in made])
    return [(casts, held) for (casts, _), held in zip(made, batches, strict=True)]


def _ends(item: Item) -> bool:
    return item.placed.facts.ends_tensor or "_scaled_mm" in item.work.name


def _weight_part(item: Item, forward: list[Item]) -> float:
    """Of a cast in forward: the weight's share of the elements that its layer casts, if sizes tell; else a half."""
    layer = item.scope.operators[-1].name if item.scope.operators else ""
    sizes = [each.product.size for each in forward if each.product and each.product.size and each.product.layer == layer]
    if not sizes:
        sizes = [each.product.size for each in forward if each.product and each.product.size]
    inputs, weights = sum(m * k for m, k, _ in sizes), sum(k * n for _, k, n in sizes)
    return weights / (inputs + weights) if sizes else 0.5


def _poor_kernel(found: Evidence) -> Iterator[Cause]:
    """Large low products that are hardly faster than large BF16 ones of the same trace."""
    rates = found.rates
    if "BF16" not in rates:
        return
    for precision in ("FP4", "MXFP8", "FP8 blocks", "FP8"):
        if precision in rates and rates[precision] < 1.25 * rates["BF16"]:
            items = [item for item in found.low if item.product and item.product.precision == precision]
            evidence = (
                f"{precision} products run at {rates[precision]:.0f} TFLOP/s, BF16 ones of this step at {rates['BF16']:.0f}",
                f"sizes: {sizes_of(items)}",
            )
            usual = 1.5 * rates["BF16"]
            yield Cause("poor_kernel", found.ms(items) * (1 - rates[precision] / usual), evidence, main_kernels(items))


def _spans(items: list[Item], words: str) -> tuple[tuple[float, float, str], ...]:
    return tuple((item.work.start, item.work.end, words) for item in items[:2000])
