"""The keywords of the Python API: typed, complete, written from the options that are declared once, and shown to people."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path

import pytest

import gemmscope as gs
from gemmscope import api
from gemmscope.api.calls import SPECS
from support import api_script, api_signatures

SCRIPT = Path(api_script.__file__)
ROOT = Path(__file__).parents[1]


def mypy(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_script_with_every_function_is_typed(tmp_path: Path) -> None:
    """And with a wrong keyword, a wrong value and a wrong name it is not."""
    text = SCRIPT.read_text()
    assert [name for name in gs.__all__ if name not in ("record_tensors", "trace_me") and f"gs.{name}" not in text] == []
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(text)
    assert mypy(right).stdout.startswith("Success")
    replaced = [("share_gpu=True", "share_gpus=True"), ('state="burst"', 'state="fast"'), ("gs.doctor()", "gs.docter()")]
    for before, after in replaced:
        assert before in text
        text = text.replace(before, after)
    wrong.write_text(text)
    outcome = mypy(wrong)
    assert outcome.returncode == 1
    for code in ('"share_gpus"', "[arg-type]", "[attr-defined]"):
        assert code in outcome.stdout
    assert outcome.stdout.count("error:") == len(replaced)


@pytest.mark.parametrize("path", sorted(Path(api.__file__).parent.glob("[fjm]*.py")), ids=lambda path: path.stem)
def test_the_keywords_are_those_of_the_options(path: Path) -> None:
    """Run `make api` if this fails."""
    source = path.read_text()
    assert api_signatures.written(source) == source


def test_no_function_takes_any_keyword() -> None:
    functions = [getattr(api, name) for name in api.__all__]
    functions += [getattr(owner, name) for owner in (api.Job, api.Model) for name in vars(owner) if not name.startswith("_")]
    kinds = {one.kind for function in functions if callable(function) for one in signature(function).parameters.values()}
    assert Parameter.VAR_KEYWORD not in kinds
    assert len(SPECS) >= 18


def test_dir_shows_the_api() -> None:
    assert set(dir(gs)) == set(gs.__all__)
    assert {"forecast", "bench", "step"} <= set(dir(api.Job))


@pytest.mark.parametrize(
    "call",
    [
        lambda: gs.load("gpt2").on(1, 64).bench(precison=0.1),
        lambda: gs.load("gpt2").plan("h100", 8, layres=2),
        lambda: gs.load("gpt2").explore("h100", stcak="nvidia"),
        lambda: gs.bench_gemms(share_gpus=True),
        lambda: gs.explain_trace("x.json", stepps=3),
        lambda: gs.trace_me("x.json", stepps=3),
        lambda: gs.record_tensors(None, "x.safetensors", stepps=3),
    ],
)
def test_a_wrong_keyword_lists_the_right_ones(call: Callable[[], object]) -> None:
    with pytest.raises(gs.UserError) as error:
        call()
    assert "options: " in error.value.hint


@pytest.mark.parametrize("name", ["forecast", "bench", "step", "shapes", "sweep"])
def test_a_model_without_a_batch_says_what_to_type(name: str) -> None:
    model = gs.load("gpt2")
    with pytest.raises(gs.UserError) as error:
        getattr(model, name)("h200")
    assert isinstance(error.value, AttributeError)
    ast.parse(error.value.hint)
    assert ".on(micro_batch_size=" in error.value.hint
    assert not hasattr(model, "no_such_name")


def test_hints_are_python() -> None:
    with pytest.raises(gs.UserError) as error:
        gs.load("gpt2").on(1, 64).forecast()
    assert "gpu='b300,h200'" in str(error.value)
    assert gs.load("gpt2").on(1, 64).forecast(gpu="b300,h200").gpus


@pytest.mark.parametrize(
    ("call", "proposed"),
    [
        (lambda: gs.load("gpt2").on(1, 64).forecast("h200", tokens="1T"), "gpu_count=256"),
        (lambda: gs.load("gpt2").on(1, 64).forecast("h200", price="cheap", tokens="1T", gpu_count=8), "price='h200=2.5,b300=4'"),
    ],
)
def test_what_a_message_proposes_is_accepted(call: Callable[[], object], proposed: str) -> None:
    with pytest.raises(gs.UserError) as error:
        call()
    assert proposed in str(error.value)
    assert "--" not in str(error.value)
    [keyword] = ast.parse(f"f({proposed})", mode="eval").body.keywords  # type: ignore[attr-defined]
    given = {"gpu_count": 8, keyword.arg: ast.literal_eval(keyword.value)}
    assert gs.load("gpt2").on(1, 64).forecast("h200", "b300", tokens="1T", **given).gpus


@pytest.mark.parametrize("shapes", [[(1, 2)], [("a", "b", "c")]])
def test_shapes_that_are_none(shapes: object) -> None:
    with pytest.raises(gs.UserError) as error:
        gs.forecast_gemms("h200", shapes=shapes)  # type: ignore[arg-type]
    assert "(8192, 4096, 14336)" in error.value.hint


def test_one_mode_needs_no_list() -> None:
    forecast = gs.load("gpt2").on(1, 64).forecast("h200", modes="autocast")
    assert forecast.gpus[0].linears.modes == ("autocast",)


def test_completion_shows_the_api() -> None:
    """Of results too: their own names, and none of pydantic's."""
    result = gs.load("gpt2").on(1, 64).shapes()
    public = {name for name in dir(result) if not name.startswith("_")}
    assert {"save", "to_frame", "to_json", "findings", "gemms", "run"} <= public
    assert not {"model_dump", "copy", "parse_obj"} & public
