"""Linears of a live module that compute as a recipe does, on any device: it emulates formats that the device lacks.

    with Emulation(model, "NVFP4"):
        loss = model(batch)
        loss.backward()

Inside the context every `nn.Linear` quantizes the operands of fprop, dgrad and wgrad as the recipe's library does. Parameters,
inputs and the module itself stay as they are; a BF16 optimizer step works as always. Imports torch: it runs in workers and in
the user's own process.

How the GEMMs are computed. A dequantized value is a low-precision value times the scale of its block, and in some recipes times
one scale of the whole tensor. Without the latter it is exact in BF16, which has eight significant bits: E4M3 has four and E5M2
three, and their block scales are powers of two; NVFP4 has two, times the four of its E4M3 block scale. So on a GPU the operands
without their per-tensor scales are multiplied as BF16 with float32 accumulation, and the float32 output is multiplied by the
per-tensor scales. Tensor cores compute the same with these formats, up to the order and the precision of their accumulation. On a
CPU the same values are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gemmscope.errors import UserError
from gemmscope.numerics.formats import FORMATS, AmaxHistory
from gemmscope.numerics.quantizers import HADAMARD_SIZE, HIGH_PRECISION, GemmOperand, Quantizer, operands
from gemmscope.recipe.recipes import recipe as find_recipe
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

Factors = tuple[torch.Tensor, torch.Tensor | None]
"""An operand as it is multiplied, and the scale of the whole tensor that multiplies the output (None: there is none)."""


def quantized_factors(
    quantizer: Quantizer, rows: torch.Tensor, amax: torch.Tensor | None, generator: torch.Generator | None
) -> Factors:
    """The operand without its per-tensor scale, which is exact in BF16, and that scale.

    With a Hadamard transform it stays rotated: so does the other operand, and the rotations cancel in the GEMM. There, rows that
    end within a block are filled up with zeros.
    """
    if quantizer.format in HIGH_PRECISION:
        return rows.to(HIGH_PRECISION[quantizer.format]), None
    if quantizer.signs and rows.shape[1] % HADAMARD_SIZE:
        rows = functional.pad(rows, (0, -rows.shape[1] % HADAMARD_SIZE))
    quantized = quantizer(rows, amax=amax, generator=generator)
    if quantizer.two_levels:  # E4M3 scales of blocks
        values = quantized.rounded * quantized.scales.float().repeat_interleave(quantizer.block, 1)[:, : rows.shape[1]]
    else:
        values = quantized.rounded if quantizer.per_tensor else quantized.values
    scale = quantized.tensor_scale if quantizer.per_tensor or quantizer.two_levels else None
    return (values.to(torch.bfloat16) if values.is_cuda else values), scale


class Emulation:
    """A context manager in which the linears of `module` compute as the recipe does. `linears`: the paths of those that are
    emulated; `kept`: why the others are not.

    `backend`: whose variant of the recipe; by default the recipe's first. `why_kept`: why the linear of a path stays as it
    is; empty if it does not. `seed`: of stochastic rounding; None: random numbers come from PyTorch's default generator.
    `passes` are the operands of every pass, and may be replaced. It can be entered many times; the history of delayed scaling
    and the random numbers go on. `quantize`: `quantized_factors`, or the same compiled (then `seed` must be None), which takes
    a fraction of the time on a GPU. The module itself may be compiled too, except with delayed scaling. `observing`: while it is
    set, nothing is quantized and the histories of delayed scaling are filled.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: str,
        *,
        backend: str = "",
        why_kept: Callable[[str], str] = lambda _: "",
        seed: int | None = 0,
        quantize: Callable[..., Factors] = quantized_factors,
    ) -> None:
        known = find_recipe(recipe)
        self.passes = {name: operands(known.name, name, backend) for name in OPERANDS}
        self.delayed = {
            operand.tensor: FORMATS[operand.quantizer.format]
            for pair in self.passes.values()
            for operand in pair
            if operand.quantizer.delayed
        }
        """The formats of tensors whose scales come from earlier calls."""
        self.quantize, self.observing = quantize, False
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()
        self.kept: dict[str, str] = {}
        self.linears: dict[str, tuple[nn.Linear, EmulatedLinear]] = {}
        linears = {path: child for path, child in module.named_modules() if isinstance(child, nn.Linear)}
        if not linears:
            name = type(module).__name__
            raise UserError(f"{name} has no nn.Linear: there is nothing to emulate", "pass the module that holds the linears")
        for path, linear in linears.items():
            if reason := (why_kept(path) or _why_not(linear, known.multiple_of)):
                self.kept[path] = reason
            else:
                self.linears[path] = (linear, EmulatedLinear(self))

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Random numbers for stochastic rounding, apart from those of the user's training; None: PyTorch's default ones."""
        if self._seed is None or torch.compiler.is_compiling():
            return None  # the compiler knows the default generator only
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def __enter__(self) -> Emulation:
        taken = [path for path, (linear, _) in self.linears.items() if _is_emulated(linear)]
        if taken:
            raise UserError(f"{taken[0]} is emulated already", "leave the first emulation before you enter another")
        for linear, emulated in self.linears.values():
            linear.forward = partial(emulated.forward, linear)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        for linear, _ in self.linears.values():
            vars(linear).pop("forward", None)


def _why_not(linear: nn.Linear, multiple: int) -> str:
    """Why a linear cannot be emulated; empty if it can."""
    if type(linear).forward is not nn.Linear.forward or ("forward" in vars(linear) and not _is_emulated(linear)):
        return "a forward pass of its own"
    for name, size in (("input features", linear.in_features), ("output features", linear.out_features)):
        if size % multiple:
            return f"{name} = {size} is not a multiple of {multiple}"
    return ""


def _is_emulated(linear: nn.Linear) -> bool:
    forward = vars(linear).get("forward")
    return isinstance(forward, partial) and isinstance(getattr(forward.func, "__self__", None), EmulatedLinear)


class EmulatedLinear:
    """The operands of one linear in one recipe, and the maxima that delayed scaling remembers of its tensors."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._histories: dict[str, AmaxHistory] = {}

    def forward(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """`nn.Linear.forward` with quantized operands."""
        weight, bias, device = linear.weight, linear.bias, x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        elif x.dtype != weight.dtype:
            return functional.linear(x, weight, bias)  # raises PyTorch's own error
        output: torch.Tensor = _EmulatedGemms.apply(x, weight, bias, self)
        return output

    def gemm(
        self,
        pass_name: Pass,
        tensors: Mapping[str, torch.Tensor],
        maxima: Mapping[str, torch.Tensor | None],
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The GEMM of a pass: its second operand times its first one transposed, both as [rows, reduced dimension]."""
        first, second = (
            self._factors(one, tensors[one.tensor], maxima.get(one.tensor)) for one in self._emulation.passes[pass_name]
        )
        with torch.autocast(first[0].device.type, enabled=False):
            return _product(first, second, dtype, bias)

    def _factors(self, operand: GemmOperand, tensor: torch.Tensor, amax: torch.Tensor | None) -> Factors:
        rows = tensor.t() if operand.columnwise else tensor
        if self._emulation.observing:
            return rows, None
        generator = self._emulation.generator(tensor.device) if operand.quantizer.stochastic else None
        return self._emulation.quantize(operand.quantizer, rows, amax, generator)

    def maximum(self, tensor: TensorName, value: torch.Tensor) -> torch.Tensor | None:
        """The maximum that scales this call's tensor where scaling is delayed, else None; the history then gets this call's.

        Every call counts as a step: with several micro-batches, the history gets an entry for each.
        """
        if tensor not in self._emulation.delayed:
            return None
        if tensor not in self._histories:
            self._histories[tensor] = AmaxHistory(self._emulation.delayed[tensor], device=value.device)
        history = self._histories[tensor]
        amax = history.amax
        history.push(value.detach().abs().amax())
        return amax


def _product(first: Factors, second: Factors, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """The output in `dtype`, accumulated in float32 and rounded once."""
    (a, a_scale), (b, b_scale) = first, second
    if a.dtype == b.dtype == dtype and a_scale is None and b_scale is None:  # BF16 and FP32 as PyTorch computes them
        return functional.linear(b, a, bias)
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        output = torch.mm(b, a.t(), out_dtype=torch.float32)
    else:
        output = functional.linear(b.float(), a.float())
    for scale in (a_scale, b_scale):
        output = output if scale is None else output * scale
    return (output if bias is None else output + bias.float()).to(dtype)


class _EmulatedGemms(torch.autograd.Function):  # type: ignore[misc]
    """Forward and backward of a linear whose three GEMMs have quantized operands."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, emulated: EmulatedLinear
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        maxima = {"X": emulated.maximum("X", rows), "W": emulated.maximum("W", weight)}
        ctx.save_for_backward(x, weight, maxima["X"], maxima["W"])
        ctx.emulated, ctx.has_bias = emulated, bias is not None
        output = emulated.gemm("fprop", {"X": rows, "W": weight}, maxima, x.dtype, bias)
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, x_maximum, w_maximum = ctx.saved_tensors
        emulated, rows = ctx.emulated, dy.reshape(-1, dy.shape[-1])
        tensors = {"X": x.reshape(-1, x.shape[-1]), "W": weight, "dY": rows}
        maxima = {"X": x_maximum, "W": w_maximum, "dY": emulated.maximum("dY", rows)}
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx = emulated.gemm("dgrad", tensors, maxima, x.dtype).view(x.shape) if needs_dx else None
        dw = emulated.gemm("wgrad", tensors, maxima, weight.dtype) if needs_dw else None
        return dx, dw, rows.sum(0) if ctx.has_bias and needs_db else None, None
