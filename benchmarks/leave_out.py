"""How well error bars hold for what was not measured: each group of series is left out in turn, and forecast from the others.

`forecast_accuracy.py` writes the tables; the tests check that they hold. Everything comes from the samples in tests/data/.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gemmscope.choices import ClockState
from gemmscope.errors import UserError
from gemmscope.forecast.coefficients import Coefficients, Series
from gemmscope.forecast.estimate import Estimate, ratio
from gemmscope.forecast.gemm import GemmModel, Times
from gemmscope.forecast.linears import in_common
from gemmscope.forecast.physics import Shapes
from gemmscope.gpu.specs import gpu

DATA = Path(__file__).resolve().parent.parent / "tests/data"
FITTED_ROWS = 512  # and more
GOAL = 0.85
Key = tuple[str, str, str, str]  # GPU, format, state, library
Rule = Callable[[Series, Key], bool]

# Formats measured with cuBLAS on an H200, and the library as which they are forecast: measured, not measured, or not named.
CUBLAS = (
    ("bf16", "trtllm"), ("bf16", "trtllm 1.4"), ("bf16", "cublas"), ("bf16", None), ("fp8", "cublas"), ("fp8", None),
    ("fp8-rowwise", "cublas"), ("fp8-rowwise", None), ("fp8-block", "cublas"), ("fp8-block", None),
)  # fmt: skip

# What is left out to forecast a series, and whether its library is named.
KINDS: dict[str, tuple[Rule, bool]] = {
    "the series": (lambda series, key: (series.gpu, series.fmt, series.state, series.library) == key, True),
    "its library, on every GPU": (lambda series, key: series.library == key[3], True),
    "its library, and none is named": (lambda series, key: series.library == key[3], False),
    "its GPU": (lambda series, key: series.gpu == key[0], True),
    "its GPU, and no library is named": (lambda series, key: series.gpu == key[0], False),
    "its state on that GPU": (lambda series, key: (series.gpu, series.state) == (key[0], key[2]), True),
}


@dataclass(frozen=True)
class Group:
    """One series that was left out: what it was forecast from, errors (log of measured over forecast), and the error bar."""

    key: Key
    based_on: str
    errors: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def inside(self) -> np.ndarray:
        return (self.errors >= -self.low) & (self.errors <= self.high)


def sample() -> dict[Key, np.ndarray]:
    """The held-out rows (m, k, n, ms) of every series."""
    rows: dict[Key, list[list[float]]] = defaultdict(list)
    for row in csv.DictReader(gzip.decompress((DATA / "held_out_gemms.csv.gz").read_bytes()).decode().splitlines()):
        key = (row["gpu"], row["fmt"], row["state"], row["library"])
        rows[key].append([float(row[column]) for column in ("m", "k", "n", "latency_ms")])
    return {key: np.array(values) for key, values in rows.items()}


def state_of(key: Key) -> ClockState:
    """Of a series."""
    return "sustained" if key[2] == "sustained" else "burst"


def without(coefficients: Coefficients, rule: Rule, key: Key) -> GemmModel:
    """A model that has not seen the series of a rule."""
    return GemmModel(replace(coefficients, series=tuple(series for series in coefficients.series if not rule(series, key))))


def forecast(gemms: GemmModel, key: Key, rows: np.ndarray, library: str | None) -> Group:
    """One series, forecast by a model."""
    m, k, n, measured = rows.T
    basis = gemms.basis(gpu(key[0]), key[1], state_of(key), library)
    times = gemms.time(gpu(key[0]), key[1], Shapes.of(m, k, n), state_of(key), library)
    source = f"{basis.series.gpu}, {basis.series.state}, {basis.series.library}"
    return Group(key, source, np.log(measured / times.total_ms), times.low, times.high)


def left_out(coefficients: Coefficients, rule: Rule, *, named: bool) -> Iterator[Group]:
    """Every series that something else can stand in for."""
    for key, rows in sample().items():
        try:
            yield forecast(without(coefficients, rule, key), key, rows, key[3] if named else None)
        except UserError:
            continue


def share_inside(groups: list[Group]) -> float:
    """Over all rows."""
    return float(np.concatenate([group.inside for group in groups]).mean())


@dataclass(frozen=True)
class Speedups:
    """Speedups over BF16 of one series: errors, and half-widths of the error bar: as it is, and of two independent sides."""

    key: Key
    errors: np.ndarray
    width: np.ndarray
    independent: np.ndarray


def speedups(coefficients: Coefficients, rule: Rule) -> Iterator[Speedups]:
    """Of every format over BF16 by the same library on the same GPU and in the same state, both left out."""
    rows = sample()
    for key, fast_rows in rows.items():
        baseline: Key = (key[0], "bf16", key[2], key[3])
        if key == baseline or baseline not in rows:
            continue
        slow_times = {tuple(row[:3]): row[3] for row in rows[baseline]}
        common = np.array([[*row, slow_times[tuple(row[:3])]] for row in fast_rows if tuple(row[:3]) in slow_times])
        if not len(common):
            continue
        m, k, n, fast_ms, slow_ms = common.T
        shapes, chip = Shapes.of(m, k, n), gpu(key[0])
        try:
            gemms = without(coefficients, rule, key)
            slow, fast = (gemms.time(chip, fmt, shapes, state_of(key), key[3]) for fmt in ("bf16", key[1]))
        except UserError:
            continue
        pairs = list(zip(_estimates(slow), _estimates(fast), strict=True))
        width = [ratio(*pair, in_common()).uncertainty for pair in pairs]
        independent = [ratio(*pair, 0.0).uncertainty for pair in pairs]
        errors = np.log(slow_ms / fast_ms) - np.log(slow.total_ms / fast.total_ms)
        yield Speedups(key, errors, np.array(width), np.array(independent))


def _estimates(times: Times) -> list[Estimate]:
    own = np.sqrt(np.maximum(times.high**2 - times.shared**2, 0.0))
    return [Estimate(*facts) for facts in zip(times.total_ms.tolist(), own.tolist(), times.shared.tolist(), strict=True)]


def on_h200(coefficients: Coefficients, fmt: str, library: str | None, *, few: bool) -> Group:
    """GEMMs of cuBLAS on an H200 in bursts, of fewer rows than were fitted or of as many, forecast as `library`.

    Only the GEMM was measured there, without quantization.
    """
    rows = [
        [float(row[column]) for column in ("m", "k", "n", "ms")]
        for row in csv.DictReader(gzip.decompress((DATA / "h200_small_m.csv.gz").read_bytes()).decode().splitlines())
        if row["format"] == fmt and (float(row["m"]) < FITTED_ROWS) == few
    ]
    m, k, n, measured = np.array(rows).T
    used = "fp8" if fmt == "fp8-rowwise" else fmt
    times = GemmModel(coefficients).time(gpu("h200"), used, Shapes.of(m, k, n), "burst", library)
    key = ("h200", fmt, "burst", library or "")
    return Group(key, "h200, burst, trtllm", np.log(measured / times.gemm_ms), times.low, times.high)
