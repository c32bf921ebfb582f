"""Quantizes the operands of a GEMM in plain PyTorch: one function for every kind of scale.

An operand is [rows, contraction]. It is cut into blocks; the largest value of a block decides its scale, and the values divided
by the scale are cast. Recipes differ in the size of a block and the format of values and scales (`recipe/precisions.toml`).
Frameworks do the same with fused kernels; here it is not part of the timed region, so only the result matters.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad

from gemmscope.recipe.precisions import number_format as format_facts
from gemmscope.recipe.precisions import precision_facts

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


def dtype_of(number_format: str) -> torch.dtype:
    """The dtype of values in this format."""
    dtype: torch.dtype = getattr(torch, format_facts(number_format)["torch"])
    return dtype


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
