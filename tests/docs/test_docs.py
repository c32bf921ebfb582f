"""The documentation is correct: commands run, lists and numbers are current, figures show the current output."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gemmscope
from gemmscope.bench.timing import stopping_rule
from gemmscope.choices import MODES
from gemmscope.interval import Interval
from gemmscope.model import presets
from gemmscope.model.families import known_model_types
from gemmscope.options.measuring import TimingOptions
from gemmscope.results.bench import BenchSettings
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.linears import Linears
from support.command import Run, run
from support.step_files import recorded_step
from support.workers import forked_workers

__all__ = ["forked_workers", "run"]  # the fixtures

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
H200 = (ROOT / "docs" / "measured" / "h200.md").read_text()
SHAPES = (ROOT / "docs" / "shapes.md").read_text()
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]
import forecast_accuracy  # noqa: E402
import outputs  # noqa: E402
import pictures  # noqa: E402
import reference_tool  # noqa: E402
import step_on_gpu  # noqa: E402
import worked_example  # noqa: E402


def test_bench_is_described_as_it_measures() -> None:
    text, settings = " ".join((ROOT / "docs" / "bench.md").read_text().split()), BenchSettings("transformer_engine")
    assert f"the first {settings.drop_ms:g} ms of each burst are discarded" in text
    assert f"Bursts of {settings.keep_ms / 1000:g} s" in text
    assert stopping_rule(TimingOptions()).least_rounds == 2
    first, second = re.findall(r"Wall time ([\d.]+) s and ([\d.]+) s", H200)[0]
    assert f"took {first} s and {second} s" in text


def test_counts_in_the_texts() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"The {len(known_model_types())} model types that have a closed form" in README
    assert f"({len(known_model_types())} model types in closed form" in changes
    assert f"one of {len(presets.names())} presets" in README
    assert f"{len(presets.names())} presets" in changes


@pytest.mark.usefixtures("forked_workers")
def test_shown_check_is_real_output(run: Run) -> None:
    pytest.importorskip("transformers", reason="the check needs transformers")
    shown = re.search(r"^\$ (gemmscope shapes .*--check)\n…\n(Check passed: .*)$", SHAPES, flags=re.MULTILINE)
    assert shown is not None
    assert shown[2] in run(shown[1].removeprefix("gemmscope ")).out.splitlines()


def test_picture_is_current() -> None:
    """The picture's text is what the command prints now."""
    svg = (ROOT / "docs" / "images" / "shapes.svg").read_text()
    command = re.search(r"\$</text>.*", svg)
    assert command is not None
    text = re.sub(r"<[^>]+>|&#160;|\s+", " ", svg)
    preset = "shapes --preset qwen3-30b-a3b --micro-batch-size 4 --sequence-length 4096 --tp 2 --sequence-parallel --ep 8"
    child = subprocess.run([sys.executable, "-m", "gemmscope", *preset.split()], capture_output=True, text=True, check=True)
    for line in child.stdout.splitlines():
        for shape in re.findall(r"\d+x\d+x\d+", line):
            assert shape in text, "run: make pictures"
    assert child.stdout.splitlines()[0].split(":")[1].strip()[:40] in text, "run: make pictures"


def test_accuracy_is_generated_from_measurements() -> None:
    kept = json.loads((ROOT / "docs" / "measured" / "h200_steps.json").read_text())
    assert (ROOT / "docs" / "measured" / "steps.md").read_text() == step_on_gpu.markdown(kept)


def test_accuracy_of_a_model_too_large_to_verify() -> None:
    """The page is also written if nothing was verified, one recipe has no interval and nothing is recommended."""
    result = recorded_step("llama8b")
    recipes = [
        time.model_copy(update={"verified": None, "speedup": replace(time.speedup, low=None, high=None)})
        if time.recipe == "FP8Block" and time.speedup is not None
        else time
        for time in result.step.recipes
    ]
    step = result.step.model_copy(update={"recipes": tuple(recipes)})
    changed = result.model_copy(update={"step": step, "recommendation": None})
    kept = json.loads(json.dumps(step_on_gpu.summary(changed, {"config": {}}, "transformer_engine")))
    page = step_on_gpu.markdown({"transformer_engine": {"big": kept}})
    assert re.search(
        r"^\| big \| FP8Current \| 1\.327 \[1\.318, 1\.336\] \|  \|  \|  \|  \| \w",
        page,
        re.MULTILINE,
    )
    assert "| big | FP8Block |" not in page
    assert re.search(r"^\| big \| 41 s \|  \| [\d.]+% \| nothing \|$", page, re.MULTILINE)


