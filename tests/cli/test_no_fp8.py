"""`--no-fp8` skips MXFP8, as in the script that users come from; a note says so where they may have meant every FP8 recipe."""

from __future__ import annotations

import pytest

from gemmscope.cli.commands import _explain_no_fp8
from gemmscope.options.declare import options_of
from gemmscope.options.measuring import BenchOptions, MeasuringOptions, RecipeOptions
from support.command import Run, run

__all__ = ["run"]  # the fixture

OTHERS = "To skip the other FP8 recipes, add --no-fp8-current --no-fp8-delayed --no-fp8-block\n"


@pytest.mark.parametrize(
    ("options", "gpus", "note"),
    [
        (RecipeOptions(no_fp8=True), ["h200"], f"note: --no-fp8 skips MXFP8 only, which this GPU does not support. {OTHERS}"),
        (RecipeOptions(no_fp8=True), ["h100", "h200"], f"skips MXFP8 only, which these GPUs do not support. {OTHERS}"),
        (RecipeOptions(no_fp8=True), ["b200", "h200"], f"note: --no-fp8 skips MXFP8 only. {OTHERS}"),
        (RecipeOptions(no_fp8=True, no_fp8_block=True), ["h200"], "add --no-fp8-current --no-fp8-delayed\n"),
        (RecipeOptions(no_fp8=True, no_fp8_block=True), ["b200"], ""),  # users who know that flag know what --no-fp8 means
        (RecipeOptions(no_fp8=True, no_fp8_block=True, no_fp8_current=True, no_fp8_delayed=True), ["h200"], ""),
        (RecipeOptions(no_fp8=True, recipes=["fp8block"]), ["h200"], ""),
        (RecipeOptions(no_fp8_block=True), ["h200"], ""),
        (MeasuringOptions(no_fp8=True, device="cpu"), None, ""),
    ],
)
def test_a_note_where_it_surprises(
    capsys: pytest.CaptureFixture[str], options: RecipeOptions, gpus: list[str] | None, note: str
) -> None:
    _explain_no_fp8(options, gpus)
    said = capsys.readouterr().err
    assert said.endswith(note)
    assert said.count("\n") == bool(note)


def test_it_skips_mxfp8_alone(run: Run) -> None:
    outcome = run("forecast --shapes 4k --gpu b200 --no-fp8")
    assert outcome.code == 0
    assert "MXFP8" not in outcome.out
    assert "FP8Current" in outcome.out
    assert outcome.err.startswith("note: --no-fp8 skips MXFP8 only. ")


def test_the_help_says_so() -> None:
    assert options_of(BenchOptions)["no_fp8"].option.help.startswith("Skip MXFP8 only.")
