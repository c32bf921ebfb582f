"""The fitted coefficients of GEMMs: what was measured, on what, and the small networks that correct the physics.

A *series* is one (GPU, format, state, library) that was measured. Each network maps `physics.features` and the series to two
numbers per GEMM: how far the library's time is from the physics (a logarithm), and how uncertain that is. The correction is the
mean over networks that were fitted from different starts. Arrays are stored as 16-bit floats in base64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Base64Bytes, ConfigDict, Field, TypeAdapter, ValidationError

from gemmscope.errors import UserError
from gemmscope.forecast.physics import Array, Shapes, features

REINSTALL = "it is part of the package: install gemmscope again"
CORRECTION_LIMIT = 2.5  # as a logarithm: no measurement is further from the physics
FINITE = ConfigDict(allow_inf_nan=False)
Stored = TypeVar("Stored")
Range = tuple[float, float]
Sizes = tuple[Range, Range, Range]  # the smallest and largest m, k and n


@dataclass(frozen=True)
class Series:
    """One measured series. `quantize` is (launch ms, passes over the bytes) of quantizing the activations, where it was included.

    `low` and `high` are the 5% and 95% quantiles of its errors, in units of the networks' own uncertainty. `version` is that of
    the library.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    index: int
    gpu: str
    fmt: str
    state: str
    library: str
    version: str
    sizes: Sizes
    quantize: tuple[float, float]
    low: float
    high: float
    default: bool
    held_out: Mapping[str, float]


@dataclass(frozen=True)
class StoredArray:
    """An array of a network."""

    shape: tuple[int, ...]
    float16: Base64Bytes

    def __post_init__(self) -> None:
        if not np.isfinite(self.values).all():
            raise ValueError("a number in it is not finite")

    @cached_property
    def values(self) -> NDArray[np.float64]:
        return np.frombuffer(self.float16, dtype="<f2").reshape(self.shape).astype(np.float64)


@dataclass(frozen=True)
class Coefficients:
    """The contents of one coefficients file. `features_version` is that of `physics.features`, which the networks were fitted on.

    `ranges` are the smallest and largest features of the fit: features beyond them are clipped.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    version: Literal[1]
    features_version: Literal[1]
    source: str
    fitted: str
    series: tuple[Series, ...]
    networks: Annotated[tuple[Mapping[str, StoredArray], ...], Field(min_length=1)]
    ranges: Mapping[Literal["low", "high"], tuple[float, ...]]

    def correction(self, shapes: Shapes, sms: int, work: Array, series: NDArray[np.int_]) -> tuple[Array, Array]:
        """The correction to the physics, as a logarithm, and its uncertainty (the scale of a Laplace distribution)."""
        low, high = (np.array(self.ranges[end], dtype=np.float32) for end in ("low", "high"))
        known = _on_grid(features(shapes, sms, work).clip(low, high))
        total = np.zeros((len(known), 2))
        for network in self.networks:
            net = {name: array.values for name, array in network.items()}
            hidden = np.tanh((known @ net["w1"] + net["b1"] + net["s1"][series]).astype(np.float32))
            hidden = (_on_grid(hidden) @ net["w2"] + net["b2"] + net["s2"][series]).astype(np.float32)
            total += _on_grid(hidden / (1 + np.exp(-hidden.clip(-30, 30)))) @ net["w3"] + net["b3"]
        total /= len(self.networks)
        return total[:, 0].clip(-CORRECTION_LIMIT, CORRECTION_LIMIT), np.exp(total[:, 1])

    def fits_together(self) -> bool:
        """Whether the shapes of the arrays match the number of features and series."""
        inputs, series = features(Shapes.of(1, 1, 1), 1).shape[1], len(self.series)
        hidden = self.networks[0]["b1"].shape[0] if "b1" in self.networks[0] else 0
        first = {"w1": (inputs, hidden), "b1": (hidden,), "s1": (series, hidden)}
        second = {"w2": (hidden, hidden), "b2": (hidden,), "s2": (series, hidden)}
        shapes = {**first, **second, "w3": (hidden, 2), "b3": (2,)}
        stored = [{name: array.values.shape for name, array in network.items()} for network in self.networks]
        return stored == [shapes] * len(stored) and [len(values) for values in self.ranges.values()] == [inputs, inputs]


def _on_grid(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """The values as multiples of 2^-20. Their products with weights, which are multiples of 2^-24, then add up without rounding.
    So a GEMM has the same correction whatever is computed beside it, in any order and with any number of threads."""
    return np.rint(values.astype(np.float64) * 2**20) * 2.0**-20


def read_stored(kind: type[Stored], what: str, text: str, origin: str, hint: str) -> Stored:
    """Read a dataclass from its JSON; a `UserError` that names `origin` if it is damaged or of another version."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        problems = error.errors()
    for problem in problems:
        if problem["type"] == "literal_error" and problem["loc"] == ("version",):
            version, expected = str(problem["input"])[:20], problem["ctx"]["expected"]
            raise UserError(f"{origin} is a {what} of version {version}, not {expected}", hint)
    where = "".join(f"{part}: " for part in problems[0]["loc"])
    raise UserError(f"{origin} is a damaged {what}: {where}{problems[0]['msg'][:120]}", hint)


def read_coefficients(text: str, origin: str) -> Coefficients:
    """Read coefficients from their JSON and check them."""
    coefficients = read_stored(Coefficients, "coefficients file", text, origin, REINSTALL)
    if not coefficients.fits_together():
        raise UserError(f"{origin} is a damaged coefficients file: its networks and its series do not fit together", REINSTALL)
    return coefficients


@cache
def shipped() -> Coefficients:
    """The coefficients that ship with the package."""
    return read_coefficients(files("gemmscope.forecast").joinpath("coefficients/gemm.json").read_text("utf-8"), "gemm.json")
