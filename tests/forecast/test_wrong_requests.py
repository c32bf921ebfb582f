"""Requests that cannot be forecast: each is one message that names what is possible, exit code 2 and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Run, run

__all__ = ["run"]  # the fixture

OWN = """
title = "mine"
capability = "9.0"
sms = 132
memory_gb = 80
memory_mib = 81559
bandwidth_tbps = 3.35
usual_share = 0.65
network = "infiniband-ndr"
nvlink_domain = 8
host_gbps = 64
collectives_of = "h100"
"""
MEASURED = Path(__file__).parents[2] / "docs" / "measured" / "h200_llama_step.json.gz"


@pytest.mark.parametrize(
    ("arguments", "problem", "possible"),
    [
        ("llama-3.1-8b h100 --stack megatronn", "'megatronn' is not a known software stack", "torchtitan"),
        ("llama-3.1-8b b200 --stack mosaic", "does not run on b200", "automodel"),
        ("llama-3.1-8b h100 --stack torchtitan --recipes fp8delayed", "which has no FP8Delayed", "nvidia"),
        ("llama-3.1-8b h100 --lora 0", "--lora must be at least 1", ""),
        ("llama-3.1-8b h100 --lora 5000", "--lora 5000 is larger than QKV Proj", "at most --lora 4096"),
        ("llama-3.1-8b h100 --lora 16 --lora-linears q_proj", "names no linear of llama-3.1-8b", "qkv-proj"),
        ("llama-3.1-8b h100 --lora-linears mlp", "but there are none", "--lora 16"),
        ("llama-3.1-8b h100 --power-limit 900", "beyond the range of h100", "280 to 700 W"),
        ("llama-3.1-8b h100,b200 --power-limit 300", "beyond the range of b200", "400 to 1000 W"),
        (f"llama-3.1-8b h100 --measured {MEASURED}", "a step of another model", "gemmscope step --preset llama-3.1-8b"),
        ("llama-3.1-8b --gpu no_rates.toml", "no_rates.toml lacks tflops", 'like = "h100"'),
        ("llama-3.1-8b --gpu no_fp8.toml --recipes fp8current", "the file of no_fp8 gives no tflops.fp8", "BF16"),
        ("llama-3.1-8b mi300x", "is not an NVIDIA GPU", "h200"),
    ],
)
def test_one_message_names_what_is_possible(
    arguments: str, problem: str, possible: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_rates.toml").write_text(OWN)
    (tmp_path / "no_fp8.toml").write_text(OWN + "tflops = { bf16 = 989 }\n")
    result = run(f"forecast {arguments}")
    assert result.code == 2
    assert problem in result.err
    assert possible in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_gpu_file_without_a_rate_forecasts_the_other_recipes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "no_fp8.toml").write_text(OWN + "tflops = { bf16 = 989 }\n")
    result = run(f"forecast llama-3.2-1b --gpu {tmp_path / 'no_fp8.toml'} --detail")
    assert result.code == 0
    assert "the file of no_fp8 gives no tflops.fp8" in result.out
