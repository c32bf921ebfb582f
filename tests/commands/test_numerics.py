"""`run_numerics`: from a file to a result, in a worker process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gemmscope.commands.numerics import chosen_recipes  # noqa: E402
from gemmscope.document import document  # noqa: E402
from gemmscope.errors import MissingFactError  # noqa: E402
from gemmscope.job.load import ModelRun, load_model  # noqa: E402
from gemmscope.model.spec import RunSpec  # noqa: E402
from gemmscope.numerics.evaluation import requests, worker  # noqa: E402
from gemmscope.numerics.evaluation.error_findings import dropped_passes, padded_tokens  # noqa: E402
from gemmscope.numerics.recording import RecordingFacts, write_recording  # noqa: E402
from gemmscope.results.numerics import DroppedPass, LinearError, NumericsResult  # noqa: E402
from gemmscope.results.read import read_result  # noqa: E402
from gemmscope.signals import Interrupted, raised  # noqa: E402
from support.commands import run_numerics  # noqa: E402
from support.recorded import measured_linear  # noqa: E402
from support.refusals import refused, refused_with_hint  # noqa: E402
from support.tensor_files import write_tensors  # noqa: E402
from support.workers import forked_workers  # noqa: E402

__all__ = ["forked_workers"]  # the fixture
pytestmark = pytest.mark.usefixtures("forked_workers")

RECIPES = ["FP8Current", "FP8Delayed", "MXFP8", "NVFP4"]


def write(path: Path, names: dict[str, tuple[int, float]], heads: tuple[str, ...] = (), gradient: float = 1.0) -> Path:
    """A recording of linears of 64 input features: name → output features, and a factor of X (NaN makes it invalid). `gradient`:
    a factor of dY."""
    facts = []
    for index, (name, (outputs, factor)) in enumerate(names.items()):
        generator = torch.Generator().manual_seed(index)
        tokens = 8 if name in heads else 64  # the head of a classifier reads one token of each sequence
        shapes = ((tokens, 64), (outputs, 64), (tokens, outputs))
        x, w, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
        x[0, 0] *= factor
        dy *= gradient
        facts.append(measured_linear(name, x, w, dy, linear=name[-1], layer=None if name in heads else index))
    write_recording(path, RecordingFacts(source="recording", model="Small", steps=(0,), linears=tuple(facts)))
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    linears = {"l.0.a": (64, 1.0), "l.1.b": (40, 1.0), "l.2.c": (64, float("nan"))}
    return write(tmp_path_factory.mktemp("numerics") / "small.safetensors", linears)


def test_an_empty_checkpoint_is_not_the_current_folder() -> None:
    with refused("checkpoint"):
        run_numerics(checkpoint="")


def test_dropped_passes_are_in_their_usual_order() -> None:
    """Even if the first linear has no dgrad, because its input needs no gradient."""
    reason = {"steps": (0,), "reason": "dY has NaN or Inf values"}
    linears = [
        LinearError(name=name, linear="a", recipe="MXFP8", dropped=[DroppedPass(**{"pass": one}, **reason) for one in passes])
        for name, passes in (("l.0.a", ["wgrad"]), ("l.1.a", ["dgrad", "wgrad"]))
    ]
    (one,) = dropped_passes(linears)
    assert one.text.startswith("No errors of dgrad, wgrad of l.0.a, l.1.a")


def test_what_can_be_computed_is_and_the_rest_says_why(recording: Path, tmp_path: Path) -> None:
    result = run_numerics(recording, recipes=RECIPES, command="test")
    by_key = {(one.name, one.recipe): one for one in result.linears}
    assert len(by_key) == 3 * len(RECIPES)
    assert [one.pass_name for one in by_key["l.0.a", "MXFP8"].passes] == ["fprop", "dgrad", "wgrad"]
    assert "output features = 40" in by_key["l.1.b", "MXFP8"].failure
    assert all([one.pass_name for one in by_key["l.2.c", recipe].passes] == ["dgrad"] for recipe in RECIPES)  # it reads no X
    assert result.has("numerics-failed")
    dropped = next(one for one in result.findings if one.code == "numerics-dropped-passes")
    assert dropped.text == (
        "No errors of fprop, wgrad of l.2.c: X has NaN or Inf values in step 0. "
        "In the errors of recipes, these passes count as the mean of the other linears."
    )
    assert result.has("numerics-no-history")
    assert (result.source, result.model_name, result.steps, result.tokens) == ("recording", "Small", (0,), 64)
    assert {one.recipe for one in result.recipes} == set(RECIPES)
    (tmp_path / "run.json").write_text(result.to_json())
    assert read_result(tmp_path / "run.json").to_json() == result.to_json()


def test_a_recording_without_gradients_says_so(recording: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "forward.safetensors", {"l.0.a": (64, 1.0)}, gradient=0.0)
    codes = [{entry.code for entry in run_numerics(file, recipes=["MXFP8"]).findings} for file in (path, recording)]
    assert ["numerics-forward-only" in own for own in codes] == [True, False]


def test_weights_of_zero_do_not_make_a_recipe_look_more_accurate(tmp_path: Path) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    tensors = {"layers.0.a.weight": weight, "layers.1.a.weight": torch.zeros(64, 64)}
    write_tensors(tmp_path / "zeros.safetensors", tensors, {})
    result = run_numerics(checkpoint=tmp_path / "zeros.safetensors", recipes=["MXFP8"])
    assert result.recipes[-1].error == result.recipes[-1].worst_error
    assert [entry.facts["linears"] for entry in result.findings if entry.code == "numerics-failed"] == [["layers.1.a"]]


def test_tokens_are_those_of_the_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "r.safetensors", {"l.0.a": (64, 1.0), "head": (64, 1.0)}, heads=("head",))
    assert run_numerics(path, recipes=["MXFP8"]).tokens == 64


def test_tokens_that_must_be_padded_are_said_once() -> None:
    padded = [(one.facts["recipes"], one.facts["padded"]) for one in padded_tokens(1000, ["BF16", *RECIPES], "")]
    assert padded == [(["FP8Current", "FP8Delayed", "NVFP4"], 1008), (["MXFP8"], 1024)]
    assert not list(padded_tokens(1024, RECIPES, ""))


def test_linears_that_do_not_count_cause_no_warnings(tmp_path: Path) -> None:
    """A head stays in BF16, so a vocabulary that no recipe can run changes nothing."""
    path = write(tmp_path / "small.safetensors", {"l.0.a": (64, 1.0), "head": (50, 1.0)}, heads=("head",))
    assert not run_numerics(path, recipes=["MXFP8"]).has("numerics-failed")


def test_synthetic_tensors_of_a_model() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    job = ModelRun(load_model(**sizes), RunSpec(micro_batch_size=1, sequence_length=128))
    result = run_numerics(synthetic="outliers", job=job, recipes=["MXFP8", "NVFP4"])
    assert result.source == "synthetic"
    errors = {one.recipe: one.error for one in result.recipes}
    assert errors["MXFP8"] < errors["NVFP4"]


COUNT = 400


@pytest.mark.real_process
def test_ctrl_c_keeps_what_was_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = {f"l.{index}.a": (64, 1.0) for index in range(COUNT)}  # more than the buffer of a pipe
    path = write(tmp_path / "many.safetensors", linears)
    taken = requests.ComputedErrors.take

    def take(result: requests.ComputedErrors, message: requests.ErrorsMessage) -> None:
        taken(result, message)
        if result.done == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    monkeypatch.setattr(requests.ComputedErrors, "take", take)
    result = run_numerics(path, recipes=["MXFP8"])
    assert result.has("numerics-interrupted")
    assert 3 <= len(result.linears) == result.sample_count < COUNT
    whole = result.model_copy(update={"interrupted": False, "linears": 2 * result.linears})
    whole.save(tmp_path / "run.json")
    result.save(tmp_path / "run.json")
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["run.interrupted.json", "run.json"]
    delivered: list[NumericsResult] = []
    with raised(), pytest.raises(Interrupted) as ended:  # as on the command line
        run_numerics(path, recipes=["MXFP8"], deliver=delivered.append)
    assert len(delivered) == 1
    assert delivered[0].has("numerics-interrupted")
    assert f"{len(delivered[0].linears)} of {COUNT} linears" in ended.value.outcome


def test_a_worker_that_dies_is_reported(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "WORKER", "gemmscope.no_such_worker")
    with refused("exit code 1"):
        run_numerics(recording, recipes=["MXFP8"])


def test_a_missing_fact_is_one_error_and_not_one_for_every_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: str) -> None:
        raise MissingFactError("recipe/quantizers.toml", "recipes.MXFP8")

    monkeypatch.setattr(worker, "operands", missing)
    with pytest.raises(MissingFactError) as caught:
        next(
            worker.compute(
                requests.ErrorsRequest(requests.TensorSource("synthetic", "normal", sizes={"a": (64, 64)}), ("MXFP8",))
            )
        )
    assert caught.value.key == "recipes.MXFP8"


def test_invalid_files_and_arguments(tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "bench"}))
    for path in (other, tmp_path / "missing.safetensors"):
        with refused(path.name):
            run_numerics(path, recipes=["MXFP8"])
    with refused_with_hint("no tensors", hint=("gemmscope.record_tensors", "checkpoint", "synthetic")):
        run_numerics()
    with refused("recording", "synthetic"):
        run_numerics(recording, synthetic="normal")
    with refused_with_hint("synthetic", "normal", "model", hint=("preset",)):
        run_numerics(synthetic="normal")
    with refused_with_hint("synthetic", "uniform", hint=("normal", "heavy", "outliers")):
        run_numerics(synthetic="uniform")
    for bound in (0.0, 1.5, float("nan")):
        with refused("bound", bound, 0, 1):
            run_numerics(recording, bound=bound)
    with refused_with_hint("device", "tpu", hint=("cpu", "cuda")):
        run_numerics(recording, device="tpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("torch"):
        run_numerics(recording)


def test_recipes_by_name_and_backend() -> None:
    assert chosen_recipes(None, "torchao") == ["BF16", "FP8Tensorwise", "FP8Rowwise", "FP8RowwiseGWHP", "MXFP8", "NVFP4"]
    with refused_with_hint("FP8Block", "torchao", hint=("transformer_engine",)):
        chosen_recipes(["FP8Block"], "torchao")
    with refused_with_hint("backend", "cpu", hint=("transformer_engine", "torchao")):
        chosen_recipes(None, "cpu")
    with refused_with_hint("recipes", hint=("MXFP8",)):
        chosen_recipes([], "")


def test_later_recordings_of_the_same_training(recording: Path, tmp_path: Path) -> None:
    later = write(tmp_path / "later.safetensors", {"l.0.a": (64, 100.0), "l.1.b": (40, 1.0), "l.2.c": (64, 1.0)})
    result = run_numerics(recording, recipes=["MXFP8"], later=[str(later)])
    first, second = result.moments
    assert first.recipes[0].recipe == second.recipes[0].recipe == "MXFP8"
    assert first.recipes == result.recipes
    assert second.recipes == run_numerics(later, recipes=["MXFP8"]).recipes
    assert second.octaves["X"] > first.octaves["X"], "an outlier"
    (shown,) = (one for one in document(result).tables() if one.title == "Recordings of one training")
    assert len(shown.rows) == 2
    with refused("missing.safetensors"):
        run_numerics(recording, later=[str(tmp_path / "missing.safetensors")])
