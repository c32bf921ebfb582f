"""Errors of operands and GEMMs from samples, compared with those of the whole tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gemmscope.numerics import recording  # noqa: E402
from gemmscope.numerics.evaluation.gemm_errors import SampledGemm, relative_error  # noqa: E402
from gemmscope.numerics.evaluation.linear_errors import LinearErrors, stale_scales  # noqa: E402
from gemmscope.numerics.evaluation.requests import ErrorsRequest, TensorSource  # noqa: E402
from gemmscope.numerics.evaluation.worker import errors_of  # noqa: E402
from gemmscope.numerics.probes import compute_probes  # noqa: E402
from gemmscope.numerics.quantizers import operands  # noqa: E402
from gemmscope.numerics.recording import (  # noqa: E402
    HISTORY,
    LinearFacts,
    LinearStep,
    RecordedLinear,
    StepFacts,
    TensorFacts,
    scale_maxima,
)
from gemmscope.numerics.sample import random_for, sample_linear  # noqa: E402
from gemmscope.results.numerics import LinearError, PassError  # noqa: E402

RECIPES = ("FP8Current", "FP8Block", "MXFP8", "NVFP4", "FP8Rowwise")
PASSES = ("fprop", "dgrad", "wgrad")
Tensors = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


def tensors(seed: int = 0, tokens: int = 512, inputs: int = 256, outputs: int = 192) -> Tensors:
    """X with outlier channels and tokens that repeat, as in the first layer; W; dY, alike for equal tokens, a few rows large."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(40, (tokens,), generator=generator)
    x = torch.randn(40, inputs, generator=generator)[token]
    x[:, torch.randperm(inputs, generator=generator)[:4]] *= 20
    w = torch.randn(outputs, inputs, generator=generator) * 0.02
    dy = torch.randn(tokens, outputs, generator=generator) + torch.randn(40, outputs, generator=generator)[token]
    dy[torch.randperm(tokens, generator=generator)[:16]] *= 8
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def recorded(
    whole: Tensors, seed: int = 0, *, probes: bool = True, earlier: tuple[StepFacts, ...] = (), with_history: bool = True
) -> RecordedLinear:
    """A linear as the recorder keeps it, in 100 kB; `with_history`: probes know the maxima of earlier steps."""
    facts, kept = sample_linear(*whole, dtype=whole[0].dtype, budget=100_000, random=random_for(seed), step=len(earlier))
    if probes:
        history = scale_maxima(earlier, facts) if with_history else None
        facts = facts.model_copy(update={"probes": compute_probes(*whole, random=random_for(seed, "probes"), history=history)})
    outputs, inputs = whole[1].shape
    linear = LinearFacts(name="layers.0.q", linear="q", layer=0, inputs=inputs, outputs=outputs, steps=(*earlier, facts))
    return RecordedLinear(linear, tuple(LinearStep(step, kept.__getitem__) for step in linear.steps))


def full_error(whole: Tensors, recipe: str, pass_name: str) -> float:
    """Of the whole tensors; with stochastic rounding, the root mean square of 24 roundings."""
    by_name = dict(zip(("X", "W", "dY"), whole, strict=True))
    pair = operands(recipe, pass_name)
    exact = [(by_name[one.tensor].T if one.columnwise else by_name[one.tensor]).float().contiguous() for one in pair]
    output = exact[0] @ exact[1].T
    squares = []
    for seed in range(24 if any(one.quantizer.stochastic for one in pair) else 1):
        generator = torch.Generator().manual_seed(seed)
        first, second = (one.quantizer(values, generator=generator).values for one, values in zip(pair, exact, strict=True))
        squares.append(float((first @ second.T - output).double().square().sum() / output.double().square().sum()))
    return (sum(squares) / len(squares)) ** 0.5


def error_of(linear: RecordedLinear, recipe: str, pass_name: str) -> PassError:
    return next(one for one in LinearErrors(linear).of(recipe).passes if one.pass_name == pass_name)


