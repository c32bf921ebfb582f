"""The Document of numerics: the answer in each situation, marks of synthetic data, tables and charts that agree."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from gemmscope.document import document
from gemmscope.document.charts import CurveChart, HeatMap, ScatterChart
from gemmscope.document.model import Document, decisive
from gemmscope.document.numerics_tables import kept_names
from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.results.numerics import LinearError, Mix, NumericsResult
from gemmscope.writers import figure, html, markdown, tables, terminal
from support.commands import compare
from support.numerics_files import linear_errors, numerics_result, recipes_and_mix


def told(result: NumericsResult, *, detail: bool = False, width: int = 100) -> str:
    return terminal.text(document(result), detail=detail, width=width)


def chart(shown: Document, kind: type) -> list:
    return [block for block in shown.charts() if isinstance(block, kind)]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("bound", [None, 0.001, 0.05, 0.12])
def test_the_answer_is_on_one_screen(bound: float | None, width: int) -> None:
    lines = told(numerics_result(bound=bound), width=width).splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= width


def test_the_answer_names_the_mix_its_error_and_its_speedup() -> None:
    result = numerics_result(bound=0.12)
    shown = document(result)
    assert result.mixed is not None
    mix = result.mixed.chosen
    assert mix is not None
    assert mix.is_mixed
    assert shown.answer.startswith("Fastest with an error of at most 12.0%: NVFP4 with ")
    assert f"error {100 * mix.error:.1f}%" in shown.answer
    assert "(FORECAST)" in shown.answer
    assert any("NVFP4 in all linears: error 17.8%" in line for line in shown.because)
    assert any("model.layers.0.mlp.down_proj 40.3%" in line for line in shown.because)
    assert any("loss curve" in line for line in shown.because)
    assert "--mix" in shown.next_purpose
    assert shown.advice is not None
    assert set(shown.advice.ready_to_paste) == {"Transformer Engine", "Megatron-LM"}


def test_a_number_is_no_short_name() -> None:
    names = ("mlp.2", "mlp.down_proj", "attn.out", "mlp.out")
    linears = tuple(LinearError(name=f"blocks.0.{name}", linear=name, recipe="MXFP8") for name in names)
    result = numerics_result().model_copy(update={"linears": linears})
    assert list(kept_names(result).values()) == ["mlp.2", "down_proj", "attn.out", "mlp.out"]


def test_every_other_answer() -> None:
    assert document(numerics_result(bound=0.08)).answer.startswith(
        "Fastest with an error of at most 8.0%: FP8Delayed in all linears"
    )
    none = document(numerics_result(bound=0.001)).answer
    assert none == "Stay with BF16: no low-precision recipe has an error of at most 0.1%. The smallest is 5.1% in FP8Block."
    slow = numerics_result(4, bound=0.3)
    assert slow.mixed is not None
    baseline = Mix(recipe="BF16", higher="BF16", error=0.0)
    slow = slow.model_copy(update={"mixed": slow.mixed.model_copy(update={"chosen": baseline})})
    assert document(slow).answer == "Use BF16: no recipe and no mix with an error of at most 30.0% is faster."


def gains(result: NumericsResult) -> dict[str, str]:
    """The forecast speedups, as they are printed."""
    return {row.recipe: f"{row.speedup.value:.2f}x" for row in result.recipes if row.speedup is not None}


def test_a_mix_within_its_interval_of_bf16_is_not_called_faster() -> None:
    result = numerics_result(bound=0.12)
    assert result.mixed is not None
    assert result.mixed.chosen is not None
    assert document(result).advice is not None
    unsure = result.mixed.chosen.model_copy(update={"speedup": Interval(1.01, 0.76, 1.36)})
    shown = document(result.model_copy(update={"mixed": result.mixed.model_copy(update={"chosen": unsure})}))
    assert shown.answer == "Stay with BF16: nothing with an error of at most 12.0% is faster by more than its interval."
    assert shown.because[0].startswith("The fastest is NVFP4 with ")
    assert shown.advice is None
    open_ended = document(numerics_result(bound=None))
    gain = gains(numerics_result(bound=None))
    smallest = f"FP8Block has the smallest error of the low-precision recipes, 5.1%, {gain['FP8Block']} ["
    fastest = f"The fastest are NVFP4 and FP8Delayed, too close to call. NVFP4: error 17.8%, {gain['NVFP4']} ["
    assert open_ended.answer.startswith(smallest)
    assert open_ended.because[0].startswith(fastest)
    typed = numerics_result(bound=None).model_copy(update={"command": "gemmscope numerics 'my file.safetensors'"})
    assert document(typed).next_command == "gemmscope numerics 'my file.safetensors' --bound 5%"
    no_speeds = document(numerics_result(gpu="", bound=0.12))
    assert no_speeds.answer.startswith("Fewest bits with an error of at most 12.0%: NVFP4 with ")
    assert "over BF16" not in no_speeds.answer
    assert "--speed" in no_speeds.next_purpose
    empty = numerics_result().model_copy(update={"recipes": (), "linears": (), "mixed": None, "depth": (), "stale": ()})
    assert "nothing could be computed" in document(empty).answer
    assert terminal.text(document(empty), width=80)


def test_speeds_that_are_too_close_have_no_winner() -> None:
    """The forecast cannot tell NVFP4 from FP8Delayed, nor FP8Delayed from FP8Block; without rivals, the fastest is named."""
    open_ended, bounded = numerics_result(bound=None), numerics_result(bound=0.08)
    assert document(open_ended).because[0].startswith("The fastest are NVFP4 and FP8Delayed, too close to call.")
    assert any(line.startswith("Next: ") and line.endswith("; too close to call.") for line in document(bounded).because)
    for result in (open_ended, bounded):
        certain = tuple(row.model_copy(update={"rivals": ()}) for row in result.recipes)
        because = document(result.model_copy(update={"recipes": certain})).because
        assert not any("too close to call" in line for line in because)
    alone = tuple(row.model_copy(update={"rivals": ()}) for row in open_ended.recipes)
    assert document(open_ended.model_copy(update={"recipes": alone})).because[0].startswith("The fastest is NVFP4: error 17.8%")


def test_recipes_with_the_same_error_are_named_together() -> None:
    result = numerics_result(bound=None)
    same = tuple(
        row.model_copy(update={"error": 0.051}) if row.recipe in ("FP8Block", "MXFP8") else row for row in result.recipes
    )
    answer = document(result.model_copy(update={"recipes": same})).answer
    gain = gains(result)
    assert answer.startswith(
        f"FP8Block and MXFP8 have the smallest error of the low-precision recipes, 5.1%: FP8Block {gain['FP8Block']} ["
    )
    assert answer.endswith("] over BF16 in the training step (FORECAST).")


@pytest.mark.parametrize("bound", [None, 0.12])
def test_synthetic_is_marked_wherever_a_number_stands(bound: float | None) -> None:
    """Title, answer, every section's charts and tables, the page, the figure, Markdown."""
    shown = document(numerics_result(source="synthetic", bound=bound))
    assert shown.title.startswith("SYNTHETIC")
    assert shown.answer.startswith("SYNTHETIC: ")
    assert any("SYNTHETIC" in line for line in shown.because)
    assert all(table.title.startswith("SYNTHETIC: ") for table in shown.tables())
    assert shown.summary is not None
    assert shown.summary.title.startswith("SYNTHETIC: ")
    page = html.page([shown])
    assert '<span class="tag">SYNTHETIC tensors; speeds are a FORECAST</span>' in page
    assert markdown.markdown([shown]).startswith("# SYNTHETIC")
    assert "SYNTHETIC" not in told(numerics_result(bound=bound), detail=True)


