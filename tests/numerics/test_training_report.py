"""The report of the training check: paired gaps, their intervals, the noise of BF16 and rank orders."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from train_report import Comparison, comparison_of, gap_of, ranks, spearman

SETTINGS = {"size": "toy", "steps": 10}


def write(folder: Path, recipe: str, seed: int, loss: float, finished: bool = True, **changes: Any) -> None:
    losses = dict.fromkeys(("train_loss", "validation_loss", "validation_loss_bf16"), loss)
    facts = {
        "parameters": 1,
        "tokens": 1,
        "text": {},
        "device": "CPU",
        "versions": {},
        "settings": SETTINGS,
        "curve": [loss] * 40,
    }
    name = recipe.replace(":", "-").replace("+", "-")
    run = {**facts, **losses, "recipe": recipe, "seed": seed, "finished": finished, **changes}
    (folder / f"{name}-seed{seed}.json").write_text(json.dumps(run))


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    base = [2.0, 1.5, 1.8]
    gaps = {
        "FP8Current": [0.010, 0.011, 0.012],
        "emulated:FP8Current": [0.009, 0.012, 0.012],
        "emulated:MXFP8": [0.003, 0.004, 0.005],
        "emulated:NVFP4": [0.030, 0.036, 0.033],
        "BF16+bit": [0.001, -0.001, 0.001],
        "BF16+order": [-0.001, 0.001, -0.001],
    }
    for seed, loss in enumerate(base):
        write(tmp_path, "BF16", seed, loss)
        for recipe, differences in gaps.items():
            write(tmp_path, recipe, seed, loss + differences[seed])
        write(tmp_path, "FP8Block", seed, float("nan"), finished=False)
    write(tmp_path, "emulated:MXFP8", 7, 9.0)  # this seed was not run in the other recipes
    errors = {"FP8Current": 0.05, "MXFP8": 0.037, "NVFP4": 0.14}
    return comparison_of(tmp_path, errors)


def test_gaps_are_paired_by_seed(comparison: Comparison) -> None:
    gap = comparison.gap("FP8Current", "validation_loss")
    assert gap.mean == pytest.approx(0.011)
    assert gap.half_width == pytest.approx(4.303 * 0.001 / 3**0.5, rel=1e-3)
    assert gap.separated
    assert comparison.gap("emulated:MXFP8", "train_loss").seeds == 3


def test_order_of_recipes(comparison: Comparison) -> None:
    assert comparison.recipes[0] == "emulated:MXFP8"
    assert comparison.recipes[-1] == "emulated:NVFP4"
    assert comparison.rank_correlation("validation_loss") == pytest.approx(0.949, abs=0.01)  # two recipes share a predicted error
    assert comparison.ordered_pairs("validation_loss") == (5, 5, 5)


def test_pairs_ordered_otherwise_are_counted(comparison: Comparison) -> None:
    swapped = replace(comparison, predicted={**comparison.predicted, "MXFP8": 0.2})
    assert swapped.ordered_pairs("train_loss") == (2, 5, 5)
    assert (swapped.rank_correlation("train_loss") or 0) < 0.5


def test_noise_of_bf16(comparison: Comparison) -> None:
    assert comparison.noise("train_loss") == pytest.approx(0.001, rel=1e-3)
    alone = replace(comparison, losses={"BF16": comparison.losses["BF16"]})
    assert alone.noise("train_loss") is None


def test_the_baseline_is_the_mean_of_all_bf16_runs(comparison: Comparison) -> None:
    lucky = {seed: {name: loss - 0.004 for name, loss in run.items()} for seed, run in comparison.losses["BF16"].items()}
    changed = replace(comparison, losses={**comparison.losses, "BF16+bits": lucky})
    difference = changed.gap("FP8Current", "train_loss").mean - comparison.gap("FP8Current", "train_loss").mean
    assert difference == pytest.approx(0.001)  # a quarter: three other BF16 runs have no such luck


def test_table(comparison: Comparison) -> None:
    rows = comparison.table().splitlines()
    assert rows[2].startswith("| MXFP8 (emulated) | 3.70% | **+0.0040 ± 0.0025** |")
    assert rows[-2] == "| BF16: mean loss | | 1.7667 | 1.7667 | 1.7667 |"
    assert rows[-1] == "| BF16: standard deviation within a seed | | 0.0010 | 0.0010 | 0.0010 |"
    assert "FP8Block" not in comparison.table()  # its loss is not finite
    assert "of 5 pairs of recipes with different predicted errors, the runs separate 5, and 5" in comparison.rank_sentences()


def test_runs_with_other_settings_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, "BF16", 0, 2.0)
    write(tmp_path, "BF16", 1, 2.0, settings={"size": "toy", "steps": 20})
    with pytest.raises(SystemExit, match="other settings"):
        comparison_of(tmp_path, {})


def test_recipes_with_the_same_predicted_error_are_one_group(comparison: Comparison) -> None:
    assert list(comparison.groups().values()) == [["emulated:MXFP8"], ["FP8Current", "emulated:FP8Current"], ["emulated:NVFP4"]]
    rows = comparison.table_of_groups().splitlines()
    assert rows[3].startswith("| 5.00% | FP8Current, FP8Current (emulated) | **+0.0110 ± ")
    differences = comparison.table_of_differences().splitlines()
    assert differences[2].startswith("| 5.00% minus 3.70% | **+0.0070 ± ")
    assert len(differences) == 4


def test_gaps_of_single_seeds(comparison: Comparison, tmp_path: Path) -> None:
    rows = comparison.table_of_seeds().splitlines()
    assert rows[0] == "| | seed 0 | seed 1 | seed 2 |"
    assert rows[-1] == "| NVFP4 (emulated), last tenth of the steps | +0.0300 | +0.0360 | +0.0330 |"
    early = tmp_path / "early"
    early.mkdir()
    for recipe in ("BF16", "emulated:MXFP8"):
        write(early, recipe, 0, 2.0)
    write(early, "emulated:NVFP4", 0, 2.0, curve=[2.0 + 0.01 * place for place in range(40)])
    rows = comparison_of(early, comparison.predicted).table_of_seeds().splitlines()
    assert rows[-2:] == [
        "| NVFP4 (emulated), steps 2 to 2 | +0.0750 |",
        "| NVFP4 (emulated), last tenth of the steps | +0.0000 |",
    ]


def test_a_folder_without_bf16_runs(tmp_path: Path) -> None:
    write(tmp_path, "FP8Block", 0, 2.0)
    with pytest.raises(SystemExit, match="no BF16 run"):
        comparison_of(tmp_path, {})


def test_one_seed_separates_nothing() -> None:
    assert gap_of([0.5]).half_width is None
    assert not gap_of([0.5]).separated


def test_ranks() -> None:
    assert ranks([0.3, 0.1, 0.1]) == [3.0, 1.5, 1.5]
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
