"""Synthetic tensors: always marked, the same for the same seed, of the kind that was asked for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gemmscope.numerics.evaluation.synthetic import MAKERS, synthetic_recording  # noqa: E402
from support.recorded import measure_few  # noqa: E402


def sizes(hidden: int = 128) -> dict[str, tuple[int, int]]:
    return {
        "QKV Proj": (hidden, 3 * hidden),
        "Attn Out": (hidden, hidden),
        "MLP Up": (hidden, 2 * hidden),
        "MLP Down": (2 * hidden, hidden),
    }


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)


@pytest.mark.parametrize("kind", MAKERS)
def test_all_linears_are_there_and_marked(kind: str) -> None:
    recording, linears = synthetic_recording(kind, sizes(), tokens=64)
    assert [(linear.name, linear.inputs, linear.outputs) for linear in recording.linears] == [
        ("QKV Proj", 128, 384), ("Attn Out", 128, 128), ("MLP Up", 128, 256), ("MLP Down", 256, 128)
    ]  # fmt: skip
    assert recording.source == "synthetic"
    assert recording.origin.startswith("SYNTHETIC")
    assert recording.notes[0].startswith("SYNTHETIC")
    for linear in linears:
        (step,) = linear.measured
        assert tuple(step.outputs) == ("fprop", "dgrad", "wgrad")
        assert step.tokens == 64
        assert step.gemms


def test_the_seed_decides() -> None:
    first = [next(synthetic_recording("normal", sizes(), tokens=64, seed=seed)[1]) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


def test_kinds_differ_as_they_say() -> None:
    def amax_over_rms(kind: str) -> float:
        facts = next(synthetic_recording(kind, sizes(), tokens=256)[1]).steps[0].tensors["X"]
        assert facts.norm is not None
        return facts.amax / facts.norm * (256 * 128) ** 0.5

    normal, heavy, outliers = map(amax_over_rms, MAKERS)
    assert 3.5 < normal < 6 < heavy < 60
    assert outliers > 2 * normal


def test_large_sizes_are_scaled_down_and_that_is_said() -> None:
    recording, _ = synthetic_recording("normal", sizes(4096), tokens=32)
    assert max(linear.outputs for linear in recording.linears) == 2048
    assert "scaled down" in recording.notes[1]
