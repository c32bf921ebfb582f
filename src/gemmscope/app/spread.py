"""What another GPU of a fleet would give, beside the answer of a single GPU."""

from pathlib import Path
from typing import TypeVar

from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.fleet.quote import quoted_spread
from gemmscope.results.base import Result, command_of
from gemmscope.results.bench import BenchResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult

Measured = TypeVar("Measured", BenchResult, StepResult)
FLAGS = {"bench": "", "step": " --step"}


def read_fleet(fleet: str | Path | Result, kind: str) -> FleetResult:
    """The fleet, if its GPUs ran what this command runs; else a `UserError`, before anything is measured."""
    given = f"{option('fleet')} {shown(str(fleet))}" if isinstance(fleet, (str, Path)) else option("fleet")
    result = read_result(fleet) if isinstance(fleet, (str, Path)) else fleet
    if not isinstance(result, FleetResult):
        hint = "name a run file of gemmscope fleet"
        raise UserError(f"{given} must be a run file of gemmscope fleet, but is one of {command_of(result.kind)}", hint)
    if result.of != kind:
        message = f"{given} holds results of {result.of}, but this is {kind}"
        raise UserError(message, f"name a run file of gemmscope fleet{FLAGS[kind]}")
    return result


def with_spread(result: Measured, fleet: FleetResult | None) -> Measured:
    """The result with the expected range of another GPU of the fleet, or with the reason why the fleet does not give one."""
    quoted: list[Finding] = _quoted(fleet, result) if fleet is not None else []
    return result.model_copy(update={"findings": (*result.findings, *quoted)})


def _quoted(fleet: FleetResult, result: BenchResult | StepResult) -> list[Finding]:
    try:
        return quoted_spread(fleet, result)
    except UserError as error:  # the measurement is done and must not be lost
        return [finding("fleet-not-quoted", reason=error.message)]