def test_within_five_percent_of_the_whole_tensors_and_covered() -> None:
    """Five draws of two linears: every estimate is near, and 95% intervals hold the error of the whole tensors."""
    inside = total = 0
    for number in range(2):
        whole = tensors(number)
        exact = {(recipe, name): full_error(whole, recipe, name) for recipe in RECIPES for name in PASSES}
        for seed in range(5):
            linear = LinearErrors(recorded(whole, seed))
            for recipe in RECIPES:
                for one in linear.of(recipe).passes:
                    truth = exact[recipe, one.pass_name]
                    assert one.relative.value == pytest.approx(truth, rel=0.05), (number, seed, recipe, one.pass_name)
                    assert one.relative.low is not None
                    assert one.relative.high is not None
                    inside += one.relative.low <= truth <= one.relative.high
                    total += 1
    assert inside / total > 0.9


@pytest.mark.parametrize("outliers", [False, True])
def test_values_that_are_cut_off_by_stochastic_rounding_add_up(outliers: bool) -> None:
    """Where gradients of all tokens have a common part, the Hadamard transform makes it the largest value of every block, and
    block scales that are rounded down cut it off. This error has the same sign for every token."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 128, generator=generator) + torch.randn(128, generator=generator)
    x[:, :4] *= 40 if outliers else 1
    w = torch.randn(96, 128, generator=generator)
    dy = torch.randn(1024, 96, generator=generator) * torch.randn(1024, 1, generator=generator).exp()
    dy += torch.randn(96, generator=generator)
    whole = (x.bfloat16(), w.bfloat16(), dy.bfloat16())
    truth = full_error(whole, "NVFP4", "wgrad")
    for seed in range(2):
        estimate = error_of(recorded(whole, seed), "NVFP4", "wgrad").relative
        assert estimate.value == pytest.approx(truth, rel=0.02)
        assert estimate.low <= truth <= estimate.high  # type: ignore[operator]


def test_equal_tokens_add_up_in_wgrad_and_only_probes_show_it() -> None:
    whole = tensors()
    truth = full_error(whole, "MXFP8", "wgrad")
    alone = error_of(recorded(whole, probes=False), "MXFP8", "wgrad").relative
    assert alone.value < 0.8 * truth  # the sample takes errors for uncorrelated
    probed = error_of(recorded(whole), "MXFP8", "wgrad").relative
    assert probed.value == pytest.approx(truth, rel=0.05)
    assert alone.half_width > 2 * probed.half_width


@pytest.mark.parametrize("largest", [1e-14, 1e-16, 1e-26])
def test_gradients_too_small_for_torchaos_scales_do_not_change_other_recipes(largest: float) -> None:
    """They underflow with torchao's scales of rows, whose errors must not be taken for those of blocks."""
    x, w, dy = tensors()
    whole = (x, w, dy / dy.abs().max() * largest)
    linear = recorded(whole)
    for recipe in ("FP8Block", "MXFP8", "FP8Rowwise"):
        for name in PASSES:
            assert error_of(linear, recipe, name).relative.value == pytest.approx(full_error(whole, recipe, name), rel=0.05)


def test_older_recordings_have_one_probe_for_blocks_and_rows() -> None:
    whole = tensors()
    linear = recorded(whole)
    (facts,) = linear.facts.steps
    probes = {key: values for key, values in facts.probes.items() if "blocks" not in key}
    assert len(probes) < len(facts.probes)
    older = replace(linear, steps=(replace(linear.steps[0], facts=facts.model_copy(update={"probes": probes})),))
    for name in PASSES:
        assert error_of(older, "MXFP8", name).relative.value == pytest.approx(full_error(whole, "MXFP8", name), rel=0.05)


