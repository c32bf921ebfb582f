"""Quantizes one operand of a GEMM as Transformer Engine or torchao does it, in plain PyTorch, on any device.

The reduced dimension is the last one: what a library calls the columnwise copy is the quantized transpose. Python never looks at
a value, so that torch.compile sees one graph. `operands` says which quantizers a recipe uses, from `recipe/quantizers.toml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemmscope.choices import SWITCHES, Switch
from gemmscope.errors import UserError, shown
from gemmscope.numerics.formats import FORMATS, IGNORES_NAN, RULES, round_nearest, round_stochastic
from gemmscope.recipe.precisions import precision_facts
from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.toml import load_data
from gemmscope.workload.ops import COLUMNWISE, OPERANDS, Pass, TensorName

HIGH_PRECISION = {
    name: getattr(torch, facts["torch"])
    for name, facts in precision_facts()["format"].items()
    if "torch" in facts and "largest" not in facts
}


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantized tensor, as the GEMM reads it."""

    values: Tensor
    """float32, dequantized, of the input's shape; with a Hadamard transform, rotated back."""
    saturated: Tensor
    """bool: where |x| * scale is above the format's largest value by more than half a step."""
    scales: Tensor
    """Decode scales as the library stores them: [rows, blocks], [rows, 1] with a scale per row, 0-dim with one per tensor."""
    tensor_scale: Tensor
    """float32, 0-dim: the factor of the whole tensor in `values`. Without it (and without a Hadamard transform) they are exact in
    bfloat16."""
    rounded: Tensor
    """float32: the values in the low-precision format, before decode scales (and before rotating back)."""


