"""What a fleet needs from one GPU's run: a few kB of plain data, made where the GPU is, or from its run file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from math import exp, hypot, isfinite
from statistics import median
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from gemmscope.findings import Finding, catalog
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.base import UNCOMPARED_SETTINGS, ModelSummary, OneGpuResult, Part
from gemmscope.results.bench import BenchResult, BenchSettings
from gemmscope.results.fleet import GpuCondition
from gemmscope.results.linears import Linears
from gemmscope.results.step import StepResult, StepSettings, StepTimes

LARGEST = 1e30  # of a number in a result
MOST_FINDINGS = 20
MOST_TEXTS = 60  # versions, facts
LONGEST_TEXT = 200
DIGITS = 6


class SummaryFigure(Part):
    """One number of one GPU."""

    name: str
    unit: Literal["ms", "x"]
    recipe: str
    mode: str = ""
    flops: float | None = None
    value: Interval


class RunSummary(Part):
    """One run on one GPU. `measured`: what must be the same in all runs of a fleet."""

    of: Literal["bench", "step"]
    origin: str = ""
    model: ModelSummary | None = None
    run: RunSpec | None = None
    stage: int = 0
    measured: dict[str, str]
    figures: tuple[SummaryFigure, ...]
    condition: GpuCondition
    device: dict[str, str]
    """Name, CPU, node, uuid, index, and limits, where known."""
    versions: dict[str, str]
    findings: tuple[Finding, ...] = ()
    failure: str = ""


class _StatesView(Part):
    """A measured task, without its samples."""

    model_config = ConfigDict(extra="ignore", from_attributes=True)

    states: tuple[dict[str, Any], ...] = ()
    failure: str = ""


class RunView(OneGpuResult):
    """A run file of bench or step, without its samples: quick to read. Other parts of the file are ignored."""

    model_config = ConfigDict(extra="ignore", from_attributes=True)

    kind: Literal["bench", "step"]
    settings: Any
    linears: Linears | None = None
    tasks: tuple[_StatesView, ...] = ()
    ran: str = ""
    layers: int = 0
    step: StepTimes | None = None
    variants: tuple[_StatesView, ...] = ()


def summary(result: BenchResult | StepResult) -> dict[str, Any]:
    """The summary of a result as plain data: what a GPU sends to the fleet's driver."""
    return summary_of(RunView.model_validate(result)).model_dump(mode="json")


def summary_of(view: RunView) -> RunSummary:
    """The summary of a run file."""
    figures = tuple(figure for figure in (*_bench_figures(view), *_step_figures(view)) if _is_valid(figure.value))
    return RunSummary(
        of=view.kind,
        origin=view.origin,
        model=view.model,
        run=view.run,
        stage=view.stage,
        measured=_measured(view),
        figures=figures,
        condition=_condition(view),
        device=_texts({"name": "this machine"} | {key: view.device.get(key) for key in DEVICE_FACTS}),
        versions=_versions(view),
        findings=tuple(entry for entry in view.findings if entry.level != "note" and entry.code in catalog())[:MOST_FINDINGS],
        failure="" if figures else _why_nothing(view),
    )


def _why_nothing(view: RunView) -> str:
    """Why nothing was measured: the first reason that a task has."""
    reason = next((task.failure for task in (*view.tasks, *view.variants) if task.failure), "")
    return f"nothing was measured ({reason[:LONGEST_TEXT]})" if reason else "nothing was measured"


_SETTINGS: dict[str, TypeAdapter[Any]] = {"bench": TypeAdapter(BenchSettings), "step": TypeAdapter(StepSettings)}
DEVICE_FACTS = ("name", "cpu", "node", "uuid", "index", "serial", "pci_bus", "max_sm_mhz", "memory_bytes")


