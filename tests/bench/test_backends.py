"""The backends that multiply with PyTorch and torchao: what they quantize, lay out and refuse, as far as a CPU can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from gemmscope.choices import MODES
from gemmscope.recipe.recipes import recipe, recipes
from gemmscope.recipe.support import support
from gemmscope.workload.cases import Case, Task, tasks_of
from gemmscope.workload.ops import PASSES

torch = pytest.importorskip("torch", reason="measuring needs torch")


from gemmscope.bench.backends import torch_gemms  # noqa: E402
from gemmscope.bench.backends.base import BackendOptions, Operands, OperandStore  # noqa: E402
from gemmscope.bench.backends.torch_gemms import E2M1, Quantized, Scaling, quantize, scaling_of, swizzle  # noqa: E402
from gemmscope.recipe.precisions import precision_facts  # noqa: E402

CASE = Case("QKV Proj", 256, 384, 640)
FORWARD = replace(CASE, op="256x384x640", passes=("fprop",))
EXPERTS = Case("Experts Up", 256, 128, 192, rows=(64, 112, 80))
WITH_TORCH = [name for name, recipe in recipes().items() if "torch" in recipe.backends]
ROUNDING = {"e4m3": 0.05, "e5m2": 0.1, "e2m1": 0.25}  # relative rounding error of this many bits, with a small margin
SCALINGS = {kind: scaling_of(kind, "X") for kind in precision_facts()["scales"]} | {"block128 of W": scaling_of("block128", "W")}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def test_factors_multiply_to_the_passes() -> None:
    operands = Operands(CASE, "cpu")
    for name in PASSES:
        left, right = (factor.values.double() for factor in operands.factors(name))
        assert operands.error({name: left @ right.t()}) < 1e-12


def dequantize(quantized: Quantized, scaling: Scaling) -> Any:
    """The values that the GEMM multiplies, in float64."""
    data = quantized.data
    if data.dtype == torch.uint8:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=data.device, dtype=torch.float64)
        values = table[torch.stack([data % 16, data // 16], dim=-1).flatten(1).long()]
    else:
        values = data.double()
    rows, columns = values.shape
    scales = quantized.scales.double() * (1.0 if quantized.of_tensor is None else quantized.of_tensor.double())
    scales = scales.repeat_interleave(scaling.block[0] or rows, 0)[:rows]
    return values * scales.repeat_interleave(scaling.block[1] or columns, 1)[:, :columns]


@pytest.mark.parametrize("kind", SCALINGS)
@limits(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9).map(lambda tens: 16 * tens),
    columns=st.integers(1, 9).map(lambda tens: 32 * tens),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_values_survive_quantizing(kind: str, rows: int, columns: int, spread: float, seed: int) -> None:
    """For any size, magnitude and block, dequantized values are within the rounding error of their format."""
    scaling = SCALINGS[kind]
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16) * spread
    for number_format in ("e2m1",) if scaling.format == "e4m3" else ("e4m3", "e5m2"):
        back = dequantize(quantize(values, number_format, scaling), scaling)
        assert back.shape == values.shape
        assert float((back - values.double()).norm() / values.double().norm()) < ROUNDING[number_format]


@pytest.mark.parametrize("kind", SCALINGS)
def test_zeros_and_outliers(kind: str) -> None:
    values = torch.zeros(128, 256)
    number_format = "e2m1" if SCALINGS[kind].format == "e4m3" else "e4m3"
    assert dequantize(quantize(values, number_format, SCALINGS[kind]), SCALINGS[kind]).abs().max() < 1e-20
    values[3, 5] = 1000.0
    back = dequantize(quantize(values, number_format, SCALINGS[kind]), SCALINGS[kind])
    assert back[3, 5] == pytest.approx(1000.0, rel=ROUNDING[number_format])


def test_scales_by_block_keep_what_one_scale_loses() -> None:
    """If small values share a scale with a value ten million times larger, they lose all their bits."""
    values = torch.randn(128, 256)
    values[0, 0] = 1e7
    errors = {}
    for kind in ("tensor", "row", "block32"):
        back = dequantize(quantize(values, "e4m3", SCALINGS[kind]), SCALINGS[kind])
        errors[kind] = float((back - values)[1:].norm() / values[1:].norm())
    assert errors["tensor"] > 0.5
    assert errors["row"] < 0.05
    assert errors["block32"] < 0.05


def test_swizzled_scales_stand_where_cublas_looks() -> None:
    rows, columns = 200, 6
    scales = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    flat = swizzle(scales)
    assert flat.numel() == 256 * 8
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 3), (128, 0), (199, 5)):
        tile = (row // 128) * 2 + column // 4
        place = tile * 512 + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert flat[place] == scales[row, column]


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("name", [name for name in WITH_TORCH if recipe(name).quantizes])
def test_quantized_products_are_right(name: str, pass_name: str) -> None:
    """The quantized operands are multiplied in float64, and by PyTorch itself where the CPU has that GEMM."""
    operands = Operands(CASE, "cpu")
    asked = recipe(name)
    quantized = [
        dequantize(torch_gemms._quantized(factor, asked, pass_name), scaling_of(asked.scales, factor.tensor))
        for factor in operands.factors(pass_name)
    ]
    assert operands.error({pass_name: quantized[0] @ quantized[1].t()}) < max(
        ROUNDING[format_name] for format_name in asked.operands[pass_name]
    )
    if asked.scales in ("tensor", "row"):
        product = torch_gemms._gemm(Task(CASE, name, "pre-quantized", pass_name), asked, operands)
        assert operands.error({pass_name: product()}) < 0.1


def faked(tensor: Any) -> Any:
    """A tensor of this layout that claims to be on a GPU."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("name", [name for name in WITH_TORCH if recipe(name).quantizes])
