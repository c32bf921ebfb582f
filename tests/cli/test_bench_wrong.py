"""`gemmscope bench` as people mistype it, and on machines that cannot measure what is asked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gemmscope.bench.campaign import LinearCampaign
from support.command import Run, run
from support.fake_gpu import ON_CPU, SMALL, Pretend, own_state, pretend
from support.machines import NOTHING, machine

__all__ = ["own_state", "pretend", "run"]  # the fixtures
pytest.importorskip("torch", reason="the CPU backend needs torch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{SMALL}", "there is no NVIDIA GPU here"),
        (f"{SMALL} --device tpu", "--device 'tpu' is not known"),
        (f"{ON_CPU} --recipes fp9", "unknown recipe 'fp9'"),
        (f"{ON_CPU} --recipes ,", "--recipes is empty"),
        (f"{ON_CPU} --recipes fp8current", "FP8Current cannot be measured here: the cpu backend does not have it"),
        (f"{ON_CPU} --pre-quantize --autocast-only", "exclude each other"),
        ("--micro-batch-size 4 --device cpu", "no model is named"),
        ("--shapes 12x --device cpu", "'12x' is not a shape"),
        ("--shapes 0x4x4 --device cpu", "0x4x4 is not a shape: every size must be at least 1"),
        ("--shapes abc --device cpu", "'abc' is not a shape"),
        ("--shapes 4x4 --device cpu", "'4x4' is not a shape"),
        ("--shapes -5 --device cpu", "'-5' is not a shape"),
        ("--shapes 16,-5 --device cpu", "'-5' is not a shape"),
        ("--shapes , --device cpu", "--shapes is empty"),
        ("--shapes= --device cpu", "--shapes is empty"),
        ("--shapes 10000001 --device cpu", "is too large: a size can be at most 10000000"),
        (f"--shapes {'9' * 5000} --device cpu", "is too large"),
        (f"--shapes 64 {ON_CPU}", "--shapes measures bare GEMMs, but --hidden-size"),
        ("--shapes 64 --micro-batch-size 4 --device cpu", "but --micro-batch-size describes a model"),
        ("--shapes --preset gpt2 --device cpu", "but --preset describes a model"),
        (f"{ON_CPU} --timing stopwatch", "--timing 'stopwatch' is not known"),
        (f"{ON_CPU} --num-iters 0", "--num-iters 0 measures nothing"),
        (f"{ON_CPU} --num-warmup -1", "--num-warmup -1 is invalid"),
        (f"{ON_CPU} --gpu-warmup -1", "--gpu-warmup -1 is invalid"),
        (f"{ON_CPU} --gpu-warmup inf", "--gpu-warmup inf is invalid"),
        (f"{ON_CPU} --num-iters many", "'many' is not a whole number"),
        (f"{ON_CPU} --precision 0", "--precision must be between 0 and 1, got 0"),
        (f"{ON_CPU} --longest nan", "--time-limit must be more than 0 seconds, got nan"),
        (f"{ON_CPU} --cache-weights", "--cache-weights is not possible with the cpu backend"),
        (f"{ON_CPU} --backend torch", "the torch backend does not measure on cpu"),
        (f"{ON_CPU} --backend jax", "--backend 'jax' is not known"),
        (f"{ON_CPU} --profile-shape 64", "--profile-shape selects what --profile runs"),
        (f"{ON_CPU} --profile --profile-shape 64", "runs a model or --profile-shape, not both"),
        ("--profile --profile-shape 64x --device cpu", "'64x' is not a shape"),
        ("--profile --profile-shape 64,128 --device cpu", "'64,128' is not a shape"),
        ("--profile --micro-batch-size 2 --device cpu", "no model is named"),
        (f"{ON_CPU} --json /nowhere/run.json", "--json /nowhere/run.json cannot be written: there is no folder /nowhere"),
        (f"{ON_CPU} --csv /", "--csv / cannot be written: it is a folder"),
        (f"{ON_CPU} --markdown /nowhere/run.md", "--markdown /nowhere/run.md cannot be written"),
        (f"{ON_CPU} -o /nowhere/run.png", "--output /nowhere/run.png cannot be written"),
        (f"{ON_CPU} -o run.xlsx", "--output 'run.xlsx' is not a figure file"),
        (f"{ON_CPU} -o -", "--output '-' is not a figure file"),
        (f"{ON_CPU} --json - --csv -", "two outputs go to the same place: -, -"),
        (f"{ON_CPU} --csv=", "--csv is empty"),
        (f"{ON_CPU} --num-iters 9 --precision 1%", "--num-iters measures a fixed number of times, so --precision has no effect"),
        (f"{ON_CPU} --gpu-warmup 0 --time-limit 9", "so --time-limit has no effect"),
        (f"{ON_CPU} --gpus 0", "--gpus 0 names GPUs, but --device cpu uses none"),
        (f"{ON_CPU} --html run.png", "--html run.png: the page is HTML, not .png"),
        (f"{ON_CPU} --num-iters 1e9", "--num-iters must be at most 1000000, got 1000000000"),
        (f"{ON_CPU} --num-warmup 1e7", "--num-warmup must be at most 1000000, got 10000000"),
    ],
)
def test_bad_input(run: Run, options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported before a campaign starts."""
    monkeypatch.setattr("gemmscope.commands.bench.environment", lambda: NOTHING)
    monkeypatch.setattr(LinearCampaign, "run", lambda *_, **__: pytest.fail("it started to measure"))
    outcome = run(f"bench {options}")
    assert outcome.code == 2
    assert message in outcome.err


def test_a_place_without_permission(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    outcome = run(f"bench {ON_CPU} --json {tmp_path}/run.json")
    assert outcome.code == 2
    assert "no permission" in outcome.err


@pytest.mark.parametrize(
    ("busy", "message"),
    [({"processes": (4711,)}, "in use by process 4711"), ({"utilization": 60}, "is 60% busy with other work")],
)
def test_a_busy_gpu_is_refused(run: Run, busy: dict[str, object], message: str, pretend: Pretend) -> None:
    pretend(machine(**busy))
    outcome = run(f"bench {SMALL}")
    assert outcome.code == 2
    assert message in outcome.err
    assert "--share-gpu" in outcome.err


def test_a_hidden_gpu_is_no_gpu(run: Run, pretend: Pretend) -> None:
    pretend(machine(visible="-1"))
    outcome = run(f"bench {SMALL}")
    assert outcome.code == 2
    assert "CUDA_VISIBLE_DEVICES is '-1'" in outcome.err


def test_a_gpu_that_is_visible_by_its_uuid(run: Run, pretend: Pretend) -> None:
    """The visible GPU is checked for other processes and supported recipes, not the driver's first GPU."""
    one_gpu = machine(visible="GPU-2222", processes=(4711,))
    other = replace(one_gpu.gpus[0], index=1, name="NVIDIA B200", capability=(10, 0), processes=(), uuid="GPU-22224444-5555")
    pretend(replace(one_gpu, gpus=(*one_gpu.gpus, other)))
    assert run(f"bench {SMALL} --recipes bf16").code == 0
    pretend(one_gpu)
    assert "there is no NVIDIA GPU here" in run(f"bench {SMALL}").err
