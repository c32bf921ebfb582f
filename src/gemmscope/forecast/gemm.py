"""The time of a GEMM: the physics times a correction fitted to measured libraries, with a 90% error bar.

A GPU, format and state that were measured use their own series. Otherwise a related series is used: that of the same chip in its
other state, or of a chip of the same architecture. The physics is always that of the requested chip; only the correction is
borrowed, and the error bar is wider (`transfer.toml`). In training, a GPU that was not measured in a format takes no longer than
one that was, of this or a related architecture, and that is no faster in anything: what is borrowed may be of a slower library.

The error bar is also wider for a library or a version of it that was not measured, and for sizes beyond those of the series.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from gemmscope.choices import CLOCK_STATES, ClockState
from gemmscope.errors import MissingFactError, UserError
from gemmscope.forecast.coefficients import Coefficients, Series, Sizes, shipped
from gemmscope.forecast.physics import Array, Shapes, memory_ms, roofline_ms, tile_work
from gemmscope.gpu.specs import GpuSpec, gpu
from gemmscope.recipe.precisions import precisions, timed_precisions
from gemmscope.toml import load_data
from gemmscope.workload.ops import Pass

Layout = Literal["tn", "nn", "nt"]
LAYOUT_OF: dict[Pass, Layout] = {"fprop": "tn", "dgrad": "nn", "wgrad": "nt"}
CAST_BYTES = 3.0  # per element: bf16 read, eight bits written
LEAST_QUANTIZING = 0.1  # share of the fitted quantization time that stays when the GEMM's share grows
Corrections = dict[int, tuple[Array, Array]]  # by series, for the same GEMMs
MEASURED_SIZES: Sizes = ((512, 32768), (512, 65536), (512, 65536))  # of most series: m, k, n
NAMED = re.compile(r"(.+?)(?:\s*(?:==|[=@:\s])\s*v?(\d[\w.+-]*))?")
_transfer = cache(partial(load_data, "gemmscope.forecast", "coefficients/transfer.toml"))


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
    burst_ms: Array  # the GEMM alone in a burst, the fastest state

    @property
    def total_ms(self) -> Array:
        return self.gemm_ms + self.quantize_ms

    @property
    def low_ms(self) -> Array:
        return self.total_ms * np.exp(-self.low)

    @property
    def high_ms(self) -> Array:
        return self.total_ms * np.exp(self.high)

    @staticmethod
    def merged(pieces: list[tuple[NDArray[np.int_], Times]]) -> Times:
        """Merge the times of parts of the GEMMs; each part comes with the indices of its GEMMs."""
        result = {field.name: np.zeros(sum(len(index) for index, _ in pieces)) for field in fields(Times)}
        for index, part in pieces:
            for name, values in result.items():
                values[index] = getattr(part, name)
        return Times(**result)

    def within(self, limit_ms: Array) -> Times:
        """Shorten the error bar so that it does not go below the time at the chip's rate; the series' own error stays."""
        own = np.sqrt(np.maximum(self.low**2 - self.shared**2, 0.0))
        room = np.log(np.maximum(self.total_ms / limit_ms, 1.0))
        return replace(self, low=np.maximum(np.minimum(self.low, room), own))

    def reaching(self, other: Times) -> Times:
        """Widen the error bar so that it covers the error bar of `other`."""
        low = np.maximum(self.low, np.log(self.total_ms / other.low_ms))
        return replace(self, low=low, high=np.maximum(self.high, np.log(other.high_ms / self.total_ms)))

    def at_most(self, other: Times) -> Times:
        """The same, but no GEMM takes longer than in `other`; the error bar still covers what it was."""
        least = {name: np.minimum(getattr(self, name), getattr(other, name)) for name in ("gemm_ms", "quantize_ms", "burst_ms")}
        return replace(self, **least).reaching(self)

    def at_least(self, gemm_ms: Array, total_ms: Array | None = None) -> Times:
        """Raise GEMM times to at least `gemm_ms`, taken from quantization: the sum was measured, its parts were not."""
        gemm = np.maximum(self.gemm_ms, gemm_ms)
        quantize = np.maximum(self.quantize_ms - (gemm - self.gemm_ms), LEAST_QUANTIZING * self.quantize_ms)
        if total_ms is not None:
            gemm = np.maximum(gemm, total_ms - quantize)
        return replace(self, gemm_ms=gemm, quantize_ms=quantize)


@dataclass(frozen=True)
class Basis:
    """The measured series that a forecast is based on, and how it differs from what was asked for."""

    chip: GpuSpec
    fmt: str
    state: ClockState
    series: Series
    factor: float  # on compute time, for the other state and for a format that was not measured itself
    uncertainty: float  # logarithmic, added to the error bar
    stands_for: str = ""  # the library (or version) that was asked for but not measured

    def widened(self, uncertainty: float, stands_for: str = "") -> Basis:
        """The same with more uncertainty, for a library that was not measured."""
        return replace(self, uncertainty=float(np.hypot(self.uncertainty, uncertainty)), stands_for=stands_for or self.stands_for)

    @property
    def direct(self) -> bool:
        """Whether this GPU, state and format were themselves measured."""
        return (self.series.gpu, self.series.state, self.series.fmt) == (self.chip.name, self.state, self.fmt)

    @property
    def description(self) -> str:
        """The measurements that the forecast is based on, in one line.

        >>> model().basis(gpu("h100"), "bf16", "sustained").description
        'bf16: corrections measured on h200 (sustained, vllm)'
        """
        measured = f"{self.series.gpu} ({self.series.state}, {self.series.library})"
        as_what = "" if self.series.fmt == self.fmt else f" in {self.series.fmt}"
        instead = f", because {self.stands_for} was not measured" if self.stands_for else ""
        return f"{self.fmt}: {'' if self.direct else 'corrections '}measured on {measured}{as_what}{instead}"


class GemmModel:
    """Times of GEMMs from one set of coefficients."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients

    def basis(
        self,
        chip: GpuSpec,
        fmt: str,
        state: ClockState,
        library: str | None = None,
        *,
        in_training: bool = False,
        outside: frozenset[Sizes] = frozenset(),
    ) -> Basis:
        """The series used for this GPU, format and state; a `UserError` if the chip does not support the format.

        `library` may include a version. `in_training`: prefer one library for both states, so that they can be compared.
        `outside`: ranges of sizes that do not contain the GEMMs; series with other ranges are preferred.
        """
        formats = sorted(timed_precisions())
        if fmt not in formats:
            raise UserError(f"there is no format {fmt!r}", f"formats: {', '.join(formats)}")
        able = [name for name in formats if precisions()[name].runs_on(chip.tflops, chip.capability)]
        if fmt not in able:
            raise UserError(f"{chip.name} has no {fmt} GEMMs", f"supported formats: {', '.join(able)}")
        facts, (name, version) = _transfer(), library_and_version(library)
        near = {which: self._near(chip, fmt, which, name, outside) for which in CLOCK_STATES}
        if not near[state] and name is not None:
            usual = self.basis(chip, fmt, state, in_training=in_training, outside=outside)
            return usual.widened(facts["uncertainty"]["other_library"][fmt], library or "")
        if not near[state]:
            if not any(series.fmt in (fmt, *facts["stands_for"].get(fmt, ())) for series in self.coefficients.series):
                raise MissingFactError("forecast/coefficients/transfer.toml", f"stands_for.{fmt}")
            raise UserError(f"no measurement is similar to {fmt} GEMMs on {chip.name}")
        mixed = facts["distance"]["other_library"] if in_training else 0.0
        pairs = product(near["sustained"], near["burst"])
        chosen = min(pairs, key=lambda pair: pair[0][0] + pair[1][0] + mixed * (pair[0][2].library != pair[1][2].library))
        _, uncertainty, series = chosen[0 if state == "sustained" else 1]
        slower, unsure = slowed(chip) if state == "sustained" else (1.0, 0.0)
        basis = Basis(chip, fmt, state, series, _factor(chip, fmt, state, series) * slower, float(np.hypot(uncertainty, unsure)))
        if version in ("", series.version):
            return basis
        return basis.widened(facts["uncertainty"]["other_version"][fmt], f"{name} {version}")

    def _near(
        self, chip: GpuSpec, fmt: str, state: ClockState, library: str | None, outside: frozenset[Sizes]
    ) -> list[tuple[float, float, Series]]:
        """The series that could be used, each with its distance and the uncertainty that it adds."""
        candidates, facts = [], _transfer()
        for series in self.coefficients.series:
            if series.fmt not in (fmt, *facts["stands_for"].get(fmt, ())) or (library is not None and series.library != library):
                continue
            distance, uncertainty = _distance(chip, gpu(series.gpu), fmt)
            if not np.isfinite(distance):
                continue
            if series.fmt != fmt:
                uncertainty = float(np.hypot(uncertainty, facts["uncertainty"]["other_format"]))
                distance += facts["distance"]["other_format"]
            if series.state != state:
                uncertainty = float(np.hypot(uncertainty, _uncertainty("other_state", chip, fmt)))
                distance += facts["distance"]["other_state"]
            distance += facts["distance"]["outside"] * (series.sizes in outside)
            candidates.append((distance + (not series.default) * 0.01, uncertainty, series))
        return candidates

    def _pieces(self, shapes: Shapes) -> Iterator[tuple[NDArray[np.int_], frozenset[Sizes]]]:
        """Groups of GEMMs (as indices) outside the same ranges of sizes, with these ranges; none if they are outside of all."""
        ranges = [*dict.fromkeys(series.sizes for series in self.coefficients.series)]
        beyond = np.stack([octaves_outside(shapes, sizes).any(axis=0) for sizes in ranges])
        codes = np.where(beyond.all(axis=0), 0, (1 << np.arange(len(ranges))) @ beyond)
        for code in np.unique(codes):
            yield np.flatnonzero(codes == code), frozenset(sizes for bit, sizes in enumerate(ranges) if code >> bit & 1)

    def time(
        self,
        chip: GpuSpec,
        fmt: str,
        shapes: Shapes,
        state: ClockState = "sustained",
        library: str | None = None,
        layout: Any = "tn",
        *,
        in_training: bool = False,
        calibrated: bool = False,
    ) -> Times:
        """The times of GEMMs of one format. `layout` is one layout for all GEMMs, or one per GEMM.

        `in_training`: with the library that training uses; the caller adds its uncertainty. `calibrated`: with the user's own
        library, which was measured.

        >>> model().time(gpu("h200"), "bf16", Shapes.of(8192, 8192, 8192)).gemm_ms.round(1).tolist()
        [1.6]
        """
        layouts = np.broadcast_to(np.asarray(layout), shapes.m.shape)
        whole = tile_work(shapes, chip.sms)
        pieces = []
        for index, outside in self._pieces(shapes):
            part, work, known = shapes.take(index), whole[index], Corrections()
            basis = self.basis(chip, fmt, state, library, in_training=in_training, outside=outside)
            if in_training or calibrated:
                times = self._time(basis, part, layouts[index], work, known)
            else:
                times = self._as_any_library(basis, library, part, layouts[index], work, known)
            if state == "sustained" and in_training:  # single GEMMs are forecast as they were measured
                cool = self.basis(chip, fmt, "burst", library, in_training=True, outside=outside)
                first = self._time(cool, part, layouts[index], work, known)
                times = times.at_least(first.gemm_ms, first.total_ms).reaching(times)
                times = replace(times, burst_ms=np.minimum(first.gemm_ms, times.gemm_ms))
            pieces.append((index, times))
        times = Times.merged(pieces)
        for other in self._limits(chip, fmt) if in_training else ():
            times = times.at_most(self.time(other, fmt, shapes, state, library, layouts, in_training=True))
        return times

    def _limits(self, chip: GpuSpec, fmt: str) -> list[GpuSpec]:
        """Of a GPU that was not measured in a format: the measured ones of this or a related architecture that are no faster."""
        same = (fmt, *_transfer()["stands_for"].get(fmt, ()))
        measured = {series.gpu: gpu(series.gpu) for series in self.coefficients.series if series.fmt in same}
        related, rate = {chip.architecture, *_transfer()["relatives"].get(chip.architecture, ())}, precisions()[fmt].rate
        return [
            other
            for other in measured.values()
            if chip.name not in measured
            and chip.power_limit_w is None
            and other.architecture in related
            and other.sms <= chip.sms
            if other.tflops[rate] <= chip.tflops[rate] and other.bandwidth_tbps <= chip.bandwidth_tbps
        ]

    def _as_any_library(
        self, basis: Basis, library: str | None, shapes: Shapes, layouts: Any, work: Array, known: Corrections
    ) -> Times:
        """Times of single GEMMs where the library may not be the measured one: error bars cover the times of other libraries."""
        name, _ = library_and_version(library)
        widest = _transfer()["uncertainty"]["other_library"]
        asked = basis.widened(widest[basis.fmt] * widest["unnamed"]) if name is None else basis
        times = self._time(asked, shapes, layouts, work, known)
        if basis.direct and basis.series.library != name:
            for series in self.coefficients.series:
                same = (series.gpu, series.fmt, series.state) == (basis.chip.name, basis.fmt, basis.state)
                if same and series is not basis.series:
                    other = replace(basis, series=series, uncertainty=0.0)
                    times = times.reaching(self._time(other, shapes, layouts, work, known))
        return times.within(shapes.flops / (basis.chip.tflops[precisions()[basis.fmt].rate] * 1e9))  # caches can beat the memory

    def _time(self, basis: Basis, shapes: Shapes, layouts: NDArray[np.str_], work: Array, known: Corrections) -> Times:
        chip, series, fmt = basis.chip, basis.series, basis.fmt
        rates = {"tflops": chip.tflops[precisions()[fmt].rate], "bandwidth_tbps": chip.bandwidth_tbps}
        physics = roofline_ms(shapes, fmt, sms=chip.sms, work=work, **rates)
        if series.index not in known:
            known[series.index] = self.coefficients.correction(shapes, chip.sms, work, np.full(len(physics), series.index))
        correction, scale = known[series.index]
        compute, moved = work.min(axis=1) / (rates["tflops"] * 1e9), memory_ms(shapes, fmt, chip.bandwidth_tbps)
        bound = 1 / (1 + (moved / compute) ** 4)  # the degree to which the GEMM is compute-bound, 0 to 1
        factors, uncertainties = _layouts(layouts, chip, fmt)
        gemm = physics * np.exp(correction) * (1 + (basis.factor * factors - 1) * bound)
        gemm = np.maximum(gemm, power_limit_ms(shapes, fmt, chip, basis.state))
        quantize = np.zeros(len(physics))
        if fmt != "bf16":
            launch, passes = series.quantize if series.fmt == fmt else _transfer()["quantize"][fmt]
            once_ms = shapes.m * shapes.k * (CAST_BYTES / (chip.bandwidth_tbps * 1e9))  # one pass over the bytes of a cast
            quantize = launch + passes * once_ms
        uncertainty = np.hypot(np.hypot(basis.uncertainty, uncertainties), uncertainty_outside(shapes, series.sizes))
        low, high = np.maximum(-series.low * scale, 0.005), np.maximum(series.high * scale, 0.005)
        times = Times(gemm, quantize, np.hypot(low, uncertainty), np.hypot(high, uncertainty), uncertainty, gemm)
        return times.at_least(chip_limit_ms(shapes, fmt, chip))


