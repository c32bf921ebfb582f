"""What is measured of a linear, compared with its whole tensors; and how much work that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gemmscope.numerics import measure  # noqa: E402
from gemmscope.numerics.evaluation.error_table import completed  # noqa: E402
from gemmscope.numerics.evaluation.linear_errors import growth_of_maxima, linear_error  # noqa: E402
from gemmscope.numerics.measure import Drawn, LinearMeasurement, WeightPieces, weight_numbers  # noqa: E402
from gemmscope.numerics.quantizers import operands  # noqa: E402
from gemmscope.numerics.recording import LinearFacts, StepFacts, TensorFacts, earlier_maxima, operand_numbers, step_facts  # noqa: E402  # noqa: E402
from gemmscope.results.numerics import PassError  # noqa: E402

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


def measured(whole: Tensors, seed: int = 0, *, step: int = 0, delayed: dict[Any, float] | None = None) -> StepFacts:
    x, w, dy = whole
    sums = LinearMeasurement(x, w, dy, x.dtype, seed, delayed=delayed or {}).numbers()
    return step_facts(step, len(x), {key: values.tolist() for key, values in sums.items()})


def linear(whole: Tensors, *steps: StepFacts) -> LinearFacts:
    outputs, inputs = whole[1].shape
    return LinearFacts(name="layers.0.q", linear="q", layer=0, inputs=inputs, outputs=outputs, steps=steps or (measured(whole),))


def quantized(whole: Tensors, recipe: str, pass_name: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact output of a GEMM and the one of quantized operands."""
    by_name = dict(zip(("X", "W", "dY"), whole, strict=True))
    pair = operands(recipe, pass_name)
    exact = [(by_name[one.tensor].T if one.columnwise else by_name[one.tensor]).float().contiguous() for one in pair]
    generator = torch.Generator().manual_seed(seed)
    first, second = (one.quantizer(values, generator=generator).values for one, values in zip(pair, exact, strict=True))
    return exact[0] @ exact[1].T, first @ second.T


def full_error(whole: Tensors, recipe: str, pass_name: str) -> float:
    """Of the whole tensors; with stochastic rounding, the root mean square of 8 roundings."""
    squares = []
    for seed in range(8 if recipe == "NVFP4" and pass_name != "fprop" else 1):
        exact, low = quantized(whole, recipe, pass_name, seed)
        squares.append(float((low - exact).double().square().sum() / exact.double().square().sum()))
    return (sum(squares) / len(squares)) ** 0.5


def error_of(facts: LinearFacts, recipe: str, pass_name: str) -> PassError:
    return next(one for one in linear_error(facts, recipe).passes if one.pass_name == pass_name)