def _bench_figures(view: RunView) -> Iterator[SummaryFigure]:
    if view.linears is None or view.kind != "bench":
        return
    flops = float(sum(case.flops * case.count * len(case.passes) for case in view.linears.cases))
    if not view.linears.totals:  # bare GEMMs have no sum
        yield from _gemm_figures(view.linears, flops)
        return
    what = "GEMMs" if view.linears.bare else "linears"
    times: dict[str, SummaryFigure] = {}
    for total in view.linears.totals:
        time = _figure(total.recipe, what, total.total_ms, total.mode, flops)
        times.setdefault(time.name, time)  # pre-quantized, BF16 is the same as in autocast mode
    yield from times.values()
    for ratio in view.linears.speedups:
        if ratio.over == BASELINE and not ratio.op and not ratio.pass_name:
            yield _figure(ratio.recipe, "speedup", ratio.speedup, ratio.mode)


def _gemm_figures(linears: Linears, flops: float) -> Iterator[SummaryFigure]:
    """The sum over all shapes, in every recipe and mode that has them all, and its speedup where every shape has one."""
    ops = {case.op for case in linears.cases}
    times = grouped(((timing.recipe, str(timing.mode)), (timing.op, timing.total_ms)) for timing in linears.ops)
    sums = {key: dict(own) for key, own in times.items() if dict(own).keys() == ops}
    comparisons = [ratio for ratio in linears.speedups if ratio.over == BASELINE and not ratio.pass_name]
    compared = {(ratio.recipe, ratio.mode, ratio.op) for ratio in comparisons}
    speedups, totals = [], dict[str, SummaryFigure]()
    for (recipe, mode), own in sums.items():
        total = _sum(own.values())
        figure = _figure(recipe, "GEMMs", total, mode, flops)
        totals.setdefault(figure.name, figure)
        base = sums.get((BASELINE, mode))
        if base is not None and all((recipe, mode, op) in compared for op in ops):
            speedups.append(_figure(recipe, "speedup", _ratio(_sum(base.values()), total), mode))
    yield from totals.values()
    if len(ops) == 1:  # its own speedup, with its own interval
        single = {(ratio.recipe, ratio.mode): ratio.speedup for ratio in comparisons}
        speedups = [figure.model_copy(update={"value": rounded(single[figure.recipe, figure.mode])}) for figure in speedups]
    yield from speedups


def _sum(times: Iterable[Interval]) -> Interval:
    """The sum of independent times."""
    times = list(times)
    if len(times) == 1:
        return times[0]
    total = sum(time.value for time in times)
    reach = hypot(*(time.half_width * time.value for time in times))
    return Interval(total, total - reach, total + reach) if isfinite(reach) else Interval(total)


def _ratio(slow: Interval, fast: Interval) -> Interval:
    """The ratio of independent times."""
    ratio = slow.value / fast.value
    reach = hypot(slow.half_width, fast.half_width)
    return Interval(ratio, ratio * exp(-reach), ratio * exp(reach)) if reach < 1 else Interval(ratio)


def _step_figures(view: RunView) -> Iterator[SummaryFigure]:
    if view.step is None or view.kind != "step":
        return
    for time in view.step.recipes:
        yield _figure(time.recipe, "step", time.step_ms, flops=time.model_tflops * 1e12 * time.step_ms.value / 1000)
        if time.speedup is not None and time.recipe != BASELINE:
            yield _figure(time.recipe, "speedup", time.speedup)


def _figure(recipe: str, what: str, value: Interval, mode: str = "", flops: float | None = None) -> SummaryFigure:
    """One figure; every `what` but "speedup" is a time."""
    return SummaryFigure(
        name=figure_name(recipe, what, mode),
        unit="x" if what == "speedup" else "ms",
        recipe=recipe,
        mode=mode,
        flops=flops,
        value=rounded(value),
    )


def figure_name(recipe: str, what: str, mode: str = "") -> str:
    """The name of a figure.

    >>> figure_name("FP8Block", "speedup", "autocast"), figure_name("FP8Block", "linears", "pre-quantized")
    ('FP8Block speedup', 'FP8Block linears (pre-quantized)')
    """
    return f"{recipe} {what}" + " (pre-quantized)" * (mode == "pre-quantized" and recipe != BASELINE)