def test_accuracy_of_forecasts_is_current() -> None:
    page = (ROOT / "docs" / "measured" / "forecasts.md").read_text()
    assert forecast_accuracy.training_steps() in page, "run: python benchmarks/forecast_accuracy.py"


def test_output_blocks_are_current() -> None:
    for path in outputs.PAGES:
        assert outputs.renewed(path.read_text()) == path.read_text(), f"{path.name} is stale: make pictures"


def test_every_made_block_is_shown_somewhere() -> None:
    marks = re.findall(r"<!-- made: (.*?) -->", "".join(path.read_text() for path in outputs.PAGES))
    assert sorted(marks) == sorted(outputs.MADE)


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_pictures_are_current(name: str, tmp_path: Path) -> None:
    pictures.DRAWN[name](tmp_path / name)
    shown, now = (pictures.labels((folder / name).read_text()) for folder in (pictures.IMAGES, tmp_path))
    assert len(now) > 10
    assert shown == now, "run: make pictures"


def test_recorded_runs_agree_with_the_tutorial() -> None:
    """The runs of docs/measured/h200.md agree with the numbers of the tutorial."""
    lines = re.findall(r"^\| ([\w-]+) \| (FP8\w+) \| ([\d.]+) \| \[.*?\] \| ([\d.]+) \|", H200, flags=re.MULTILINE)
    assert len(lines) == 5
    for mode_name, name, *others in lines:
        mode = next(mode for mode in MODES if mode == mode_name)
        speedup = worked_example.measured().speedup(name, mode)
        assert speedup is not None
        assert all(float(other) == pytest.approx(speedup.value, rel=0.015) for other in others)
    assert "gave speedups within 1.5% of these" in " ".join(TUTORIAL.split())


def test_forecasts_agree_with_the_tutorial() -> None:
    """Inside the error bars: measured speedups on an H200, and what was published with autocast, counted as it was."""
    forecast = worked_example.forecast_linears("h200")
    measured = worked_example.measured()
    for mode in MODES:
        for name in measured.columns(mode):
            own, forecasted = measured.speedup(name, mode), forecast.speedup(name, mode)
            if own is None:
                continue
            assert forecasted is not None
            assert forecasted.low is not None
            assert forecasted.high is not None
            assert forecasted.low < own.value < forecasted.high
            assert forecasted.value == pytest.approx(own.value, rel=0.032)
    rows = [line.strip("| ").split(" | ") for line in worked_example.published().splitlines()[2:]]
    for gpu, mode_name, _, gain, ours, time_ms, ours_ms in rows:
        if mode_name == "autocast" or gpu == "H200 NVL":
            assert _inside(time_ms, ours_ms)
            assert gain == "1" or _inside(gain, ours)
        else:
            assert float(ours_ms.split()[0]) == pytest.approx(float(time_ms), rel=0.15)


def test_winner_of_the_tutorial() -> None:
    """NVFP4 is called the winner on a B300, for linears and step; FP8Delayed is second, in the forecast and as published."""
    [b300] = worked_example.forecast("b300").gpus
    assert b300.step is not None
    assert b300.step.winner is not None
    for winner in (b300.linears.winners["autocast"], b300.step.winner):
        assert (winner.best, winner.rivals) == ("NVFP4", ())
    rows = [line.strip("| ").split(" | ") for line in worked_example.published().splitlines()[2:]]
    autocast = {
        name: (float(theirs), float(ours.split()[0]))
        for gpu, mode, name, theirs, ours, *_ in rows
        if (gpu, mode) == ("B300", "autocast")
    }
    for column in (0, 1):
        assert sorted(autocast, key=lambda name: -autocast[name][column])[:2] == ["NVFP4", "FP8Delayed"]