@pytest.mark.parametrize("few", [False, True])
def test_errors_are_those_of_the_whole_tensors(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tokens and features; and of a part of them, where intervals hold the truth."""
    if few:
        monkeypatch.setattr(measure, "TOKENS", 256)
        monkeypatch.setattr(measure, "LINES", 96)
    else:
        monkeypatch.setattr(measure, "LINES", 256)
    whole = tensors()
    facts = linear(whole)
    for recipe in RECIPES:
        for pass_name in PASSES:
            truth, error = full_error(whole, recipe, pass_name), error_of(facts, recipe, pass_name).relative
            assert error.value == pytest.approx(truth, rel=0.15 if few else 0.06), (recipe, pass_name)
            if not few and recipe != "NVFP4":
                assert error.value == pytest.approx(truth, rel=1e-3)
            assert (error.half_width > 0.001) == few


@pytest.mark.parametrize("few", [False, True])
def test_damage_is_the_squared_inner_product_of_the_gradient_and_the_error(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tuple(tensor.float() for tensor in tensors(tokens=2048))
    for recipe in ("FP8Current", "NVFP4"):
        exact, low = quantized(whole, recipe, "fprop")
        truth = float(((low - exact).T * whole[2]).sum(1).square().sum() / 2)
        monkeypatch.setattr(measure, "TOKENS", 512 if few else 2048)
        facts = linear(whole, *(measured(whole, seed) for seed in range(4 if few else 1)))
        assert linear_error(facts, recipe).damage == pytest.approx(truth, rel=0.15 if few else 1e-3)
    (scaled,) = completed([linear_error(linear(whole), "NVFP4")])
    assert scaled.damage == pytest.approx(linear_error(linear(whole), "NVFP4").damage * 2048, rel=1e-6)


def test_noise_of_a_gradient_is_that_between_micro_batches() -> None:
    """Tokens that differ: the variance between many micro-batches. What all have in common is bias."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(32, 32, generator=generator)
    gradients, errors, facts = [], [], []
    common = torch.randn(32, generator=generator)
    for _ in range(24):
        x, dy = torch.randn(256, 32, generator=generator) + common, torch.randn(256, 32, generator=generator)
        exact, low = quantized((x, w, dy), "FP8Current", "wgrad")
        gradients.append(exact)
        errors.append(low - exact)
        facts.append(measured((x, w, dy), step=len(facts)))
    gradient = linear_error(linear((x, w, dy), *facts), "FP8Current").gradient
    assert gradient is not None
    assert gradient.own_noise == pytest.approx(float(torch.stack(gradients).var(0).sum()), rel=0.1)
    assert gradient.noise == pytest.approx(float(torch.stack(errors).var(0).sum()), rel=0.1)
    assert gradient.squared == pytest.approx(float(torch.stack(gradients).square().sum() / 24), rel=1e-3)
    x[:], dy[:] = common, torch.randn(32, generator=generator)  # all tokens alike, and so are their errors
    alike = measured((x, w, dy)).gemms["FP8Current/transformer_engine"]["wgrad"]
    assert alike.bias == pytest.approx(alike.squared, rel=1e-3)
    assert alike.noise == pytest.approx(0.0, abs=1e-3 * alike.squared)


def test_a_bias_counts_beyond_its_standard_error() -> None:
    """Of independent tokens, next to nothing counts; the standard error is that of many such estimates. What all tokens have in
    common counts."""
    generator, estimates, errors, counted = torch.Generator().manual_seed(0), [], [], []
    for step in range(24):
        x, dy = (torch.randn(256, 32, generator=generator) for _ in range(2))
        facts = linear((x, torch.eye(32), dy), measured((x, torch.eye(32), dy), step=step))
        gemm = facts.measured[0].gemms["NVFP4/transformer_engine"]["wgrad"]
        estimates.append(gemm.bias)
        errors.append(gemm.bias_error)
        counted.append(linear_error(facts, "NVFP4").gradient.bias)
    spread = torch.tensor(estimates).std()
    assert torch.tensor(errors).mean() == pytest.approx(float(spread), rel=0.5)
    assert sum(one > 0 for one in counted) <= 3
    alike = (x[:1].expand(256, 32).contiguous(), torch.eye(32), dy[:1].expand(256, 32).contiguous())
    whole = linear_error(linear(alike), "FP8Current").gradient
    assert whole.bias == pytest.approx(
        linear_error(linear(alike), "FP8Current").passes[2].relative.value ** 2 * whole.squared, rel=0.1
    )


@pytest.mark.parametrize("without", [("hadamard",), ("stochastic",), ("hadamard", "stochastic")])
def test_parts_of_nvfp4_are_switched_off(without: Any) -> None:
    whole = tensors(tokens=256, inputs=64, outputs=64)
    facts = linear(whole)
    by_name = dict(zip(("X", "W", "dY"), whole, strict=True))
    for one in linear_error(facts, "NVFP4", without=without).passes:
        squares = []
        for seed in range(8):
            pair, generator = operands("NVFP4", one.pass_name, without=without), torch.Generator().manual_seed(seed)
            exact = [
                (by_name[operand.tensor].T if operand.columnwise else by_name[operand.tensor]).float().contiguous()
                for operand in pair
            ]
            low = [operand.quantizer(rows, generator=generator).values for operand, rows in zip(pair, exact, strict=True)]
            squares.append((low[0] @ low[1].T - exact[0] @ exact[1].T).square().sum() / (exact[0] @ exact[1].T).square().sum())
        assert one.relative.value == pytest.approx(
            float(sum(squares) / 8) ** 0.5, rel=0.1 if "stochastic" not in without else 1e-3
        )
    assert linear_error(facts, "MXFP8", without=without) == linear_error(facts, "MXFP8")
    assert linear_error(facts, "NVFP4", without=without) != linear_error(facts, "NVFP4")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 2.0**99, width=32), min_size=1, max_size=60), st.integers(1, 40), st.floats(0, 0.999))
