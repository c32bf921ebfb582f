"""PyTorch's own GEMMs, without any layer around them: the speed of the kernels that torchao and others call.

Pre-quantized mode only. One call multiplies the quantized operands: `torch.mm`, `torch.nn.functional.scaled_mm` with the recipe's
kind of scales, or, for experts, one grouped GEMM of all of them.

The operands are quantized in plain PyTorch, by one function for every kind of scale. An operand is [rows, contraction]. It is
cut into blocks; the largest value of a block decides its scale, and the values divided by the scale are cast. Recipes differ
in the size of a block and the format of values and scales (`recipe/precisions.toml`). Frameworks do the same with fused
kernels; here it is not part of the timed region, so only the result matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional
from torch.nn.functional import pad

from gemmscope.bench.backends.base import FACTORS, Backend, Factor, Operands, dtype_of
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.precisions import number_format as format_facts
from gemmscope.recipe.precisions import precision_facts
from gemmscope.recipe.recipes import Recipe, recipe
from gemmscope.recipe.support import support
from gemmscope.workload.cases import Task
from gemmscope.workload.ops import PASSES

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of four bits, without the sign
SMALLEST_E4M3 = 2.0**-9
TILE = (128, 4)  # of swizzled scales


@dataclass(frozen=True)
class Scaling:
    """`block` is how many rows and how many values along the contraction share a scale; 0 means all.

    `torch` is the name in `torch.nn.functional.ScalingType`; `swizzled` scales are stored in tiles, as Blackwell reads them.
    """

    torch: str
    block: tuple[int, int]
    format: str = "fp32"  # of the scales
    power_of_two: bool = False
    swizzled: bool = False


def scaling_of(scales: str, tensor: str) -> Scaling:
    """How a recipe with these scales treats X, W or dY.

    >>> scaling_of("block128", "W").block, scaling_of("block128", "dY").block, scaling_of("row", "W").block
    ((128, 128), (1, 128), (1, 0))
    """
    facts = precision_facts()["scales"][scales]
    facts = facts["weight"] if tensor == "W" and "weight" in facts else facts
    return Scaling(**{name: value for name, value in facts.items() if name != "weight"} | {"block": tuple(facts["block"])})


@dataclass(frozen=True)
class Quantized:
    """The quantized values of an operand and their scales: value x scale of its block x scale of the tensor.

    `data` is [rows, contraction]; a byte has two 4-bit values. `scales` are fp32, [row blocks, contraction blocks].
    """

    data: torch.Tensor
    scales: torch.Tensor
    of_tensor: torch.Tensor | None = None


def quantize(values: torch.Tensor, number_format: str, scaling: Scaling) -> Quantized:
    """Scale the values so that the largest of every block is the largest number of the format, and cast them."""
    rows, columns = values.shape
    height, width = scaling.block[0] or rows, scaling.block[1] or columns
    padded = pad(values.contiguous().float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    wanted = blocks.abs().amax(dim=(1, 3)).clamp(min=2.0**-100) / format_facts(number_format)["largest"]
    of_tensor = None
    if scaling.format == "e4m3":  # too few bits for the range of a whole tensor, so the tensor has a scale too
        of_tensor = wanted.amax() / format_facts("e4m3")["largest"]
        scales = (wanted / of_tensor).to(dtype_of("e4m3")).float().clamp(min=SMALLEST_E4M3)
        whole = scales * of_tensor
    else:
        whole = scales = _power_of_two(wanted) if scaling.power_of_two else wanted
    scaled = (blocks / whole[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return Quantized(_cast(scaled, number_format), scales, of_tensor)


def _power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two, so that no value overflows."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def _cast(values: torch.Tensor, number_format: str) -> torch.Tensor:
    if number_format != "e2m1":
        largest = format_facts(number_format)["largest"]
        return values.clamp(-largest, largest).to(dtype_of(number_format))
    between = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=values.device)
    codes = torch.bucketize(values.abs(), between, out_int32=True).to(torch.uint8) + 8 * (values < 0).to(torch.uint8)
    return codes[:, 0::2] + 16 * codes[:, 1::2]  # the first of two values is in the lower half of the byte


def lay_out(quantized: Quantized, scaling: Scaling, *, second: bool) -> list[torch.Tensor]:
    """The scales as `torch.nn.functional.scaled_mm` expects them, of the first or the second operand."""
    scales = quantized.scales
    if scaling.swizzled:
        tiles = swizzle(scales).to(torch.float8_e8m0fnu if scaling.format == "e8m0" else dtype_of(scaling.format))
        return [tiles] if quantized.of_tensor is None else [tiles, quantized.of_tensor]
    if scaling.block[0] > 1:
        return [pad(scales, (0, -scales.shape[1] % 4)).t()]
    if scaling.block[1]:
        return [scales.t().contiguous().t()]
    return [scales.view(1, -1) if second else scales]


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Scales in tiles of 128 rows x 4 columns, as documented for cuBLAS: in a tile, (row, column) is at index
    16 (row % 32) + 4 (row // 32) + column; tiles are ordered along the contraction first.

    >>> swizzle(torch.arange(512.0).view(128, 4))[:6].tolist()  # rows 0 and 32
    [0.0, 1.0, 2.0, 3.0, 128.0, 129.0]
    """
    rows, columns = scales.shape
    padded = pad(scales, (0, -columns % TILE[1], 0, -rows % TILE[0]))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // TILE[1], TILE[1])
    return tiles.permute(0, 3, 2, 1, 4).flatten()


