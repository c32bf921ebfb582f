"""Whether a rank's training state fits into a chip: a lower bound, from what the memory tables and the parameters give."""

from __future__ import annotations

from gemmscope.forecast.findings import ForecastFindings
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.step.answer import BYTES_PER_PARAMETER
from gemmscope.workload.ops import ELEMENT_BYTES


def needed_bytes(report: ForecastFindings, model: ModelSpec, run: RunSpec, parameters: int) -> dict[str, float]:
    """By recipe: weights, gradients and moments, quantized copies, and what one micro-batch keeps of the linears' inputs.

    Where whole layers are computed again, each keeps its input alone.
    """
    layers = sum(case.count for case in report.cases if case.op.startswith("Attn Out"))
    needed = {}
    for name, found in report.memory().items():
        kept = layers * run.tokens * model.hidden_size * ELEMENT_BYTES if run.recompute == "full" else found.kept
        needed[name] = BYTES_PER_PARAMETER * parameters + found.copies + kept
    return needed


def does_not_fit(report: ForecastFindings, model: ModelSpec, run: RunSpec, parameters: int) -> list[str]:
    """One line where some recipe needs more than the chip has."""
    there = report.chip.memory_gb
    needed = {name: size / 1e9 for name, size in needed_bytes(report, model, run, parameters).items()}
    large = [f"{name} {size:.0f} GB" for name, size in needed.items() if size > there]
    if not large:
        return []
    hint = f"{there:.0f} GB there; --tp, --pp, --recompute"
    what = "for weights, gradients, optimizer state, quantized copies and the linears' inputs"
    return [f"does not fit: {report.chip.name}: {', '.join(large)} needed at least {what}, {hint}"]
