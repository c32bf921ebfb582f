"""The steps of a recorded trace, one by one."""

from gemmscope.document.table import Cell, Table, columns, number
from gemmscope.results.explain import ExplainResult, TracedStep

MOST_STEPS = 60  # that are listed one by one


def step_summary(result: ExplainResult) -> str:
    """The shortest, the median and the longest step, where there are several."""
    times = result.step_range_ms
    if times is None:
        return ""
    shortest, middle, longest = times
    return f" (min {shortest:.2f}, median {middle:.2f}, max {longest:.2f})"


def steps_table(result: ExplainResult) -> Table:
    """A row for each step; if there are very many, only the slowest."""
    steps = result.each_step if len(result.each_step) > 1 else ()
    slowest = sorted(range(len(steps)), key=lambda place: -steps[place].time_ms)[:MOST_STEPS]
    rows = []
    for place in sorted(slowest):
        step = steps[place]
        times = (number(time, f"{time:.2f}") for time in (step.time_ms, step.busy_ms, step.idle_ms))
        rows.append((Cell(step.name), Cell(_remark(step)), *times))
    hidden = len(steps) - len(rows)
    note = f"The {MOST_STEPS} slowest of {len(steps)} steps; {hidden} others are not listed." if hidden else ""
    heads = columns(("Step", "Extra time of slow steps"), ("ms", "GPU busy, ms", "GPU idle, ms"))
    return Table("Steps", heads, tuple(rows), note)


def _remark(step: TracedStep) -> str:
    """What makes a slow step slow, and whether it counts."""
    extra = f"{step.extra}: {step.extra_ms:+.1f} ms" if step.extra else "slow" if step.slow else ""
    return extra if step.averaged else f"{extra}; excluded from the averages" if extra else "excluded from the averages"