@dataclass(frozen=True)
class Quantizer:
    """How one operand is quantized. Call it with a 2-D tensor whose last dimension is the reduced one."""

    format: str
    """e4m3, e5m2, e2m1, bf16 or fp32."""
    rule: str = ""
    """How a maximum becomes a scale (formats.py); empty for bf16 and fp32."""
    block: int = 0
    """Values of a row that share a scale; 0: all of them."""
    block_rows: int = 1
    """Rows that share a scale; 0: all of them."""
    delayed: bool = False
    """The maximum is that of earlier steps, so values may saturate."""
    stochastic: bool = False
    signs: tuple[int, ...] = ()
    """Of the random Hadamard transform before quantization; empty: there is none."""

    @property
    def per_tensor(self) -> bool:
        return self.block == 0 and self.block_rows == 0

    @property
    def two_levels(self) -> bool:
        """Whether both the blocks and the whole tensor are scaled."""
        return self.rule.startswith("nvfp4")

    def __call__(
        self,
        x: Tensor,
        *,
        amax: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> QuantizedOperand:
        """Quantize x, the tensor or a sample of its rows.

        `amax`: the maximum of the whole tensor where x is a sample of it, or of the history with delayed scaling; None: x's own.
        With a Hadamard transform the maximum of the rotated tensor counts: the larger one of `amax` and x's own is taken.
        `generator`: of stochastic rounding; None: PyTorch's default one. Rows that share scales must be there together.
        """
        if x.dim() != 2:
            raise UserError(f"a tensor of shape {tuple(x.shape)} cannot be quantized", "pass a 2-D tensor: tensor.flatten(0, -2)")
        if self.format in HIGH_PRECISION or x.numel() == 0:  # an expert without tokens
            return self._cast(x)
        if self.signs and x.shape[1] % HADAMARD_SIZE:
            raise UserError(
                f"{x.shape[1]} values along the reduced dimension are not a multiple of {HADAMARD_SIZE}",
                f"the Hadamard transform needs blocks of {HADAMARD_SIZE}: pad it to {x.shape[1] + -x.shape[1] % HADAMARD_SIZE}",
            )
        values = rotate(x, self.signs) if self.signs else x.float()
        target, (rows, columns) = FORMATS[self.format], values.shape
        width = self.block or columns
        if columns % width:
            values = pad(values, (0, -columns % width))
        blocks = values.reshape(rows, -1, width)
        maxima, tensor_amax = self._maxima(blocks, amax)
        scales = RULES[self.rule](maxima, target, tensor_amax)
        encode_scales, decode_scales = scales.encode, scales.decode
        if not self.per_tensor:
            encode_scales, decode_scales = encode_scales.unsqueeze(-1), decode_scales.unsqueeze(-1)
        scaled = blocks * encode_scales
        rounded = round_stochastic(scaled, target, generator) if self.stochastic else round_nearest(scaled, target)
        decoded = rounded * decode_scales * scales.tensor
        saturated = (scaled.abs() > target.overflow) & (decode_scales != 0)  # with a scale of 0 it is underflow
        decoded, saturated, rounded = (part.reshape(rows, -1)[:, :columns] for part in (decoded, saturated, rounded))
        if self.signs:
            decoded = rotate_back(decoded, self.signs)
        return QuantizedOperand(decoded, saturated, scales.stored, scales.tensor, rounded)

    def _maxima(self, blocks: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
        """The maxima that share a scale, and the maximum of the whole tensor where the rule needs it."""
        if self.per_tensor and amax is not None:
            return amax.float().reshape(()), amax
        magnitudes = blocks.abs()
        if self.rule in IGNORES_NAN:
            magnitudes = magnitudes.nan_to_num(nan=0.0, posinf=torch.inf)
        maxima = magnitudes.amax() if self.per_tensor else magnitudes.amax(-1)
        tensor_amax = maxima.amax() if amax is None else amax.float().reshape(())
        if self.signs:
            tensor_amax = torch.maximum(tensor_amax, maxima.amax())
        if self.block_rows > 1:
            rows = len(maxima)
            groups = pad(maxima, (0, 0, 0, -rows % self.block_rows)).reshape(-1, self.block_rows, maxima.shape[1])
            maxima = groups.amax(1).repeat_interleave(self.block_rows, 0)[:rows]
        return maxima, tensor_amax

    def _cast(self, x: Tensor) -> QuantizedOperand:
        rounded, one = (
            x.to(HIGH_PRECISION.get(self.format, x.dtype)).float(),
            torch.ones((), dtype=torch.float32, device=x.device),
        )
        return QuantizedOperand(rounded, rounded.isinf() & x.isfinite(), one, one, rounded)


HADAMARD_SIZE = 16
SWITCHED_OFF: dict[Switch, dict[str, Any]] = {"hadamard": {"signs": ()}, "stochastic": {"stochastic": False}}


@cache
def _built(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """diag(signs) · H / 4, with Sylvester's Hadamard matrix H: its values are ±1/4, and it is orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < HADAMARD_SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (torch.tensor(signs)[:, None] * matrix / 4).to(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rotation(signs: tuple[int, ...], device: torch.device) -> Tensor:
    """The matrix. Compiled code takes it as a constant; it would otherwise build it, and copy it to the GPU, in every call."""
    return _built(signs, device)


def rotate(values: Tensor, signs: tuple[int, ...]) -> Tensor:
    """The transform of every block of 16 of the last dimension, of bfloat16 values and rounded to bfloat16 as the kernels do.

    In float64 the sum is exact, so that it does not depend on the order of the terms; kernels add in float32.
    """
    exact = values.bfloat16().double().reshape(-1, HADAMARD_SIZE) @ _rotation(signs, values.device)
    return exact.bfloat16().float().reshape(values.shape)


def rotate_back(values: Tensor, signs: tuple[int, ...]) -> Tensor:
    """The inverse transform, of float32 values."""
    return (values.double().reshape(-1, HADAMARD_SIZE) @ _rotation(signs, values.device).T).float().reshape(values.shape)


@dataclass(frozen=True)
class GemmOperand:
    """One operand of a GEMM. `columnwise`: the reduced dimension is the tensor's first one, so its transpose is quantized."""

    tensor: TensorName
    columnwise: bool
    quantizer: Quantizer


@cache
def _table() -> dict[str, Any]:
    return load_data("gemmscope.recipe", "quantizers.toml")


@cache
def quantizer_named(name: str, number_format: str) -> Quantizer:
    """A quantizer of quantizers.toml, for values of this format.

    >>> quantizer_named("te_1x128", "e4m3")
    Quantizer(format='e4m3', rule='te_power_of_two', block=128, block_rows=1, delayed=False, stochastic=False, signs=())
    """
    facts = dict(_table()["quantizers"][name])
    signs = tuple(_table()["hadamard"]["signs"]) if facts.pop("hadamard", False) else ()
    return Quantizer(number_format, **facts, signs=signs)


def libraries_of(recipe: Recipe) -> tuple[str, ...]:
    """The libraries that quantize a recipe, in their order."""
    return tuple(_table()["recipes"][recipe.name]) if recipe.quantizes else recipe.backends


def library_of(recipe: Recipe, backend: str = "") -> str:
    """The library whose quantization a backend uses. `torch` and `cpu` only time GEMMs: for them, the recipe's first library.

    >>> library_of(recipe_named("MXFP8")), library_of(recipe_named("FP8Rowwise"), "torch")
    ('transformer_engine', 'torchao')
    """
    libraries = libraries_of(recipe)
    if backend and backend not in recipe.backends:
        raise UserError(f"{recipe.name} does not run with the backend {shown(backend)}", f"one of: {', '.join(recipe.backends)}")
    return backend if backend in libraries else next(iter(libraries))


def operands(recipe: str, pass_name: Pass, backend: str = "", without: Sequence[Switch] = ()) -> tuple[GemmOperand, GemmOperand]:
    """The operands of a pass: W, X in fprop; W, dY in dgrad; X, dY in wgrad. `without`: what is switched off.

    >>> [(one.tensor, one.columnwise, one.quantizer.format) for one in operands("FP8Current", "dgrad")]
    [('W', True, 'e4m3'), ('dY', False, 'e5m2')]
    """
    known = recipe_named(recipe)
    library, formats = library_of(known, backend), known.operands[pass_name]
    if set(formats) <= set(HIGH_PRECISION):
        quantizers = [Quantizer(number_format) for number_format in formats]
    else:
        names = _table()["recipes"][known.name][library][pass_name]
        changes = {"delayed": known.delayed} | {key: value for one in without for key, value in SWITCHED_OFF[one].items()}
        quantizers = [replace(quantizer_named(*pair), **changes) for pair in zip(names, formats, strict=True)]
    first, second = (
        GemmOperand(tensor, (tensor, pass_name) in COLUMNWISE, quantizer)
        for tensor, quantizer in zip(OPERANDS[pass_name], quantizers, strict=True)
    )
    return first, second


@cache
def switches_of(recipe: str, library: str) -> tuple[tuple[Switch, ...], ...]:
    """Every set of what can be switched off in a recipe, first the empty one. Only as its first library quantizes it: recording
    takes time for every set.

    >>> switches_of("NVFP4", "transformer_engine"), switches_of("NVFP4", "torchao")
    (((), ('hadamard',), ('stochastic',), ('hadamard', 'stochastic')), ((),))
    """
    as_it_is = [operands(recipe, one, library) for one in OPERANDS]
    own = [one for one in SWITCHES if [operands(recipe, name, library, (one,)) for name in OPERANDS] != as_it_is]
    own = own if library == library_of(recipe_named(recipe)) else []
    return tuple(chain.from_iterable(combinations(own, count) for count in range(len(own) + 1)))