def test_outputs_of_one_common_direction() -> None:
    """All tokens are alike, so the error of a row of W is one random number, and 512 of 2048 rows alone would miss the sum."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(128, generator=generator) + 0.1 * torch.randn(192, 128, generator=generator)
    w = torch.randn(2048, 128, generator=generator) * 0.02
    whole = (x.bfloat16(), w.bfloat16(), torch.randn(192, 2048, generator=generator).bfloat16())
    for name in ("fprop", "wgrad"):
        truths = {recipe: full_error(whole, recipe, name) for recipe in ("FP8Current", "MXFP8", "FP8Rowwise")}
        for seed in range(3):
            linear = LinearErrors(recorded(whole, seed))
            for recipe, truth in truths.items():
                error = next(one.relative for one in linear.of(recipe).passes if one.pass_name == name)
                assert error.value == pytest.approx(truth, rel=0.015)
                assert error.low is not None
                assert error.high is not None
                assert error.low <= truth <= error.high
                assert error.high / error.low < 1.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_that_a_recipe_can_hold_have_no_error(recipe: str) -> None:
    """±1 and 0 are exact with any power-of-two scale; scales of whole tensors are 448 / 1, whose products are exact too."""
    generator = torch.Generator().manual_seed(3)
    whole = tuple(torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ((128, 64), (96, 64), (128, 96)))
    for one in LinearErrors(recorded(whole)).of(recipe).passes:
        if recipe == "NVFP4" and one.pass_name == "wgrad":  # the Hadamard transform makes other values of them
            continue
        assert one.relative.value < 1e-6
        assert all(operand.relative < 1e-6 and operand.underflow == 0 and operand.saturated == 0 for operand in one.operands)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(("FP8Current", "FP8Block", "MXFP8", "FP8Rowwise")), st.integers(-20, 20))
def test_powers_of_two_do_not_matter(recipe: str, power: int) -> None:
    whole = tensors(1, tokens=128, inputs=64, outputs=32)
    scaled = tuple(tensor * 2.0**power for tensor in whole)
    before, after = (LinearErrors(recorded(tensors_of)).of(recipe) for tensors_of in (whole, scaled))
    for one, other in zip(before.passes, after.passes, strict=True):
        assert other.relative.value == pytest.approx(one.relative.value, rel=1e-3)
        assert other.first_share == pytest.approx(one.first_share, abs=1e-3)


def test_fewer_bits_lose_more_and_the_weight_gradients_cosine_follows() -> None:
    linear = recorded(tensors())
    errors = {recipe: LinearErrors(linear).of(recipe) for recipe in ("BF16", "MXFP8", "NVFP4")}
    values = [error.error for error in errors.values()]
    assert values == sorted(values, key=lambda value: value or 0.0)
    assert errors["BF16"].error == 0.0
    for name in PASSES:
        fine, coarse = (error_of(linear, recipe, name) for recipe in ("MXFP8", "NVFP4"))
        assert 0 <= fine.first_share <= 1
        assert coarse.cosine is not None
        assert fine.cosine is not None
        assert coarse.cosine < fine.cosine < 1
        assert 1 - fine.cosine == pytest.approx(fine.relative.value**2 / 2, rel=0.1)


def test_first_share_is_that_of_the_operand_with_the_error() -> None:
    """W in bfloat16 that FP8 holds exactly: all of the error of fprop comes from X."""
    x, w, dy = tensors()
    error = error_of(recorded((x, torch.sign(w.float()).bfloat16(), dy)), "FP8Current", "fprop")
    assert error.first_share < 0.01
    assert error.operands[0].relative < 1e-6 < error.operands[1].relative


def test_underflow_saturation_and_octaves_of_an_operand() -> None:
    """A value of 2^30 next to ones in a tensor: E4M3 with one scale loses all the others."""
    x, w, dy = tensors()
    x = torch.ones_like(x)
    x[0, 0] = 2.0**30
    operand = error_of(recorded((x, w, dy)), "FP8Current", "fprop").operands[1]
    assert operand.underflow > 0.9
    assert operand.octaves == 30
    assert operand.saturated == 0


def step_with(maxima: float, step: int) -> StepFacts:
    return StepFacts(
        step=step, tensors={"X": TensorFacts(amax=maxima), "W": TensorFacts(amax=maxima), "dY": TensorFacts(amax=maxima)}
    )


def test_stale_scales_saturate_what_has_grown() -> None:
    whole = tensors()
    linear = recorded(whole, earlier=(step_with(1.0, 0), step_with(2.0, 1)))
    stale = {one.tensor: one for one in stale_scales(linear, "FP8Delayed")}
    assert stale["X"].growth == pytest.approx(float(whole[0].abs().max()) / 2)
    assert stale["X"].growth > 1 < stale["dY"].growth
    assert stale["X"].saturated > 0
    assert stale["X"].relative > 5 * stale["X"].fresh_relative
    assert stale["W"].saturated == 0
    assert stale["W"].growth < 1
    current, delayed = (error_of(linear, recipe, "fprop").relative.value for recipe in ("FP8Current", "FP8Delayed"))
    assert delayed == pytest.approx(current, rel=0.2)  # two recorded steps are not the history of 1024
    assert not list(stale_scales(recorded(whole), "FP8Delayed"))  # a first step has no history
    broken = recorded((whole[0], whole[1], with_nan(whole[2])), earlier=(step_with(1.0, 0),))
    assert [one.tensor for one in stale_scales(broken, "FP8Delayed")] == ["X", "W"]


def test_maxima_of_a_history_that_is_too_short() -> None:
    own = step_with(4.0, 2)
    short = (step_with(1.0, 0), step_with(8.0, 1).model_copy(update={"tensors": {"X": TensorFacts(amax=8.0)}}))
    assert scale_maxima(short, own) == {"X": 8.0, "W": 4.0, "dY": 4.0}
    long = tuple(step_with(1.0, number) for number in range(HISTORY))
    assert scale_maxima(long, step_with(4.0, HISTORY)) == {"X": 1.0, "W": 1.0, "dY": 1.0}
    assert scale_maxima((), own) == {}


def test_delayed_scaling_follows_the_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of half of X's maximum: its largest values saturate, which few sampled rows show."""
    monkeypatch.setattr(recording, "HISTORY", 1)
    x, w, _ = whole = tensors()
    maxima = {"X": float(x.abs().max()) / 2, "W": float(w.abs().max()), "dY": 100.0}
    history = StepFacts(step=0, tensors={name: TensorFacts(amax=amax) for name, amax in maxima.items()})
    output = x.float() @ w.float().T
    first, second = (
        one.quantizer(values.float(), amax=torch.tensor(maxima[one.tensor])).values
        for one, values in zip(operands("FP8Delayed", "fprop"), (w, x), strict=True)
    )
    truth = float((second @ first.T - output).norm() / output.norm())
    for seed in range(3):
        estimate = error_of(recorded(whole, seed, earlier=(history,)), "FP8Delayed", "fprop").relative
        assert estimate.value == pytest.approx(truth, rel=0.05)
    blind = error_of(recorded(whole, earlier=(history,), with_history=False), "FP8Delayed", "fprop").relative
    assert blind.value > 3 * error_of(recorded(whole), "FP8Current", "fprop").relative.value  # not the probe's own scale
    assert blind.half_width > 0.1  # only the sample shows what saturates


