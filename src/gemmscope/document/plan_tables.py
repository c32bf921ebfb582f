"""The tables of a plan: the layouts on the front of speed and memory, those of each recipe, all of them, what was excluded."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gemmscope import units
from gemmscope.document.table import (
    NOTHING,
    Cell,
    Column,
    Table,
    amount_cell,
    columns,
    number,
    range_cell,
    share_cell,
    without_empty,
)
from gemmscope.interval import Interval
from gemmscope.results.plan import PlanLayout, PlanPoint, PlanResult

SHARDING = {0: "-", 1: "optimizer", 2: "optimizer, gradients", 3: "FSDP"}
MOST_ROWS = 6  # of the short view
MOST_VARIED = 14
MOST_LISTED = 200
SAVING = 0.03  # a layout of the short view needs this much less memory than the one above it
RULES = {
    "domain": "TP beyond one NVLink domain: its collectives would wait for the network",
    "gpus": "TP x CP x PP does not divide the number of GPUs",
    "heads": "a size of the model, such as its heads, does not divide evenly",
    "layers": "more pipeline stages than layers to fill them",
    "context": "CP leaves a rank fewer than 4,096 tokens of a sequence",
    "experts": "EP x ETP does not divide the ranks of a pipeline stage",
    "batch": "the global batch does not split into these micro-batches",
    "virtual": "virtual stages need a multiple of PP micro-batches, and layers that divide evenly",
    "fsdp pipeline": "FSDP with PP gathers the weights for every micro-batch; sharding the optimizer is used instead",
    "fsdp experts": "FSDP gathers the weights of all experts for every micro-batch; expert parallelism is used instead",
    "recipe": "the recipe does not support the sizes of a GEMM",
    "memory": "it needs more memory than a GPU has",
}
NO_RESTARTS = "Assumes that every GPU computes or waits for others all the time. Restarts are not included."


def layout_name(layout: PlanLayout) -> str:
    """A layout in a sentence: `FP8Current with TP4 PP8 VP5, micro-batch 1, recompute full, FSDP`."""
    parts = [f"micro-batch {layout.micro_batch_size}"]
    parts += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    parts += ["FSDP"] if layout.zero == 3 else []
    parts += [f"activations of {layout.offloaded_layers} layers offloaded"] if layout.offloaded_layers else []
    return f"{layout.recipe} with {layout.splits}, {', '.join(parts)}"


def sharding(layout: PlanLayout) -> str:
    """What ranks share, and whether activations are offloaded."""
    return SHARDING[layout.zero] + (", offload" if layout.offloaded_layers else "")


def rate_text(rate: Interval) -> str:
    """Tokens per second with their error bar."""
    value = plain_rate(rate)
    if rate.low is None or rate.high is None:
        return value
    low, high = (plain_rate(replace(rate, value=end)) for end in (rate.low, rate.high))
    return f"{value} [{low}, {high}]"


def plain_rate(rate: Interval) -> str:
    """Tokens per second."""
    return units.rounded(rate.value, rate.half_width)


def days(result: PlanResult, layout: PlanLayout) -> Interval:
    """Days for the whole run, or for a billion tokens."""
    rate = layout.tokens_per_s
    tokens = result.tokens if result.tokens is not None else 1e9
    day = tokens / result.gpus / 86400
    return Interval(
        day / rate.value, day / rate.high if rate.high is not None else None, day / rate.low if rate.low is not None else None
    )


def money(result: PlanResult, layout: PlanLayout) -> Interval:
    """The price of the whole run, or of a billion tokens."""
    return days(result, layout).times(24 * result.gpus * (result.price or 0.0))


def summary(result: PlanResult) -> Table | None:
    """The front, as much of it as fits a screen: layouts that need clearly less memory than the one above."""
    point = result.points[0]
    if not point.layouts:
        return None
    front, shown = [layout for layout in point.layouts if layout.on_front], list[PlanLayout]()
    for layout in front:
        if not shown or layout.memory_gb < shown[-1].memory_gb * (1 - SAVING):
            shown.append(layout)
    shown = shown[:MOST_ROWS]
    rows = tuple(_row(result, layout) for layout in shown)
    notes = [f"{len(shown)} of the {len(front)} layouts on the front."] if len(shown) < len(front) else []
    if any(layout.close for layout in shown) and not _has_cost(result):
        notes.append("?: too close to call against the best.")
    title = "Pareto front: the fastest layouts for a given memory [90% error bar]"
    return without_empty(Table(title, _heads(result), rows, " ".join([*notes, _cost_note(result)]).strip()))


def _cost_note(result: PlanResult) -> str:
    if result.price is not None and result.tokens is None:
        return f"Cost of a billion tokens at {result.price:g} per GPU-hour."
    return ""


def _heads(result: PlanResult) -> tuple[Column, ...]:
    drop = {"MFU": 4, "Days": 3, "Speed": 3, "Cost": 2, "Recompute": 1, "Sharding": 1}
    heads = ["Micro-batch", "Tokens/s/GPU", *([] if _has_cost(result) else ["Speed"]), "MFU", "GB"]
    heads += ["Days"] if result.tokens is not None else []
    heads += ["Cost"] if result.price is not None else []
    texts = columns(("Recipe", "Layout", "Recompute", "Sharding"), (), drop)
    return (*texts, *columns((), heads, drop))


def _has_cost(result: PlanResult) -> bool:
    return result.tokens is not None or result.price is not None


def _row(result: PlanResult, layout: PlanLayout) -> tuple[Cell, ...]:
    rate = layout.tokens_per_s
    cells = [
        Cell(layout.recipe),
        Cell(layout.splits),
        Cell(layout.recompute if layout.recompute != "none" else "-"),
        Cell(sharding(layout)),
        number(layout.micro_batch_size),
        Cell(rate_text(rate), rate.value, rate.low, rate.high),
        *([] if _has_cost(result) else [_speed(layout)]),
        share_cell(layout.mfu, rate.half_width),
        number(layout.memory_gb, f"{layout.memory_gb:.0f}"),
    ]
    if result.tokens is not None:
        cells.append(_short(days(result, layout)))
    if result.price is not None:
        cells.append(_money(money(result, layout)))
    return tuple(cells)


def _money(amount: Interval) -> Cell:
    return Cell(units.rounded(amount.value, min(amount.half_width, 0.01)), amount.value, amount.low, amount.high)


def _short(amount: Interval) -> Cell:
    text = (
        f"{amount.value:,.2f}" if amount.value < 10 else f"{amount.value:,.1f}" if amount.value < 100 else f"{amount.value:,.0f}"
    )
    return Cell(text, amount.value, amount.low, amount.high)


def _speed(layout: PlanLayout) -> Cell:
    """Relative to the best, marked where it is too close to call."""
    ratio = layout.slowdown
    if ratio is None:
        return Cell("best", 1.0)
    low, high = (1 / end if end else None for end in (ratio.high, ratio.low))
    return Cell(f"{1 / ratio.value:.2f}{'?' if layout.close else ''}", 1 / ratio.value, low, high)


def front_table(result: PlanResult, point: PlanPoint, prefix: str) -> Table:
    """All layouts on the front."""
    front = [layout for layout in point.layouts if layout.on_front]
    title = f"{prefix}FORECAST: Pareto front of tokens/s and memory: no other layout is faster with as little memory"
    return _layouts(result, front, title)


def best_of_recipes(result: PlanResult, point: PlanPoint, prefix: str) -> Table:
    """The fastest layout of each recipe."""
    best: dict[str, PlanLayout] = {}
    for layout in point.layouts:
        best.setdefault(layout.recipe, layout)
    return _layouts(result, best.values(), f"{prefix}FORECAST: the fastest layout of each recipe")


def all_layouts(result: PlanResult, point: PlanPoint, prefix: str) -> Table:
    """The fastest layouts, each size in a column of its own."""
    shown = point.layouts[:MOST_LISTED]
    more = (
        f"The fastest {len(shown):,} of {point.fitting:,}; the run file (--json) has more. " if point.fitting > len(shown) else ""
    )
    return _layouts(result, shown, f"{prefix}FORECAST: the layouts that fit, fastest first", more)


def _layouts(result: PlanResult, layouts: Iterable[PlanLayout], title: str, note: str = "") -> Table:
    heads = (
        *columns(("Recipe",), ("TP", "PP", "VP", "CP", "EP", "ETP", "DP", "Micro-batch", "Micro-batches")),
        *columns(("Recompute", "Sharding"), ("Step ms", "Tokens/s/GPU", "MFU", "GB", "Slowdown [90% error bar]")),
        *columns((), ["Days"] if result.tokens is not None else []),
        *columns((), ["Cost"] if result.price is not None else []),
        *columns(("Remarks",), ()),
    )
    rows = tuple(_wide_row(result, layout) for layout in layouts)
    costs = f"{_cost_note(result)} {NO_RESTARTS}" if _has_cost(result) else ""
    return without_empty(Table(title, heads, rows, f"{note}{costs}".strip()))


def _wide_row(result: PlanResult, layout: PlanLayout) -> tuple[Cell, ...]:
    rate, ratio = layout.tokens_per_s, layout.slowdown
    sizes = (layout.tp, layout.pp, layout.vp, layout.cp, layout.ep, layout.etp, layout.dp)
    remarks = [name for name, applies in (("too close to call", layout.close), ("host-bound", layout.host_bound)) if applies]
    remarks += ["memory is tight"] if layout.tight else []
    remarks += [f"layers {','.join(map(str, layout.pp_layers))}"] if layout.pp_layers else []
    costs = [amount_cell(days(result, layout))] if result.tokens is not None else []
    costs += [amount_cell(money(result, layout))] if result.price is not None else []
    return (
        Cell(layout.recipe),
        *(number(size) for size in sizes),
        number(layout.micro_batch_size),
        number(layout.micro_batches),
        Cell(layout.recompute),
        Cell(sharding(layout)),
        range_cell(layout.step_ms),
        Cell(rate_text(rate), rate.value, rate.low, rate.high),
        share_cell(layout.mfu),
        number(layout.memory_gb, f"{layout.memory_gb:.1f}"),
        Cell(units.speedup(ratio), ratio.value, ratio.low, ratio.high) if ratio is not None else Cell("best"),
        *costs,
        Cell(", ".join(remarks) or "-"),
    )


def pruned_table(point: PlanPoint, prefix: str) -> Table:
    """What each rule excluded."""
    rows = tuple(
        (Cell(RULES.get(rule.rule, rule.rule)), number(rule.count, f"{rule.count:,}"), Cell(rule.unit), Cell(rule.example or "-"))
        for rule in point.pruned
    )
    heads = (*columns(("Why",), ("Count",)), *columns(("Of", "For example"), ()))
    note = "A split divides the model among the GPUs (TP, CP, PP, EP). Each split has many layouts."
    return Table(f"{prefix}What the search excluded", heads, rows, note)


def varied_table(result: PlanResult, *, every: bool = False) -> Table:
    """A row for each model: its best layout."""
    points: Sequence[PlanPoint] = result.points if every else result.points[:MOST_VARIED]
    drop = {"Sharding": 4, "Recompute": 3, "MFU": 1, "Days": 2, "Cost": 1, "Step ms": 5, "GB": 2}
    heads = (
        *columns((), (*result.varied, "Parameters")),
        *columns(("Recipe", "Layout", "Recompute", "Sharding"), ("Micro-batch", "Step ms", "Tokens/s/GPU", "MFU", "GB"), drop),
        *columns((), [*(["Days"] if result.tokens is not None else []), *(["Cost"] if result.price is not None else [])], drop),
    )
    rows = tuple(_varied_row(result, point, len(heads)) for point in points)
    left_out = f"{len(points)} of {len(result.points)} models." if len(points) < len(result.points) else ""
    title = (
        "FORECAST: every model in its best layout [90% error bar]" if every else "The best layout of each model [90% error bar]"
    )
    return without_empty(Table(title, heads, rows, left_out))


def _varied_row(result: PlanResult, point: PlanPoint, width: int) -> tuple[Cell, ...]:
    sizes = [number(value, str(value)) for value in point.values.values()]
    known = number(point.parameters, units.parameters(point.parameters)) if point.parameters else NOTHING
    if point.best is None:
        rest = width - len(sizes) - 2
        return (*sizes, known, Cell(point.why_not, level="warning"), *[NOTHING] * (rest))
    cells = list(_row(result, point.best))
    if not _has_cost(result):
        del cells[6]  # its speed relative to itself
    cells.insert(5, range_cell(point.best.step_ms))
    return (*sizes, known, *cells)