GemmCall = Callable[[], torch.Tensor]

# Passes with fast accumulation. Per tensor: as torchao and Transformer Engine choose it; per row, the kernel is slow without it.
FAST_ACCUMULATION: dict[str, tuple[str, ...]] = {"tensor": ("fprop",), "row": PASSES}
GROUPED = {"none": ("grouped_mm", "_grouped_mm"), "row": ("_scaled_grouped_mm",)}  # by scales: the function's names, newest first
ROWS_MULTIPLE_OF = 16  # of every expert


class TorchBackend(Backend):
    """PyTorch as it is installed."""

    name = "torch"

    def why_not(self, recipe: Recipe) -> str:
        if self.name not in recipe.backends:
            return "PyTorch has no GEMM for this recipe"
        if not torch.cuda.is_available():
            return "no GPU"
        known = support(recipe.name, torch.cuda.get_device_capability())
        if known.note:  # PyTorch does not emulate
            return known.note
        if recipe.quantizes and not hasattr(torch.nn.functional, "scaled_mm"):
            return f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm, which needs 2.10 or later"
        return ""

    def why_not_task(self, task: Task) -> str:
        if task.mode == "autocast":
            return "PyTorch has no layer that quantizes, so it is measured only in pre-quantized mode"
        chosen = recipe(task.recipe)
        if not task.case.rows:
            return chosen.misaligned(task.case.sizes())
        scales = chosen.scales
        if scales not in GROUPED:
            return "PyTorch has grouped GEMMs only in BF16 and FP8Rowwise"
        if _grouped(scales) is None:
            return f"PyTorch {torch.__version__} has no {GROUPED[scales][-1]}"
        uneven = next((row for row in task.case.rows if row % ROWS_MULTIPLE_OF), None)
        if uneven is not None:
            return f"an expert has {uneven} tokens, and grouped GEMMs need a multiple of {ROWS_MULTIPLE_OF}"
        return ""

    def prepare_set(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        gemm = (_grouped_gemm if task.case.rows else _gemm)(task, recipe, operands)
        result = gemm()
        first = result[0] if task.case.rows and task.pass_name == "wgrad" else result  # of experts, the first has a reference
        return Prepared(gemm, 1, operands.error({task.pass_name: first}))


def _gemm(task: Task, recipe: Recipe, operands: Operands) -> GemmCall:
    if not recipe.quantizes:
        return operands.plain_gemm(task.pass_name)
    left, right = operands.factors(task.pass_name)
    kinds = torch.nn.functional.ScalingType
    swizzles = torch.nn.functional.SwizzleType
    a, b = (_quantized(factor, recipe, task.pass_name) for factor in (left, right))
    settings: dict[str, Any] = {"use_fast_accum": task.pass_name in FAST_ACCUMULATION.get(recipe.scales, ())}
    for side, factor, quantized in (("a", left, a), ("b", right, b)):
        scaling = scaling_of(recipe.scales, factor.tensor)
        scales = lay_out(quantized, scaling, second=side == "b")
        settings[f"scale_{side}"] = scales
        settings[f"scale_recipe_{side}"] = [getattr(kinds, scaling.torch), kinds.TensorWise][: len(scales)]
        if scaling.swizzled:
            settings[f"swizzle_{side}"] = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE][: len(scales)]
    first, second = _packed(a.data), _packed(b.data).t()
    return lambda: torch.nn.functional.scaled_mm(first, second, output_dtype=torch.bfloat16, **settings)


