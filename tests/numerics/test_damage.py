"""Predicted damage compared with what quantization does to a small model that is trained here: benchmarks/damage.py, reduced."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import damage  # noqa: E402
import gemmscope  # noqa: E402
from gemmscope.document import document  # noqa: E402
from gemmscope.numerics.evaluation.error_table import with_arriving_errors  # noqa: E402
from gemmscope.numerics.evaluation.mixes import with_mix  # noqa: E402
from gemmscope.numerics.recording import read_recording  # noqa: E402
from gemmscope.results.numerics import NumericsResult  # noqa: E402
from support.recorded import measure_few  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, NumericsResult]:
    """A Llama with two layers after 60 steps on text, and its recording."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BATCH": 8, "LENGTH": 64, "WIDTH": 64}.items():
            patch.setattr(damage, name, value)
        measure_few(patch)
        model = damage.build("llama2", 0)
        loss = damage.train(model, damage.Batches(0), 60)
        assert loss < 3.5, "it has learned something"
        result = damage.record(model, damage.Batches(500), tmp_path_factory.mktemp("damage") / "r.safetensors", 4)
        unseen = damage.Batches(0, held_out=True)
        batches = [unseen.next() for _ in range(4)]
    torch.set_num_threads(threads)
    return (model, batches), result


def test_predicted_damage_is_the_divergence_of_other_batches(trained: tuple[Any, NumericsResult]) -> None:
    (model, batches), result = trained
    units, known = damage.units_of(model), damage.predicted(result)
    measured = damage.divergences(model, units, batches)
    predicted = {path: known[damage.cells_of(path)]["damage"] for path in units}
    assert len(units) == 14
    assert damage.rank_correlation(list(predicted.values()), list(measured.values())) > 0.9
    assert max(measured.values()) > 10 * min(measured.values()), "or all linears are alike"
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.5)
    by_error = damage.rank_correlation([known[damage.cells_of(path)]["error"] for path in units], list(measured.values()))
    assert by_error < 0.7, "relative errors do not tell"


def test_the_mix_is_nearly_the_best_one_by_divergence(trained: tuple[Any, NumericsResult]) -> None:
    (model, batches), result = trained
    units = damage.units_of(model)
    truth = {"kl": damage.divergences(model, units, batches)}
    compared = damage.mixes(model, result, truth, units, batches)
    assert compared
    assert all(one["chosen"] <= 1.25 * one["best"] for one in compared)


def test_noise_of_weight_gradients(trained: tuple[Any, NumericsResult]) -> None:
    """Against a float32 backward pass of the quantized model, over several batches."""
    (model, batches), result = trained
    units, known = damage.units_of(model), damage.predicted(result)
    truth = damage.gradient_errors(model, units, batches)
    for name, least in (("noise", 0.9), ("own_noise", 0.9)):
        predicted = [known[damage.cells_of(path)][name] for path in units]
        assert damage.rank_correlation(predicted, [truth[path][name] for path in units]) > least, name


def test_errors_of_dgrad_arrive_at_earlier_layers(trained: tuple[Any, NumericsResult]) -> None:
    """The last linear gets none of them; every other one gets more than its own."""
    _, result = trained
    own = [one for one in result.linears if one.recipe == damage.RECIPE and one.layer is not None]
    again = with_arriving_errors(own)
    more = {one.name for before, one in zip(own, again, strict=True) if one.gradient.noise > before.gradient.noise}
    assert {one.name for one in own} - more == {"model.layers.1.mlp.down_proj"}


def test_a_gradient_that_is_all_error_counts_in_the_mix(trained: tuple[Any, NumericsResult]) -> None:
    """A linear with little forward damage is kept, if its gradient's error is far above the gradient's own noise."""
    _, result = trained
    damages = {one.name: one.damage for one in result.linears if one.recipe == damage.RECIPE}
    harmless = min(damages, key=lambda name: damages[name] or 0.0)
    linears = [
        one.model_copy(update={"gradient": one.gradient.model_copy(update={"bias": 100 * one.gradient.own_noise})})
        if one.name == harmless and one.recipe == damage.RECIPE
        else one
        for one in result.linears
    ]
    mixed = with_mix(result.model_copy(update={"linears": tuple(linears)}), bound=0.05).mixed
    assert mixed is not None
    assert mixed.chosen is not None
    layer, linear = damage.cells_of(harmless)
    assert linear in mixed.chosen.linears or layer < mixed.chosen.first_layers or layer >= 2 - mixed.chosen.last_layers


def test_a_probe_measures_the_divergence_in_the_training_itself(
    trained: tuple[Any, NumericsResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, batches), _ = trained
    measure_few(monkeypatch)
    model.train()
    state = torch.get_rng_state()
    with gemmscope.record_tensors(
        model, tmp_path / "r.safetensors", steps=1, after=0, probe=lambda: model(input_ids=batches[0]).logits
    ) as recording:
        model(input_ids=batches[0], labels=batches[0]).loss.backward()
        recording.step()
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    probes = {(one.recipe, one.layer): one for one in read_recording(tmp_path / "r.safetensors").probes}
    assert {recipe for recipe, _ in probes} == {"FP8Current", "FP8Block", "MXFP8", "NVFP4"}
    units = damage.units_of(model)
    every = [unit for own in units.values() for unit in own]
    first = [unit for path, own in units.items() if damage.layer_of(path) == 0 for unit in own]
    truth = damage.divergences(model, {"all": every, "first": first}, batches[:1])
    assert probes["NVFP4", None].divergence == pytest.approx(truth["all"], rel=1e-3)
    assert probes["NVFP4", 0].divergence == pytest.approx(truth["first"], rel=1e-3)
    assert (probes["NVFP4", None].linears, probes["NVFP4", 0].linears) == (14, 7)
    result = gemmscope.quantization_errors(tmp_path / "r.safetensors", recipes=["NVFP4"])
    shown = {(one.recipe, one.layer): one for one in result.probed}
    assert shown["NVFP4", None].predicted == pytest.approx(shown["NVFP4", None].measured, rel=0.7)
    assert shown["MXFP8", None].predicted is None
    assert "Damage, predicted and measured" in [table.title for table in document(result).tables()]


def test_a_probe_that_fails_costs_nothing_else(
    trained: tuple[Any, NumericsResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model, batches), _ = trained
    measure_few(monkeypatch)

    def fails() -> torch.Tensor:
        raise RuntimeError("no batch")

    other = torch.randn(2, 8)  # as where weights are sharded or compiled: none of them is seen
    probes = {
        "no batch": fails,
        "must return logits": lambda: model(input_ids=batches[0]),
        "none of the recorded weights": other.clone,
    }
    for message, probe in probes.items():
        with gemmscope.record_tensors(model, tmp_path / "r.safetensors", steps=1, after=0, probe=probe) as recording:
            model(input_ids=batches[0], labels=batches[0]).loss.backward()
            recording.step()
        said = capsys.readouterr().err
        assert "nothing was probed, the recording is complete" in said
        assert message in said
        assert read_recording(tmp_path / "r.safetensors").probes == ()
        assert all(module.training for module in model.modules())