def test_a_checkpoint_says_that_weights_are_all_it_knows() -> None:
    linears = tuple(
        linear.model_copy(update={"passes": (), "weight": linear.passes[0].operands[0]}) for linear in numerics_result().linears
    )
    shown = document(
        numerics_result(source="checkpoint", bound=None).model_copy(update={"linears": linears, "stale": (), "depth": ()})
    )
    assert "the weights of" in shown.title
    assert any("weights only" in line for line in shown.because)
    [operands] = [table for table in shown.tables() if "Operands" in table.title]
    assert {row[1].text for row in operands.rows} == {"W"}
    assert "Share of error" not in [column.name for column in operands.columns]


def test_tables_agree_with_the_errors() -> None:
    result = numerics_result(bound=0.12)
    shown = document(result)
    heat = chart(shown, HeatMap)[0]
    values = [cell.value for row in heat.cells for cell in row]
    nvfp4 = next(recipe for recipe in result.recipes if recipe.recipe == "NVFP4")
    assert sqrt(sum(value**2 for value in values) / len(values)) == pytest.approx(nvfp4.error)
    assert max(values) == pytest.approx(nvfp4.worst_error)
    table = heat.table()
    assert [column.name.removesuffix(" *") for column in table.columns][1:4] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]
    assert table.rows[0][-1].value == pytest.approx(nvfp4.worst_error)
    [scatter] = chart(shown, ScatterChart)
    assert {dot.name: dot.error for dot in scatter.dots} == {
        recipe.recipe: recipe.error for recipe in result.recipes if recipe.recipe != "BF16"
    }
    assert [dot.error for dot in scatter.mixes] == sorted((dot.error for dot in scatter.mixes), reverse=True)
    assert scatter.chosen is not None
    assert scatter.table().rows[-1][0].text == scatter.chosen.name
    whole = replace(scatter, chosen=replace(scatter.dots[0], name="FP8Block in all linears"))
    assert len(whole.table().rows) == len(scatter.dots)  # a recipe in all linears is not listed twice
    assert scatter.bound == 0.12
    forward, backward = chart(shown, CurveChart)
    assert forward.series["NVFP4"][0].value.value == pytest.approx(100 * result.depth[-1].forward[0])
    assert backward.series["NVFP4"][0].value.value == pytest.approx(100 * result.depth[-1].backward[-1])  # the last layer first