def _quantized(factor: Factor, recipe: Recipe, pass_name: str) -> Quantized:
    number_format = recipe.operands[pass_name][1 if factor.tensor == "dY" else 0]
    return quantize(factor.values, number_format, scaling_of(recipe.scales, factor.tensor))


def _packed(data: torch.Tensor) -> torch.Tensor:
    """Bytes that have two 4-bit values each get the dtype for that; all others stay."""
    return data.view(torch.float4_e2m1fn_x2) if data.dtype == torch.uint8 else data


def _grouped(scales: str) -> Any:
    """PyTorch's function for grouped GEMMs, the public one where there is one."""
    places = [(torch.nn.functional, name) for name in GROUPED[scales]] + [(torch, name) for name in GROUPED[scales]]
    return next((getattr(place, name) for place, name in places if hasattr(place, name)), None)


def _grouped_gemm(task: Task, recipe: Recipe, operands: Operands) -> GemmCall:
    """The GEMMs of all experts in one call. Tokens are sorted by expert; `ends` are the ends of each expert's tokens."""
    multiply = _grouped(recipe.scales)
    ends = torch.tensor(list(accumulate(task.case.rows)), dtype=torch.int32, device=operands.x.device)
    left, right = operands.factors(task.pass_name)
    if recipe.quantizes:
        first, second, scales = _quantized_experts(task, recipe, operands)
        fast = task.pass_name in FAST_ACCUMULATION[recipe.scales]
        return lambda: multiply(first, second, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast)
    if task.pass_name == "wgrad":
        return lambda: multiply(left.values, right.values.t(), offs=ends)
    weights = torch.stack(operands.weights)
    transposed = FACTORS[task.pass_name][1][1]
    stacked = weights if transposed else weights.transpose(1, 2)
    return lambda: multiply(left.values, stacked, offs=ends)


def _quantized_experts(
    task: Task, recipe: Recipe, operands: Operands
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Both operands with their scales, one per row. In wgrad, which sums over tokens, every expert has its own rows."""
    left, right = operands.factors(task.pass_name)
    if task.pass_name == "wgrad":
        (a, a_scales), (b, b_scales) = (_by_expert(factor, task, recipe) for factor in (left, right))
        return a, b.t(), (a_scales, b_scales)
    tokens = _quantized(left, recipe, task.pass_name)
    weights = [
        _quantized(operands.factors(task.pass_name, expert)[1], recipe, task.pass_name) for expert in range(len(task.case.rows))
    ]
    data = torch.stack([weight.data.view(torch.uint8) for weight in weights]).view(weights[0].data.dtype)
    scales = torch.stack([weight.scales.flatten() for weight in weights])
    return tokens.data, data.transpose(1, 2), (tokens.scales.flatten(), scales)


def _by_expert(factor: Factor, task: Task, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """An operand whose contraction is split by expert: [rows, tokens], and the scales of each expert's rows in turn."""
    pieces = [
        _quantized(Factor(factor.tensor, values), recipe, task.pass_name) for values in factor.values.split(task.case.rows, dim=1)
    ]
    data = torch.cat([piece.data.view(torch.uint8) for piece in pieces], dim=1).view(pieces[0].data.dtype)
    return data, torch.cat([piece.scales.flatten() for piece in pieces])
