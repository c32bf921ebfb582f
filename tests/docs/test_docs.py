"""What the documentation says is so: commands run, lists and numbers are current, the picture is of today's output."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemmscope.cli.bench_options import TimingOptions
from gemmscope.measure.campaign import Settings
from gemmscope.model import presets
from gemmscope.model.families import known_model_types
from support.run_files import recorded_bench

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
H200 = (ROOT / "docs" / "measured" / "h200.md").read_text()
sys.path.insert(0, str(ROOT / "docs"))
import outputs  # noqa: E402
import pictures  # noqa: E402
import worked_example  # noqa: E402


def test_families_listed() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    listed = text.split("<!-- families -->")[1].split("<!-- /families -->")[0]
    assert tuple(re.findall(r"`([\w-]+)`", listed)) == known_model_types()


def test_bench_is_described_as_it_measures() -> None:
    text, settings = " ".join((ROOT / "docs" / "bench.md").read_text().split()), Settings("transformer_engine")
    assert f"drops its first {settings.drop_ms:g} ms" in text
    assert f"Bursts of {settings.keep_ms / 1000:g} s" in text
    assert TimingOptions().rule().least_rounds == 2
    first, second = re.findall(r"Wall time ([\d.]+) s and ([\d.]+) s", H200)[0]
    assert f"took {first} s and {second} s" in text


def test_counts_in_the_texts() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"each of the {len(known_model_types())} model types" in README
    assert f"({len(known_model_types())} model types in closed form" in changes
    assert f"# {len(presets.names())} well-known models" in README
    assert f"{len(presets.names())} presets" in changes


@pytest.mark.parametrize("line", re.findall(r"^(?:\$ )?(gemmscope [^…#\n]+)$", README, flags=re.MULTILINE))
def test_readme_commands_run(line: str) -> None:
    arguments = shlex.split(line)[1:]
    if "--check" in arguments:
        pytest.skip("test_readme_shows_real_output runs it")
    child = subprocess.run([sys.executable, "-m", "gemmscope", *arguments], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_readme_shows_real_output() -> None:
    pytest.importorskip("transformers", reason="the check needs transformers")
    shown = re.search(r"^\$ (gemmscope shapes .*--check)\n…\n(check: .*)$", README, flags=re.MULTILINE)
    assert shown is not None
    command = [sys.executable, "-m", "gemmscope", *shlex.split(shown[1])[1:]]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == shown[2]


def test_picture_is_current() -> None:
    """The picture's text is what the command prints now."""
    svg = (ROOT / "docs" / "images" / "shapes.svg").read_text()
    command = re.search(r"\$</text>.*", svg)
    assert command is not None
    words = re.sub(r"<[^>]+>|&#160;|\s+", " ", svg)
    preset = "shapes --preset qwen3-30b-a3b --micro-batch-size 4 --sequence-length 4096 --tp 2 --sequence-parallel --ep 8"
    child = subprocess.run([sys.executable, "-m", "gemmscope", *preset.split()], capture_output=True, text=True, check=True)
    for line in child.stdout.splitlines():
        for shape in re.findall(r"\d+x\d+x\d+", line):
            assert shape in words, "run: make pictures"
    assert child.stdout.splitlines()[0].split(":")[1].strip()[:40] in words, "run: make pictures"


def test_accuracy_is_made_from_what_was_measured() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from step_on_gpu import FORECASTS, markdown
    finally:
        sys.path.pop(0)
    kept = json.loads((ROOT / "docs" / "measured" / "h200_steps.json").read_text())
    assert (ROOT / "docs" / "accuracy.md").read_text().partition(FORECASTS)[0] == markdown(kept)


