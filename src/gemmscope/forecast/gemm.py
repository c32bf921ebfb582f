"""The time of a GEMM: physics, times what was learned of the libraries, with a 90% error bar.

A GPU, format and state that were measured use their own series. Otherwise a relative stands in: the same chip in its other state,
or a chip of the same architecture. The physics is always that of the chip asked for; only the correction is borrowed, and the
error bar says so by being wider (`transfer.toml`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np

from gemmscope.errors import UserError
from gemmscope.forecast.coefficients import Coefficients, Series, shipped
from gemmscope.forecast.physics import RATE_OF, Array, Shapes, memory_ms, roofline_ms, tile_work
from gemmscope.gpu.specs import GpuSpec, gpu
from gemmscope.toml import load_data
from gemmscope.workload.ops import Pass

State = Literal["sustained", "burst"]
STATES: tuple[State, ...] = ("sustained", "burst")
FORMATS = tuple(RATE_OF)
Layout = Literal["tn", "nn", "nt"]
LAYOUT_OF: dict[Pass, Layout] = {"fprop": "tn", "dgrad": "nn", "wgrad": "nt"}
CAST_BYTES = 3.0  # per element: bf16 read, eight bits written
LEAST_QUANTIZING = 0.1  # of what the fit gives it: so much of it is left where the GEMM needs the rest
Corrections = dict[int, tuple[Array, Array]]  # by series, for the same GEMMs
MEASURED_SIZES = {"m": (512, 32768), "k": (512, 65536), "n": (512, 65536)}


def quantize_bytes_ms(elements: Array, bandwidth_tbps: float) -> Array:
    """One pass over the bytes of a cast at the data sheet's bandwidth."""
    return elements * (CAST_BYTES / (bandwidth_tbps * 1e9))


@dataclass(frozen=True)
class Times:
    """Milliseconds of GEMMs, as arrays. `low` and `high` are logarithmic half-widths of the 90% error bar of their sum.

    `shared` is the part of it that GEMMs of this kind have in common, so that it does not average out in a sum.
    """

    gemm_ms: Array
    quantize_ms: Array
    low: Array
    high: Array
    shared: Array
    burst_ms: Array  # the GEMM alone in the chip's first moments: no other state is faster

    @property
    def total_ms(self) -> Array:
        return self.gemm_ms + self.quantize_ms

    @property
    def low_ms(self) -> Array:
        return self.total_ms * np.exp(-self.low)

    @property
    def high_ms(self) -> Array:
        return self.total_ms * np.exp(self.high)

    def reaching(self, other: Times) -> Times:
        """The same with an error bar that reaches the ends of another's."""
        low = np.maximum(self.low, np.log(self.total_ms / other.low_ms))
        return replace(self, low=low, high=np.maximum(self.high, np.log(other.high_ms / self.total_ms)))

    def at_least(self, gemm_ms: Array, total_ms: Array | None = None) -> Times:
        """The same with GEMMs that take no less. Quantization gives way: the sum was measured, its parts were not."""
        gemm = np.maximum(self.gemm_ms, gemm_ms)
        quantize = np.maximum(self.quantize_ms - (gemm - self.gemm_ms), LEAST_QUANTIZING * self.quantize_ms)
        if total_ms is not None:
            gemm = np.maximum(gemm, total_ms - quantize)
        return replace(self, gemm_ms=gemm, quantize_ms=quantize)


@dataclass(frozen=True)
class Basis:
    """What a forecast stands on: a measured series, and what separates it from what was asked."""

    chip: GpuSpec
    fmt: str
    state: State
    series: Series
    factor: float  # on compute time, for the other state and for a format that was not measured itself
    uncertainty: float  # logarithmic, added to the error bar
    stands_for: str = ""  # a library that was asked for and not measured

    @property
    def direct(self) -> bool:
        """Whether this very thing was measured."""
        return (self.series.gpu, self.series.state, self.series.fmt) == (self.chip.name, self.state, self.fmt)

    @property
    def description(self) -> str:
        """Where it comes from.

        >>> model().basis(gpu("h100"), "bf16", "sustained").description
        'bf16: corrections measured on h200 (sustained, vllm)'
        """
        measured = f"{self.series.gpu} ({self.series.state}, {self.series.library})"
        as_what = "" if self.series.fmt == self.fmt else f" in {self.series.fmt}"
        instead = f", for want of {self.stands_for}" if self.stands_for else ""
        return f"{self.fmt}: {'' if self.direct else 'corrections '}measured on {measured}{as_what}{instead}"


