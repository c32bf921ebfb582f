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
    """The communication of the best recipe; None if there is none."""
    time = step.of(step.winner.best) if step.winner is not None else None
    time = time or (step.recipes[0] if step.recipes else None)
    if time is None or not time.exchanged:
        return None
    heads = ("Over", "Exposed share")
    figures = ("Total ms", "Hidden ms", "Exposed ms [90% error bar]")
    return Table(
        f"{prefix}FORECAST: communication of one GPU in a step ({time.recipe})",
        columns(("Exchange", *heads), figures),
        tuple(_row(exchange) for exchange in time.exchanged),
        "Hidden: overlapped with computation. Only the exposed share of tensor parallelism was fitted to published runs.",
    )


def _row(exchange: Exchanged) -> tuple[Cell, ...]:
    hidden, low = exchange.time_ms - exchange.exposed_ms, max(exchange.exposed_ms - exchange.unsure_ms, 0.0)
    high = exchange.exposed_ms + exchange.unsure_ms
    if not exchange.crosses:
        high = min(high, exchange.time_ms)
    return (
        Cell(NAMES[exchange.kind]),
        Cell("CPU link" if exchange.kind == "offload" else "network" if exchange.crosses else "NVLink"),
        Cell(exchange.basis),
        number(exchange.time_ms, f"{exchange.time_ms:.1f}"),
        number(hidden, f"{hidden:.1f}"),
        number(exchange.exposed_ms, f"{exchange.exposed_ms:.1f} [{low:.1f}, {max(high, exchange.exposed_ms):.1f}]"),
    )
