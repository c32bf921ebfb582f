"""The tables of a plan: the layouts on the front of speed and memory, those of each recipe, all of them, what was excluded."""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from gemmscope import units
from gemmscope.document.common import phrase, phrases
from gemmscope.document.table import Cell, Column, Table, across, estimated, share_cell, table
from gemmscope.interval import Interval
from gemmscope.results.plan import PlanLayout, PlanPoint, PlanResult, Pruned

SHARDING = {0: "-", 1: "optimizer", 2: "optimizer, gradients", 3: "FSDP"}
MOST_ROWS = 5  # of the short view
MOST_VARIED = 14
MOST_LISTED = 200
SAVING = 0.03  # a layout of the short view needs this much less memory than the one above it
LayoutColumn = Column[PlanLayout]


def layout_name(layout: PlanLayout) -> str:
    """A layout in a sentence: `FP8Current with TP4 PP8 VP5, micro-batch 1, recompute full, FSDP`."""
    parts = [f"micro-batch {layout.micro_batch_size}"]
    parts += [f"recompute {layout.recomputed}"] if layout.recompute != "none" else []
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
    return layout.tokens_per_s.inverse((result.tokens if result.tokens is not None else 1e9) / result.gpus / 86400)


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
    best = point.best
    added = best is not None and not any(best is layout for layout in shown[:MOST_ROWS])
    shown = shown[: MOST_ROWS - added]
    notes = [phrase("plan-part-of-front", shown=len(shown), front=len(front))] if len(shown) < len(front) else []
    if added and best is not None:
        shown = sorted([best, *shown], key=point.layouts.index)
        notes = [phrase("plan-best-added"), *notes]
    notes += [phrase("plan-close-mark")] if any(layout.close for layout in shown) and not _has_cost(result) else []

    return table(
        "summary",
        "Pareto front: the fastest layouts for a given memory of one GPU [90% error bar]",
        shown,
        *_names(1, 1),
        *_numbers(result, {"MFU": 4, "Days": 3, "Speed": 3, "Cost": 2}),
        note=" ".join([*notes, _cost_note(result)]).strip(),
        sparse=True,
        recommended=lambda layout: layout is point.best,
    )


def _cost_note(result: PlanResult) -> str:
    return phrase("plan-cost-of-billion", price=result.price) if result.price is not None and result.tokens is None else ""


def _has_cost(result: PlanResult) -> bool:
    return result.tokens is not None or result.price is not None


def _names(recompute: int, sharded: int) -> list[LayoutColumn]:
    """Which layout it is, in few columns, with the drop order of two of them."""
    return [
        Column("Recipe", lambda layout: layout.recipe),
        Column("Layout", lambda layout: layout.splits),
        Column("Recompute", lambda layout: layout.recomputed if layout.recompute != "none" else None, drop=recompute),
        Column("Sharding", sharding, drop=sharded),
    ]


def _numbers(result: PlanResult, drop: dict[str, int], *, varied: bool = False) -> list[LayoutColumn]:
    """The numbers of a layout in the short views. `varied`: the rows are the best layouts of models."""
    return [
        Column("Micro-batch", lambda layout: layout.micro_batch_size, "g"),
        Column("Step ms", lambda layout: layout.step_ms, "ms, range", drop=5, when=varied),
        Column("Tokens/s/GPU", _rate, ",.0f"),
        Column("Speed", _speed, "x", drop=drop.get("Speed", 0), when=not varied and not _has_cost(result)),
        Column("MFU (BF16)", lambda layout: share_cell(layout.mfu, layout.tokens_per_s.half_width), "%", drop=drop["MFU"]),
        Column("GB", lambda layout: layout.memory_gb, ".0f", drop=drop.get("GB", 0)),
        Column("At most", lambda layout: _most(result, layout), ".0f", drop=drop.get("GB", 2), when=not varied),
        Column("Days", lambda layout: _short(days(result, layout)), "amount", drop["Days"], when=result.tokens is not None),
        Column("Cost", lambda layout: _money(money(result, layout)), "amount", drop["Cost"], when=result.price is not None),
    ]


def _rate(layout: PlanLayout) -> Cell:
    return estimated(rate_text(layout.tokens_per_s), layout.tokens_per_s)


def _money(amount: Interval) -> Cell:
    return estimated(units.rounded(amount.value, min(amount.half_width, 0.01)), amount)


def _short(amount: Interval) -> Cell:
    places = 2 if amount.value < 10 else 1 if amount.value < 100 else 0
    return estimated(f"{amount.value:,.{places}f}", amount)


def _most(result: PlanResult, layout: PlanLayout) -> Cell | None:
    """The most memory that it can need, marked where a GPU has less."""
    most_gb = layout.most_memory_gb
    return Cell(f"{most_gb:.0f}", most_gb, level="warning" if most_gb > result.memory_gb else "") if most_gb is not None else None


