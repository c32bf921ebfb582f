"""Findings about the times of a step, measured or forecast."""

from collections.abc import Iterator
from dataclasses import replace

from gemmscope.engine.kernels import CAST_SHARE
from gemmscope.findings import Finding, finding
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import StepTime, StepTimes

RUN_TO_RUN = 0.02  # the same step on another day or machine
NO_GAIN = 0.25  # a smaller share of the predicted gain is not explained by dilution


def step_findings(times: StepTimes, *, graphs: bool = False) -> list[Finding]:
    """What explains the speedup of each recipe, what is host-bound or too close to call, what is missing. `graphs`: CUDA graphs
    were requested."""
    findings = [entry for time in times.recipes for entry in _of_recipe(time)]
    if waiting := [time for time in times.recipes if _says_host_bound(time)]:
        idle_ms = max(float(str(time.verdict.facts["idle_ms"])) for time in waiting if time.verdict is not None)
        findings.append(finding("step-host-bound", recipe=[time.recipe for time in waiting], idle_ms=idle_ms))
    if bound := [time for time in times.recipes if time.host_bound and not _says_host_bound(time)]:
        facts = {"host_ms": max(time.host_ms or 0.0 for time in bound), "busy_ms": max(time.gpu_busy_ms or 0.0 for time in bound)}
        findings.append(finding("step-launch-bound", recipes=[time.recipe for time in bound], **facts))
    if (waiting or bound) and times.origin == "measured" and not graphs:
        findings.append(finding("graphs-not-measured"))
    findings += _captured(times)
    code = "step-not-measured" if times.origin == "measured" else "step-not-forecast"
    findings += [finding(code, recipe=name, reason=reason) for name, reason in times.failures.items()]
    findings += _attention(times)
    if any(time.mfu is not None for time in times.recipes):
        findings.append(finding("mfu-definition"))
    return findings


def _attention(times: StepTimes) -> Iterator[Finding]:
    """Which implementation of attention ran: once for all recipes in which it is the same one."""
    alike: dict[tuple[str, ...], list[StepTime]] = {}
    for time in times.recipes:
        if time.attention_kernels:
            alike.setdefault(tuple(time.attention_kernels), []).append(time)
    for group in alike.values():
        kernels_ms = max((time.attention_kernels for time in group), key=lambda kernels: sum(kernels.values()))
        yield finding("attention-ran", recipes=[time.recipe for time in group], kernels_ms=dict(kernels_ms))


def _captured(times: StepTimes) -> Iterator[Finding]:
    """What CUDA graphs change, in one line; and what could not be captured."""
    both = [(time, time.captured) for time in times.recipes if time.captured is not None]
    if both:
        gains = [(time.recipe, time.speedup, captured.speedup) for time, captured in both]
        known = [(name, launched, as_graph) for name, launched, as_graph in gains if launched and as_graph]
        yield finding(
            "step-captured" if known else "step-captured-alone",
            captured_ms={time.recipe: captured.step_ms.value for time, captured in both},
            launched_ms={time.recipe: time.step_ms.value for time, _ in both},
            captured={name: as_graph.value for name, _, as_graph in known},
            launched={name: launched.value for name, launched, _ in known},
        )
    for name, reason in times.not_captured.items():
        yield finding("step-not-captured", recipe=name, reason=reason)


def _of_recipe(time: StepTime) -> Iterator[Finding]:
    name = time.recipe
    if time.verdict is not None and not _says_host_bound(time):
        yield named_verdict(time, time.verdict)
        if time.verdict.facts.get("fused_casts"):
            yield finding("fused-casts", recipe=name, share=CAST_SHARE)
    if time.speedup is not None and time.speedup.includes_one:
        yield finding("too-close-to-call", recipe=name, over=BASELINE, what="the training step")
    if time.named_share is not None and time.named_share < 1:
        yield finding("unknown-kernels", recipe=name, share=1 - time.named_share, kernels=list(time.unknown_kernels))


def _says_host_bound(time: StepTime) -> bool:
    return time.verdict is not None and time.verdict.code == "step-host-bound"


def named_verdict(time: StepTime, why: Finding) -> Finding:
    """The verdict with the name of its recipe."""
    return replace(why, facts={**why.facts, "recipe": time.recipe})


def observed_findings(times: StepTimes, observed: float) -> list[Finding]:
    """The speedup of the user's own run compared with every prediction."""
    return [
        finding(_observed(time, observed), recipe=time.recipe, observed=observed, predicted=time.speedup)
        for time in times.recipes
        if time.recipe != BASELINE
    ]


def _observed(time: StepTime, observed: float) -> str:
    predicted = time.speedup
    if time.fell_back:
        return "observed-fallback"
    if predicted is None or predicted.low is None or predicted.high is None:
        return "observed-unknown"
    low, high = predicted.low * (1 - RUN_TO_RUN), predicted.high * (1 + RUN_TO_RUN)
    if low <= observed <= high:
        return "observed-as-expected"
    if observed > high:
        return "observed-more"
    lost = 1 - RUN_TO_RUN <= observed <= 1 + NO_GAIN * (predicted.value - 1)
    return "observed-no-gain" if lost else "observed-less"
