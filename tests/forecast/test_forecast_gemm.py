"""The forecast of GEMMs: errors and error bars on sites that were never fitted, physics that points the right way."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.choices import ClockState
from gemmscope.errors import UserError
from gemmscope.forecast.coefficients import read_coefficients
from gemmscope.forecast.gemm import GemmModel, model
from gemmscope.forecast.physics import Shapes
from gemmscope.gpu.specs import GpuSpec, gpu, gpus

SAMPLE = Path(__file__).parent.parent / "data" / "held_out_gemms.csv.gz"
MEDIAN, P90 = 0.04, 0.12
COVERED = (0.85, 0.95)
SAMPLING = 0.035  # sampling error of the coverage: each series has only a few hundred rows


def held_out() -> dict[tuple[str, str, str, str], np.ndarray]:
    """Rows (m, k, n, measured ms) by series."""
    rows: dict[tuple[str, str, str, str], list[list[float]]] = defaultdict(list)
    for row in csv.DictReader(gzip.decompress(SAMPLE.read_bytes()).decode().splitlines()):
        key = (row["gpu"], row["fmt"], row["state"], row["library"])
        rows[key].append([float(row[name]) for name in ("m", "k", "n", "latency_ms")])
    return {key: np.array(values) for key, values in rows.items()}


ROWS = held_out()


def errors(key: tuple[str, str, str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of one series, and whether each measured time lies inside the error bar."""
    name, fmt, state, library = key
    m, k, n, measured = ROWS[key].T
    known: ClockState = "sustained" if state == "sustained" else "burst"
    estimate = model().time(gpu(name), fmt, Shapes.of(m, k, n), known, library)
    inside = (measured >= estimate.low_ms) & (measured <= estimate.high_ms)
    return np.abs(estimate.total_ms / measured - 1), inside


def test_the_sample_was_never_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks"))
    from sites import HELD_OUT, part

    assert all(part(int(n), int(k)) == HELD_OUT for rows in ROWS.values() for _, k, n, _ in rows)
    assert {(series.gpu, series.fmt, series.state, series.library) for series in model().coefficients.series} == set(ROWS)


@pytest.mark.parametrize("pair", sorted({key[:2] for key in ROWS}), ids="-".join)
def test_held_out_error_of_every_gpu_and_format(pair: tuple[str, str]) -> None:
    pair_errors = np.concatenate([errors(key)[0] for key in ROWS if key[:2] == pair])
    assert np.median(pair_errors) <= MEDIAN
    assert np.quantile(pair_errors, 0.9) <= P90


def test_error_bars_hold() -> None:
    """90% of the measured times are inside the 90% error bar, in total and for every GPU and format."""
    inside: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for key in ROWS:
        inside[key[:2]].append(errors(key)[1])
    covered = {pair: float(np.concatenate(flags).mean()) for pair, flags in inside.items()}
    everything = np.concatenate([flag for flags in inside.values() for flag in flags])
    assert COVERED[0] <= everything.mean() <= COVERED[1]
    assert all(COVERED[0] - SAMPLING <= share <= COVERED[1] + SAMPLING for share in covered.values()), covered


def test_published_errors_are_those_of_the_coefficients() -> None:
    """docs/measured/forecasts.md lists every series with its numbers from the coefficients file."""
    text = (Path(__file__).parent.parent.parent / "docs" / "measured" / "forecasts.md").read_text()
    for measured in model().coefficients.series:
        held_out = measured.held_out
        series = f"| {measured.gpu} | {measured.fmt} | {measured.state} | {measured.library} |"
        line = f"{series} {held_out['rows']:.0f} | {held_out['median']:.1%} | {held_out['p90']:.1%} |"
        assert line in text, "run: python benchmarks/fit_forecast.py DATA"


def test_better_than_the_roofline_everywhere() -> None:
    assert all(series.held_out["median"] * 4 < series.held_out["roofline_median"] for series in model().coefficients.series)


# --- physics ----------------------------------------------------------------------------------------------------------

