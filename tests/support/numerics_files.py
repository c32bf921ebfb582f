"""Results of `gemmscope numerics`, made by hand: errors of a Llama-like model whose first layer and down_proj are hard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import hypot

from gemmscope.interval import Interval
from gemmscope.numerics.evaluation.mixes import with_mix
from gemmscope.numerics.evaluation.speeds import SpeedResult
from gemmscope.recipe.recipes import recipe
from gemmscope.results.numerics import (
    DepthError,
    LinearError,
    NumericsResult,
    OperandError,
    PassError,
    Source,
    StaleScale,
)
from gemmscope.workload.ops import OPERANDS
from support.forecast_files import several_gpus

SIZES = {
    "self_attn.q_proj": ("QKV Proj", 4096, 4096),
    "self_attn.k_proj": ("QKV Proj", 4096, 1024),
    "self_attn.v_proj": ("QKV Proj", 4096, 1024),
    "self_attn.o_proj": ("Attn Out", 4096, 4096),
    "mlp.gate_proj": ("MLP Gate+Up", 4096, 14336),
    "mlp.up_proj": ("MLP Gate+Up", 4096, 14336),
    "mlp.down_proj": ("MLP Down", 14336, 4096),
}
ROUNDING = {"bf16": 0.0, "e4m3": 0.0262, "e5m2": 0.0525, "e2m1": 0.095}
SPREAD = {"FP8Current": 1.10, "FP8Delayed": 1.14, "FP8Block": 1.03, "MXFP8": 1.06, "NVFP4": 1.0, "BF16": 1.0}
RECIPES = ("BF16", "FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4")


def hardness(name: str, layer: int, layers: int) -> float:
    """How much larger than rounding its error is: outliers in down_proj, the first layer and the last one."""
    return 1 + (1.1 if name == "mlp.down_proj" else 0.0) + (0.9 if layer == 0 else 0.5 if layer == layers - 1 else 0.004 * layer)


def linear_error(name: str, layer: int, layers: int, recipe_name: str) -> LinearError:
    """All three passes of one linear."""
    op, inputs, outputs = SIZES[name]
    passes = []
    for pass_name, formats in recipe(recipe_name).operands.items():
        sizes = [ROUNDING[format_name] * SPREAD[recipe_name] * hardness(name, layer, layers) for format_name in formats]
        operands = [
            OperandError(
                tensor=tensor, format=format_name, relative=size, underflow=0.02 * size, saturated=0.0, octaves=18.0 + layer % 5
            )
            for tensor, format_name, size in zip(OPERANDS[pass_name], formats, sizes, strict=True)
        ]
        total = hypot(*sizes)
        passes.append(
            PassError(
                pass_name=pass_name,
                relative=Interval(total, total * 0.97, total * 1.03),
                first_share=sizes[0] ** 2 / total**2 if total else 0.5,
                cosine=1 - total**2 / 2,
                operands=(operands[0], operands[1]),
            )
        )
    full = f"model.layers.{layer}.{name}"
    return LinearError(
        name=full, linear=name, layer=layer, op=op, inputs=inputs, outputs=outputs, recipe=recipe_name, passes=tuple(passes)
    )


@cache
def linear_errors(layers: int = 32, recipes: Sequence[str] = RECIPES) -> tuple[LinearError, ...]:
    """Every linear of every layer in every recipe."""
    return tuple(linear_error(name, layer, layers, recipe) for recipe in recipes for layer in range(layers) for name in SIZES)


def recipes_and_mix(
    linears: Sequence[LinearError], speed: SpeedResult | None = None, bound: float | None = None, gpu: str = ""
) -> NumericsResult:
    """The recipes and the mix of these linears, in a result without other facts."""
    return with_mix(NumericsResult(command="", source="recording", origin="", linears=tuple(linears)), speed, bound, gpu)


@cache
def numerics_result(
    layers: int = 32, *, source: Source = "recording", gpu: str = "b300", bound: float | None = 0.08, detailed: bool = True
) -> NumericsResult:
    """With the speeds of a forecast for Llama 3.1 8B (without, if `gpu` is empty)."""
    linears = linear_errors(layers)
    comparison = recipes_and_mix(linears, several_gpus() if gpu else None, bound, gpu)
    stale = StaleScale(name="model.layers.0.mlp.down_proj", tensor="dY", growth=1.8)
    depth = tuple(
        DepthError(
            recipe=recipe.recipe,
            forward=tuple(recipe.error * (0.6 + 0.02 * layer) for layer in range(layers)),
            backward=tuple(recipe.error * (1.5 - 0.02 * layer) for layer in range(layers)),
            loss=recipe.error**2 / 10,
        )
        for recipe in comparison.recipes
        if recipe.recipe != "BF16"
    )
    origin = {"recording": "recording.safetensors", "checkpoint": "checkpoints/step-1000", "synthetic": "outliers"}[source]
    return NumericsResult(
        command=f"gemmscope numerics {origin}",
        source=source,
        origin=origin,
        model_name="llama-3.1-8b",
        steps=(100, 101) if source == "recording" else (),
        tokens=8192,
        layers=layers,
        recipes=comparison.recipes,
        linears=linears,
        stale=(stale,) if detailed else (),
        depth=depth if detailed else (),
        speed_origin=comparison.speed_origin,
        speed_of=comparison.speed_of,
        speed_gpu=comparison.speed_gpu,
        mixed=comparison.mixed,
        findings=comparison.findings,
        device="cpu",
        versions={"torch": "2.13.0"},
    )