def test_what_is_kept_is_marked_in_the_heat_map_of_its_recipe_alone() -> None:
    result = numerics_result(bound=0.12)
    first, *others = chart(document(result), HeatMap)
    assert others.pop().columns == ("FP8Block", "MXFP8", "FP8Current", "FP8Delayed", "NVFP4")
    assert result.mixed is not None
    assert result.mixed.chosen is not None
    kept = {name.rpartition(".")[2] for name in result.mixed.chosen.linears}
    assert {row.removesuffix(" *") for row in first.rows if row.endswith(" *")} == kept
    certain = {name.removesuffix(" *"): {cell.certain for cell in row} for name, row in zip(first.rows, first.cells, strict=True)}
    assert {name for name, states in certain.items() if states == {False}} == kept
    assert all(cell.certain for other in others for row in other.cells for cell in row)
    assert first.best is None


def test_every_writer_shows_it() -> None:
    """Recorded and without speeds, with layers that have no numbers, and with one layer alone."""
    shown = document(numerics_result(bound=0.12))
    for text in (tables.csv_text(shown), markdown.markdown([shown]), told(numerics_result(bound=0.12), detail=True)):
        assert "Mixes: what to keep in a higher precision" in text
        assert "Delayed scaling on recorded steps" in text
    assert figure.image(document(numerics_result(2, gpu="", bound=None)), ".png").startswith(b"\x89PNG")
    assert figure.image(document(numerics_result(1, bound=None, detailed=False)), ".png").startswith(b"\x89PNG")
    assert "Along depth" in html.page([shown])


def test_a_model_without_layers_has_its_chart() -> None:
    """SYNTHETIC tensors belong to no layer: the chart shows linears and recipes only."""
    result = numerics_result(1, source="synthetic", gpu="", bound=None, detailed=False)
    linears = tuple(one.model_copy(update={"layer": None}) for one in result.linears)
    shown = document(result.model_copy(update={"linears": linears, "layers": 0}))
    [heat] = chart(shown, HeatMap)
    assert heat.main
    table = heat.table()
    assert [column.name for column in table.columns] == ["linear", *heat.columns]
    assert table.rows[0][0].text == linears[0].linear.rpartition(".")[2]
    assert heat.cells[-1][0].value == next(one.error for one in linears if one.recipe == heat.columns[0])
    assert figure.image(shown, ".png").startswith(b"\x89PNG")


