"""The Document of a `PlanResult`: the best layout, the front of speed and memory, what was excluded, settings to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, CurveChart, Point, Segment
from gemmscope.document.common import command_facts, model_facts, phrase, same_model, sections, subject
from gemmscope.document.model import Advice, Block, Document, KeyFigure, Message, Section
from gemmscope.document.palette import part_key
from gemmscope.document.plan_tables import (
    MOST_LISTED,
    best_by_recipe,
    days,
    layout_name,
    layouts_table,
    memory_text,
    money,
    plain_rate,
    pruned_table,
    rate_text,
    summary,
    varied_table,
)
from gemmscope.document.sweep_tables import spread
from gemmscope.document.table import grouped
from gemmscope.model.spec import RunSpec
from gemmscope.options.declare import options_of
from gemmscope.options.job import LoraOptions, ModelOptions, OverlapOptions, SystemOptions
from gemmscope.results.plan import PlanLayout, PlanPoint, PlanResult

MOST_PLACES = 14  # along the axis of memory
KEPT = (*options_of(ModelOptions, LoraOptions, SystemOptions, OverlapOptions), "imbalance", "state")
"""The options of the command that the next one needs too."""


def plan_document(result: PlanResult, name: str = "") -> Document:
    """Build the Document of the result."""
    answer, because = _varied_answer(result) if result.varied else _answer(result)
    best = result.best
    return Document(
        kind="plan",
        title=f"FORECAST, not measured: layouts of {result.name} on {result.gpus} x {result.title}",
        subject=subject(result.model, result.run),
        where=f"{result.title}, FORECAST",
        answer=answer,
        because=tuple(because),
        key_figures=_figures(result) if best is not None and not result.varied else (),
        summary=varied_table(result) if result.varied else summary(result),
        context=tuple(_context(result)),
        sections=_sections(result),
        messages=tuple(map(Message.of, result.findings)),
        advice=Advice(f"{layout_name(best)}.", result.ready_to_paste) if best is not None and result.ready_to_paste else None,
        facts={"Method": _method(result)},
        forecast=True,
        next_purpose=phrase("plan-next-model" if result.varied else "plan-next-layout"),
        next_command="" if result.varied else _next_command(result),
        name=name,
    )


def _context(result: PlanResult) -> Iterator[str]:
    point = result.points[0]
    tokens = units.tokens(point.global_batch * point.sequence_length)
    length = "" if "sequence" in result.varied else f" x {point.sequence_length:,} = {tokens}"
    yield phrase(
        "plan-batch",
        batch=point.global_batch,
        length=length,
        network=result.network_gbps * 8,
        domain=result.nvlink_domain,
        state="BF16" if result.run is not None and result.run.state_precision == "bf16" else "FP32",
    )
    yield phrase(f"clocks-{result.state}")


def _answer(result: PlanResult) -> tuple[str, list[str]]:
    """The best layout; how sure that is; what was excluded."""
    point, best = result.points[0], result.best
    if best is None:
        return phrase("plan-nothing-fits"), []
    sentence = phrase(
        "plan-may-fit" if best.may_not_fit else "plan-fastest" if best is point.layouts[0] else "plan-use",
        layout=layout_name(best),
        rate=rate_text(best.tokens_per_s),
        mfu=best.mfu,
        needed=memory_text(best),
        memory=result.memory_gb,
        cost=_cost_text(result, best),
    )
    return sentence, [*_safe_text(point), *([_close_text(point)] if point.fitting else []), _pruned_text(point)]


def _safe_text(point: PlanPoint) -> list[str]:
    """Why the fastest layout is not recommended; if it is, and its memory is tight, the fastest layout for which it is not."""
    fastest = point.layouts[0]
    if point.best is not fastest:
        return [
            phrase(
                "plan-faster-but-tight" if fastest.tight else "plan-faster-but-offloads",
                layout=layout_name(fastest),
                rate=plain_rate(fastest.tokens_per_s),
                memory=memory_text(fastest),
            )
        ]
    if not fastest.tight:
        return []
    safe = next((layout for layout in point.layouts if not (layout.tight or layout.may_not_fit)), None)
    if safe is None:
        return [phrase("plan-all-tight")]
    return [phrase("plan-safe", layout=layout_name(safe), rate=plain_rate(safe.tokens_per_s), memory=memory_text(safe))]


def _cost_text(result: PlanResult, layout: PlanLayout) -> str:
    parts = []
    if result.tokens is not None:
        parts.append(phrase("plan-days", tokens=units.tokens(result.tokens), days=units.amount(days(result, layout))))
    if result.price is not None:
        parts.append(
            phrase(
                ("plan-costs" if result.tokens is not None else "plan-costs-of-billion"), cost=units.amount(money(result, layout))
            )
        )
    return f"; {' and '.join(parts)}" if parts else ""


def _close_text(point: PlanPoint) -> str:
    """The layouts that are too close to call against the best."""
    close = [layout.recipe for layout in point.layouts if layout.close]
    if not close:
        return phrase("plan-certain", fitting=point.fitting)
    return phrase("plan-close", fitting=point.fitting, close=len(close), recipes=close)


def _pruned_text(point: PlanPoint) -> str:
    """How many splits and layouts were excluded, and why."""
    layouts = {rule.rule: rule.count for rule in point.pruned if rule.unit == "layouts"}
    counts = {
        "plan-excluded-splits": sum(rule.count for rule in point.pruned if rule.unit == "splits"),
        "plan-excluded-by-memory": layouts.pop("memory", 0),
        "plan-excluded-layouts": sum(layouts.values()),
    }
    parts = [phrase(code, count=count) for code, count in counts.items() if count]
    return phrase("plan-excluded", parts=", ".join(parts)) if parts else phrase("plan-excluded-nothing")


def _varied_answer(result: PlanResult) -> tuple[str, list[str]]:
    """How speed changes over the models."""
    best = {_place(point): point.best for point in result.points if point.best is not None}
    sizes = {_place(point): point.parameters for point in result.points if point.best is not None}
    ordered = sorted(best, key=lambda place: sizes[place])
    missing = [f"{_place(point)}: {point.why_not}" for point in result.points if point.best is None]
    why_not = [phrase("plan-not-possible", models=units.names(missing, 3))] if missing else []
    if len(ordered) == 1:
        [(place, layout)] = best.items()
        return phrase("plan-one-model", model=place, rate=rate_text(layout.tokens_per_s), layout=layout_name(layout)), why_not
    fastest = max(ordered, key=lambda place: best[place].tokens_per_s.value)
    efficient = max(ordered, key=lambda place: best[place].mfu)
    sentence = phrase(
        "plan-models",
        models=len(ordered),
        varied=result.varied,
        fastest=fastest,
        rate=rate_text(best[fastest].tokens_per_s),
        efficient=efficient,
        mfu=best[efficient].mfu,
    )
    ends = ordered[0], ordered[-1]
    counts = " to ".join(units.parameters(sizes[place]) for place in ends)
    return sentence, [
        phrase("plan-change", counts=counts, rates=" to ".join(plain_rate(best[place].tokens_per_s) for place in ends)),
        *why_not,
    ]


def _place(point: PlanPoint) -> str:
    return " ".join(f"{name} {value}" for name, value in point.values.items())


def _figures(result: PlanResult) -> tuple[KeyFigure, ...]:
    best = result.best
    assert best is not None
    rate = best.tokens_per_s
    amounts = {"Days": days(result, best)} if result.tokens is not None else {}
    amounts |= {"Cost": money(result, best)} if result.price is not None else {}
    sure = f"±{rate.half_width:.0%}"
    return (
        KeyFigure("Tokens/s per GPU", plain_rate(rate), units.ends(rate, 0)),
        KeyFigure("MFU", f"{best.mfu:.0%}"),
        KeyFigure("Memory of a GPU", f"{best.memory_gb:.0f} GB", f"of {result.memory_gb:.0f} GB"),
        *[KeyFigure(name, units.rounded(amount.value, amount.half_width), sure) for name, amount in amounts.items()],
    )


def _sections(result: PlanResult) -> tuple[Section, ...]:
    main, named = not result.varied, dict[str, list[Block | None]]()
    if result.varied:
        named["Models"] = [_varied_chart(result) if len(result.varied) == 1 else None, varied_table(result, every=True)]
    for point in result.points:
        prefix = f"{_place(point)}: " if result.varied else ""
        front, more = [layout for layout in point.layouts if layout.on_front], point.fitting > MOST_LISTED
        listed = phrase("plan-fastest-listed", shown=MOST_LISTED, fitting=point.fitting) if more else ""
        named[f"{prefix}Layouts"] = [
            _memory_chart(point, result.memory_gb, prefix, main=main),
            layouts_table(result, front, f"{prefix}front", f"{prefix}{phrase('plan-front')}"),
            layouts_table(result, best_by_recipe(point).values(), f"{prefix}recipes", f"{prefix}{phrase('plan-recipes')}"),
            _parts_chart(point, prefix, main=main),
            layouts_table(result, point.layouts[:MOST_LISTED], "layouts", phrase("plan-layouts"), listed) if main else None,
        ]
        named[f"{prefix}What was excluded"] = [pruned_table(point, prefix)]
    return sections(named)


def _memory_chart(point: PlanPoint, memory_gb: float, prefix: str, *, main: bool) -> CurveChart | None:
    """For each recipe, the fastest layout within each memory limit."""
    by_recipe = grouped((layout.recipe, layout) for layout in point.layouts)
    steps = sorted({ceil(layout.memory_gb) for layout in point.layouts if layout.on_front or layout.parts_ms})
    places = [steps[place] for place in spread(len(steps), MOST_PLACES)]
    if len(places) < 2:
        return None
    series = grouped(
        (recipe, _point(str(place), layout, ("memory", f"{layout.memory_gb:.0f} GB")))
        for recipe, layouts in sorted(by_recipe.items(), key=lambda pair: min(layout.memory_gb for layout in pair[1]))
        for place in places
        for layout in [fitting for fitting in layouts if fitting.memory_gb <= place][:1]
    )
    title = f"{prefix}FORECAST: fastest layout within a memory limit"
    return CurveChart(
        f"{prefix}by_memory",
        title,
        "memory limit (GB); dashed: the memory of one GPU",
        series,
        unit="tokens/s per GPU",
        main=main,
        limit=memory_gb,
    )


def _point(place: str, layout: PlanLayout, fact: tuple[str, str]) -> Point:
    return Point(place, layout.tokens_per_s, (("layout", layout_name(layout)), fact))


def _parts_chart(point: PlanPoint, prefix: str, *, main: bool) -> BarChart | None:
    """Where the step of the best layout of each recipe spends its time."""
    bars = []
    for recipe, layout in best_by_recipe(point).items():
        total_ms = sum(layout.parts_ms.values())
        segments = tuple(
            Segment(part, time_ms, part_key(part), facts=((part, units.percent(time_ms / total_ms)),))
            for part, time_ms in layout.parts_ms.items()
            if time_ms > 0
        )
        if segments:
            bars.append(Bar(recipe, segments, total=layout.step_ms))
    title = f"{prefix}FORECAST: where the step of each recipe's best layout spends its time"
    return BarChart(f"{prefix}parts", title, "ms per step", tuple(bars), figure=main) if bars else None


def _varied_chart(result: PlanResult) -> CurveChart:
    """The best layout of each recipe over the size that varies."""
    series = grouped(
        (recipe, _point(point.place, layout, ("parameters", units.parameters(point.parameters))))
        for point, recipe, layout in [
            (point, recipe, best_by_recipe(point).get(recipe)) for point in result.points for recipe in result.recipes
        ]
        if layout is not None
    )
    return CurveChart(
        "by_size",
        f"FORECAST: the best layout at each value of {result.varied[0]}",
        result.varied[0],
        series,
        unit="tokens/s per GPU",
        main=True,
    )


def _next_command(result: PlanResult) -> str:
    """The forecast of the best layout, with the same model."""
    best, run = result.best, result.run
    if best is None or run is None:
        return ""
    options: dict[str, object] = {
        "micro-batch-size": best.micro_batch_size,
        "sequence-length": run.sequence_length,
        **{name: getattr(best, name) for name in ("tp", "cp", "pp", "vp", "ep") if getattr(best, name) > 1},
        **({"etp": best.etp} if best.etp != best.tp else {}),
        "dp": best.dp,
        "gradient-accumulation": best.micro_batches,
        **({"zero": best.zero} if best.zero else {}),
        **({"recompute": best.recompute} if best.recompute != "none" else {}),
        **({"recompute-share": f"{best.recompute_share:.6g}"} if best.recompute_share < 1 else {}),
        **({"offloaded-layers": best.offloaded_layers} if best.offloaded_layers else {}),
        **({"optimizer-state": run.optimizer_state} if run.optimizer_state != _usual_state(run) else {}),
        **({"pp-layers": ",".join(map(str, best.pp_layers))} if best.pp_layers else {}),
        "gpu": result.gpu,
        "recipes": best.recipe.lower(),
    }
    if result.tokens is not None:
        options |= {"tokens": _typed(result.tokens), "gpus": result.gpus}
        options |= {"price": f"{result.price:g}"} if result.price is not None else {}
    flags = ["--sequence-parallel"] if run.sequence_parallel else []
    arguments = [*flags, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    return same_model("forecast", result, shlex.join(arguments), KEPT)


def _typed(tokens: float) -> str:
    """A number of tokens as people type it, if that is exact.

    >>> _typed(15e12), _typed(15.5e12), _typed(123456789.0)
    ('15T', '15.5T', '123456789')
    """
    for letter, factor in (("T", 1e12), ("B", 1e9)):
        text = f"{tokens / factor:g}"
        if tokens >= factor and "e" not in text and float(text) * factor == tokens:
            return f"{text}{letter}"
    return f"{tokens:.0f}"


def _usual_state(run: RunSpec) -> str:
    return replace(run, optimizer_state=None).state_precision


def _method(result: PlanResult) -> tuple[tuple[str, str], ...]:
    return (
        *model_facts(result.model, result.run),
        ("network", f"{result.network or 'as given'}, {result.network_gbps:g} GB/s per GPU and direction"),
        ("GPUs of an NVLink domain", str(result.nvlink_domain)),
        ("recipes", ", ".join(result.recipes)),
        ("state", result.state),
        ("fitted on", result.coefficients),
        *command_facts(result),
    )
