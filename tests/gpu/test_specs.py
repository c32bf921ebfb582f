"""GPUs by name, by the driver's name, and from a file of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemmscope as gs
from gemmscope.errors import UserError
from gemmscope.forecast.gemm import model, slowed
from gemmscope.forecast.gpus_and_recipes import chips_of
from gemmscope.forecast.physics import Shapes
from gemmscope.gpu.specs import gpu, gpus


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a800"), ("NVIDIA H800", "h800"), ("NVIDIA H20", "h20"), ("NVIDIA H200", "h200"),
        ("NVIDIA L40", "l40"), ("NVIDIA L40S", "l40s"), ("NVIDIA L20", "l20"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)  # fmt: skip
def test_names_as_the_driver_prints_them(driver: str, name: str) -> None:
    assert gpu(driver).name == name


def test_other_vendors_are_refused_with_a_sentence() -> None:
    for name in ("mi300x", "AMD Instinct MI250X", "gaudi3"):
        with pytest.raises(UserError, match="is not an NVIDIA GPU: no kernel of other vendors was measured"):
            gpu(name)


def test_every_gpu_has_collectives_and_rates() -> None:
    for chip in gpus().values():
        assert chip.collectives_of in gpus()
        assert chip.tflops["bf16"] > 0


def write(folder: Path, text: str) -> str:
    (folder / "my_gpu.toml").write_text(text)
    return str(folder / "my_gpu.toml")


def test_a_file_describes_a_gpu_that_is_like_another(tmp_path: Path) -> None:
    [chip] = chips_of([write(tmp_path, 'like = "h100"\nbandwidth_tbps = 2.4\ntflops = { bf16 = 800 }')])
    assert (chip.name, chip.bandwidth_tbps, chip.tflops["bf16"], chip.tflops["fp8"]) == ("my_gpu", 2.4, 800, 1979)
    assert (chip.architecture, chip.sms, chip.collectives_of) == ("9.0", 132, "h100")
    assert gpu("my_gpu") is chip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = "mine"', "lacks capability, sms"), ('like = "h1000"', "unknown GPU"), ("sms = ", "the TOML is not valid"),
        ('like = "h100"\nbandwith = 2', "'bandwith' is not a fact of a GPU"),
        ('like = "h100"\nsms = "many"', "sms: Input should be"),
        ('like = "h100"\nbandwidth_tbps = -1', "bandwidth_tbps: Input should be greater than 0"),
        ('like = "h100"\ntflops = 3', "tflops: Input should be a valid"),
        ('like = "h100"\ncapability = "7.0"', "compute capability 7.0 is not known"),
        ('like = "h100"\ncollectives_of = "tpu"', "lacks collectives_of"),
        ('like = "h100"\nnetwork = "pigeon"', "not a known network"),
    ],
)  # fmt: skip
def test_a_file_that_lacks_or_mistakes_a_fact_says_which(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chips_of([write(tmp_path, text)])


def test_a_lower_power_limit_slows_what_computes_and_not_what_moves_bytes() -> None:
    whole, limited = gpu("h200"), gpu("h200").limited_to(500, "--power-limit 500")
    compute, memory = Shapes.of(8192, 8192, 8192), Shapes.of(16, 8192, 8192)
    for shapes, ratio in ((compute, (700 / 500) ** 0.33), (memory, 1.0)):
        times = [model().time(chip, "bf16", shapes, "sustained", in_training=True) for chip in (whole, limited)]
        assert times[1].gemm_ms / times[0].gemm_ms == pytest.approx(ratio, rel=0.01)
        assert times[1].low > times[0].low
    assert slowed(gpu("h100").limited_to(700, "")) == (1.0, 0.0)


@pytest.mark.parametrize("watts", [100, 701, -5, float("nan")])
def test_a_power_limit_beyond_the_range_names_the_range(watts: float) -> None:
    with pytest.raises(UserError, match="is beyond the range of h100\ngive 280 to 700 W"):
        chips_of(["h100"], watts)


def test_a_gpu_file_may_set_a_power_limit(tmp_path: Path) -> None:
    [chip] = chips_of([write(tmp_path, 'like = "h100"\npower_limit_w = 500\nbandwidth_tbps = 2.4')])
    assert (chip.title, chip.bandwidth_tbps, chip.power_w) == ("H100 SXM5 80 GB at 500 W", 2.4, 700)
    with pytest.raises(UserError, match=r"my_gpu\.toml: power_limit_w = 50 is beyond the range of my_gpu"):
        chips_of([write(tmp_path, 'like = "h100"\npower_limit_w = 50')])


def test_a_forecast_says_what_a_lower_power_limit_is_assumed_to_do() -> None:
    result = gs.load("llama-3.2-1b").on(micro_batch_size=4, sequence_length=4096).forecast("h100,h20", power_limit=300)
    assert [any(entry.code == "power-limit" for entry in one.findings) for one in result.gpus] == [True, True]
    assert "at 300 W" in result.gpus[0].title