def memory_text(layout: PlanLayout) -> str:
    """The memory of a layout in a sentence: what it usually needs, and at most."""
    most = f" (at most {layout.most_memory_gb:.0f})" if layout.most_memory_gb is not None else ""
    return f"{layout.memory_gb:.0f}{most}"


def _speed(layout: PlanLayout) -> Cell:
    """Relative to the best, marked where it is too close to call."""
    if layout.slowdown is None:
        return Cell("fastest", 1.0)
    speed = layout.slowdown.inverse()
    return estimated(f"{speed.value:.2f}{'?' if layout.close else ''}", speed)


def best_by_recipe(point: PlanPoint) -> dict[str, PlanLayout]:
    """The fastest layout of each recipe."""
    best: dict[str, PlanLayout] = {}
    for layout in point.layouts:
        best.setdefault(layout.recipe, layout)
    return best


def layouts_table(result: PlanResult, layouts: Iterable[PlanLayout], name: str, title: str, note: str = "") -> Table:
    """Layouts, each size in a column of its own."""
    costs = f"{_cost_note(result)} {phrase('no-restarts')}" if _has_cost(result) else ""
    return table(
        name,
        title,
        layouts,
        Column("Recipe", lambda layout: layout.recipe),
        *across(("tp", "pp", "vp", "cp", "ep", "etp", "dp"), lambda layout, size: getattr(layout, size), "g", head=str.upper),
        Column("Micro-batch", lambda layout: layout.micro_batch_size, "g"),
        Column("Micro-batches", lambda layout: layout.micro_batches, "g"),
        Column("Recompute", lambda layout: layout.recomputed),
        Column("Sharding", sharding),
        Column("Step ms", lambda layout: layout.step_ms, "ms, range"),
        Column("Tokens/s/GPU", _rate, ",.0f"),
        Column("MFU (BF16)", lambda layout: layout.mfu, "%"),
        Column("GB", lambda layout: layout.memory_gb, ".1f"),
        Column("At most, GB", lambda layout: _most(result, layout), ".1f"),
        Column("Slowdown [90% error bar]", _slowdown, "x"),
        Column("Days", lambda layout: days(result, layout), "amount", when=result.tokens is not None),
        Column("Cost", lambda layout: money(result, layout), "amount", when=result.price is not None),
        Column("Remarks", _remarks),
        note=f"{note}{costs}".strip(),
        sparse=True,
        recommended=lambda layout: any(layout is point.best for point in result.points),
    )


def _slowdown(layout: PlanLayout) -> Cell:
    return estimated(units.speedup(layout.slowdown), layout.slowdown) if layout.slowdown is not None else Cell("best")


def _remarks(layout: PlanLayout) -> str | None:
    remarks = {
        "too close to call": layout.close,
        "host-bound": layout.host_bound,
        "memory is tight": layout.tight,
        "may not fit": layout.may_not_fit,
        f"layers {','.join(map(str, layout.pp_layers or ()))}": bool(layout.pp_layers),
    }
    return ", ".join(remark for remark, applies in remarks.items() if applies) or None


def pruned_table(point: PlanPoint, prefix: str) -> Table:
    """What each rule excluded."""
    return table(
        f"{prefix} excluded",
        f"{prefix}What the search excluded",
        point.pruned,
        Column("Why", _rule),
        Column("Count", lambda rule: rule.count, ",d"),
        Column("Of", lambda rule: rule.unit),
        Column("For example", lambda rule: rule.example or None),
        note=phrase("plan-splits"),
    )


def _rule(pruned: Pruned) -> str:
    code = f"plan-rule-{pruned.rule.replace(' ', '-')}"
    return phrase(code) if code in phrases() else pruned.rule  # that of another version, in a run file


def varied_table(result: PlanResult, *, every: bool = False) -> Table:
    """A row for each model: its best layout."""
    points = result.points if every else result.points[:MOST_VARIED]
    _, *names = _names(3, 4)
    numbers = _numbers(result, {"MFU": 1, "GB": 2, "Days": 2, "Cost": 1}, varied=True)
    title = "FORECAST: every model in its best layout" if every else "The best layout of each model"
    shown, models = len(points), len(result.points)
    return table(
        "models" if every else "summary",
        f"{title} [90% error bar]",
        points,
        *across(result.varied, lambda point, name: point.values[name], "d"),
        Column(
            "Parameters",
            lambda point: Cell(units.parameters(point.parameters), float(point.parameters)) if point.parameters else None,
            "g",
        ),
        Column("Recipe", lambda point: point.best.recipe if point.best else Cell(point.why_not, level="warning")),
        *(column.of(attrgetter("best")) for column in [*names, *numbers]),
        note=phrase("plan-small-models", shown=shown, models=models) if shown < models else "",
        sparse=True,
    )