def chip_limit_ms(shapes: Shapes, fmt: str, chip: GpuSpec) -> Array:
    """The lower bound for any library on this chip: FLOPs at the published rate, bytes at the published bandwidth."""
    compute_ms = shapes.flops / (chip.tflops[precisions()[fmt].rate] * 1e9)
    return cast(Array, np.maximum(compute_ms, shapes.bytes_moved(fmt) / (chip.bandwidth_tbps * 1e9)))


def power_limit_ms(shapes: Shapes, fmt: str, chip: GpuSpec, state: ClockState) -> Array:
    """What the chip's power limit allows where it is known to be far below the published rate; zero elsewhere."""
    rate = chip.sustained_tflops.get(precisions()[fmt].rate)
    if rate is None:
        return np.zeros(len(shapes.m))
    return shapes.flops / (rate * 1e9) * (slowed(chip)[0] if state == "sustained" else 1 / _slower(chip, fmt))


def slowed(chip: GpuSpec) -> tuple[float, float]:
    """How much longer compute-bound work takes at the chip's power limit than at its usual one, and the uncertainty of it.

    >>> slowed(gpu("h100")), round(slowed(gpu("h100").limited_to(500, ""))[0], 2)
    ((1.0, 0.0), 1.12)
    """
    known, deficit = _transfer()["power_limit"], np.log(chip.power_w / chip.power_limit_w) if chip.power_limit_w else 0.0
    return float(np.exp(known["exponent"] * deficit)), float(known["uncertainty"] * deficit)


