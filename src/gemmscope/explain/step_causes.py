"""Causes around low precision: the GPU waits, repeats work, runs slowly, or has other things to do."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

from gemmscope.explain.account import EXPOSED, Item
from gemmscope.explain.cause import Cause, Evidence, main_kernels, sizes_of
from gemmscope.explain.place import LOW
from gemmscope.explain.rates import chip, facts_clock
from gemmscope.explain.timeline import Gap

# Parts of a step that low precision does not touch: from which share of the step on they are named, and what is usual.
DILUTES = {
    "attention": (0.30, 0.15),
    "head": (0.30, 0.12),
    "optimizer": (0.25, 0.12),
    "rest": (0.40, 0.15),
}
WAITING = 0.05  # of the step
SLOW_CLOCK = 0.55  # of the greatest
SLOW_RATE = 0.6  # of what large products usually reach on this chip
IMPOSSIBLE_RATE = 0.02  # of the peak: no clock is that slow, so the file's times are not microseconds
BAD_REASONS = ("HW slowdown", "SW thermal slowdown", "HW thermal slowdown", "HW power brake")


def step_causes(found: Evidence) -> Iterator[Cause]:
    """In no order."""
    yield from _waiting(found)
    yield from _idle_unexplained(found)
    yield from _recompute(found)
    yield from _communication(found)
    yield from _copies(found)
    yield from _throttled(found)
    yield from _dilution(found)


def _waiting(found: Evidence) -> Iterator[Cause]:
    gaps = [gap for shares in found.seen.shares for gap in shares.gaps]
    away = [gap for gap in gaps if gap.why == "host elsewhere"]
    late = [gap for gap in gaps if gap.why in ("launching", "after a wait")]
    away_ms, late_ms = _ms(found, away), _ms(found, late)
    if away_ms > WAITING * found.step_ms:
        longest = max(away, key=lambda gap: gap.time)
        evidence = [
            f"GPU idle {away_ms:.1f} ms per step ({away_ms / found.step_ms:.0%}) in {found.per_step(away):.0f} stretches "
            f"in which nothing was launched for a millisecond or more; the longest {longest.time / 1000:.1f} ms",
            *_marks_in(found, longest),
        ]
        yield Cause("elsewhere", away_ms, tuple(evidence), (), _where(found, longest), _gap_spans(away, "host elsewhere"))
    if late_ms > WAITING * found.step_ms:
        account = found.account
        evidence = [
            f"GPU idle {late_ms:.1f} ms per step ({late_ms / found.step_ms:.0%}): {found.per_step(late):.0f} times it had "
            f"finished before the next kernel was launched",
            f"{account.launches:.0f} launches per step, one every {1000 * found.step_ms / max(account.launches, 1):.0f} µs, "
            f"of kernels that run {1000 * account.busy_ms / max(account.kernels, 1):.0f} µs on average",
            "recording slows the host itself: without it the GPU waits less",
        ]
        grouped = [gap for gap in late if gap.scope.inside("Grouped", "Expert", "Moe", "MoE")]
        key = "host"
        if _ms(found, grouped) > 0.5 * late_ms:
            key = "experts"
            products = [item for item in found.products if item.scope.inside("Grouped", "Expert", "Moe", "MoE")]
            evidence.insert(
                1,
                f"{_ms(found, grouped):.1f} ms of it in experts' layers: {found.per_step(products):.0f} products of "
                f"{1000 * found.ms(products) / max(found.per_step(products), 1):.0f} µs each",
            )
        waits = _waits(found)
        if waits >= 2:
            evidence.insert(1, f"the host waits for the GPU {waits:.0f} times in each step (synchronisation, copies to the host)")
            blocked = _ms(found, [gap for gap in late if gap.why == "after a wait"])
            key = "syncs" if blocked > 0.5 * late_ms else key
        yield Cause(key, late_ms, tuple(evidence), (), "", _gap_spans(late, "waiting for a launch"))


def _idle_unexplained(found: Evidence) -> Iterator[Cause]:
    """Idle time of which the trace does not say why."""
    gaps = [gap for shares in found.seen.shares for gap in shares.gaps if gap.why in ("not recorded", "another stream")]
    time = _ms(found, gaps)
    if time > WAITING * found.step_ms:
        recorded = bool(found.seen.trace.launches)
        evidence = [
            f"GPU idle {time:.1f} ms per step ({time / found.step_ms:.0%}) in {found.per_step(gaps):.0f} gaps",
            "their next kernels had been launched in time: they wait for other streams, or for an event"
            if recorded
            else "launches were not recorded: whether the host was late cannot be told",
        ]
        yield Cause("idle", time, tuple(evidence), (), "", _gap_spans(gaps, "idle"))


def _ms(found: Evidence, gaps: list[Gap]) -> float:
    return sum(gap.time for gap in gaps) / 1000 / found.steps


def _waits(found: Evidence) -> float:
    """Calls that wait for the GPU, per step."""
    begins = [step.begin for step in found.seen.steps.chosen]
    ends = [step.end for step in found.seen.steps.chosen]
    inside = 0
    for wait in found.seen.trace.waits:
        at = bisect_right(begins, wait.start) - 1
        inside += "Synchronize" in wait.name and "Event" not in wait.name and at >= 0 and wait.start < ends[at]
    return inside / found.steps


def _marks_in(found: Evidence, gap: Gap) -> list[str]:
    """What a person or a loader marked there."""
    names = [
        mark.name
        for mark in found.seen.trace.marks
        if min(mark.end, gap.end) - max(mark.start, gap.begin) > 0.5 * gap.time and not mark.name.startswith("ProfilerStep")
    ]
    return [f"the host was in {', '.join(dict.fromkeys(names))}"] if names else []


def _where(found: Evidence, gap: Gap) -> str:
    step = next((step for step in found.seen.steps.chosen if step.begin <= gap.begin < step.end), None)
    if step is None:
        return ""
    place = (gap.begin - step.begin) / step.time
    return (
        "at the end of the step" if place > 0.8 or gap.end >= step.end else "at its beginning" if place < 0.2 else "in its middle"
    )


def _gap_spans(gaps: list[Gap], words: str) -> tuple[tuple[float, float, str], ...]:
    return tuple((gap.begin, gap.end, words) for gap in gaps[:2000])


def _recompute(found: Evidence) -> Iterator[Cause]:
    again = [item for item in found.items if item.scope.phase == "again"]
    time = found.ms(again)
    if time > WAITING * found.step_ms:
        products = [item for item in again if item.product is not None]
        casts = [item for item in again if item.placed.name == "quantization"]
        evidence = [
            f"{time:.1f} ms of forward work ({time / found.step_ms:.0%} of the step) run inside of backward",
            f"{found.per_step(products):.0f} products and {found.per_step(casts):.0f} casts are repeated in each step",
        ]
        high = [item for item in products if item.product and not item.product.low]
        if high and found.low and found.weight(high) > 0.5 * found.weight(products):
            evidence.append("the repeated products run in BF16, though the first ones ran low")
        spans = tuple((item.work.start, item.work.end, "computed again") for item in again[:2000])
        yield Cause("recompute", time, tuple(evidence), main_kernels(again), "backward", spans)
        return
    attention = [item for item in found.items if item.placed.name == "attention"]
    forward = [item for item in attention if _is(item, "fprop", "fwd", "forward", "Forward")]
    backward = [item for item in attention if _is(item, "bprop", "bwd", "backward", "Backward")]
    most = _most_of_a_name(backward)
    repeated_ms = _repeated_products(found)
    if most and len(forward) > 1.5 * most:
        told = [f"attention runs forward {len(forward) / most:.1f} times for each time backward"]
        if repeated_ms:
            told.append(f"products are repeated as well: about {repeated_ms:.1f} ms of them")
        yield Cause("recompute", found.ms(forward) * 0.5 + repeated_ms, tuple(told), main_kernels(forward), "backward")


def _most_of_a_name(items: list[Item]) -> int:
    """How often the work ran that takes several kernels each time."""
    return max(Counter(item.work.name for item in items).values(), default=0)


def _repeated_products(found: Evidence) -> float:
    """Where the compiler repeats forward inside of backward no function tells: products of each size are counted.

    Without sizes or passes, norms are: if they run forward twice, whole layers do, and a quarter of their products is repeated.
    """
    if not found.flops_known or not any(item.product and item.product.pass_name == "fprop" for item in found.products):
        norms = [item for item in found.items if item.placed.name == "norms"]
        once = _most_of_a_name([item for item in norms if _is(item, "bwd", "backward", "Backward")])
        twice = _most_of_a_name([item for item in norms if _is(item, "fwd", "forward", "Forward")])
        return found.ms(found.products) / 4 if once and twice > 1.8 * once else 0.0
    forward: Counter[tuple[int, ...]] = Counter()
    backward: Counter[tuple[int, ...]] = Counter()
    times: Counter[tuple[int, ...]] = Counter()
    for item in found.products:
        if item.product is None or item.product.size is None or item.product.reduces:
            continue
        size = tuple(sorted(item.product.size))
        if item.product.pass_name == "fprop":
            forward[size] += 1
        else:
            backward[size] += 1
            times[size] += item.share  # type: ignore[assignment]
    extra = {size: backward[size] - 2 * count for size, count in forward.items() if backward[size] > 2.4 * count}
    return sum(times[size] * count / backward[size] for size, count in extra.items()) / 1000 / found.steps


def _is(item: Item, *words: str) -> bool:
    return any(word in item.work.name for word in words)


def _communication(found: Evidence) -> Iterator[Cause]:
    exposed = found.account.classes.get(EXPOSED, 0.0)
    if exposed <= WAITING * found.step_ms:
        return
    items = [item for item in found.items if item.placed.name == "communication"]
    whole = exposed + found.account.hidden_ms
    updates = [item for item in found.items if item.placed.facts.kernel_class == "update"]
    short = [item for item in items if item.work.time < 200 and _is(item, "AllReduce", "all_reduce")]
    evidence = [
        f"{exposed:.1f} ms per step ({exposed / found.step_ms:.0%}) in which only communication ran; "
        f"{found.account.hidden_ms / whole:.0%} of {whole:.1f} ms is hidden behind computation",
        f"{found.per_step(items):.0f} collectives per step: {', '.join(main_kernels(items, 2))}",
    ]
    spans = tuple((item.work.start, item.work.end, "exposed") for item in items[:2000])
    if updates and found.ms(short) > 0.6 * exposed:
        evidence.append(f"{found.per_step(short):.0f} of them are short all-reduces, as delayed scaling makes for its maxima")
        yield Cause("amax", exposed, tuple(evidence), main_kernels(short), "", spans)
    else:
        yield Cause("communication", exposed, tuple(evidence), main_kernels(items), "", spans)


def _copies(found: Evidence) -> Iterator[Cause]:
    """Between host and GPU, while nothing is computed: offloading, or batches that arrive late."""
    items = [item for item in found.items if item.placed.name == "copies" and _is(item, "HtoD", "DtoH")]
    time = found.ms(items)
    if time > WAITING * found.step_ms:
        evidence = (
            f"{time:.1f} ms per step ({time / found.step_ms:.0%}) in which only copies between host and GPU ran, "
            f"{found.per_step(items):.0f} of them",
        )
        spans = tuple((item.work.start, item.work.end, "only copying") for item in items[:2000])
        yield Cause("copies", time, evidence, main_kernels(items), "", spans)


def _throttled(found: Evidence) -> Iterator[Cause]:
    """By the clock that was read beside the trace; else by all large products alike being slow for the chip."""
    clock = facts_clock(found.seen.trace.facts)
    known = chip(found.seen.trace.gpu_name)
    slow = _slow_products(found)
    if clock is not None:
        mean, greatest, reasons = clock
        bad = [reason for reason in reasons if reason in BAD_REASONS]
        if mean < SLOW_CLOCK * greatest and (slow or known is None or not found.rates) and found.account.idle_share < 0.5:
            evidence = [
                f"SM clock {mean:.0f} MHz while recording, of {greatest:.0f}; held back by {', '.join(reasons) or 'a lock'}"
            ]
            yield Cause("throttled", found.account.busy_ms * (1 - mean / (0.8 * greatest)), (*evidence, *slow))
            return
        if bad:
            lost = max(1 - mean / (0.8 * greatest), 0.0)
            yield Cause("throttled", found.account.busy_ms * lost, (f"the clock was held back by {', '.join(bad)}", *slow))
        return
    if slow and known is not None:
        share = max(rate / peak / known.usual for precision, rate in found.rates.items() if (peak := known.peak(precision)))
        yield Cause("throttled", found.account.busy_ms * max(1 - share, 0.0), tuple(slow))


def _slow_products(found: Evidence) -> list[str]:
    """In words, if large products of every precision are slow: one precision alone is a matter of kernels."""
    known = chip(found.seen.trace.gpu_name)
    if known is None or not found.rates:
        return []
    shares = {name: rate / peak for name, rate in found.rates.items() if (peak := known.peak(name))}
    if not shares or any(share > SLOW_RATE * known.usual or share < IMPOSSIBLE_RATE for share in shares.values()):
        return []
    told = ", ".join(f"{name} {found.rates[name]:.0f} TFLOP/s ({share:.0%} of the peak)" for name, share in shares.items())
    return [f"large products run at {told}; {known.usual:.0%} is usual on {found.seen.trace.gpu_name}"]


def odd_times(found: Evidence) -> list[str]:
    """A note, if products are so slow or fast for the chip that the file's times cannot be microseconds."""
    known = chip(found.seen.trace.gpu_name)
    shares = [rate / peak for name, rate in found.rates.items() if (peak := known.peak(name))] if known is not None else []
    if not shares or IMPOSSIBLE_RATE <= max(shares) <= 1.5:
        return []
    return [
        f"large products would run at {max(shares):.1%} of {found.seen.trace.gpu_name}'s peak: the times in this file are not "
        "microseconds, it seems, as they should be; shares hold, milliseconds do not"
    ]


