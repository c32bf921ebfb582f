"""Each step of a trace beside the others: how long it took, what made it slow, and whether the steps fall into two groups."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from gemmscope.explain.account import EXPOSED, UNRECORDED
from gemmscope.explain.steps import SIMILAR
from gemmscope.explain.timeline import NOT_RECORDED, Shares
from gemmscope.explain.view import TraceView, add_up
from gemmscope.findings import Fact, Finding, finding
from gemmscope.results.explain import TracedStep

GROUPS_APART = 1.5  # ratio of the shortest step of the slow group to the longest of the fast one
SMALLEST_GROUP = 0.2  # of all steps
NAMED = 0.1  # of a step's extra time: what takes less is not named


def timed_steps(view: TraceView) -> tuple[TracedStep, ...]:
    """A row for each step, those that are not averaged included."""
    profiles = [_profile(view, shares) for shares in view.every_shares]
    averaged = len(view.steps.every) - len(view.steps.chosen)  # only first ones are left out
    fast = _usual_times([step.time for step in view.steps.chosen])
    typical = median(fast) / 1000
    alike = zip(profiles[averaged:], view.steps.chosen, strict=True)
    usual = _usual([profile for profile, step in alike if step.time <= fast[-1]])
    rows = []
    for number, (step, profile) in enumerate(zip(view.steps.every, profiles, strict=True)):
        time = step.time / 1000
        slow = time > SIMILAR * typical
        extra, extra_ms = _extra(profile, usual) if slow else ("", 0.0)
        if extra_ms < NAMED * (time - typical):
            extra, extra_ms = "", 0.0
        unrecorded = profile.get(UNRECORDED, 0.0)
        idle = sum(gap.time for gap in view.every_shares[number].gaps if gap.why != NOT_RECORDED) / 1000
        rows.append(
            TracedStep(
                name=step.name, time_ms=time, busy_ms=max(time - idle - unrecorded, 0.0), idle_ms=idle, unrecorded_ms=unrecorded,
                averaged=number >= averaged, slow=slow, extra=extra, extra_ms=extra_ms,
            )
        )  # fmt: skip
    return tuple(rows)


def _usual_times(times: Sequence[float]) -> list[float]:
    """The sorted times that slow steps are compared with: those of the fast group, or else of all steps."""
    groups = two_groups(times)
    return groups[0] if groups else sorted(times)


def _profile(view: TraceView, shares: Shares) -> dict[str, float]:
    """Milliseconds of one step by class of work and by reason of idle time."""
    renamed = {"communication": EXPOSED}
    work = ((view.placed[number].name, share) for number, share in shares.of.items())
    gaps = ((UNRECORDED if gap.why == NOT_RECORDED else gap.why, gap.time) for gap in shares.gaps)
    return {renamed.get(name, name): time / 1000 for name, time in add_up([*work, *gaps]).items()}


def _usual(profiles: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for profile in profiles for name in profile}
    return {name: median(profile.get(name, 0.0) for profile in profiles) for name in names}


def _extra(profile: dict[str, float], usual: dict[str, float]) -> tuple[str, float]:
    """What takes most time beyond that of the usual step."""
    extra = {name: time - usual.get(name, 0.0) for name, time in profile.items()}
    name = max(extra, key=lambda name: extra[name], default="")
    return name, extra.get(name, 0.0)


def step_findings(rows: Sequence[TracedStep]) -> Iterator[Finding]:
    """What the times of the steps show: one left out, slow ones, two groups."""
    averaged = [row for row in rows if row.averaged]
    times = [row.time_ms for row in averaged]
    typical = median(_usual_times(times))
    for row in rows:
        if not row.averaged:
            extra: dict[str, Fact] = {"extra": row.extra or "work on the GPU", "extra_ms": row.extra_ms or row.time_ms - typical}
            yield finding(
                "first-step-left-out", time_ms=row.time_ms, times=row.time_ms / max(typical, 1e-9), median_ms=typical, **extra
            )
    if len(times) < 2:
        return
    slow = [row for row in averaged if row.slow]
    reasons = add_up((row.extra, row.extra_ms) for row in slow if row.extra)
    extra_ms = sum(row.time_ms - typical for row in slow)
    reason = max(reasons, key=lambda name: reasons[name], default="")
    share = min(reasons.get(reason, 0.0) / extra_ms, 1.0) if slow else 0.0
    why: dict[str, Fact] = {"extra": reason or "work on the GPU", "share": share}
    if groups := two_groups(times):
        fast, others = groups
        counts: dict[str, Fact] = {"fast": len(fast), "slow": len(others)}
        means: dict[str, Fact] = {"fast_ms": fmean(fast), "slow_ms": fmean(others), "mean_ms": fmean(times)}
        yield finding("steps-in-two-groups", **counts, **means, **why)
    elif slow:
        compared: dict[str, Fact] = {"ratio": SIMILAR, "median_ms": typical, "longest_ms": max(times)}
        yield finding("steps-slow", count=len(slow), steps=len(times), **compared, **why)


def two_groups(times: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """The times of fast and slow steps, if they are far apart and neither group is an exception.

    >>> two_groups([118.1, 115.7, 1014.7, 1068.4, 1076.1])
    ([115.7, 118.1], [1014.7, 1068.4, 1076.1])
    >>> two_groups([10, 11, 12, 13, 14, 15]), two_groups([10, 10, 10, 10, 90])
    (None, None)
    """
    ordered = sorted(times)
    least = max(2, round(SMALLEST_GROUP * len(ordered)))
    places = range(least, len(ordered) - least + 1)
    at = max(places, key=lambda place: ordered[place] / max(ordered[place - 1], 1e-9), default=None)
    if at is None or ordered[at] < GROUPS_APART * ordered[at - 1]:
        return None
    return ordered[:at], ordered[at:]
