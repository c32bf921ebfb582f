"""The sample of a linear: unbiased, within its bytes, with maxima and norms of the whole tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from gemmscope.numerics.recording import (  # noqa: E402
    LinearFacts,
    LinearStep,
    RecordingFacts,
    StepFacts,
    read_recording,
    tensor_key,
    write_recording,
)
from gemmscope.numerics.sample import draw, random_for, sample_linear  # noqa: E402
from gemmscope.workload.ops import OPERANDS  # noqa: E402


@given(
    st.lists(st.floats(0, 1e30), min_size=1, max_size=60).map(np.array),
    st.integers(1, 70),
    st.integers(0, 1000),
)
def test_a_draw_has_as_many_different_items_as_asked(importance: np.ndarray, count: int, seed: int) -> None:
    indices, weights = draw(importance, count, random_for(seed))
    assert len(indices) == len(weights) == min(count, len(importance))
    assert (np.diff(indices) > 0).all()
    assert ((weights >= 1 - 1e-9) & (weights <= 4 * len(importance) / min(count, len(importance)) + 1e-9)).all()


@pytest.mark.parametrize("bad", [[0.0] * 8, [np.nan] * 8, [np.inf] + [1.0] * 7])
def test_without_usable_importance_all_are_alike(bad: list[float]) -> None:
    _, weights = draw(np.array(bad), 2, random_for(0))
    assert weights == pytest.approx([4.0, 4.0])


def test_every_item_is_drawn_with_the_probability_that_its_weight_says() -> None:
    importance = np.array([0.0, 1.0, 2.0, 3.0, 10.0, 100.0])
    hits, inverse, random = np.zeros(6), np.zeros(6), random_for(1)
    runs = 4000
    for _ in range(runs):
        indices, weights = draw(importance, 3, random)
        hits[indices] += 1
        inverse[indices] = weights
    expected = 1 / inverse
    assert expected.sum() == pytest.approx(3)
    assert np.abs(hits / runs - expected).max() < 4.5 * np.sqrt(0.25 / runs), "4.5 standard deviations at most"


def tensors(tokens: int = 300, inputs: int = 400, outputs: int = 500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*size, generator=generator) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    x[:, 7] *= 30
    x[11] *= 10
    return x, w, dy * torch.rand(tokens, 1, generator=generator) ** 4 * 1e-20


def sampled(budget: int, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int) -> LinearStep:
    x, w, dy = tensors(**sizes)
    facts, kept = sample_linear(x, w, dy, dtype=dtype, budget=budget, random=random_for(seed))
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept.values()) <= budget
    return LinearStep(facts, kept.__getitem__)


def test_facts_are_those_of_the_whole_tensors() -> None:
    x, w, dy = tensors()
    facts, kept = sample_linear(x, w, dy, dtype=torch.float32, budget=60_000, random=random_for(0))
    for name, tensor in {"X": x, "W": w, "dY": dy}.items():
        assert facts.tensors[name].amax == float(tensor.abs().max())
        assert facts.tensors[name].norm == pytest.approx(float(tensor.double().norm()), rel=1e-5)
        exponents = torch.frexp(tensor).exponent + 126
        assert torch.equal(kept[f"{name}.exponents"].long(), torch.bincount(exponents.flatten().clamp(min=0), minlength=256))
    outputs = {"fprop": (w, x), "dgrad": (w.T, dy), "wgrad": (x.T, dy.T)}
    for name, (first, second) in outputs.items():
        assert facts.passes[name].norm == pytest.approx(float((first.double() @ second.double().T).norm()), rel=1e-4)
        energies = first.double().square().sum(0) @ second.double().square().sum(0)
        assert facts.passes[name].product == pytest.approx(float(energies), rel=1e-4)


def test_rows_and_maxima_are_those_of_the_tensors() -> None:
    x, w, dy = tensors()
    whole = {"fprop": (w, x), "dgrad": (w.T, dy), "wgrad": (x.T, dy.T)}
    step = sampled(60_000)
    for name, facts in step.facts.passes.items():
        kept = torch.cat([torch.arange(start, min(start + 128, facts.reduced)) for start in facts.blocks])
        for operand, tensor in zip([step.sample(name, one) for one in OPERANDS[name]], whole[name], strict=True):
            distances = torch.cdist(operand.rows.double(), tensor[:, kept].double())
            index = distances.argmin(1)
            assert torch.equal(operand.rows, tensor[index][:, kept])
            assert torch.equal(operand.row_amax, tensor[index].abs().amax(1))
            relative = tensor[:, kept].double().square().sum(0) / tensor.abs().max().double() ** 2
            torch.testing.assert_close(operand.energy.double(), relative, rtol=1e-4, atol=0)
            for size, maxima in operand.block_amax.items():
                for row, number in enumerate(index.tolist()):
                    start = number // size * size
                    blocks = tensor[start : start + size].abs().amax(0)
                    expected = [float(blocks[at : at + size].max()) for at in range(0, len(blocks), size) if at in kept]
                    assert maxima[row].tolist() == expected


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([30_000, 100_000, 10_000_000]), st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_any_sizes_stay_within_their_bytes(budget: int, tokens: int, inputs: int, outputs: int) -> None:
    step = sampled(budget, dtype=torch.bfloat16, tokens=max(tokens, 12), inputs=max(inputs, 8), outputs=outputs)
    for name, facts in step.facts.passes.items():
        sample = step.sample(name, OPERANDS[name][0])
        if budget == 10_000_000:
            assert sample.weights.tolist() == [1.0] * len(sample.rows)
            assert sample.column_weights.tolist() == [1.0] * facts.reduced


def test_weighted_sums_are_unbiased() -> None:
    """The squared norm of each operand, and the sum that the ratio estimator divides by, on average over draws."""
    x, w, _ = tensors()
    exact = float((x.double().square() @ w.double().square().sum(0)).sum())
    estimates = []
    for seed in range(50):
        step = sampled(30_000, seed)
        assert 0 < len(step.facts.passes["fprop"].blocks) < 4
        first, second = step.sample("fprop", "W"), step.sample("fprop", "X")
        energy = first.energy.double() * float(w.abs().max()) ** 2 * first.column_weights
        estimates.append(float(second.weights.double() @ (second.rows.double().square() @ energy)))
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - exact) < 4 * error
    assert error / exact < 0.08


def test_nan_and_inf_are_counted_and_left_out_of_energies() -> None:
    x, w, dy = tensors()
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    facts, kept = sample_linear(x, w, dy, dtype=torch.float32, budget=60_000, random=random_for(0))
    assert facts.tensors["X"].nonfinite == 2
    assert np.isnan(facts.tensors["X"].amax)
    assert facts.passes["fprop"].norm is None
    assert np.isfinite(facts.tensors["X"].norm or np.nan)
    assert all(torch.isfinite(kept[f"{name}.energy"]).all() for name in ("fprop.first", "fprop.second", "wgrad.first"))


def test_zeros_alone_are_no_problem() -> None:
    facts, _ = sample_linear(
        torch.zeros(64, 64), torch.zeros(32, 64), torch.zeros(64, 32), dtype=torch.bfloat16, budget=60_000, random=random_for(0)
    )
    assert facts.tensors["X"].zeros == 1.0
    assert facts.passes["fprop"].norm == 0.0


def test_without_gradient_only_fprop_is_sampled() -> None:
    x, w, _ = tensors()
    facts, _ = sample_linear(x, w, None, dtype=torch.float32, budget=60_000, random=random_for(0))
    assert list(facts.passes) == ["fprop"]
    facts, _ = sample_linear(None, w, None, dtype=torch.float32, budget=60_000, random=random_for(0))
    assert list(facts.passes) == ["fprop", "dgrad"]


def test_a_sample_survives_the_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x, w, dy = tensors()
    facts, kept = sample_linear(x, w, dy, dtype=torch.bfloat16, budget=60_000, random=random_for(0))
    linear = LinearFacts(name="a", linear="a", inputs=400, outputs=500, steps=(facts,))
    stored = {tensor_key("a", 0, name): tensor for name, tensor in kept.items()}
    write_recording(tmp_path / "t", RecordingFacts(source="synthetic", linears=(linear,)), stored)
    step: StepFacts = read_recording(tmp_path / "t").linears[0].steps[0].facts
    assert step == facts