def test_accuracy_of_a_model_too_large_to_verify() -> None:
    """Nothing was verified, and one precision has no interval: the page is made all the same."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from step_on_gpu import findings, markdown
    finally:
        sys.path.pop(0)
    gains = {"FP8Current": {"value": 1.2, "low": 1.19, "high": 1.21}, "FP8Block": {"value": 1.1, "low": None, "high": None}}
    plain = {"named_share": None, "verified": None, "verdict": ""}
    recipes = [{"recipe": name, "speedup": gains.get(name), **plain} for name in ("BF16", *gains)]
    run = {
        "recipes": recipes, "recommendation": None, "seconds": {"predicting": 40.0}, "device": {"name": "NVIDIA H200"},
        "environment": {"driver": "1"}, "versions": {"torch": "2"},
    }  # fmt: skip
    page = markdown({"transformer_engine": {"big": findings(run, {"config": {}}, "transformer_engine")}})
    assert "| big | FP8Current | 1.200 [1.190, 1.210] |  |  |  |  |  |" in page
    assert "| big | 40 s |  | 0.0% | nothing |" in page


def test_forecasts_accuracy_is_current() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from forecast_accuracy import training_steps
    finally:
        sys.path.pop(0)
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert training_steps() in page, "run: python benchmarks/forecast_accuracy.py"


def test_output_blocks_are_current() -> None:
    for path in outputs.PAGES:
        assert outputs.renewed(path.read_text()) == path.read_text(), f"{path.name} is stale: make pictures"


def test_every_made_block_is_shown_somewhere() -> None:
    marks = re.findall(r"<!-- made: (.*?) -->", "".join(path.read_text() for path in outputs.PAGES))
    assert sorted(marks) == sorted(outputs.MADE)


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_pictures_are_current(name: str, tmp_path: Path) -> None:
    pictures.DRAWN[name](tmp_path / name)
    shown, now = (pictures.words((folder / name).read_text()) for folder in (pictures.IMAGES, tmp_path))
    assert len(now) > 10
    assert shown == now, "run: make pictures"


def test_replayed_bench_says_what_the_recorded_one_said() -> None:
    """And the runs of docs/measured/h200.md are within what the tutorial says of them."""
    whole = [each for each in recorded_bench()["speedups"] if not each["op"] and each["over"] == "BF16"]
    recorded = {(each["mode"], each["recipe"]): each["speedup"]["value"] for each in whole}
    lines = re.findall(r"^\| ([\w-]+) \| (FP8\w+) \| ([\d.]+) \| \[.*?\] \| ([\d.]+) \|", H200, flags=re.MULTILINE)
    assert len(lines) == 5
    for mode, name, *others in lines:
        found = worked_example.measured().gain(name, mode)
        assert found is not None
        assert found.value == pytest.approx(recorded[mode, name], rel=1e-3)
        assert all(float(other) == pytest.approx(found.value, rel=0.015) for other in others)
    assert "came out within 1.5% of them" in TUTORIAL


def test_what_the_tutorial_says_of_forecasts() -> None:
    """Measured speedups lie inside the bars of the H200's forecast; published products too, and autocast on a B300 does not."""
    forecast = worked_example.forecast_rows("h200")
    for one in worked_example.measured().speedups:
        if not one.op and one.over == "BF16":
            found = forecast.gain(one.recipe, one.mode)
            assert found is not None
            assert found.low is not None
            assert found.high is not None
            assert found.low < one.speedup.value < found.high
            assert found.value == pytest.approx(one.speedup.value, rel=0.032)
    rows = [line.strip("| ").split(" | ") for line in worked_example.published().splitlines()[2:]]
    for gpu, mode, _, gain, ours, time_ms, ours_ms in rows:
        if mode == "pre-quantized":
            assert _inside(time_ms, ours_ms)
        elif gain != "1":
            assert _inside(gain, ours) == (gpu == "H200 NVL")


def _inside(value: str, interval: str) -> bool:
    low, high = re.findall(r"[\d.]+", interval.split("[")[1])
    return float(low) <= float(value) <= float(high)


def test_errors_in_the_readme_are_those_of_the_accuracy_page() -> None:
    page, text = (ROOT / "docs" / "accuracy.md").read_text(), " ".join(README.split())
    same = re.search(r"same run: ([\d.]+%) mean error, ([\d.]+%) at worst", page)
    other = re.search(r"other machine: ([\d.]+%) mean error, ([\d.]+%) at worst", page)
    forecast = re.search(r"Speedups: ([\d.]+%) off on average, ([\d.]+%) at worst", page)
    assert same
    assert other
    assert forecast
    assert f"| {same[1]} on average, {same[2]} at worst |" in text
    assert f"`step` is off by {other[1]} on average, {other[2]} at worst" in text
    assert f"is {forecast[1]} off on average, {forecast[2]} at worst" in text
    medians = re.findall(r"\| \d+ \| ([\d.]+)% \| [\d.]+% \| \d+% \| (\d+)% \|", page)
    ours, roofline = ([float(row[column]) for row in medians] for column in (0, 1))
    assert f"| {min(ours):.0f} to {max(ours):.0f}% (median) |" in text
    assert f"| {min(roofline):.0f} to {max(roofline):.0f}% (median) |" in text


def test_python_examples_run() -> None:
    """Those of the API's page, what needs a GPU left out."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "needs a GPU" not in line]
    child = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "b300 NVFP4" in child.stdout
