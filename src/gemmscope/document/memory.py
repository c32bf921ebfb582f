"""The memory of one GPU as a table: a row for each use, a column for each recipe."""

from gemmscope import units
from gemmscope.document.table import Cell, Table, bytes_cell, columns
from gemmscope.results.forecast import GpuForecast

ROWS = {
    "weights_bytes": "Weights",
    "gradients_bytes": "Gradients",
    "master_weights_bytes": "Master weights",
    "moments_bytes": "Optimizer moments",
    "activations_bytes": "Activations",
    "quantized_copies_bytes": "Quantized copies of weights",
    "communication_bytes": "Communication buffers",
    "workspace_bytes": "Logits and loss, or gradients of one layer",
    "reserve_bytes": "CUDA, libraries, allocator",
    "total_bytes": "Total, usual",
    "least_bytes": "At least",
    "most_bytes": "At most",
}
NOTE = (
    "Computed from sizes and the layout, not measured. At least: with the best value of every setting that is not known (BF16 "
    "gradients, weights stored only in the quantized format, a fused loss). At most: with an unfused loss and a fragmented "
    "allocator."
)


def memory_table(gpu: GpuForecast, prefix: str = "") -> Table:
    """Every use of the memory in every recipe, and whether it fits."""
    rows = [(Cell(text), *(bytes_cell(getattr(memory, field)) for memory in gpu.memory)) for field, text in ROWS.items()]
    marks = [Cell(memory.fit, level="" if memory.fit in ("fits", "tight") else "warning") for memory in gpu.memory]
    first = gpu.memory[0]
    where = f"The GPU that needs the most memory is on pipeline stage {first.stage}" if first.stage or first.in_flight > 1 else ""
    where += f" and holds the activations of {first.in_flight:g} micro-batches. " if where else ""
    title = f"{prefix}FORECAST: memory of one GPU, out of {units.si(first.available_bytes, 'B')}"
    heads = columns(("Use",), [memory.recipe for memory in gpu.memory])
    return Table(title, heads, (*rows, (Cell("Fits"), *marks)), f"{where}{NOTE}")
