"""Error bars without measurements: groups of series are left out and forecast from the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import leave_out
from gemmscope.forecast.gemm import GemmModel, library_and_version, model, octaves_outside
from gemmscope.forecast.physics import Shapes
from gemmscope.forecast.training import library_uncertainty
from gemmscope.gpu.specs import gpu, gpus

SQUARE = Shapes.of(8192, 8192, 8192)


def bar(name: str, fmt: str, library: str | None = None, shapes: Shapes = SQUARE, state: str = "burst") -> float:
    known = model().time(gpu(name), fmt, shapes, "sustained" if state == "sustained" else "burst", library)
    return float(known.high[0])


# --- coverage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", leave_out.KINDS)
def test_error_bars_hold_for_what_is_left_out(kind: str) -> None:
    rule, named = leave_out.KINDS[kind]
    groups = list(leave_out.left_out(model().coefficients, rule, named=named))
    assert len(groups) > 15
    assert leave_out.share_inside(groups) >= leave_out.GOAL
    assert min(group.inside.mean() for group in groups) > 0.7


@pytest.mark.parametrize("kind", ["its library, on every GPU", "its GPU", "its state on that GPU"])
def test_error_bars_of_speedups_hold_and_are_narrower(kind: str) -> None:
    pairs = list(leave_out.speedups(model().coefficients, leave_out.KINDS[kind][0]))
    inside = np.concatenate([np.abs(pair.errors) <= pair.width for pair in pairs])
    assert len(inside) > 1000
    assert inside.mean() >= leave_out.GOAL
    assert all((pair.width <= pair.independent).all() for pair in pairs)
    assert np.median(np.concatenate([pair.width / pair.independent for pair in pairs])) < 0.9


@pytest.mark.parametrize(("fmt", "library"), [pair for pair in leave_out.CUBLAS if pair[0] != "fp8-rowwise"])
@pytest.mark.parametrize("few", [True, False])
def test_error_bars_hold_for_another_library_and_for_few_rows(fmt: str, library: str | None, few: bool) -> None:
    group = leave_out.on_h200(model().coefficients, fmt, library, few=few)
    goal = leave_out.GOAL if library else 0.8  # an unnamed library could be the measured one; here it is not
    assert group.inside.mean() >= goal


def test_bars_of_what_was_measured_stay_narrow() -> None:
    groups = [leave_out.forecast(model(), key, rows, key[3]) for key, rows in leave_out.sample().items()]
    assert 0.88 <= leave_out.share_inside(groups) <= 0.93
    assert np.median(np.concatenate([group.high for group in groups])) < 0.08


# --- what widens them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp8-block"])
def test_the_less_is_known_of_the_library_the_wider(fmt: str) -> None:
    version = next(series.version for series in model().coefficients.series if (series.gpu, series.state) == ("h200", "burst"))
    measured, newer, unnamed, other = (bar("h200", fmt, library) for library in ("trtllm", "trtllm==99.1", None, "sglang"))
    assert bar("h200", fmt, f"trtllm {version}") == measured
    assert measured < newer < unnamed < other


def test_libraries_with_versions() -> None:
    assert library_and_version(None) == (None, "")
    assert library_and_version("vllm @ v0.24.0") == ("vllm", "0.24.0")
    assert library_and_version("transformer engine") == ("transformer engine", "")
    basis = model().basis(gpu("h200"), "bf16", "burst", "trtllm 99.1")
    assert basis.description == "bf16: measured on h200 (burst, trtllm), because trtllm 99.1 was not measured"


def test_few_rows_and_other_states_widen() -> None:
    bars = [bar("h200", "bf16", "trtllm", Shapes.of(m, 4096, 4096)) for m in (512, 256, 64, 8)]
    assert bars == sorted(bars)
    assert bars[-1] > 0.35
    assert bar("h200", "fp8", "trtllm", state="sustained") > 1.5 * bar("h200", "fp8", "trtllm")


def test_unmeasured_libraries_promise_no_more_than_the_chip_has() -> None:
    estimate = model().time(gpu("h200"), "fp8-block", SQUARE, "burst", "sglang")
    assert estimate.low_ms[0] >= SQUARE.flops[0] / (gpu("h200").tflops["fp8"] * 1e9) * (1 - 1e-9)
    assert estimate.high[0] > 1


def test_ranges_are_those_of_each_series() -> None:
    """B200's sustained trtllm series have no n above 2560; vllm's have."""
    wide, narrow = Shapes.of(8192, 8192, 8192), Shapes.of(8192, 8192, 2048)
    assert bar("b200", "fp8", "trtllm", wide, "sustained") > 1.5 * bar("b200", "fp8", "trtllm", narrow, "sustained")
    series = {(entry.gpu, entry.fmt, entry.state, entry.library): entry for entry in model().coefficients.series}
    trtllm, vllm = (series["b200", "bf16", "sustained", library] for library in ("trtllm", "vllm"))
    assert trtllm.sizes[2] == (512, 2560)
    assert octaves_outside(wide, trtllm.sizes)[:, 0].round(2).tolist() == [0, 0, 1.68]
    assert not octaves_outside(wide, vllm.sizes).any()


def test_series_that_contain_the_gemm_are_preferred() -> None:
    """With the defaults exchanged, trtllm is used as far as it was measured, and vllm beyond."""
    exchanged = [
        replace(series, default=not series.default)
        if (series.gpu, series.fmt, series.state) == ("b200", "bf16", "sustained")
        else series
        for series in model().coefficients.series
    ]
    gemms = GemmModel(replace(model().coefficients, series=tuple(exchanged)))
    mixed = Shapes.of(4096, 4096, [1024, 8192, 2048, 100])
    both = gemms.time(gpu("b200"), "bf16", mixed)
    alone = [
        gemms.time(gpu("b200"), "bf16", mixed.take(np.array([place])), "sustained", library).gemm_ms[0]
        for place, library in enumerate(["trtllm", "vllm", "trtllm", "trtllm"])
    ]
    assert both.gemm_ms == pytest.approx(alone)


def test_l40s_is_limited_by_its_power() -> None:
    for state, most in (("sustained", 201), ("burst", 220)):
        estimate = model().time(gpu("l40s"), "bf16", SQUARE, "sustained" if state == "sustained" else "burst")
        assert 190 < SQUARE.flops[0] / estimate.gemm_ms[0] / 1e9 < most
        assert estimate.high[0] > 0.5
    memory_bound = Shapes.of(64, 8192, 8192)
    assert model().time(gpu("l40s"), "bf16", memory_bound).gemm_ms[0] > 3 * memory_bound.flops[0] / (200 * 1e9)
    assert [gpu.name for gpu in gpus().values() if gpu.sustained_tflops] == ["l40s", "rtx-6000-ada"]  # the same chip


def test_training_is_less_certain_where_its_library_was_not_measured() -> None:
    for fmt in ("bf16", "fp8"):
        assert library_uncertainty(fmt, gpu("h100")) < library_uncertainty(fmt, gpu("b200")) <= 0.12