def failure_of(linear: RecordedLinear, recipe: str = "MXFP8") -> str:
    result: LinearError = LinearErrors(linear).of(recipe)
    assert result.failure == "" or not result.passes
    return result.failure


def test_one_clear_failure_for_nan_shapes_and_zero_outputs() -> None:
    x, w, dy = tensors(tokens=128, inputs=64, outputs=32)
    broken = w.clone()
    broken[3, 5] = torch.nan
    assert failure_of(recorded((with_nan(x), broken, dy))) == "W has NaN or Inf values in step 0"
    odd = tensors(tokens=128, inputs=64, outputs=40)
    assert "output features = 40 is not a multiple of 32" in failure_of(recorded(odd))
    assert LinearErrors(recorded(odd)).of("BF16").passes
    assert "output is zero in all of its GEMMs" in failure_of(
        recorded((torch.zeros_like(x), torch.zeros_like(w), torch.zeros_like(dy)))
    )
    silent = LinearErrors(recorded((x, w, torch.zeros_like(dy)))).of("MXFP8")
    assert [one.pass_name for one in silent.passes] == ["fprop"]  # what can be computed still is
    assert not silent.dropped


@pytest.mark.parametrize(("key", "kept"), [("fprop/W/e4m3", 3), ("fprop/e4m3+e4m3", 1)])
def test_a_truncated_probe_costs_its_linear_only(key: str, kept: int) -> None:
    linear = recorded(tensors(tokens=128, inputs=64, outputs=32))
    step = linear.steps[0].facts
    cut = step.model_copy(update={"probes": {**step.probes, key: step.probes[key][:kept]}})
    damaged = replace(linear, steps=(replace(linear.steps[0], facts=cut),))
    request = ErrorsRequest(TensorSource("recording", ""), ("BF16", "FP8Current"))
    for one, problems in ((damaged, (key, f"{kept} value")), (linear, ())):
        errors = errors_of(one, request).errors
        assert [bool(error.passes) for error in errors] == [not problems] * 2
        assert all(part in error.failure for error in errors for part in problems)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    broken = tensor.clone()
    broken[3, 5] = torch.nan
    return broken