def rounded(estimate: Interval) -> Interval:
    """The interval with as many digits as the run file of a fleet keeps.

    >>> rounded(Interval(1.23456789, 1.2, None))
    Interval(value=1.23457, low=1.2, high=None)
    """
    value, low, high = (
        float(f"{end:.{DIGITS}g}") if end is not None else None for end in (estimate.value, estimate.low, estimate.high)
    )
    return Interval(value or 0.0, low, high)


def _is_valid(estimate: Interval) -> bool:
    """Whether it can be a time or a speedup; damaged files hold anything."""
    ends = [end for end in (estimate.low, estimate.high) if end is not None]
    return 0 < estimate.value < LARGEST and all(isfinite(end) and abs(end) < LARGEST for end in ends)


def _measured(view: RunView) -> dict[str, str]:
    """What was measured, and how: runs that differ in this cannot be in one fleet."""
    settings = _SETTINGS[view.kind].validate_python(view.settings)
    facts: dict[str, Any] = {"command": view.kind}
    if view.linears is not None:
        cases = view.linears.cases
        first = f"{cases[0].op} {cases[0].tokens}x{cases[0].inputs}x{cases[0].outputs}" if cases else "none"
        facts["linears"] = f"{first}{f' and {len(cases) - 1} more' if len(cases) > 1 else ''} ({digest(cases)})"
    if view.kind == "step":
        facts |= {"ran": view.ran, "layers": view.layers}
    if view.model is not None:
        facts |= {"hidden size": view.model.hidden_size, "layers of the model": view.model.layers}
    if view.run is not None:
        facts |= {**asdict(view.run), "stage": view.stage}
    facts |= {f"setting {name}": value for name, value in asdict(settings).items() if name not in UNCOMPARED_SETTINGS}
    return {name: str(value)[:LONGEST_TEXT] for name, value in facts.items() if value is not None}


def digest(content: object) -> str:
    """A short hash of the content."""
    return sha256(repr(content).encode("utf-8", "replace")).hexdigest()[:16]


def _versions(view: RunView) -> dict[str, str]:
    machine = view.environment
    facts = {"driver": machine.driver, "CUDA": view.device.get("cuda"), **machine.packages, **view.versions}
    return _texts(facts | {"python": machine.python, "kernel": machine.system, "gemmscope": view.gemmscope_version})


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    known = [(name, value) for name, value in facts.items() if isinstance(value, (str, int, float)) and value != ""]
    return {str(name)[:LONGEST_TEXT]: str(value)[:LONGEST_TEXT] for name, value in known[:MOST_TEXTS]}


def _condition(view: RunView) -> GpuCondition:
    """The GPU under load: medians over the states after every burst."""
    states = [state for part in (*view.tasks, *view.variants) for state in part.states]
    reasons = [state["throttle"] for state in states if isinstance(state.get("throttle"), (list, tuple))]
    names = {str(reason)[:LONGEST_TEXT] for own in reasons for reason in own if isinstance(reason, str)}
    health = view.device.get("health")
    return GpuCondition(
        sm_mhz=_median(state.get("sm_mhz") for state in states),
        power_w=_median(state.get("power_w") for state in states),
        power_limit_w=_median([view.device.get("power_limit_w")]),
        temperature_c=_median(state.get("temperature_c") for state in states),
        throttled={name: round(sum(name in own for own in reasons) / len(reasons), 3) for name in sorted(names)[:MOST_TEXTS]},
        health=_health(health) if isinstance(health, Mapping) else {},
    )


def _health(facts: Mapping[Any, Any]) -> dict[str, int | str]:
    known = [(str(name), fact) for name, fact in facts.items() if isinstance(fact, (int, str))]
    return {name: fact if isinstance(fact, int) else fact[:LONGEST_TEXT] for name, fact in known[:MOST_TEXTS]}


def _median(values: Iterable[Any]) -> float | None:
    known = [float(value) for value in values if isinstance(value, (int, float)) and abs(value) < LARGEST]
    return float(f"{median(known):.{DIGITS}g}") if known else None
