"""torchao's casts: codes, and decode scales as our quantizers give them. The last dimension is the reduced one."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

CASTS = {  # which cast of Float8LinearConfig an operand of a pass has
    ("fprop", "X"): "cast_config_input",
    ("fprop", "W"): "cast_config_weight",
    ("dgrad", "dY"): "cast_config_grad_output",
    ("dgrad", "W"): "cast_config_weight_for_grad_input",
    ("wgrad", "X"): "cast_config_input_for_grad_weight",
    ("wgrad", "dY"): "cast_config_grad_output_for_grad_weight",
}
RECIPES = {"FP8Tensorwise": "tensorwise", "FP8Rowwise": "rowwise", "FP8RowwiseGWHP": "rowwise_with_gw_hp"}


def cast_config(recipe: str, pass_name: str, tensor: str) -> CastConfig:
    """How torchao casts that operand."""
    return getattr(Float8LinearConfig.from_recipe_name(RECIPES[recipe]), CASTS[pass_name, tensor])


def stays_high_precision(recipe: str, pass_name: str, tensor: str) -> bool:
    return cast_config(recipe, pass_name, tensor).scaling_type is ScalingType.DISABLED


def float8(x: Tensor, recipe: str, pass_name: str, tensor: str) -> tuple[Tensor, Tensor]:
    """The cast of an operand in a float8 recipe."""
    cast = cast_config(recipe, pass_name, tensor)
    cast_tensor = hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        LinearMMConfig(),
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=Float8LinearConfig.from_recipe_name(RECIPES[recipe]).round_scales_to_power_of_2,
    )
    shape = (-1, 1) if cast.scaling_granularity is ScalingGranularity.AXISWISE else ()
    return cast_tensor._data, cast_tensor._scale.reciprocal().reshape(shape)


def mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """1x32 with E8M0 scales, rounded up."""
    scales, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return codes, scales


def mx_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantized."""
    return to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.float32)


BLOCK_CASTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"ao_mx": mx}  # by the name of our quantizer
