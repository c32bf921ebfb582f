"""The table of what one GPU exchanges with others in a forecast step."""

from gemmscope.document.table import Cell, Table, columns, number
from gemmscope.results.step import Exchanged, StepTimes

NAMES = {
    "tensor": "tensor parallelism: activations",
    "context": "context parallelism: keys and values",
    "experts": "expert parallelism: tokens",
    "stages": "pipeline: activations and gradients",
    "gradients": "data parallelism: gradients",
    "weights": "data parallelism: weights",
    "offload": "activations to the CPU and back",
}


def exchange_table(step: StepTimes, prefix: str = "") -> Table | None:
    """Of the best recipe; None where nothing is exchanged."""
    time = step.of(step.winner.best) if step.winner is not None else None
    time = time or (step.recipes[0] if step.recipes else None)
    if time is None or not time.exchanged:
        return None
    heads = ("Over", "Exposed share")
    figures = ("Total ms", "Hidden ms", "Exposed ms [90% error bar]")
    return Table(
        f"{prefix}FORECAST: communication of one GPU in a step ({time.recipe})",
        columns(("Exchange", *heads), figures),
        tuple(_row(each) for each in time.exchanged),
        "Hidden: overlapped with computation. Only the exposed share of tensor parallelism was fitted to published runs.",
    )


def _row(each: Exchanged) -> tuple[Cell, ...]:
    hidden, low = each.time_ms - each.exposed_ms, max(each.exposed_ms - each.unsure_ms, 0.0)
    high = min(each.exposed_ms + each.unsure_ms, each.time_ms) if not each.crosses else each.exposed_ms + each.unsure_ms
    return (
        Cell(NAMES[each.kind]),
        Cell("CPU link" if each.kind == "offload" else "network" if each.crosses else "NVLink"),
        Cell(each.basis),
        number(each.time_ms, f"{each.time_ms:.1f}"),
        number(hidden, f"{hidden:.1f}"),
        number(each.exposed_ms, f"{each.exposed_ms:.1f} [{low:.1f}, {max(high, each.exposed_ms):.1f}]"),
    )
