"""The two operands of every GEMM of a recipe, with their quantizers, from `operands.toml`."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from gemmscope.errors import UserError, shown
from gemmscope.numerics.quantizers import Quantizer
from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.toml import load_data

TensorName = Literal["X", "W", "dY"]
TENSORS: dict[str, tuple[TensorName, TensorName]] = {"fprop": ("W", "X"), "dgrad": ("W", "dY"), "wgrad": ("X", "dY")}
COLUMNWISE = {("dgrad", "W"), ("wgrad", "X"), ("wgrad", "dY")}


@dataclass(frozen=True)
class GemmOperand:
    """One operand of a GEMM. `columnwise`: the reduced dimension is the tensor's first one, so its transpose is quantized."""

    tensor: TensorName
    columnwise: bool
    quantizer: Quantizer


@cache
def _table() -> dict[str, Any]:
    return load_data("gemmscope.numerics", "operands.toml")


QUANTIZERS = tuple(_table()["quantizers"])  # their names


@cache
def quantizer_named(name: str) -> Quantizer:
    """A quantizer of operands.toml.

    >>> quantizer_named("te_1x128")
    Quantizer(format='e4m3', rule='te_power_of_two', block=128, block_rows=1, delayed=False, stochastic=False, signs=())
    """
    facts = dict(_table()["quantizers"][name])
    signs = tuple(_table()["hadamard"]["signs"]) if facts.pop("hadamard", False) else ()
    return Quantizer(**facts, signs=signs)


def library_of(recipe: Recipe, backend: str = "") -> str:
    """The library whose quantization a backend uses. `torch` and `cpu` only time GEMMs: for them, the recipe's first library.

    >>> library_of(recipe_named("MXFP8")), library_of(recipe_named("FP8Rowwise"), "torch")
    ('transformer_engine', 'torchao')
    """
    libraries = _table()["recipes"][recipe.name]
    if backend and backend not in recipe.backends:
        raise UserError(f"{recipe.name} does not run with the backend {shown(backend)}", f"one of: {', '.join(recipe.backends)}")
    return backend if backend in libraries else next(iter(libraries))


def operands(recipe: str, pass_name: str, backend: str = "") -> tuple[GemmOperand, GemmOperand]:
    """The operands of a pass: W, X in fprop; W, dY in dgrad; X, dY in wgrad.

    >>> [(one.tensor, one.columnwise, one.quantizer.format) for one in operands("FP8Current", "dgrad")]
    [('W', True, 'e4m3'), ('dY', False, 'e5m2')]
    """
    if pass_name not in TENSORS:
        raise UserError(f"unknown pass {shown(pass_name)}", f"one of: {', '.join(TENSORS)}")
    known = recipe_named(recipe)
    names = _table()["recipes"][known.name][library_of(known, backend)][pass_name]
    first, second = (
        GemmOperand(tensor, (pass_name, tensor) in COLUMNWISE, quantizer_named(name))
        for tensor, name in zip(TENSORS[pass_name], names, strict=True)
    )
    return first, second