@cache
def library_and_version(library: str | None) -> tuple[str | None, str]:
    """A library as people name it: trtllm, trtllm 1.3.0, trtllm==1.3.0.

    >>> library_and_version("trtllm"), library_and_version("vllm==0.22.0"), library_and_version("my library v2.1")
    (('trtllm', ''), ('vllm', '0.22.0'), ('my library', '2.1'))
    """
    parts = NAMED.fullmatch(library.strip()) if library else None
    return (parts[1], parts[2] or "") if parts else (library, "")


@cache
def model() -> GemmModel:
    """The model with the coefficients of the package."""
    return GemmModel(shipped())


def _uncertainty(kind: str, chip: GpuSpec, fmt: str) -> float:
    """The uncertainty of one kind, for the chip's architecture and a format."""
    table = _transfer()["uncertainty"][kind]
    return float(table.get(chip.architecture, {}).get(fmt, table["other"][fmt]))


def _distance(chip: GpuSpec, other: GpuSpec, fmt: str) -> tuple[float, float]:
    """The distance of a measured chip from the requested one (infinite if unrelated), and the uncertainty that it adds."""
    if chip.name == other.name:
        return 0.0, 0.0
    distance = _transfer()["distance"]
    if chip.architecture == other.architecture:
        return distance["same_architecture"], _uncertainty("same_architecture", chip, fmt)
    relatives = _transfer()["relatives"][chip.architecture]
    if other.architecture in relatives:
        return distance["relative"] + relatives.index(other.architecture), _uncertainty("relative", chip, fmt)
    return float("inf"), 0.0


