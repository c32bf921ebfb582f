"""Causes around low precision: the GPU waits, repeats work, runs slowly, or spends its time on other parts of the step."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from gemmscope.explain.host_activity import HOST_ACTIVITIES
from gemmscope.explain.step_evidence import NAMED, StepEvidence, main_kernels, sizes_of
from gemmscope.explain.timeline import LATE, OTHER_STREAM, UNKNOWN_LAUNCH, Gap, frames_of, lost_launches
from gemmscope.explain.trace_view import TITLES, TimedWork
from gemmscope.findings import Finding, finding
from gemmscope.grouping import add_up, grouped
from gemmscope.results.explain import Cause

WAITING, LONG_CALL = 0.05, 0.1  # of the step
REPEATED = {"convolutions": "convolution", "casts": "quantization"}  # classes that are counted where forward is recomputed
EXPERT_NAMES = ("Grouped", "Expert", "Moe", "MoE")
# In the names of kernels of attention and norms
FORWARD_NAMES = ("fprop", "fwd", "forward", "Forward")
BACKWARD_NAMES = ("bprop", "bwd", "backward", "Backward")
# Parts that low precision does not speed up: the share of GPU time from which each is a cause, what is usual, and its classes
FUSED = ("elementwise", "norms", "activations")
SMALL_MESSAGE, BUCKET = 1 << 20, 25 << 20  # bytes: what takes the time of its start, and DistributedDataParallel's default
SHORT_COLLECTIVE_US, MANY = 100.0, 20  # of one collective without a description; per step
# The cause that the owner of idle time makes
OWNERS = {
    **{entry["name"]: entry["cause"] for entry in HOST_ACTIVITIES}, **dict.fromkeys(LATE, "host"),
    "no launch for over 1 ms": "elsewhere", OTHER_STREAM: "streams", UNKNOWN_LAUNCH: "idle",
}  # fmt: skip
MOST_SYNCS = 2  # per step: more are worth naming
DILUTIONS = {
    "attention": (0.30, 0.15, ("attention",)),
    "head": (0.30, 0.12, ("loss",)),  # and the GEMMs of the output head
    "optimizer": (0.25, 0.12, ("optimizer",)),
    "rest": (0.40, 0.15, ("norms", "activations", "elementwise", "embedding")),
}


def step_causes(step: StepEvidence) -> Iterator[Cause]:
    """All causes, in no order."""
    for search in (_idle, _recompute, _communication, _copies, _dilution, _fusing, _layout):
        yield from search(step)


def _idle(step: StepEvidence) -> Iterator[Cause]:
    """The idle time of each owner."""
    owned = grouped((OWNERS.get(gap.why, ""), gap) for shares in step.view.shares for gap in shares.gaps)
    for owner, gaps in owned.items():
        time = sum(gap.time for gap in gaps) / 1000 / step.view.count - (step.recording.excess_ms if owner == "host" else 0.0)
        if owner and time > WAITING * step.step_ms:
            longest = max(gaps, key=lambda gap: gap.time)
            facts = {**step.time_facts(time), "gaps": step.per_step(gaps), "longest_ms": longest.time / 1000}
            code, details = _host_bound(step, gaps, time) if owner == "host" else (owner, _what_the_cpu_did(step, owner, longest))
            yield step.cause(code, time, [finding("cause-idle", **facts), *details], gaps=gaps, label=f"idle: {longest.why}")


def _what_the_cpu_did(step: StepEvidence, owner: str, longest: Gap) -> list[Finding]:
    """Calls and annotations of an activity; else what the CPU did in the longest gap, or why that is not known."""
    if owner in ("streams", "idle"):
        return [finding("cause-other-streams") if owner == "streams" else finding("launches-not-recorded")]
    if owner == "elsewhere":
        frame, kind = next(iter(frames_of(step.view.trace, [longest])))
        return [finding("cause-cpu-activity", frame=frame[:100], kind=kind)] if frame else []
    return [call for activity in HOST_ACTIVITIES if activity["cause"] == owner for call in _calls(step, activity)]


def _calls(step: StepEvidence, activity: Mapping[str, str]) -> Iterator[Finding]:
    """The calls and annotations of an activity of the CPU within the steps, and how many of them take long."""
    begin, end = step.view.steps.chosen[0].begin, step.view.steps.chosen[-1].end
    inside = (call for call in step.view.trace.host_work.get(activity["name"], ()) if begin <= call.start < end)
    calls = grouped((call.name, (call.end - call.start) / 1000) for call in inside)
    ordered, limit = sorted(calls.items(), key=lambda pair: -sum(pair[1])), LONG_CALL * step.step_ms
    nested = "names" in activity  # annotations and functions of one activity are inside each other, calls are not
    for name, times in ordered[: 1 if nested else 2]:
        if sum(times) > LONG_CALL * sum(ordered[0][1]):
            facts = {"total_ms": sum(times), "longest_ms": max(times), "limit_ms": limit}
            yield finding(
                "cause-host-calls", name=name[:100], count=len(times), long=sum(time > limit for time in times), **facts
            )


def unrecorded_work(step: StepEvidence) -> Iterator[Finding]:
    """Kernels are missing from the trace, and the time is not idle."""
    time = step.account.unrecorded_ms
    if time > NAMED * step.step_ms:
        code = "launched-kernels-missing" if lost_launches(step.view.trace) else "kernels-missing"
        yield finding(code, **step.time_facts(time))


def _host_bound(step: StepEvidence, late: Sequence[Gap], time: float) -> tuple[str, list[Finding]]:
    """Why launches are late: the CPU waits for the GPU again and again, launches experts one by one, or is simply slower."""
    account, code = step.account, "host"
    evidence: list[Finding] = []
    in_experts = sum(gap.time for gap in late if gap.scope.inside(*EXPERT_NAMES)) / 1000 / step.view.count
    after_sync = sum(gap.time for gap in late if gap.why != LATE[0]) / 1000 / step.view.count
    if (syncs := _synchronizations(step)) >= MOST_SYNCS:
        evidence.append(finding("cause-synchronizations", times=syncs))
    if in_experts > 0.5 * time:
        code = "experts"
        gemms = [item for item in step.gemms if item.scope.inside(*EXPERT_NAMES)]
        gemm_us = 1000 * step.ms(gemms) / max(step.per_step(gemms), 1)
        evidence.append(finding("cause-expert-launches", time_ms=in_experts, gemms=step.per_step(gemms), gemm_us=gemm_us))
    if syncs >= MOST_SYNCS and after_sync > 0.5 * time:
        code = "syncs"
    interval_us = 1000 * step.step_ms / max(account.launches, 1)
    kernel_us = 1000 * account.busy_ms / max(account.kernels, 1)
    evidence.append(finding("cause-launch-rate", launches=account.launches, interval_us=interval_us, kernel_us=kernel_us))
    return code, evidence


def _synchronizations(step: StepEvidence) -> float:
    """Calls that wait for the GPU, per step."""
    starts = [wait.start for wait in step.view.trace.waits if "Synchronize" in wait.name and "Event" not in wait.name]
    inside = [bisect_left(starts, chosen.end) - bisect_left(starts, chosen.begin) for chosen in step.view.steps.chosen]
    return sum(inside) / step.view.count


def _recompute(step: StepEvidence) -> Iterator[Cause]:
    again = [item for item in step.items if item.scope.phase == "recomputed"]
    time = step.ms(again)
    if time > WAITING * step.step_ms:
        gemms = [item for item in again if item.work_class.is_gemm]
        counts = {name: step.per_step([item for item in again if item.name == kind]) for name, kind in REPEATED.items()}
        evidence = [
            finding("cause-recomputed", **step.time_facts(time)),
            finding("cause-recomputed-kernels", kernels=step.per_step(again), gemms=step.per_step(gemms), **counts),
        ]
        high = [item for item in gemms if not item.gemm.low]
        if high and step.low and step.weight(high) > 0.5 * step.weight(gemms):
            evidence.append(finding("cause-recomputed-high"))
        yield step.cause("recompute", time, evidence, again, "backward", "recomputed", removed=True)
        return
    forward = [item for item in step.of_class("attention") if item.mentions(*FORWARD_NAMES)]
    most = _most_of_a_name(item for item in step.of_class("attention") if item.mentions(*BACKWARD_NAMES))
    repeated_ms = _repeated_gemms_ms(step)
    if most and len(forward) > 1.5 * most:
        evidence = [finding("cause-attention-repeated", ratio=len(forward) / most)]
        if repeated_ms:
            evidence.append(finding("cause-gemms-repeated", time_ms=repeated_ms))
        yield step.cause("recompute", step.ms(forward) * 0.5 + repeated_ms, evidence, forward, "backward")


def _most_of_a_name(items: Iterable[TimedWork]) -> int:
    """How often work ran that takes several kernels each time."""
    return max(Counter(item.work.name for item in items).values(), default=0)


def _repeated_gemms_ms(step: StepEvidence) -> float:
    """Where a compiler recomputes forward inside backward no function shows it: GEMMs of each size are counted.

    Without sizes or passes, norms are counted: if they run forward twice, so do whole layers, and a quarter of the GEMMs repeats.
    """
    if not step.flops_known or not any(item.gemm.pass_name == "fprop" for item in step.gemms):
        once = _most_of_a_name(item for item in step.of_class("norms") if item.mentions(*BACKWARD_NAMES))
        twice = _most_of_a_name(item for item in step.of_class("norms") if item.mentions(*FORWARD_NAMES))
        return step.ms(step.gemms) / 4 if once and twice > 1.8 * once else 0.0
    gemms = [item for item in step.gemms if item.gemm.size and not item.gemm.reduces]
    forward = Counter(item.gemm.sides for item in gemms if item.gemm.pass_name == "fprop")
    others = [item for item in gemms if item.gemm.pass_name != "fprop"]
    backward = Counter(item.gemm.sides for item in others)
    times = add_up((item.gemm.sides, item.share) for item in others)
    extra = {size: backward[size] - 2 * count for size, count in forward.items() if backward[size] > 2.4 * count}
    return sum(times[size] * count / backward[size] for size, count in extra.items()) / 1000 / step.view.count


def _communication(step: StepEvidence) -> Iterator[Cause]:
    items, total = step.of_class("communication"), step.account.communication_ms
    exposed = step.ms(items)
    if exposed <= WAITING * step.step_ms:
        return
    scales = any(item.work_class.facts.kernel_class == "update" for item in step.items)  # are updated: delayed scaling
    short = [item for item in items if item.work.time < 200 and item.mentions("AllReduce", "all_reduce")]
    all_facts = {**step.time_facts(exposed), "total_ms": total, "hidden_share": step.account.hidden_ms / total}
    evidence = [
        finding("cause-exposed-communication", **all_facts),
        finding("cause-collectives", count=step.per_step(items), kernels=list(main_kernels(items, 2))),
    ]
    code, kernels = "communication", items
    if scales and step.ms(short) > 0.6 * exposed:
        evidence.append(finding("cause-short-all-reduces", count=step.per_step(short)))
        code, kernels = "amax", short
    yield step.cause(code, exposed, evidence, kernels, label="exposed", marked=items)
    small = [item for item in items if _message_bytes(item) < SMALL_MESSAGE]
    least_ms = sum(_message_bytes(item) for item in small) / BUCKET / len(small or items) * step.ms(small)
    if code != "amax" and step.per_step(small) >= MANY and step.ms(small) - least_ms > WAITING * step.step_ms:
        size = sum(_message_bytes(item) for item in small) / len(small)
        facts = {"count": step.per_step(small), "bytes": size, **step.time_facts(step.ms(small))}
        yield step.cause(
            "small-collectives", step.ms(small) - least_ms, [finding("cause-small-collectives", **facts)], small, "", "small"
        )


def _message_bytes(item: TimedWork) -> float:
    """Of a collective; one that is not described counts as small if it is short."""
    known = item.work.message.bytes_counted if item.work.message is not None else 0.0
    return known or (0.0 if item.work.time < SHORT_COLLECTIVE_US else BUCKET)


def _copies(step: StepEvidence) -> Iterator[Cause]:
    """Between CPU and GPU memory while nothing is computed: offloading, or batches that arrive late."""
    items = [item for item in step.of_class("copies") if item.mentions("HtoD", "DtoH")]
    time = step.ms(items)
    if time > WAITING * step.step_ms:
        evidence = [finding("cause-exposed-copies", **step.time_facts(time), copies=step.per_step(items))]
        yield step.cause("copies", time, evidence, items, "", "only copying")


def _dilution(step: StepEvidence) -> Iterator[Cause]:
    """Parts that low precision does not speed up. Their cost is the time beyond what is usual."""
    if not any(item.gemm.low for item in step.items):
        return
    attention, head = step.of_class("attention"), [item for item in step.items if item.gemm.head]
    sizes, step_ms, gemms_ms = sizes_of(head, 1), step.step_ms, step.ms(step.low)
    known: dict[str, tuple[list[TimedWork], list[Finding]]] = {
        "attention": (attention, [finding("cause-attention-kernels", kernels=step.per_step(attention))]),
        "head": (head, [finding("cause-gemm-sizes", sizes=sizes)] if sizes else []),
    }
    for code, (reported, usual, classes) in DILUTIONS.items():
        kernels, details = known.get(code, ([], []))
        items = {item.index: item for item in (*kernels, *(item for name in classes for item in step.of_class(name)))}.values()
        time = step.ms(items)
        if time > reported * step.account.busy_ms:
            names = [*(["output head"] if code == "head" else []), *(TITLES[name] for name in classes)]
            evidence = [
                finding("cause-not-sped-up", time_ms=time, step_ms=step_ms, share=time / step_ms, parts=names),
                *details,
                finding("cause-best-case", share=gemms_ms / step_ms, speedup=step_ms / max(step_ms - gemms_ms, 1e-9)),
            ]
            yield step.cause(code, time - usual * step.account.busy_ms, evidence, kernels, shortened=items)


def _fusing(step: StepEvidence) -> Iterator[Cause]:
    """Elementwise kernels of PyTorch that run in a row: fused into one, they would read and write their tensors once."""
    chains: list[list[TimedWork]] = []
    for items in step.view.by_step:
        for stream in grouped((item.work.stream, item) for item in items).values():
            alike = groupby(stream, lambda item: item.scope.phase if _is_fusible(item) else None)
            chains += [list(chain) for phase, chain in alike if phase is not None]
    items = [item for chain in chains if len(chain) > 1 for item in chain]
    saved_ms = step.ms(items) - step.ms(max(chain, key=lambda item: item.share) for chain in chains if len(chain) > 1)
    if saved_ms > WAITING * step.step_ms:
        norms = [item for item in items if item.name == "norms"]
        facts = {"chains": sum(len(chain) > 1 for chain in chains) / step.view.count, "once_ms": step.ms(items) - saved_ms}
        evidence = [finding("cause-unfused", kernels=step.per_step(items), **step.time_facts(step.ms(items)), **facts)]
        evidence += [finding("cause-eager-norms", kernels=step.per_step(norms), time_ms=step.ms(norms))] if norms else []
        yield step.cause("fusing", saved_ms, evidence, items, "", "not fused", removed=True)


def _is_fusible(item: TimedWork) -> bool:
    """Whether it is a single elementwise operation or reduction of PyTorch, not a norm that is one kernel already."""
    return (
        item.name in FUSED and item.mentions("at::native") and item.work_class.facts.kernel_class in ("elementwise", "activation")
    )


def _layout(step: StepEvidence) -> Iterator[Cause]:
    """Convolutions whose kernels want another layout than the tensors have."""
    items = step.of_class("layout")
    time_ms = step.ms(items)
    if time_ms > WAITING * step.step_ms and (convolutions := step.ms(step.of_class("convolution"))):
        evidence = finding("cause-layout", kernels=step.per_step(items), convolutions_ms=convolutions, **step.time_facts(time_ms))
        yield step.cause("layout", time_ms, [evidence], items, "around convolutions", "another layout", removed=True)
