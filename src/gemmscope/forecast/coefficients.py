"""The fitted coefficients of GEMMs: what was measured, on what, and the small networks that correct the physics.

A *series* is one (GPU, format, state, library) that was measured. Each network maps `physics.features` and the series to two
numbers per GEMM: how far the library's time is from the physics (a logarithm), and how uncertain that is. They are means over
networks fitted from different starts; numbers are stored as 16-bit floats in base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmscope.errors import UserError
from gemmscope.forecast.physics import FEATURES_VERSION, Array, Shapes, features

VERSION = 1
LAYERS = ("w1", "b1", "s1", "w2", "b2", "s2", "w3", "b3")
REINSTALL = "it is part of the package: install gemmscope again"
CORRECTION_LIMIT = 2.5  # as a logarithm: nothing measured is further from the physics


@dataclass(frozen=True)
class Series:
    """One measured series. `quantize` is (launch ms, passes over the bytes) of quantizing the activations, where it was included.

    `low` and `high` are the 5% and 95% quantiles of its errors, in units of the networks' own uncertainty.
    """

    index: int
    gpu: str
    fmt: str
    state: str
    library: str
    quantize: tuple[float, float]
    low: float
    high: float
    default: bool
    held_out: Mapping[str, float]


@dataclass(frozen=True)
class Coefficients:
    """Everything in one file. `ranges` are the smallest and largest features seen: beyond them the correction stays as it is."""

    series: tuple[Series, ...]
    networks: tuple[Mapping[str, NDArray[np.float32]], ...]
    ranges: tuple[NDArray[np.float32], NDArray[np.float32]]
    about: Mapping[str, str]

    def correction(self, shapes: Shapes, sms: int, work: Array, series: NDArray[np.int_]) -> tuple[Array, Array]:
        """Logarithms: the correction, and its uncertainty (the scale of a Laplace distribution)."""
        known = features(shapes, sms, work).clip(*self.ranges)
        total = np.zeros((len(known), 2), dtype=np.float32)
        for net in self.networks:
            hidden = np.tanh(known @ net["w1"] + net["b1"] + net["s1"][series])
            hidden = hidden @ net["w2"] + net["b2"] + net["s2"][series]
            hidden = hidden / (1 + np.exp(-hidden.clip(-30, 30)))
            total += hidden @ net["w3"] + net["b3"]
        total /= len(self.networks)
        return total[:, 0].astype(np.float64).clip(-CORRECTION_LIMIT, CORRECTION_LIMIT), np.exp(total[:, 1].astype(np.float64))


def pack(values: Any) -> dict[str, Any]:
    """An array as JSON."""
    array = np.asarray(values, dtype="<f2")
    return {"shape": list(array.shape), "float16": base64.b64encode(array.tobytes()).decode()}


def unpack(stored: Mapping[str, Any]) -> NDArray[np.float32]:
    """The array back.

    >>> unpack(pack([[1.0, 0.5]])).tolist()
    [[1.0, 0.5]]
    """
    array = np.frombuffer(base64.b64decode(stored["float16"]), dtype="<f2").reshape(stored["shape"])
    return np.asarray(array, dtype=np.float32)


def read_coefficients(text: str, origin: str) -> Coefficients:
    """Coefficients from their JSON; a `UserError` that names `origin` if it is damaged or of another version."""
    try:
        data = json.loads(text)
        version = f"{data['version']}.{data['features_version']}"
        if version == f"{VERSION}.{FEATURES_VERSION}":
            return _made(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:120]}"
        raise UserError(f"{origin} is a damaged coefficients file: {reason}", REINSTALL) from None
    raise UserError(f"{origin} is a coefficients file of version {version[:20]}, not {VERSION}.{FEATURES_VERSION}", REINSTALL)


def _made(data: Mapping[str, Any]) -> Coefficients:
    """From the file's tables; any exception tells that something is missing or does not fit."""
    series = tuple(
        Series(index=index, **{**facts, "quantize": tuple(facts["quantize"])}) for index, facts in enumerate(data["series"])
    )
    for each in series:
        if not all(isinstance(name, str) for name in (each.gpu, each.fmt, each.state, each.library)):
            raise TypeError(f"series {each.index} has a name that is no text")
        launch, passes = each.quantize
        if not np.isfinite([launch, passes, each.low, each.high]).all():
            raise ValueError(f"series {each.index} has a number that is none")
    networks = tuple({name: unpack(net[name]) for name in LAYERS} for net in data["networks"])
    low, high = (np.asarray(data["ranges"][end], dtype=np.float32) for end in ("low", "high"))
    inputs, hidden = len(low), len(networks[0]["b1"]) if networks else 0
    inside = {"w1": (inputs, hidden), "s1": (len(series), hidden), "w2": (hidden, hidden), "s2": (len(series), hidden)}
    shapes = {**inside, "b1": (hidden,), "b2": (hidden,), "w3": (hidden, 2), "b3": (2,)}
    features_known = features(Shapes.of(1, 1, 1), 1).shape[1]
    fit = all(net[name].shape == shapes[name] for net in networks for name in LAYERS)
    if not networks or not fit or not low.shape == high.shape == (features_known,):
        raise ValueError("its networks and its series do not fit together")
    if not all(np.isfinite(array).all() for array in (low, high, *(net[name] for net in networks for name in LAYERS))):
        raise ValueError("a number in it is none")
    about = {"source": str(data["source"]), "fitted": str(data["fitted"])}
    return Coefficients(series, networks, (low, high), about)


@cache
def shipped() -> Coefficients:
    """Those of the package."""
    place = files("gemmscope.forecast").joinpath("coefficients/gemm.json")
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"gemm.json cannot be read: {getattr(error, 'strerror', None) or error}", REINSTALL) from None
    return read_coefficients(text, "gemm.json")