class GemmModel:
    """Times of GEMMs from one set of coefficients."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients

    def basis(self, chip: GpuSpec, fmt: str, state: State, library: str | None = None, *, in_training: bool = False) -> Basis:
        """The series that stands for this GPU, format and state; a `UserError` where the chip cannot multiply the format.

        `in_training`: both states as one library runs them, where that is no longer way; so that they can be compared.
        """
        if fmt not in RATE_OF:
            raise UserError(f"there is no format {fmt!r}", f"formats: {', '.join(FORMATS)}")
        scales_inside = chip.capability >= (10, 0)  # scales inside the GEMM came with Blackwell
        able = [each for each in FORMATS if RATE_OF[each] in chip.tflops and (each != "mxfp8" or scales_inside)]
        if fmt not in able:
            raise UserError(f"{chip.name} has no {fmt} GEMMs", f"formats that it multiplies: {', '.join(able)}")
        facts = _transfer()
        near = {each: self._near(chip, fmt, each, library) for each in STATES}
        if not near[state] and library is not None:
            other = self.basis(chip, fmt, state, in_training=in_training)
            uncertainty = float(np.hypot(other.uncertainty, facts["uncertainty"]["other_library"]))
            return replace(other, uncertainty=uncertainty, stands_for=library)
        if not near[state]:
            raise UserError(f"nothing measured comes near {fmt} GEMMs on {chip.name}")
        mixed = facts["distance"]["other_library"] if in_training else 0.0
        pairs = product(near["sustained"], near["burst"])
        chosen = min(pairs, key=lambda pair: pair[0][0] + pair[1][0] + mixed * (pair[0][2].library != pair[1][2].library))
        _, uncertainty, series = chosen[0 if state == "sustained" else 1]
        return Basis(chip, fmt, state, series, _factor(chip, fmt, state, series), uncertainty)

    def _near(self, chip: GpuSpec, fmt: str, state: State, library: str | None) -> list[tuple[float, float, Series]]:
        """Series that could stand for it, with their distance and the uncertainty that this adds."""
        candidates, facts = [], _transfer()
        for series in self.coefficients.series:
            if series.fmt not in (fmt, *facts["stands_for"].get(fmt, ())) or (library is not None and series.library != library):
                continue
            distance, uncertainty = _distance(chip, gpu(series.gpu))
            if not np.isfinite(distance):
                continue
            for differs, how in ((series.fmt != fmt, "other_format"), (series.state != state, "other_state")):
                if differs:
                    uncertainty = float(np.hypot(uncertainty, facts["uncertainty"][how]))
                    distance += facts["distance"][how]
            candidates.append((distance + (not series.default) * 0.01, uncertainty, series))
        return candidates

    def time(
        self,
        chip: GpuSpec,
        fmt: str,
        shapes: Shapes,
        state: State = "sustained",
        library: str | None = None,
        layout: Any = "tn",
        *,
        in_training: bool = False,
    ) -> Times:
        """GEMMs of one format. `layout` is one for all, or one for each. `in_training`: by training's library, which is known.

        >>> model().time(gpu("h200"), "bf16", Shapes.of(8192, 8192, 8192)).gemm_ms.round(1).tolist()
        [1.6]
        """
        basis = self.basis(chip, fmt, state, library, in_training=in_training)
        unknown = (library is None and not in_training) or bool(basis.stands_for)  # whose GEMM it will be
        if library is None and unknown and not basis.direct:
            basis = replace(basis, uncertainty=float(np.hypot(basis.uncertainty, _transfer()["uncertainty"]["other_library"])))
        work = tile_work(shapes, chip.sms)
        known: Corrections = {}
        times = self._time(basis, shapes, layout, work, known)
        if unknown and basis.direct:
            measured = (chip.name, fmt, state)
            for series in self.coefficients.series:  # error bars reach what other libraries take
                if (series.gpu, series.fmt, series.state) == measured and series is not basis.series:
                    times = times.reaching(self._time(replace(basis, series=series), shapes, layout, work, known))
        if state == "sustained" and in_training:  # single GEMMs are forecast as they were measured
            first = self._time(self.basis(chip, fmt, "burst", library, in_training=True), shapes, layout, work, known)
            times = times.at_least(first.gemm_ms, first.total_ms).reaching(times)
            times = replace(times, burst_ms=np.minimum(first.gemm_ms, times.gemm_ms))
        return times

    def _time(self, basis: Basis, shapes: Shapes, layout: Any, work: Array, known: Corrections) -> Times:
        chip, series, fmt = basis.chip, basis.series, basis.fmt
        rates = {"tflops": chip.tflops[RATE_OF[fmt]], "bandwidth_tbps": chip.bandwidth_tbps}
        physics = roofline_ms(shapes, fmt, sms=chip.sms, work=work, **rates)
        if series.index not in known:
            known[series.index] = self.coefficients.correction(shapes, chip.sms, work, np.full(len(physics), series.index))
        correction, scale = known[series.index]
        compute, moved = work.min(axis=1) / (rates["tflops"] * 1e9), memory_ms(shapes, fmt, chip.bandwidth_tbps)
        bound = 1 / (1 + (moved / compute) ** 4)  # how far it is compute that takes the time
        factors, uncertainties = _layouts(layout, chip, fmt, len(physics))
        gemm = physics * np.exp(correction) * (1 + (basis.factor * factors - 1) * bound)
        launch, passes = series.quantize
        quantize = np.zeros(len(physics))
        if fmt != "bf16":
            if series.fmt != fmt:
                launch, passes = _transfer()["quantize"][fmt]
            quantize = launch + passes * quantize_bytes_ms(shapes.m * shapes.k, chip.bandwidth_tbps)
        uncertainty = np.hypot(np.hypot(basis.uncertainty, uncertainties), uncertainty_outside(shapes))
        low, high = np.maximum(-series.low * scale, 0.005), np.maximum(series.high * scale, 0.005)
        times = Times(gemm, quantize, np.hypot(low, uncertainty), np.hypot(high, uncertainty), uncertainty, gemm)
        return times.at_least(chip_limit_ms(shapes, fmt, chip))


def chip_limit_ms(shapes: Shapes, fmt: str, chip: GpuSpec) -> Array:
    """What no library can beat on this chip: FLOPs at the published rate, bytes at the published bandwidth."""
    compute_ms, memory_ms = (
        shapes.flops / (chip.tflops[RATE_OF[fmt]] * 1e9),
        shapes.bytes_moved(fmt) / (chip.bandwidth_tbps * 1e9),
    )
    limit: Array = np.maximum(compute_ms, memory_ms)
    return limit


@cache
def model() -> GemmModel:
    """The one of the package."""
    return GemmModel(shipped())


@cache
def _transfer() -> dict[str, Any]:
    return load_data("gemmscope.forecast", "coefficients/transfer.toml")


def _distance(chip: GpuSpec, other: GpuSpec) -> tuple[float, float]:
    """How far a measured chip is from the one asked for, and the uncertainty that this adds; infinite if it is no relative."""
    if chip.name == other.name:
        return 0.0, 0.0
    facts = _transfer()
    if chip.architecture == other.architecture:
        return facts["distance"]["same_architecture"], facts["uncertainty"]["same_architecture"]
    relatives = facts["relatives"].get(chip.architecture, [])
    if other.architecture in relatives:
        return facts["distance"]["relative"] + relatives.index(other.architecture), facts["uncertainty"]["relative"]
    return float("inf"), 0.0


def _factor(chip: GpuSpec, fmt: str, state: State, series: Series) -> float:
    """On compute time: the other state, and a format that stands in for another."""
    factor, facts = 1.0, _transfer()
    if series.fmt != fmt:
        factor *= facts["slower_than_stand_in"].get(fmt, 1.0)
    if series.state != state:
        slower = facts["sustained_over_burst"].get(chip.architecture, {}).get(series.fmt, facts["sustained_over_burst"]["other"])
        factor *= slower if state == "sustained" else 1 / slower
    return float(factor)


def _layouts(layout: Any, chip: GpuSpec, fmt: str, length: int) -> tuple[Array, Array]:
    """The factor on compute time of each GEMM's layout, and the uncertainty of it: only TN was measured widely."""
    table = _transfer()["layouts"]
    known = table.get(chip.architecture, {}).get(fmt, table["other"])
    names = np.broadcast_to(np.asarray(layout), (length,))
    factors, uncertainties = np.ones(length), np.zeros(length)
    for name, (factor, uncertainty) in known.items():
        factors[names == name], uncertainties[names == name] = factor, uncertainty
    return factors, uncertainties


def uncertainty_outside(shapes: Shapes) -> Array:
    """The uncertainty of sizes beyond those measured, and of GEMMs in groups."""
    added = _transfer()["uncertainty"]
    octaves = np.zeros(len(shapes.m))
    for name, (least, most) in MEASURED_SIZES.items():
        sizes = getattr(shapes, name)
        octaves = octaves + np.maximum(np.log2(least / sizes), 0) + np.maximum(np.log2(sizes / most), 0)
    beyond: Array = np.hypot(octaves * added["per_octave_outside"], np.where(shapes.groups > 1, added["grouped"], 0.0))
    return beyond