def test_reading_of_the_ops_in_the_tutorial() -> None:
    """The tutorial's statements about single ops, measured on the H200 and forecast for a B300."""
    h200, b300 = worked_example.measured(), worked_example.forecast_linears("b300")
    ops = [case.op for case in h200.cases]

    def gain(linears: Linears, name: str, op: str) -> Interval:
        speedup = linears.speedup(name, "autocast", op)
        assert speedup is not None
        return speedup

    def share(linears: Linears, name: str, op: str) -> float:
        time = next(op_time for op_time in linears.ops if (op_time.op, op_time.recipe, op_time.mode) == (op, name, "autocast"))
        return time.quantization_ms / time.total_ms.value

    for op in ops:
        assert max(h200.recipes[1:], key=lambda name: gain(h200, name, op).value) == "FP8Delayed"
        assert max(b300.recipes[1:], key=lambda name: share(b300, name, op)) == "NVFP4"
    for linears in (h200, b300):
        for name in linears.recipes[1:]:
            assert min(ops, key=lambda op: gain(linears, name, op).value) == "Attn Out"
    fast, second = gain(b300, "NVFP4", "Attn Out"), gain(b300, "FP8Delayed", "Attn Out")
    assert (fast.low or 0) < (second.high or 0), "their error bars overlap"


def test_errors_of_the_reference_tool() -> None:
    """The claim of README and page: 13% off on average, 30% at worst, two recipes that win called losers."""
    script, ours = reference_tool.errors()
    assert len(script) == 12
    assert (round(sum(script) / 12, 2), round(max(script), 2)) == (0.13, 0.30)
    assert reference_tool.losers() == [("gpt1b_l16", "FP8Current"), ("gpt1b_l16", "FP8Block")]
    assert max(ours) < max(script) / 4


def _inside(value: str, interval: str) -> bool:
    low, high = re.findall(r"[\d.]+", interval.split("[")[1])
    return float(low) <= float(value) <= float(high)


def test_figures_of_the_readme_are_those_of_the_accuracy_page() -> None:
    """Every row of the README's table is a row of the page, and no other text of the README has a figure of accuracy."""
    page, section = (ROOT / "docs" / "accuracy.md").read_text(), README.split("## Accuracy\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*\|$", section, flags=re.MULTILINE)
    assert len(rows) > 6
    assert all(row in page.splitlines() for row in rows)
    assert not re.search(r"\d%", re.sub(r"^\|.*\|$", "", section, flags=re.MULTILINE))


def test_accuracy_page_says_what_its_table_says() -> None:
    """Figures that the page repeats in its sentences are those of the pages with every case."""
    page = " ".join((ROOT / "docs" / "accuracy.md").read_text().split())
    forecasts = (ROOT / "docs" / "measured" / "forecasts.md").read_text()
    inside = [int(share) for share in re.findall(r"^\| its? [\w ,]+ \| \d+ \| (\d+)% \|", forecasts, flags=re.MULTILINE)]
    assert f"{min(inside)} to {max(inside)}% of the measured times lie inside" in page
    medians = [float(share) for share in re.findall(r"\| \d+ \| ([\d.]+)% \| [\d.]+% \| \d+% \| \d+% \|", forecasts)]
    assert f"({max(medians)}% and 16%)" in page


def test_python_examples_run(tmp_path: Path) -> None:
    """The examples of the API page, without the lines that need a GPU or files."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "  # needs " not in line]
    child = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert "b300 NVFP4" in child.stdout


def test_python_in_the_pages_is_python() -> None:
    count = 0
    for path in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE):
            ast.parse(block, str(path))
            count += 1
    assert count > 8


def test_names_of_the_api_exist() -> None:
    """Every `gs.name` in the documentation exists in the package."""
    for path in (ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")):
        for name in re.findall(r"\bgs\.(\w+)", path.read_text()):
            assert hasattr(gemmscope, name), f"{path.name}: gs.{name}"


def test_methods_of_results_exist() -> None:
    """Every `result.name` on the API page is an attribute of a result."""
    names = re.findall(r"\bresult\.(\w+)", (ROOT / "docs" / "api.md").read_text())
    assert "to_frame" in names
    assert all(hasattr(ForecastResult, name) or name in ForecastResult.model_fields for name in names)


def test_every_benchmark_is_in_their_index() -> None:
    listed = re.findall(r"`(\w+\.(?:py|md|toml))`", (ROOT / "benchmarks" / "README.md").read_text())
    assert sorted(listed) == sorted({path.name for path in (ROOT / "benchmarks").iterdir() if path.is_file()} - {"README.md"})


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_the_pages_for_developers_name_exist(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+\w+\.(?:py|toml|md|tsv))`", (ROOT / page).read_text())
    for path in (path for path in named if not re.search("[A-Z]{4}", path)):  # NAME, KIND and FORMAT stand for any
        assert (ROOT / path).exists() or (ROOT / "src" / "gemmscope" / path).exists(), path