def _dilution(found: Evidence) -> Iterator[Cause]:
    """Parts that low precision leaves alone. They cost what they take beyond what is usual."""
    if not any(item.product and item.product.precision in LOW for item in found.items):
        return
    classes, step = found.account.classes, found.step_ms
    head = [item for item in found.items if item.product is not None and item.product.head]
    attention = [item for item in found.items if item.placed.name == "attention"]
    rest = ("norms", "activations", "elementwise", "embedding and indexing")
    sizes = sizes_of(head, 1)
    parts = {
        "attention": (found.ms(attention), attention, f"{found.per_step(attention):.0f} kernels"),
        "head": (found.ms(head) + classes.get("loss", 0.0), head, f"products of {sizes}" if sizes else "loss"),
        "optimizer": (classes.get("optimizer", 0.0), [], ""),
        "rest": (sum(classes.get(name, 0.0) for name in rest), [], ", ".join(rest)),
    }
    busy = found.account.busy_ms
    for key, (time, items, words) in parts.items():
        named, usual = DILUTES[key]
        if time > named * busy:
            products = found.ms(found.low)
            evidence = [
                f"{time:.1f} ms of {step:.1f} ({time / step:.0%}) that low precision does not shorten"
                + (f": {words}" if words else ""),
                f"the products that run low are {products / step:.0%} of the step: were they free, it would be "
                f"{step / max(step - products, 1e-9):.2f}x faster",
            ]
            yield Cause(key, time - usual * busy, tuple(evidence), main_kernels(items) if items else ())
