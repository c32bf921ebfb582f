"""GPUs by name, by the driver's name, and from a file of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.forecast.gpus_and_recipes import chips_of
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
        ('like = "h100"\nbandwidth_tbps = -1', "must be positive"), ('like = "h100"\ntflops = 3', "tflops must be a table"),
        ('like = "h100"\ncapability = "7.0"', "compute capability 7.0 is not known"),
        ('like = "h100"\ncollectives_of = "tpu"', "lacks collectives_of"),
        ('like = "h100"\nnetwork = "pigeon"', "not a known network"),
    ],
)  # fmt: skip
def test_a_file_that_lacks_or_mistakes_a_fact_says_which(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chips_of([write(tmp_path, text)])