def test_a_draw_keeps_every_sum(shares: list[float], count: int, offset: float) -> None:
    """The weights of drawn items add up to the number of all: exactly if all are drawn, nearly if not."""
    drawn = Drawn.of([torch.tensor(shares)], count, offset)
    assert len(drawn.index) == len(drawn.weights) == min(count, len(shares))
    assert drawn.complete == (count >= len(shares))
    assert (drawn.weights > 0).all()
    assert float(drawn.weights.max()) <= len(shares) / min(count, len(shares)) / measure.FIXED + 1e-3


def test_every_item_is_drawn_as_often_as_its_weight_says() -> None:
    shares = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 100.0])
    hits = torch.zeros(6)
    for number in range(400):
        drawn = Drawn.of([shares], 3, (number + 0.5) / 400)
        hits.index_add_(0, drawn.index, drawn.weights)
    assert (hits / 400 - 1).abs().max() < 0.02


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_draw_without_usable_shares(bad: float) -> None:
    drawn = Drawn.of([torch.full((8,), bad)], 2, 0.5)
    assert ((drawn.index >= 0) & (drawn.index < 8)).all()


def test_pieces_of_a_weight_are_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tuple(tensor.float() for tensor in tensors(tokens=64, inputs=160, outputs=400))
    at_once = measured(whole)
    monkeypatch.setattr(measure, "CPU_PIECE", 160 * 128)
    pieces = WeightPieces(LinearMeasurement(*whole, torch.float32, 0))
    assert [at.stop - at.start for at, _ in pieces.pieces()] == [128, 128, 128, 16]
    for kept in (4, 0):
        monkeypatch.setattr(measure, "MOST_KEPT", kept)
        in_pieces = measured(whole)
        for name, gemms in at_once.gemms.items():
            for pass_name in ("fprop", "dgrad"):
                if pass_name in gemms and "stochastic" not in str(measure.variants()[name][pass_name]):
                    assert in_pieces.gemms[name][pass_name].squared == pytest.approx(gemms[pass_name].squared, rel=1e-3), name
    assert in_pieces.tensors["W"].norm == pytest.approx(float(whole[1].norm()), rel=1e-4)
    assert in_pieces.tensors["W"].amax == float(whole[1].abs().max())


