"""PyTorch's own GEMMs, without any layer around them: the speed of the kernels that torchao and others call.

Pre-quantized mode only. The operands are quantized in plain PyTorch (`quantize.py`), and one call multiplies them: `torch.mm`,
`torch.nn.functional.scaled_mm` with the recipe's kind of scales, or, for experts, one grouped GEMM of all of them.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional

from gemmscope.bench.backends.base import Backend, TimedStep, one_after_another
from gemmscope.bench.backends.quantize import Quantized, lay_out, quantize, scaling_of
from gemmscope.bench.backends.reference import FACTORS, Factor, Operands
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.recipes import Recipe, recipe
from gemmscope.recipe.support import support
from gemmscope.workload.cases import Task
from gemmscope.workload.ops import PASSES

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

    def prepare(self, task: Task, recipe: Recipe, copies: int) -> Prepared:
        sets = []
        for copy in range(copies):
            operands = self._operands.get(task.case, copy)
            gemm = (_grouped_gemm if task.case.rows else _gemm)(task, recipe, operands)
            sets.append(TimedStep(gemm, operands.error({task.pass_name: _of_first_expert(task, operands, gemm())})))
        prepared = one_after_another(sets)
        prepared.run()
        return prepared


def _of_first_expert(task: Task, operands: Operands, result: torch.Tensor) -> torch.Tensor:
    """The part of a grouped GEMM that has a float64 reference: that of the first expert."""
    if not task.case.rows:
        return result
    return result[0] if task.pass_name == "wgrad" else result[: operands.rows]


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
