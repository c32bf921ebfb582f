"""Every option that takes a number refuses what no number can be, and numbers far beyond any use, with one message."""

from __future__ import annotations

import pytest

from gemmscope.cli.build import function_of, shell_options
from gemmscope.cli.help import COMMANDS
from gemmscope.options.declare import Declared
from support.command import Run, run

__all__ = ["run"]  # the fixture

DIGITS = "9" * 5000
WRONG = ("nan", "-1", "-inf", "1e400", DIGITS)
EXTREME = ("inf", "0", "1e308", "1e-200", "1e-320", "0.5", "9")
MODEL = "--preset mixtral-8x7b --sequence-length 64 --micro-batch-size 1 --recipes bf16 --gpu h200"
LINES = {  # measuring commands would measure with values that are valid
    "shapes": ("--preset mixtral-8x7b --sequence-length 64 --micro-batch-size 1 --ep 8", (*WRONG, *EXTREME)),
    "forecast": (f"{MODEL} --ep 8 --gpus 8 --tokens 1e9 --price 2", (*WRONG, *EXTREME)),
    "plan": (f"{MODEL} --gpus 8 --global-batch 8 --tp 1 --pp 1 --cp 1 --ep 8 --recompute none --zero 1", (*WRONG, *EXTREME)),
    "bench": ("--shapes 32 --device cpu", WRONG),
    "step": ("--preset gpt2 --micro-batch-size 1 --sequence-length 8 --device cpu --gpus 8 --tokens 1e9 --price 2", WRONG),
    "fleet": ("--shapes 32 --device cpu", WRONG),
    "calibrate": ("", WRONG),
    "numerics": ("--synthetic normal --preset gpt2 --micro-batch-size 1 --sequence-length 8", WRONG),
    "compare": ("first.json second.json", WRONG),
    "explore": ("mixtral-8x7b h200", WRONG),
    "explain": ("trace.json --preset mixtral-8x7b --micro-batch-size 1 --sequence-length 8", WRONG),
}


def numeric(declared: Declared) -> bool:
    return float in declared.types and not declared.is_flag


CASES = [
    (command, name) for command in COMMANDS for name, declared in shell_options(function_of(command)).items() if numeric(declared)
]


def test_the_options_are_known() -> None:
    assert {command for command, _ in CASES} <= LINES.keys()
    assert len(CASES) > 25


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_number_out_of_range_is_refused_at_its_option(run: Run, command: str, name: str) -> None:
    line, values = LINES[command]
    flag = f"--{name.replace('_', '-')}"
    for value in values:
        outcome = run(f"{command} {line} {flag} {value}")
        told = outcome.err.lower()
        if value in WRONG:
            assert outcome.code == 2, (value, outcome.err)
        assert outcome.code == 0 or flag in told, (value, outcome.err)
        assert value != DIGITS or len(told) < 400