SIZES = st.integers(4, 256).map(lambda blocks: blocks * 128)
CHIPS = st.sampled_from(sorted(gpus())).map(gpu)
TILE_EFFECTS = 1.12  # a library may do better with a size that fills its tiles


def time_ms(chip: GpuSpec, fmt: str, m: int, k: int, n: int) -> float:
    return float(model().time(chip, fmt, Shapes.of(m, k, n)).total_ms[0])


def formats(chip: GpuSpec) -> list[str]:
    return [fmt for fmt in ("bf16", "fp8", "nvfp4") if {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}[fmt] in chip.tflops]


@settings(max_examples=150, deadline=None)
@given(CHIPS, SIZES, SIZES, SIZES, st.integers(0, 2), st.data())
def test_twice_the_work_never_takes_less(chip: GpuSpec, m: int, k: int, n: int, side: int, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(formats(chip)))
    larger = [m, k, n]
    larger[side] *= 2
    assert time_ms(chip, fmt, *larger) * TILE_EFFECTS >= time_ms(chip, fmt, m, k, n)


@settings(max_examples=100, deadline=None)
@given(CHIPS, SIZES, SIZES, SIZES, st.floats(0.3, 0.99), st.data())
def test_slower_chips_take_longer(chip: GpuSpec, m: int, k: int, n: int, share: float, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(formats(chip)))
    less_bandwidth = replace(chip, bandwidth_tbps=chip.bandwidth_tbps * share)
    less_compute = replace(chip, tflops={name: rate * share for name, rate in chip.tflops.items()})
    fresh = GemmModel(model().coefficients)
    shapes = Shapes.of(m, k, n)
    before = fresh.time(chip, fmt, shapes).total_ms[0]
    for slower in (less_bandwidth, less_compute):
        assert GemmModel(model().coefficients).time(slower, fmt, shapes).total_ms[0] >= before * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(CHIPS, st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 64))
def test_any_size_has_a_time_with_a_bar(chip: GpuSpec, m: int, k: int, n: int, groups: int) -> None:
    estimate = model().time(chip, "bf16", Shapes.of(m, k, n, groups))
    assert np.isfinite(estimate.high_ms).all()
    assert (estimate.low_ms > 0).all()
    assert (estimate.low_ms < estimate.gemm_ms).all()
    assert (estimate.gemm_ms < estimate.high_ms).all()


def test_bars_widen_where_nothing_was_measured() -> None:
    shapes = Shapes.of(8192, 4096, 4096)
    bars = {name: float(model().time(gpu(name), "bf16", shapes, "sustained").high[0]) for name in ("h200", "h100", "l40s")}
    assert bars["h200"] < bars["h100"] < bars["l40s"]
    inside, outside = (model().time(gpu("h200"), "bf16", Shapes.of(m, 4096, 4096)).high[0] for m in (8192, 1_000_000))
    assert inside < outside


def test_burst_is_faster_than_sustained() -> None:
    shapes = Shapes.of(16384, 8192, 8192)
    for name in ("h200", "b200", "b300", "gb200"):
        burst, sustained = (model().time(gpu(name), "bf16", shapes, state).gemm_ms[0] for state in ("burst", "sustained"))  # type: ignore[arg-type]
        assert 1.02 < sustained / burst < 1.3