def _slower(chip: GpuSpec, fmt: str) -> float:
    """Sustained compute time over that of a burst."""
    facts = _transfer()["sustained_over_burst"]
    return float(facts.get(chip.architecture, {}).get(fmt, facts["other"]))


def _factor(chip: GpuSpec, fmt: str, state: ClockState, series: Series) -> float:
    """The factor on compute time for another state, and for a format that stands in for another."""
    factor = 1.0 if series.fmt == fmt else float(_transfer()["slower_than_stand_in"][fmt])
    if series.state == state:
        return factor
    return factor * _slower(chip, series.fmt) if state == "sustained" else factor / _slower(chip, series.fmt)


def _layouts(layouts: NDArray[np.str_], chip: GpuSpec, fmt: str) -> tuple[Array, Array]:
    """The factor on compute time of each GEMM's layout, and the uncertainty of it: only TN was measured widely."""
    table = _transfer()["layouts"]
    known = table.get(chip.architecture, {}).get(fmt, table["other"])
    factors, uncertainties = np.ones(len(layouts)), np.zeros(len(layouts))
    for name, (factor, uncertainty) in known.items():
        factors[layouts == name], uncertainties[layouts == name] = factor, uncertainty
    return factors, uncertainties


def octaves_outside(shapes: Shapes, sizes: Sizes) -> Array:
    """How far the rows, inner dimension and columns of each GEMM lie beyond a range: negative below it, zero inside."""
    octaves = []
    for values, (least, most) in zip((shapes.rows, shapes.inner, shapes.n), sizes, strict=True):
        octaves.append(np.minimum(np.log2(values / least), 0) + np.maximum(np.log2(values / most), 0))
    return np.stack(octaves)


def uncertainty_outside(shapes: Shapes, sizes: Sizes = MEASURED_SIZES) -> Array:
    """The uncertainty of sizes beyond those measured, and of GEMMs in groups."""
    added, octaves = _transfer()["uncertainty"], octaves_outside(shapes, sizes)
    above, below = added["outside"]["above"], added["outside"]["below"]
    beyond = np.where(
        octaves < 0,
        np.minimum(-octaves * below["octave"], below["most"]),
        np.minimum(octaves * above["octave"], above["most"]),
    )
    return cast(Array, np.sqrt((beyond**2).sum(axis=0) + np.where(shapes.groups > 1, added["grouped"] ** 2, 0.0)))
