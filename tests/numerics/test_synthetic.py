"""Synthetic tensors: always marked, the same for the same seed, of the kind that was asked for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gemmscope.errors import UserError  # noqa: E402
from gemmscope.model.spec import RunSpec, from_hyperparameters  # noqa: E402
from gemmscope.numerics.evaluation.synthetic import KINDS, synthetic_recording  # noqa: E402
from gemmscope.workload.derive import Workload, derive  # noqa: E402


def workload(hidden: int = 128) -> Workload:
    model = from_hyperparameters(hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=1, num_hidden_layers=2)
    return derive(model, RunSpec(micro_batch_size=1, sequence_length=64))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.numerics.probes.measure_probes", lambda *_, **__: {"fprop/W/e4m3": (1.0,)})


@pytest.mark.parametrize("kind", KINDS)
def test_all_linears_are_there_and_marked(kind: str) -> None:
    recording = synthetic_recording(kind, workload(), tokens=64)
    assert [(linear.name, linear.facts.inputs, linear.facts.outputs) for linear in recording.linears] == [
        ("QKV Proj", 128, 384), ("Attn Out", 128, 128), ("MLP Up", 128, 256), ("MLP Down", 256, 128)
    ]  # fmt: skip
    assert recording.source == "synthetic"
    assert recording.origin.startswith("SYNTHETIC")
    assert recording.facts.notes[0].startswith("SYNTHETIC")
    for linear in recording.linears:
        (step,) = linear.sampled_steps
        assert step.passes == ("fprop", "dgrad", "wgrad")
        assert step.facts.tokens == 64
        assert step.facts.probes


def test_the_seed_decides() -> None:
    rows = []
    for seed in (0, 0, 1):
        sample = synthetic_recording("normal", workload(), tokens=64, seed=seed).linears[0].steps[0].sample("fprop").second
        assert sample is not None
        rows.append(sample.rows)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_kinds_differ_as_they_say() -> None:
    def amax_over_rms(kind: str) -> float:
        facts = synthetic_recording(kind, workload(), tokens=256).linears[0].steps[0].facts.tensors["X"]
        assert facts.norm is not None
        return facts.amax / facts.norm * (256 * 128) ** 0.5

    normal, heavy, outliers = (amax_over_rms(kind) for kind in ("normal", "heavy", "outliers"))
    assert 3.5 < normal < 6 < heavy < 60
    assert outliers > 2 * normal


def test_large_sizes_are_scaled_down_and_that_is_said() -> None:
    recording = synthetic_recording("normal", workload(4096), tokens=32)
    assert max(linear.facts.outputs for linear in recording.linears) == 2048
    assert "scaled down" in recording.facts.notes[1]


def test_an_unknown_kind_is_one_message() -> None:
    with pytest.raises(UserError, match="is not a kind of tensors") as caught:
        synthetic_recording("outlier", workload())
    assert "did you mean outliers?" in str(caught.value)
