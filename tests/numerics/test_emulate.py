"""Emulated linears: their three GEMMs against a plain reference, and everything else of the module untouched."""

import pytest

from gemmscope.errors import UserError
from gemmscope.numerics.quantizers import operands
from gemmscope.recipe.recipes import recipes

torch = pytest.importorskip("torch", reason="linears need torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gemmscope.numerics.evaluation.emulate import Emulation, quantized_factors  # noqa: E402

RECIPES = [name for name in recipes() if name != "FP32"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 160), nn.Linear(160, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    output = module(x)
    return [output, *torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])]


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.detach().float() - exact.detach().float()).norm() / exact.detach().float().norm())


@pytest.mark.parametrize("name", RECIPES)
def test_three_gemms_are_those_of_quantized_operands(name: str) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 160), inputs()
    dy = torch.randn(2, 48, 160, generator=torch.Generator().manual_seed(2))
    emulation = Emulation(linear, name, seed=7)
    if emulation.delayed:  # the first call fills the history, so that the second one has scales of this very tensor
        with emulation:
            linear(x).backward(dy)
        x.grad = linear.weight.grad = linear.bias.grad = None
    with emulation:
        y = linear(x)
        y.backward(dy)

    tensors = {"X": x.detach().flatten(0, 1), "W": linear.weight.detach(), "dY": dy.flatten(0, 1)}
    random = torch.Generator().manual_seed(7)

    def product(pass_name: str) -> torch.Tensor:
        pair = []
        for operand in operands(name, pass_name):
            tensor = tensors[operand.tensor]
            pair.append(operand.quantizer(tensor.t() if operand.columnwise else tensor, generator=random).values.double())
        return (pair[1] @ pair[0].t()).float()

    assert relative(y.flatten(0, 1), product("fprop") + linear.bias) < 1e-6
    assert relative(x.grad.flatten(0, 1), product("dgrad")) < 1e-6
    assert relative(linear.weight.grad, product("wgrad")) < 1e-6
    assert relative(linear.bias.grad, dy.sum((0, 1))) < 1e-6


@pytest.mark.parametrize("name", RECIPES)
def test_operands_without_the_scale_of_the_tensor_are_exact_in_bf16(name: str) -> None:
    x = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 256)
    for pass_name in ("fprop", "dgrad", "wgrad"):
        for operand in operands(name, pass_name):
            values, _ = quantized_factors(operand.quantizer, x, None, None)
            assert torch.equal(values.bfloat16().to(values.dtype), values)


def test_bf16_is_nn_linear_bit_by_bit() -> None:
    module, x = model(torch.bfloat16), inputs(torch.bfloat16)
    plain = gradients(module, x)
    with Emulation(module, "BF16") as emulation:
        assert len(emulation.linears) == 5
        emulated = gradients(module, x)
    assert all(torch.equal(*pair) for pair in zip(emulated, plain, strict=True))


def test_autocast_quantizes_what_autocast_casts() -> None:
    module, x = model(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(module, x)
        with Emulation(module, "BF16"):
            emulated = gradients(module, x)
        with Emulation(module, "MXFP8"):
            assert module.head(x).dtype == torch.bfloat16
            assert relative(gradients(module, x)[0], plain[0]) > 0.01
    assert all(torch.equal(*pair) for pair in zip(emulated, plain, strict=True))


def test_the_module_is_left_as_it_was() -> None:
    module, x = model(), inputs()
    before, state = gradients(module, x), {name: value.clone() for name, value in module.state_dict().items()}
    copy, random = x.detach().clone(), torch.get_rng_state()
    with Emulation(module, "NVFP4"):
        changed = gradients(module, x)
    assert not torch.equal(changed[0], before[0])
    assert all(torch.equal(*pair) for pair in zip(gradients(module, x), before, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(x, copy)
    assert torch.equal(random, torch.get_rng_state())


def test_stochastic_rounding_is_seeded_and_goes_on() -> None:
    module, x = model(), inputs()

    def weight_gradients(seed: int, times: int) -> list[torch.Tensor]:
        with Emulation(module, "NVFP4", seed=seed):
            return [gradients(module, x)[2] for _ in range(times)]

    first, again, other = weight_gradients(1, 2), weight_gradients(1, 2), weight_gradients(2, 1)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_delayed_scaling_uses_the_maxima_of_earlier_steps() -> None:
    linear, x = nn.Linear(64, 64, bias=False), inputs().detach()
    with Emulation(linear, "FP8Delayed"):
        linear(x)
        fresh = linear(x)
        stale = linear(10 * x)  # saturates at the scale of the history
        recovered = linear(10 * x)
        shrunk = linear(x / 1e4)  # the history still has the largest
    with Emulation(linear, "FP8Current"):
        assert torch.equal(linear(x), fresh)
        assert torch.equal(linear(10 * x), recovered)
    assert relative(stale, linear(10 * x)) > 0.3
    assert relative(shrunk, linear(x / 1e4)) > 2 * relative(fresh, linear(x))


def test_the_first_step_of_delayed_scaling_does_not_scale() -> None:
    linear, x = nn.Linear(64, 64, bias=False), inputs().detach()
    with Emulation(linear, "FP8Delayed"):
        first = linear(x)
    weight = linear.weight.to(torch.float8_e4m3fn).float()
    assert relative(first, x.to(torch.float8_e4m3fn).float() @ weight.t()) < 1e-6


def test_rows_that_fill_no_block() -> None:
    """Tokens are padded with zeros, which adds nothing to any GEMM."""
    module, x = model(), inputs()[:1, :37].detach().requires_grad_()
    plain = gradients(module, x)
    for name, most in (("MXFP8", 0.1), ("FP8Block", 0.1), ("NVFP4", 0.4)):
        with Emulation(module, name):
            assert all(relative(*pair) < most for pair in zip(gradients(module, x), plain, strict=True))


def test_linears_are_kept_with_a_reason() -> None:
    module, x = model(), inputs()
    with Emulation(module, "MXFP8", why_kept=lambda path: "head" if path == "head" else "") as emulation:
        assert len(emulation.linears) == 4
        assert emulation.kept == {"head": "head"}
        hidden = torch.randn(4, 64)
        assert torch.equal(module.head(hidden), functional.linear(hidden, module.head.weight, module.head.bias))
        gradients(module, x)


def test_linears_that_cannot_be_emulated_stay() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    emulation = Emulation(nn.Sequential(nn.Linear(64, 72), Own(64, 64), nn.Linear(64, 64)), "MXFP8")
    assert list(emulation.linears) == ["2"]
    assert emulation.kept == {"0": "output features = 72 is not a multiple of 32", "1": "a forward pass of its own"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.ReLU(), "MXFP8"), "has no nn.Linear"),
        ((nn.Linear(64, 64), "FP9"), "unknown recipe 'FP9'"),
        ((nn.Linear(64, 64), "FP8Rowwise", "transformer_engine"), "does not run with the backend 'transformer_engine'"),
    ],
)
def test_invalid_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Emulation(*arguments[:2], backend="".join(arguments[2:]))


def test_entered_twice() -> None:
    module = model()
    with Emulation(module, "MXFP8"), pytest.raises(UserError, match="emulated already"), Emulation(module, "NVFP4"):
        pass
    assert not any("forward" in vars(part) for part in module.modules())


def test_other_dtypes_fail_as_in_pytorch() -> None:
    module = model(torch.bfloat16)
    with Emulation(module, "MXFP8"), pytest.raises(RuntimeError, match="dtype"):
        module(inputs())