def test_the_error_of_a_weight_alone() -> None:
    _, w, _ = tensors()
    own = {name: operand_numbers(values.tolist()) for name, values in weight_numbers(w, torch.bfloat16).items()}
    for recipe in ("FP8Current", "NVFP4"):
        low = operands(recipe, "fprop")[0].quantizer(w.float()).values
        assert own[f"{recipe}/transformer_engine"].relative == pytest.approx(float((low - w).norm() / w.float().norm()), rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_that_a_recipe_can_hold_have_no_error(recipe: str) -> None:
    """±1 and 0 are exact with any power-of-two scale; scales of whole tensors are 448 / 1, whose products are exact too."""
    generator = torch.Generator().manual_seed(3)
    whole = tuple(torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ((128, 64), (96, 64), (128, 96)))
    for one in linear_error(linear(whole), recipe).passes:
        if recipe == "NVFP4" and one.pass_name == "wgrad":  # the Hadamard transform makes other values of them
            continue
        assert one.relative.value < 1e-6
        assert all(operand.relative < 1e-6 and operand.underflow == 0 and operand.saturated == 0 for operand in one.operands)


@settings(max_examples=3, deadline=None)
@given(st.sampled_from(("FP8Current", "FP8Block", "MXFP8", "FP8Rowwise")), st.integers(-20, 20))
def test_powers_of_two_do_not_matter(recipe: str, power: int) -> None:
    whole = tensors(1, tokens=128, inputs=64, outputs=32)
    scaled = tuple(tensor * 2.0**power for tensor in whole)
    before, after = (linear_error(linear(tensors_of), recipe) for tensors_of in (whole, scaled))
    for one, other in zip(before.passes, after.passes, strict=True):
        assert other.relative.value == pytest.approx(one.relative.value, rel=1e-3)
        assert other.first_share == pytest.approx(one.first_share, abs=1e-3)
    assert after.damage == pytest.approx(before.damage * 2.0 ** (6 * power), rel=1e-3)


def test_fewer_bits_lose_more_and_the_weight_gradients_cosine_follows() -> None:
    facts = linear(tensors())
    errors = {recipe: linear_error(facts, recipe) for recipe in ("BF16", "MXFP8", "NVFP4")}
    values = [error.error for error in errors.values()]
    assert values == sorted(values, key=lambda value: value or 0.0)
    assert (errors["BF16"].error, errors["BF16"].damage) == (0.0, 0.0)
    assert errors["NVFP4"].damage > errors["MXFP8"].damage > 0
    for name in PASSES:
        fine, coarse = (error_of(facts, recipe, name) for recipe in ("MXFP8", "NVFP4"))
        assert coarse.cosine is not None
        assert fine.cosine is not None
        assert coarse.cosine < fine.cosine < 1
        assert 1 - fine.cosine == pytest.approx(fine.relative.value**2 / 2, rel=0.1)


def test_first_share_is_that_of_the_operand_with_the_error() -> None:
    """W in bfloat16 that FP8 holds exactly: all of the error of fprop comes from X."""
    x, w, dy = tensors()
    error = error_of(linear((x, torch.sign(w.float()).bfloat16(), dy)), "FP8Current", "fprop")
    assert error.first_share < 0.01
    assert error.operands[0].relative < 1e-6 < error.operands[1].relative


def test_underflow_saturation_and_octaves_of_an_operand() -> None:
    """A value of 2^30 next to ones in a tensor: E4M3 with one scale loses all the others."""
    x, w, dy = tensors()
    x = torch.ones_like(x)
    x[0, 0] = 2.0**30
    operand = error_of(linear((x, w, dy)), "FP8Current", "fprop").operands[1]
    assert operand.underflow > 0.9
    assert operand.octaves == 30
    assert operand.saturated == 0


def test_delayed_scaling_takes_the_larger_one_of_history_and_step() -> None:
    whole = tensors()
    own = {name: float(tensor.abs().max()) for name, tensor in zip(("X", "W", "dY"), whole, strict=True)}
    errors = []
    for factor in (0.5, 1.7):
        facts = linear(whole, measured(whole, delayed={name: amax * factor for name, amax in own.items()}))
        errors.append([error_of(facts, recipe, "fprop").relative.value for recipe in ("FP8Delayed", "FP8Current")])
    assert errors[0][0] == errors[0][1]
    assert errors[1][0] != errors[1][1]


def test_growth_of_maxima() -> None:
    whole = tensors()

    def step_with(amax: float, step: int) -> StepFacts:
        return StepFacts(step=step, tensors={name: TensorFacts(amax=amax) for name in ("X", "W", "dY")})

    earlier = (step_with(1.0, 0), step_with(2.0, 1))
    assert earlier_maxima(earlier, 2) == {"X": 2.0, "W": 2.0, "dY": 2.0}
    growth = {one.tensor: one.growth for one in growth_of_maxima(linear(whole, *earlier, measured(whole, step=2)))}
    assert growth["X"] == pytest.approx(float(whole[0].abs().max()) / 2)
    assert not list(growth_of_maxima(linear(whole)))  # a first step has no history
    broken = linear(whole, step_with(1.0, 0), measured((whole[0], whole[1], with_nan(whole[2])), step=1))
    assert {one.tensor for one in growth_of_maxima(broken)} == {"X", "W"}


def failure_of(facts: LinearFacts, recipe: str = "MXFP8") -> str:
    result = linear_error(facts, recipe)
    assert result.failure == "" or not result.passes
    return result.failure


def test_one_clear_failure_for_nan_shapes_and_zero_outputs() -> None:
    x, w, dy = tensors(tokens=128, inputs=64, outputs=32)
    assert failure_of(linear((with_nan(x), with_nan(w), dy))) == "W has NaN or Inf values in step 0"
    odd = tensors(tokens=128, inputs=64, outputs=40)
    assert "output features = 40 is not a multiple of 32" in failure_of(linear(odd))
    assert linear_error(linear(odd), "BF16").passes
    nothing = linear((torch.zeros_like(x), torch.zeros_like(w), torch.zeros_like(dy)))
    assert "output is zero in all of its GEMMs" in failure_of(nothing)
    silent = linear_error(linear((x, w, torch.zeros_like(dy))), "MXFP8")
    assert [one.pass_name for one in silent.passes] == ["fprop"]  # what can be computed still is
    assert not silent.dropped


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
    intact = linear_error(linear((whole["X"], whole["W"], whole["dY"])), recipe)
    result = linear_error(linear((x, w, dy)), recipe)
    assert [one.pass_name for one in result.passes] == computed
    assert [(one.pass_name, one.steps, one.reason) for one in result.dropped] == [
        (one, (0,), f"{name} has NaN or Inf values") for one in dropped
    ]
    expected = next(one for one in intact.passes if one.pass_name == computed[0])
    assert result.passes[0].relative.value == pytest.approx(expected.relative.value, rel=0.05)


def test_a_step_with_nan_leaves_the_other_measured_steps() -> None:
    x, w, dy = tensors(tokens=128, inputs=64, outputs=32)
    good, bad = measured((x, w, dy)), measured((x, w, with_nan(dy)), step=1)
    both, alone = (linear_error(linear((x, w, dy), *steps), "MXFP8") for steps in ((good, bad), (good,)))
    assert [one.pass_name for one in both.passes] == ["fprop", "dgrad", "wgrad"]
    assert both.passes[1:] == alone.passes[1:]
    assert both.damage == alone.damage
    assert [(one.pass_name, one.steps) for one in both.dropped] == [("dgrad", (1,)), ("wgrad", (1,))]


def test_tokens_need_no_alignment() -> None:
    """100 tokens: training pads them with zeros, and so does the reference, whose 8 roundings vary too."""
    x, w, dy = tensors(tokens=100, inputs=64, outputs=32)
    padded = tuple(torch.nn.functional.pad(tensor, (0, 0, 0, 28)) for tensor in (x, dy))
    for recipe in ("MXFP8", "NVFP4"):
        estimate = error_of(
            linear((x, w, dy), *(measured((x, w, dy), seed) for seed in range(8))), recipe, "wgrad"
        ).relative.value
        assert estimate == pytest.approx(full_error((padded[0], w, padded[1]), recipe, "wgrad"), rel=0.07), recipe


# --- the work ---------------------------------------------------------------------------------------------------------------

VIEWS = ("alias", "view", "aten.t.", "transpose", "squeeze", "slice", "expand", "select", "detach", "unbind", "split", "permute")


class Work(TorchDispatchMode):
    """Counts the operations that compute, the values that they write, and the FLOPs of GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.values = self.flops = self.read_back = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = str(func)
        self.read_back += "_local_scalar_dense" in name or ("nonzero.default" in name and "count" not in name)
        if not any(view in name for view in VIEWS):
            self.operations += 1
            written = sum(one.numel() for one in flat(output))
            self.values += written
            if name.startswith(("aten.mm", "aten.bmm")):
                self.flops += 2 * written * args[0].shape[-1]
        return output


def flat(output: Any) -> Iterator[torch.Tensor]:
    for one in output if isinstance(output, (tuple, list)) else [output]:
        if isinstance(one, torch.Tensor):
            yield one


def work(tokens: int, inputs: int, outputs: int) -> Work:
    x, w, dy = (torch.ones(size, dtype=torch.bfloat16) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    counted = Work()
    with counted:
        LinearMeasurement(x, w, dy, torch.bfloat16, 0).numbers()
    return counted


def test_the_work_of_a_measured_linear_is_bounded() -> None:
    """A recorded step measures an eighth of the linears. The bounds, for all recipes of all libraries together: 4,000
    kernels; the FLOPs of two training steps of the linear with 8,192 tokens; and nothing waits for the GPU."""
    small, large, many = work(512, 256, 256), work(2048, 1024, 512), work(4096, 1024, 512)
    for one in (small, large, many):
        assert one.operations <= 4000
        assert one.read_back == 0
    tokens, recipes = measure.TOKENS, len(measure.variants())
    of_tokens = 2 * tokens * 1024 * 512 * (4 * recipes + 3)
    of_features = 2 * measure.LINES**2 * (2 * recipes + 1)
    assert large.flops <= of_tokens + of_features * 2048 + 2**28
    assert of_tokens <= 2 * 6 * 8192 * 1024 * 512
    # twice the tokens: only wgrad reads all of them, of a few features
    assert many.flops - large.flops <= of_features * 2048 + 2**28
    assert many.values - large.values <= 2048 * (2 * measure.LINES * recipes * 40 + 20 * (1024 + 512))
    # what is written of the weight grows with its size, by a bounded number of values each
    assert large.values <= 2 * recipes * 40 * 1024 * 512 + 40 * recipes * (1024 + 512) * (tokens + 2048 // 4)
