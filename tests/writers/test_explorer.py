"""The page of `gemmscope explore`: its points are what `gemmscope forecast` prints, and its controls change what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmscope.commands.explore import explore
from gemmscope.errors import UserError
from gemmscope.job.load import load_model
from gemmscope.options.estimating import ExploreOptions
from gemmscope.run_context import RunContext
from gemmscope.writers import html
from support.browser import Browser
from support.explorer_page import READY, SHOWN, choose, differences

MODEL = "gemmscope explore --preset llama-3.2-1b"
SMALL = ExploreOptions(gpu=["h200"], gpus=2, stack=["torchtitan"], micro_batch_size=[1, 64], sequence_length=[4096], price=2.5)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    path.write_text(html.explorer(explore(load_model(preset="llama-3.2-1b"), SMALL, RunContext(MODEL))))
    return path


def test_points_are_in_the_order_of_the_controls() -> None:
    data = explore(load_model(preset="llama-3.2-1b"), SMALL, RunContext(MODEL))
    controls = {name: [label for label, _ in values] for name, values in data["controls"]}
    assert controls["Software"] == ["not named", "torchtitan"]
    assert controls["Layout"] == ["1 GPU", "2 GPUs, data parallel", "2 GPUs, FSDP", "2 GPUs, TP2", "2 GPUs, PP2", "2 GPUs, CP2"]
    assert controls["Recomputation"] == ["none", "selective", "full"]
    assert len(data["points"]) == 2 * 6 * 2 * 3
    first = data["points"][0]
    assert first["columns"][-1] == "Cost"
    assert [row[0] for row in first["rows"]] == ["BF16", "FP8Current", "FP8Delayed", "FP8Block"]
    assert first["best"] in first["answer"]
    assert any("does not fit" in row[first["columns"].index("Memory")] for point in data["points"] for row in point["rows"])


def test_the_page_says_what_the_command_line_says(browser: Browser, page: Path) -> None:
    assert page.stat().st_size < 3_000_000
    for width in (1400, 390):
        tab = browser.open(page, width=width)
        tab.wait_for(READY)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.complaints() == []
        assert [url for url in tab.requests() if not url.startswith(("file:", "data:", "blob:"))] == []
    for chosen in ([0, 0, 0, 0, 0, 0, 0], [0, 1, 3, 0, 0, 2, 2], [0, 0, 2, 1, 0, 0, 1]):
        choose(tab, chosen)
        assert differences(tab) == []
    shown, link = tab.evaluate(SHOWN), tab.evaluate("location.hash")
    assert json.loads(shown)["chosen"] == "BF16"
    choose(tab, [0] * 7)
    assert tab.evaluate(SHOWN) != shown
    tab.evaluate(f"location.hash = {json.dumps(link)}")
    tab.wait_for(f"({SHOWN}) === {json.dumps(shown)}")
    tab.close()


def test_too_many_points_and_models_without_sizes() -> None:
    with pytest.raises(UserError, match="more than 50,000"):
        explore(load_model(preset="gpt2"), SMALL.but(micro_batch_size=list(range(1, 3000))))
    with pytest.raises(UserError, match="traced"):
        explore(load_model(module="x.py:build"), SMALL)
