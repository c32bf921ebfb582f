"""Findings about the bubble of a pipeline."""

from math import ceil

from gemmscope.findings import Finding, finding
from gemmscope.model.spec import RunSpec
from gemmscope.results.step import StepTimes

WORTH_SAYING, GOAL = 0.10, 0.05  # shares of the step


def bubble_findings(step: StepTimes, run: RunSpec) -> list[Finding]:
    """A finding if there are too few micro-batches for the stages, with how many are enough."""
    shares = [time.parts_ms.get("pipeline bubble", 0.0) / time.step_ms.value for time in step.recipes]
    if not shares or max(shares) < WORTH_SAYING:
        return []
    enough = enough_micro_batches(run.pp, run.vp)
    facts = {"stages": run.pp, "micro_batches": run.gradient_accumulation, "enough": enough, "goal": GOAL}
    return [finding("pipeline-bubble", share=max(shares), **facts)]


def enough_micro_batches(stages: int, virtual: int) -> int:
    """Micro-batches per step that keep the bubble at a twentieth of the step: a multiple of the stages.

    >>> enough_micro_batches(16, virtual=1), enough_micro_batches(8, virtual=4)
    (304, 40)
    """
    return ceil((stages - 1) / virtual / GOAL / stages) * stages