def test_linears_without_errors_are_named_next_to_the_error() -> None:
    """Two recipes lack the same linear: one warning, a star for each, and the answer names the linear."""
    linears = [
        one.model_copy(update={"passes": (), "weight": None, "failure": "misaligned"})
        if one.linear == "mlp.down_proj" and one.recipe in ("MXFP8", "FP8Block")
        else one
        for one in linear_errors(4)
    ]
    comparison = recipes_and_mix(linears)
    result = numerics_result(4, gpu="", bound=None).model_copy(
        update={
            "linears": tuple(linears),
            "recipes": comparison.recipes,
            "mixed": comparison.mixed,
            "findings": comparison.findings,
        }
    )
    [finding] = [finding for finding in result.findings if finding.code == "numerics-stays-in-baseline"]
    assert sorted(finding.facts["recipes"]) == ["FP8Block", "MXFP8"]  # type: ignore[type-var]
    text = told(result)
    assert "MXFP8 *" in text
    assert "FP8Block *" in text
    assert any("assume" in line and "mlp.down_proj in BF16" in line for line in document(result).because)
    bounded = recipes_and_mix(linears, None, 0.15)
    assert bounded.mixed is not None
    assert bounded.mixed.chosen is not None
    mixed = document(result.model_copy(update={"mixed": bounded.mixed})).because
    assert not any(line.startswith("Without mixing: MXFP8") for line in mixed)


def test_csv_and_markdown_have_the_errors_of_recipes() -> None:
    """The table of the short view is in neither of them."""
    result = numerics_result(bound=0.12)
    shown = document(result)
    [table] = [table for table in shown.tables() if table.title == "Errors of every recipe"]
    assert [(row[0].text, row[1].value) for row in table.rows] == [(one.recipe, one.error) for one in result.recipes]
    assert "Errors of every recipe,MXFP8," in tables.csv_text(shown)
    assert "Errors of every recipe" in markdown.markdown([shown])


def test_bf16_alone_has_no_error_to_show() -> None:
    result = numerics_result(2, gpu="", bound=None)
    only = tuple(one.model_copy(update={"recipe": "BF16"}) for one in result.recipes[:1])
    assert document(result.model_copy(update={"recipes": only})).answer == "There is no error to show: only BF16 was computed."


def test_recipes_without_a_speed_are_named() -> None:
    shown = document(numerics_result(gpu="h200", bound=0.12))
    [message] = [message for message in decisive(shown) if message.code == "numerics-no-speed"]
    assert "MXFP8, NVFP4" in message.text
    assert shown.answer.startswith("Fastest with an error of at most 12.0%: FP8Delayed in all linears")


def test_errors_are_not_compared_with_times(tmp_path: Path) -> None:
    result = numerics_result(2, gpu="", bound=None)
    result.save(tmp_path / "errors.json")
    with pytest.raises(UserError, match="not a run file of bench, step, sweep or fleet: its kind is 'numerics'") as raised:
        compare([tmp_path / "errors.json", tmp_path / "errors.json"])
    assert "gemmscope report" in raised.value.hint
    with pytest.raises(UserError, match="run 1 is a result of gemmscope numerics"):
        compare([result, result])  # type: ignore[list-item]


def test_a_mix_that_is_mostly_bf16_is_not_recommended() -> None:
    """Without speeds: a few linears in low precision are not worth their settings."""
    result = numerics_result(gpu="", bound=0.12)
    assert result.mixed is not None
    assert result.mixed.chosen is not None
    for share, advised in ((0.5, True), (0.89, False)):
        chosen = result.mixed.chosen.model_copy(update={"higher": "BF16", "kept_share": share})
        shown = document(result.model_copy(update={"mixed": result.mixed.model_copy(update={"chosen": chosen})}))
        assert shown.answer.startswith("Fewest bits" if advised else "Stay with BF16: with an error of at most 12.0%, 89% of")
        assert (shown.advice is not None) == advised