def test_layouts_are_those_that_the_gpu_product_takes(name: str, pass_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch checks layouts and scales for CUDA without a GPU, on tensors that hold nothing."""
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    real = torch.nn.functional.scaled_mm

    def checked(a: Any, b: Any, **how: Any) -> Any:
        with fake_tensor.FakeTensorMode():
            scales = {side: [faked(scale) for scale in how.pop(side)] for side in ("scale_a", "scale_b")}
            return real(faked(a), faked(b), **scales, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", checked)
    result = torch_gemms._gemm(Task(CASE, name, "pre-quantized", pass_name), recipe(name), Operands(CASE, "cpu"))()
    t, k, n = CASE.tokens, CASE.inputs, CASE.outputs
    assert result.shape == {"fprop": (t, n), "dgrad": (t, k), "wgrad": (n, k)}[pass_name]


@pytest.mark.parametrize("pass_name", PASSES)
def test_grouped_layouts_are_those_that_the_gpu_product_takes(pass_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    real = torch._scaled_grouped_mm

    def checked(a: Any, b: Any, *scales: Any, offs: Any, **how: Any) -> Any:
        with fake_tensor.FakeTensorMode():
            return real(faked(a), faked(b), *map(faked, scales), offs=faked(offs), **how)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", checked)
    task = Task(EXPERTS, "FP8Rowwise", "pre-quantized", pass_name)
    result = torch_gemms._grouped_gemm(task, recipe("FP8Rowwise"), Operands(EXPERTS, "cpu"))()
    t, k, n = EXPERTS.tokens, EXPERTS.inputs, EXPERTS.outputs
    assert result.shape == {"fprop": (t, n), "dgrad": (t, k), "wgrad": (3, n, k)}[pass_name]


@pytest.mark.parametrize("pass_name", PASSES)
def test_experts_in_bf16(pass_name: str) -> None:
    backend = torch_gemms.TorchBackend(OperandStore("cpu"), BackendOptions())
    prepared = backend.prepare(Task(EXPERTS, "BF16", "pre-quantized", pass_name), recipe("BF16"), 2)
    prepared.run()
    assert prepared.error < 0.01


def test_what_torch_does_not_measure_has_a_reason() -> None:
    backend = torch_gemms.TorchBackend(OperandStore("cpu"), BackendOptions())
    assert "no GEMM" in backend.why_not(recipe("FP8Delayed"))
    assert "only in pre-quantized mode" in backend.why_not_task(Task(CASE, "BF16", "autocast"))
    assert backend.why_not_task(Task(CASE, "MXFP8", "pre-quantized", "fprop")) == ""
    assert "only in BF16 and FP8Rowwise" in backend.why_not_task(Task(EXPERTS, "FP8Block", "pre-quantized", "fprop"))
    uneven = replace(EXPERTS, rows=(64, 100, 92))
    assert "100 tokens" in backend.why_not_task(Task(uneven, "FP8Rowwise", "pre-quantized", "fprop"))


def test_every_recipe_has_a_support_entry() -> None:
    for name in recipes():
        assert support(name, (9, 0)).runs or support(name, (9, 0)).note


@pytest.fixture
def torchao_backend() -> Any:
    """The module, where torchao is installed."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    return pytest.importorskip("gemmscope.bench.backends.torchao")


def test_torchao_refuses_with_a_reason(torchao_backend: Any) -> None:
    backend = torchao_backend.TorchaoBackend(OperandStore("cpu"), BackendOptions(cache_weights=True))
    assert backend.why_not(recipe("FP8Block")) == "torchao has no such recipe"
    assert "prototype" in backend.why_not_task(Task(EXPERTS, "FP8Rowwise", "autocast"))
    assert "in every pass" in backend.why_not_task(Task(CASE, "FP8Rowwise", "autocast"))
    assert backend.why_not_task(Task(CASE, "BF16", "autocast")) == ""
    assert "no tensor" in backend.why_not_task(Task(CASE, "NVFP4", "pre-quantized", "fprop"))


def test_torchao_leaves_layers_in_bf16_and_says_so(torchao_backend: Any) -> None:
    backend = torchao_backend.TorchaoBackend(OperandStore("cpu"), BackendOptions())
    asked = recipe("FP8Rowwise")
    assert "too small to gain" in backend._left_in_bf16(CASE, asked)
    assert "not multiples of 16" in backend._left_in_bf16(replace(CASE, inputs=60), asked)
    assert backend._left_in_bf16(Case("MLP Up", 256, 4096, 16384), asked) == ""
    assert backend._left_in_bf16(CASE, recipe("FP8RowwiseGWHP")) == ""  # torchao has no filter for it
    prepared = backend.prepare(Task(CASE, "FP8Rowwise", "pre-quantized", "fprop"), asked, 1)
    assert prepared.error < 0.01
    assert "BF16" in prepared.note


@pytest.mark.filterwarnings("ignore")  # compilers warn
@pytest.mark.parametrize("name", ["BF16", "FP8Tensorwise", "FP8Rowwise", "FP8RowwiseGWHP"])
def test_torchao_runs_every_pass(torchao_backend: Any, name: str) -> None:
    """Compiled for the CPU, which supports these GEMMs too."""
    backend = torchao_backend.TorchaoBackend(OperandStore("cpu"), BackendOptions(filter_layers=False))
    square = Case("Attn Out", 128, 256, 256)  # fprop and dgrad are of one size
    for task in tasks_of([CASE, FORWARD, square], [name], MODES, {}):
        prepared = backend.prepare(task, recipe(name), 2)
        prepared.run()
        assert prepared.note == ""
        assert prepared.error < (0.1 if recipe(name).quantizes else 0.01)
        assert sorted(prepared.order) == sorted(task.case.passes if task.mode == "autocast" else ())


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("backend_name", ["torch", "torchao"])
class TestOnGpu:
    """Every recipe that this GPU runs, through capture in a CUDA graph."""

    pytestmark = gpu

    def test_prepares_and_captures(self, backend_name: str, name: str) -> None:
        from gemmscope.engine.timer import CudaTimer

        if backend_name == "torchao":
            backend_class = pytest.importorskip("gemmscope.bench.backends.torchao").TorchaoBackend
        else:
            backend_class = torch_gemms.TorchBackend
        backend = backend_class(OperandStore("cuda"), BackendOptions(filter_layers=False))
        reason = backend.why_not(recipe(name))
        if reason:
            pytest.skip(reason)
        for task in tasks_of([CASE, FORWARD], [name], MODES, {}):
            if not backend.why_not_task(task):
                CudaTimer().ready(backend.prepare(task, recipe(name), 1)).run()
        torch.cuda.synchronize()
