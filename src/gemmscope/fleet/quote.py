"""The range to expect on another GPU, from the result of one GPU and the spread that a fleet measured."""

from __future__ import annotations

from math import exp, sqrt
from pathlib import Path
from typing import TypeVar

from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.fleet.chips import product_of
from gemmscope.fleet.summaries import RunSummary, RunView, SummaryFigure, digest, summary_of
from gemmscope.interval import Interval
from gemmscope.results.base import Result, command_of
from gemmscope.results.bench import BenchResult
from gemmscope.results.fleet import FleetFigure, FleetResult
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult

Measured = TypeVar("Measured", BenchResult, StepResult)
FLAGS = {"bench": "", "step": " --step"}
PREDICTED = 1.645  # standard deviations on either side of 90%


def read_fleet(fleet: str | Path | Result, kind: str) -> FleetResult:
    """The fleet, if its GPUs ran what this command runs; else a `UserError`, before anything is measured."""
    given = f"{option('fleet')} {shown(str(fleet))}" if isinstance(fleet, (str, Path)) else option("fleet")
    result = read_result(fleet) if isinstance(fleet, (str, Path)) else fleet
    if not isinstance(result, FleetResult):
        raise UserError(
            f"{given} must be a run file of gemmscope fleet, but is one of {command_of(result.kind)}",
            "name a run file of gemmscope fleet",
        )
    if result.of != kind:
        raise UserError(
            f"{given} holds results of {result.of}, but this is {kind}", f"name a run file of gemmscope fleet{FLAGS[kind]}"
        )
    return result


def with_spread(result: Measured, fleet: FleetResult | None) -> Measured:
    """The result with the expected range of another GPU of the fleet, or with the reason why the fleet does not give one."""
    if fleet is None:
        return result
    try:
        quoted: list[Finding] = quoted_spread(fleet, result)
    except UserError as error:  # the measurement is done and must not be lost
        quoted = [finding("fleet-not-quoted", reason=error.message)]
    return result.model_copy(update={"findings": (*result.findings, *quoted)})


def quoted_spread(fleet: FleetResult, result: BenchResult | StepResult) -> list[Finding]:
    """Where the speedups of this result would be on another GPU of the same kind, with a probability of 90%.

    If the fleet measured the same model and batch, its own range is quoted. Otherwise the relative spread is applied to this
    result, once for this GPU and once for the other one.
    """
    own = summary_of(RunView.model_validate(result))
    group = _group(fleet, own)
    same = fleet.fingerprint == digest(sorted(own.measured.items()))
    speedups = [figure for figure in own.figures if figure.unit == "x"]
    ranges = [text for figure in speedups if (text := _range(figure, fleet.figure(figure.name, group), same=same))]
    if not ranges:
        names = ", ".join(figure.name for figure in speedups)
        raise UserError(
            f"the fleet has no spread of {names} for {group}" if names else "this result has no speedup",
            f"measure the same recipes on 3 GPUs or more: gemmscope fleet{' --step' * (own.of == 'step')}",
        )
    gpus = max(figure.gpus for figure in fleet.figures if figure.group == group)
    return [finding(("fleet-another-gpu" if same else "fleet-another-gpu-about"), ranges=ranges, gpus=gpus, group=group)]


def _group(fleet: FleetResult, own: RunSummary) -> str:
    """The group of the fleet that this GPU belongs to."""
    groups = list(dict.fromkeys(figure.group for figure in fleet.figures))
    product, limit = product_of(own), own.condition.power_limit_w
    names = [product] + ([f"{product}, {limit:.0f} W"] if limit is not None else [])
    group = next((name for name in names if name in groups), None)
    if group is None:
        has = ", ".join(groups) or "no measured GPU"
        raise UserError(f"the fleet has {has}, but this is {names[-1]}", "use a fleet of the same GPU and power limit")
    return group


def _range(own: SummaryFigure, figure: FleetFigure | None, *, same: bool) -> str:
    """The range of one speedup, as text; empty where the fleet does not have it."""
    if figure is None:
        return ""
    speedup: Interval | None = figure.another
    if not same:
        if figure.spread is None:
            return ""
        reach = PREDICTED * sqrt(2) * (figure.spread.high or figure.spread.value)
        speedup = Interval(own.value.value, own.value.value * exp(-reach), own.value.value * exp(reach))
    if speedup is None or speedup.low is None or speedup.high is None:
        return ""
    return f"{own.recipe}{' (pre-quantized)' * (own.mode == 'pre-quantized')} {speedup.low:.2f}x to {speedup.high:.2f}x"
