"""The harness that kills commands covers what exists: every command that measures or computes for long, at every place."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemmscope.cli.build import function_of, option_groups
from gemmscope.cli.help import COMMANDS
from gemmscope.options.measuring import FleetOptions, MeasuringOptions, SweepOptions
from gemmscope.results.read import KINDS, result_type

KILLS = Path(__file__).parents[1] / "benchmarks" / "kills.py"
NOT_ON_A_CPU = {"calibrate"}  # it measures GPUs alone, by the campaigns of bench and step; tests/forecast/test_calibrate.py


def ways(name: str) -> Iterator[frozenset[str]]:
    """The ways in which a command measures, by its declared options; a way of computing, where its result may be incomplete."""
    groups = tuple(option_groups(function_of(name)).values())
    may_be_cut = name in KINDS and "interrupted" in result_type(name).model_fields
    if any(issubclass(group, FleetOptions) for group in groups):
        yield from (frozenset({name, "folder", "gpus"}), frozenset({name, "folder", "launched"}), frozenset({name, "ray"}))
    elif may_be_cut or any(issubclass(group, MeasuringOptions) for group in groups):
        yield frozenset({name, "sweep"} if name == "forecast" else {name})
    if any(issubclass(group, SweepOptions) for group in groups):
        yield from (frozenset({name, "sweep", "gpus"}), frozenset({name, "sweep", "ray"}))


def test_every_command_that_measures_is_killed() -> None:
    cases: dict[str, Any] = runpy.run_path(str(KILLS))["CASES"]
    declared = {way for name in COMMANDS if name not in NOT_ON_A_CPU for way in ways(name)}
    assert {"bench", "step", "fleet", "forecast", "plan", "numerics"} <= {name for way in declared for name in way}
    assert {case.way for case in cases.values()} == declared