@pytest.mark.parametrize(
    ("name", "computed", "dropped"),
    [("X", ["dgrad"], ["fprop", "wgrad"]), ("W", ["wgrad"], ["fprop", "dgrad"]), ("dY", ["fprop"], ["dgrad", "wgrad"])],
)
@pytest.mark.parametrize("recipe", ["FP8Delayed", "FP8Block", "MXFP8", "NVFP4"])
def test_nan_in_one_tensor_drops_only_the_passes_that_read_it(
    name: str, computed: list[str], dropped: list[str], recipe: str
) -> None:
    whole = dict(zip(("X", "W", "dY"), tensors(tokens=128, inputs=64, outputs=32), strict=True))
    x, w, dy = ({**whole, name: with_nan(whole[name])}[tensor] for tensor in ("X", "W", "dY"))
    intact = LinearErrors(recorded((whole["X"], whole["W"], whole["dY"]))).of(recipe)
    result = LinearErrors(recorded((x, w, dy))).of(recipe)
    assert [one.pass_name for one in result.passes] == computed
    assert [(one.pass_name, one.steps, one.reason) for one in result.dropped] == [
        (one, (0,), f"{name} has NaN or Inf values") for one in dropped
    ]
    expected = next(one for one in intact.passes if one.pass_name == computed[0])
    assert result.passes[0].relative.value == pytest.approx(expected.relative.value, rel=0.05)


def test_a_step_with_nan_leaves_the_other_sampled_steps() -> None:
    x, w, dy = tensors(tokens=128, inputs=64, outputs=32)
    good, bad = recorded((x, w, dy)), recorded((x, w, with_nan(dy)))
    later = replace(bad.steps[0], facts=bad.steps[0].facts.model_copy(update={"step": 1}))
    both = LinearErrors(replace(good, steps=(*good.steps, later))).of("MXFP8")
    alone = LinearErrors(good).of("MXFP8")
    assert [one.pass_name for one in both.passes] == ["fprop", "dgrad", "wgrad"]
    assert both.passes[1:] == alone.passes[1:]
    assert [(one.pass_name, one.steps) for one in both.dropped] == [("dgrad", (1,)), ("wgrad", (1,))]


def test_intervals_of_several_steps_are_narrower() -> None:
    whole = tensors(tokens=128, inputs=64, outputs=32)
    linear = recorded(whole)
    step = linear.sampled_steps[0]
    gemm = SampledGemm(step, "fprop")
    noise = gemm.noise(operands("NVFP4", "fprop"), {})[0]
    one, four = relative_error([noise]), relative_error([noise] * 4)
    assert four.value == pytest.approx(one.value)
    assert four.half_width <= one.half_width


def test_tokens_need_no_alignment() -> None:
    """100 tokens: training pads them with zeros, and so does the reference, whose 24 roundings vary too."""
    x, w, dy = tensors(tokens=100, inputs=64, outputs=32)
    linear = recorded((x, w, dy))
    padded = tuple(torch.nn.functional.pad(tensor, (0, 0, 0, 28)) for tensor in (x, dy))
    for recipe in ("MXFP8", "NVFP4"):
        estimate = error_of(linear, recipe, "wgrad").relative.value
        assert estimate == pytest.approx(full_error((padded[0], w, padded[1]), recipe, "wgrad"), rel=0.06), recipe