@settings(max_examples=150, deadline=None)
@given(
    CHIPS, st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from(["sustained", "burst"]), st.data()
)
def test_no_gemm_beats_the_chip(chip: GpuSpec, m: int, k: int, n: int, state: ClockState, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(formats(chip)))
    shapes = Shapes.of(m, k, n)
    estimate = model().time(chip, fmt, shapes, state)
    rate = chip.tflops[{"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}[fmt]]
    assert estimate.gemm_ms[0] >= 2 * m * k * n / (rate * 1e9) * (1 - 1e-9)
    assert estimate.gemm_ms[0] >= shapes.bytes_moved(fmt)[0] / (chip.bandwidth_tbps * 1e9) * (1 - 1e-9)
    assert (estimate.quantize_ms[0] > 0) == (fmt != "bf16")


def test_what_a_gemm_needs_comes_out_of_quantization() -> None:
    shapes = Shapes.of(20768, 52032, 688)
    estimate = model().time(gpu("b300"), "fp8", shapes, "burst", "trtllm")
    assert estimate.gemm_ms[0] >= shapes.flops[0] / (4500 * 1e9)
    assert estimate.quantize_ms[0] > estimate.gemm_ms[0] * 0.1


@settings(max_examples=100, deadline=None)
@given(CHIPS, SIZES, SIZES, SIZES, st.data())
def test_sustained_is_never_faster(chip: GpuSpec, m: int, k: int, n: int, data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(formats(chip)))
    shapes = Shapes.of(m, k, n)
    sustained = model().time(chip, fmt, shapes, "sustained", in_training=True)
    burst = model().time(chip, fmt, shapes, "burst", in_training=True)
    assert sustained.gemm_ms[0] >= burst.gemm_ms[0]
    assert sustained.total_ms[0] >= burst.total_ms[0] * (1 - 1e-9)
    assert sustained.burst_ms[0] == burst.gemm_ms[0]


def test_both_states_stand_on_one_library() -> None:
    for name, fmt in (("b200", "nvfp4"), ("gb200", "nvfp4"), ("b200", "bf16"), ("h100", "bf16")):
        sustained = model().basis(gpu(name), fmt, "sustained", in_training=True)
        burst = model().basis(gpu(name), fmt, "burst", in_training=True)
        assert sustained.series.library == burst.series.library


# --- wrong input ------------------------------------------------------------------------------------------------------


def test_formats_a_chip_lacks() -> None:
    with pytest.raises(UserError, match="a100 has no fp8 GEMMs"):
        model().time(gpu("a100"), "fp8", Shapes.of(512, 512, 512))
    with pytest.raises(UserError, match="h200 has no mxfp8 GEMMs"):
        model().time(gpu("h200"), "mxfp8", Shapes.of(512, 512, 512))
    with pytest.raises(UserError, match="there is no format"):
        model().time(gpu("h200"), "int3", Shapes.of(512, 512, 512))


@pytest.mark.parametrize("text", ["", "{}", "[1, 2", '{"version": 1, "features_version": 1}', "null", "[]"])
def test_damaged_coefficients(text: str) -> None:
    with pytest.raises(UserError, match=r"mine\.json is a damaged coefficients file"):
        read_coefficients(text, "mine.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("source"),
        lambda data: data["ranges"]["low"].pop(),
        lambda data: data["ranges"]["high"].__setitem__(3, None),
        lambda data: data["series"][2].update(gpu=None),
        lambda data: data["series"][2].update(quantize=[1]),
        lambda data: data["series"][2].update(low="x"),
        lambda data: data["series"].pop(),
        lambda data: data["networks"][0].update(w2=data["networks"][0]["b2"]),
        lambda data: data["networks"].clear(),
    ],
)
def test_coefficients_that_do_not_fit_together(damage: Callable[[dict[str, Any]], object]) -> None:
    """Valid JSON of the right version that does not contain coefficients."""
    data = json.loads((files("gemmscope.forecast") / "coefficients" / "gemm.json").read_text())
    damage(data)
    with pytest.raises(UserError, match=r"mine\.json is a damaged coefficients file"):
        read_coefficients(json.dumps(data), "mine.json")


def test_coefficients_of_another_version() -> None:
    with pytest.raises(UserError, match=r"mine\.json is a coefficients file of version 99, not 1"):
        read_coefficients(json.dumps({"version": 99, "features_version": 1}), "mine.json")


def test_unknown_gpus_list_the_nearest_first() -> None:
    with pytest.raises(UserError) as caught:
        gpu("B3000")
    assert "b300, gb300" in caught.value.hint
    assert set(gpus()) == {
        *("a100", "a100-40gb", "a800", "h100", "h800", "h20", "h200", "h200-nvl", "b200", "b300", "gb200", "gb300"),
        *("l40s", "l40", "l20", "rtx-6000-ada", "rtx-4090", "rtx-pro-6000", "rtx-5090"),
    }
    assert all(gpu.source for gpu in gpus().values())
