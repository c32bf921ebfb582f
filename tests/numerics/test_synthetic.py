"""Synthetic tensors: always marked, the same for the same seed, of the kind that was asked for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gemmscope.numerics.evaluation.synthetic import MAKERS, synthetic_recording  # noqa: E402


def sizes(hidden: int = 128) -> dict[str, tuple[int, int]]:
    return {
        "QKV Proj": (hidden, 3 * hidden),
        "Attn Out": (hidden, hidden),
        "MLP Up": (hidden, 2 * hidden),
        "MLP Down": (2 * hidden, hidden),
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.numerics.probes.compute_probes", lambda *_, **__: {"fprop/W/e4m3": (1.0,)})


@pytest.mark.parametrize("kind", MAKERS)
def test_all_linears_are_there_and_marked(kind: str) -> None:
    recording = synthetic_recording(kind, sizes(), tokens=64)
    assert [(linear.name, linear.facts.inputs, linear.facts.outputs) for linear in recording.linears] == [
        ("QKV Proj", 128, 384), ("Attn Out", 128, 128), ("MLP Up", 128, 256), ("MLP Down", 256, 128)
    ]  # fmt: skip
    assert recording.facts.source == "synthetic"
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
        sample = synthetic_recording("normal", sizes(), tokens=64, seed=seed).linears[0].steps[0].sample("fprop", "X")
        rows.append(sample.rows)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_kinds_differ_as_they_say() -> None:
    def amax_over_rms(kind: str) -> float:
        facts = synthetic_recording(kind, sizes(), tokens=256).linears[0].steps[0].facts.tensors["X"]
        assert facts.norm is not None
        return facts.amax / facts.norm * (256 * 128) ** 0.5

    normal, heavy, outliers = map(amax_over_rms, MAKERS)
    assert 3.5 < normal < 6 < heavy < 60
    assert outliers > 2 * normal


def test_large_sizes_are_scaled_down_and_that_is_said() -> None:
    recording = synthetic_recording("normal", sizes(4096), tokens=32)
    assert max(linear.facts.outputs for linear in recording.linears) == 2048
    assert "scaled down" in recording.facts.notes[1]
