"""The Python API gives what the commands give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gemmscope as gs

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 97}


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, gemmscope; print(sorted({'torch', 'numpy', 'pydantic', 'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


def test_models_are_named_in_every_way(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_key_value_heads": 1, "max_position_embeddings": 64, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file, by_folder, by_dict = gs.load(str(tmp_path / "config.json")), gs.load(tmp_path), gs.load(config)
    assert by_file.spec is not None
    assert by_file.spec.layers == by_folder.spec.layers == by_dict.spec.layers  # type: ignore[union-attr]
    assert gs.load("llama-3.1-8b").spec.hidden_size == 4096  # type: ignore[union-attr]
    assert len(gs.load(**SIZES).spec.layers) == 2  # type: ignore[union-attr]


def test_forecast_is_the_commands(tmp_path: Path) -> None:
    found = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=4096, tp=2).forecast("b300", "h200")
    sizes = "--micro-batch-size 1 --sequence-length 4096 --tp 2".split()
    command = [sys.executable, "-m", "gemmscope", "forecast", "--preset", "llama-3.1-8b", *sizes, "--gpu", "b300,h200"]
    child = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True)
    printed, mine = json.loads(child.stdout), json.loads(found.file.to_json())
    assert {**printed, "command": []} == {**mine, "command": []}
    assert "FORECAST" in str(found)
    assert "<table>" in found._repr_html_()
    assert 'src="data:image/png;base64,iVBOR' in found._repr_html_()
    assert any("calibrated on NVIDIA H200" in note for note in found.file.notes)
    for name in ("f.json", "f.md", "f.png", "f.PNG"):
        found.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_shapes_bench_and_step_on_the_cpu() -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    job = gs.load(**SIZES).on(1, 32)
    assert job.shapes().file.kind == "shapes"
    measured = job.bench(device="cpu", longest=0.5)
    assert {row.recipe for row in measured.file.rows} == {"BF16", "FP32"}
    stepped = job.step(device="cpu", longest=0.5, recipes=["bf16", "fp32"])
    assert [each.recipe for each in stepped.file.recipes] == ["BF16", "FP32"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gs.load(hiden_size=3), "a model has no hiden_size"),
        (lambda: gs.load("llama-3.1-8b", hidden_size=3), "named twice"),
        (lambda: gs.load("no-such-file.json"), "no-such-file.json"),
        (lambda: gs.load(**SIZES).on(1, 32, tpp=2), "a run has no tpp"),
        (lambda: gs.load(**SIZES).on(1), "sequence_length is not given"),
        (lambda: gs.load(**SIZES).on(1, 32).forecast("b3000"), "no GPU"),
        (lambda: gs.load(**SIZES).on(1, 32).bench(longes=3), "no option longes"),
        (lambda: gs.load(**SIZES).on(1, 32).shapes().save("x.txt"), "does not say what to write"),
        (lambda: gs.load(**SIZES).on(1, 32).shapes().save("/nowhere/x.json"), "cannot be written: No such file"),
        (lambda: gs.load("lama-3.1-8b"), "did you mean --preset llama-3.1-8b"),
        (lambda: gs.load(**SIZES).on(1, 32).forecast("h200", dp=2.5), "dp must be a whole number, not 2.5"),
        (lambda: gs.load(**SIZES).on(1, 32).step(json="step.json"), r"no option json(.|\n)*save\(\) writes files"),
    ],
)
def test_what_cannot_be_meant_says_so(call: object, message: str) -> None:
    with pytest.raises(gs.UserError, match=message):
        call()  # type: ignore[operator]
