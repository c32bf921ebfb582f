"""The Python API returns the results of the commands, and its errors speak of arguments."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmscope as gs
from gemmscope.errors import UserError
from support.run_files import recorded_bench
from support.step_files import recorded_step
from support.workers import forked_workers

__all__ = ["forked_workers"]  # the fixture

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 97}
TRACES = Path(__file__).parent / "data" / "traces"


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


def test_a_forecast_is_what_the_command_writes(tmp_path: Path) -> None:
    result = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=4096, tp=2).forecast("b300", "h200")
    sizes = "--micro-batch-size 1 --sequence-length 4096 --tp 2".split()
    command = [sys.executable, "-m", "gemmscope", "forecast", "--preset", "llama-3.1-8b", *sizes, "--gpu", "b300,h200"]
    child = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True)
    printed, own = json.loads(child.stdout), json.loads(result.to_json())
    assert {**printed, "command": ""} == {**own, "command": ""}
    assert printed["command"].startswith("gemmscope forecast --preset llama-3.1-8b")
    assert "FORECAST" in str(result)
    shown = result._repr_html_()
    assert "<table>" in shown
    assert 'src="data:image/webp;base64,UklGR' in shown
    for name in ("f.json", "f.md", "f.csv", "f.html", "f.png", "f.PNG"):
        result.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert gs.read(tmp_path / "f.json").to_json() == result.to_json()


def test_explore_writes_the_page_of_the_command(tmp_path: Path) -> None:
    model, page = gs.load(**SIZES, gated_mlp=True), tmp_path / "page.html"
    model.explore("h200", output=page, gpu_count=1, micro_batch_size=1, sequence_length="4k")
    sizes = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options = "--gpu h200 --gpus 1 --micro-batch-size 1 --sequence-length 4096 --gated-mlp -o".split()
    command = [sys.executable, "-m", "gemmscope", "explore", *sizes, *options, tmp_path / "other.html"]
    subprocess.run(command, check=True, capture_output=True)
    data, wanted = (explored(path) for path in (page, tmp_path / "other.html"))
    assert sorted(data.pop("command").split()) == sorted(wanted.pop("command").split())
    assert data == wanted
    with pytest.raises(UserError, match=r"page\.json is not the name of a page"):
        gs.load("llama-3.2-1b").explore("h200", output="page.json")
    assert data["points"]


def explored(path: Path) -> dict[str, Any]:
    """The data of a page."""
    packed = max(re.findall(r"[A-Za-z0-9+/=]{200,}", path.read_text()), key=len)
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return data


def test_sweeps_take_lists() -> None:
    job = gs.load(**SIZES).on(micro_batch_size=1, sequence_length=512)
    one = job.sweep("b300", micro_batch_size=[1, 2], recipes=["fp8current"])
    assert [point.values for point in one.sweeps[0].points] == [{"micro_batch_size": 1}, {"micro_batch_size": 2}]
    two = job.sweep("b300", "h200", hidden_size=[64, 128], sequence_length=[256, 512])
    assert [len(sweep.points) for sweep in two.sweeps] == [4, 4]


def test_bare_gemms() -> None:
    result = gs.forecast_gemms("h200", shapes=[(1024, 1024, 1024)], recipes=["fp8current"])
    assert result.gpus[0].linears.bare


def test_explain_compare_and_report(tmp_path: Path) -> None:
    explained = gs.explain_trace(TRACES / "recompute.json.gz", baseline=TRACES / "healthy_te_bf16.json.gz")
    assert explained.causes[0].code == "recompute"
    assert explained.comparisons
    compared = gs.compare_runs([recorded_bench("first"), recorded_bench("again")], fail_if_slower=0.03)
    assert compared.failing() == []
    recorded_step().save(tmp_path / "step.json")
    for name in ("report.html", "report.md"):
        gs.write_report([tmp_path / "step.json", recorded_step("llama8b", verified=False)], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.usefixtures("forked_workers")
def test_shapes_bench_and_step_on_the_cpu() -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    job = gs.load(**SIZES).on(1, 32)
    assert job.shapes().kind == "shapes"
    measured = job.bench(device="cpu", time_limit=0.5)
    assert {time.recipe for time in measured.linears.ops} == {"BF16", "FP32"}
    assert measured.command.endswith("")
    stepped = job.step(device="cpu", time_limit=0.5, recipes=["bf16", "fp32"])
    assert [time.recipe for time in stepped.step.recipes] == ["BF16", "FP32"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gs.load(hiden_size=3), "hiden_size"),
        (lambda: gs.load("llama-3.1-8b", hidden_size=3), "named twice"),
        (lambda: gs.load("no-such-file.json"), "no-such-file.json"),
        (lambda: gs.load(**SIZES).on(1, 32, tpp=2), "no option tpp"),
        (lambda: gs.load(**SIZES).on(1, 32).forecast("b3000"), "unknown GPU"),
        (lambda: gs.load(**SIZES).on(1, 32).bench(longes=3), "no option longes"),
        (lambda: gs.load(**SIZES).on(1, 32).bench(precision=3), "precision"),
        (lambda: gs.load(**SIZES).on(1, 32).shapes().save("x.txt"), "has no extension that selects a format"),
        (lambda: gs.load(**SIZES).on(1, 32).shapes().save("/nowhere/x.json"), "cannot be written: No such file"),
        (lambda: gs.load("lama-3.1-8b"), "did you mean preset='llama-3.1-8b'"),
        (lambda: gs.load(**SIZES).on(1, 32, dp=2.5).forecast("h200"), "dp must be a whole number"),
        (lambda: gs.load(**SIZES).on(1, 32).forecast("h200", dp=2), "dp is a run setting"),
        (lambda: gs.load(**SIZES).on(1, 32).sweep("h200", tp=2), "a list of values for tp"),
        (lambda: gs.load(**SIZES).on(1, 32, tp=2, gpus=3), "3 GPUs do not divide into groups of 2"),
        (lambda: gs.load(**SIZES).on(1, 32).forecast("h200", network="pigeon"), "not a known network"),
        (lambda: gs.load(**SIZES).on(1, 32).step(json="step.json"), "no option json"),
        (lambda: gs.compare_runs(["only-one.json"]), "at least two runs"),
        (lambda: gs.write_report("no-such.json", "x.html"), "no-such.json"),
    ],
)
def test_errors_speak_of_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(gs.UserError, match=message) as raised:
        call()
    assert "--" not in str(raised.value).replace("--json", "").replace("--list-presets", "")


@pytest.mark.parametrize("kind", ["object", "cycle", "deep"])
def test_a_dictionary_that_no_file_could_hold(kind: str) -> None:
    config: dict[str, object] = {"model_type": "llama"}
    inside = config
    for _ in range(3000 if kind == "deep" else 0):
        inside["x"] = inside = dict[str, object]()
    config["hidden_size"] = object() if kind == "object" else config if kind == "cycle" else 64
    with pytest.raises(gs.UserError, match="the dictionary"):
        gs.load(config)


def test_gpus_are_named_without_a_keyword() -> None:
    job = gs.load(preset="llama-3.2-1b").on(micro_batch_size=1, sequence_length=128)
    with pytest.raises(UserError, match="without a keyword"):
        job.forecast(gpus="h200")
