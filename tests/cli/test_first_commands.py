"""The first commands that people type: right ones are answered, wrong ones get one message with what to type."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gemmscope.cli.build import shell_options, spelled_out
from gemmscope.cli.commands import forecast, plan, step
from gemmscope.toml import load_data
from support.command import Run, run

__all__ = ["run"]  # the fixture

MEGATRON = "--micro-batch-size 2 --seq-length 4096 --tensor-model-parallel-size 2 --num-layers 8"
ANSWERED = {
    "forecast llama-3.1-8b h200": "Assumed: --micro-batch-size 1, --sequence-length 8192.",
    "forecast h200 llama-3.1-8b": "Use FP8Delayed",
    "forecast gpt2 h200": "micro-batch 8 x sequence 1024",
    "forecast LLAMA-3.1-8B H200,b200": "fastest is b200",
    "forecast llama-3.1-8b h200 b200": "fastest is b200",
    "forecast --model llama-3.1-8b --gpu h200 --mbs 2 --seq 4k": "micro-batch 2 x sequence 4096",
    "forecast --preset llama-3.1-8b --gpu h200 --batch_size 2 --seq_len=4096": "micro-batch 2 x sequence 4096",
    f"forecast llama-3.1-8b h200 {MEGATRON}": "tp 2, sequence parallel",
    "forecast llama-3.1-8b 8xh200 --use-distributed-optimizer": "8 GPUs, global batch 8 sequences",
    "forecast h200 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --num-layers 2 --swiglu": "Assumed:",
    "plan smollm2-135m 2xh200 --recipes fp8current --tp 1 --pp 1": "Assumed: --sequence-length 8192, --global-batch 512.",
    "shapes llama-3.1-8b": "--micro-batch-size 1, --sequence-length 8192",
    "forecast llama-3.1-8b h200 --sweep mbs=1,2 --sweep seq-length=2k": "FORECAST: on h200, the largest speedup",
    "models qwen3": "qwen3-8b",
    "gpus blackwell": "rtx-5090",
}
REFUSED = {
    "llama-3.1-8b h200": "gemmscope forecast llama-3.1-8b h200",
    "forecast llama-3.1-8bx h200": "did you mean llama-3.1-8b",
    "forecast llama-3.1-8b h2000": "did you mean h200",
    "forecast llama-3.1-8b mi300x": "is not an NVIDIA GPU",
    "forecast llama-3.1-8b v100": "is older than Ampere",
    "forecast llama-3.1-8b h200 --recipe mxfp4": "no framework here trains in it; the 4-bit format is NVFP4",
    "forecast llama-3.1-8b h200 --recipes fp8": "'fp8' is a family of recipes name one, or several with commas: FP8Current",
    "forecast llama-3.1-8b qwen3-8b h200": "2 models are named: llama-3.1-8b, qwen3-8b",
    "forecast llama-3.1-8b h200 --preset gpt2": "llama-3.1-8b and --preset name the same thing twice",
    "forecast h200": "give a name that gemmscope models lists, --config PATH",
    "forecast llama-3.1-8b": "no GPU is named add a name such as h200",
    "step llama-3.1-8b h200": "takes no name of a GPU, but got h200",
    "plan llama-3.1-8b h200": "--gpus is not given",
    "plan llama-3.1-8b 8 h200": "--gpus 8, or 8xh200",
    "models nothing-like-it": "gemmscope models and gemmscope gpus list the names",
    "gpus mi300x": "is not an NVIDIA GPU",
    "forecast nowhere/config.json h200": "there is no file or folder 'nowhere/config.json'",
    "forecast llama-3.1-8b h200 --hidden-dim 8": "No such option: --hidden-dim",
    "forecast llama-3.1-8b h200 --tp-comm-overlap --hidden-dim 8": "No such option: --hidden-dim",
}


@pytest.mark.parametrize(("line", "said"), ANSWERED.items())
def test_answered(run: Run, line: str, said: str) -> None:
    outcome = run(line)
    assert outcome.code == 0, outcome.err
    assert said in " ".join(outcome.out.split())


@pytest.mark.parametrize(("line", "said"), REFUSED.items())
def test_refused_with_one_message(run: Run, line: str, said: str) -> None:
    outcome = run(line)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("name", ["h200", "gpt2"])
def test_a_file_with_the_name_of_a_gpu_or_a_preset(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text('{"model_type": "llama"}')
    outcome = run(f"forecast {name} b200")
    assert outcome.code == 2
    assert f"--config ./{name} for the file" in outcome.err


def test_a_file_by_position(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2", "n_layer": 2, "n_positions": 128}')
    assert "micro-batch 64 x sequence 128" in run(f"shapes {file}").out


def test_the_next_command_has_the_model(run: Run) -> None:
    out = run("forecast h200 --mbs 2 llama-3.1-8b --seq-len=4k").out
    assert "gemmscope step --preset llama-3.1-8b --micro-batch-size 2 --sequence-length=4k" in " ".join(out.split())


def test_every_spelling_stands_for_an_option() -> None:
    flags = {flag for command in (forecast, plan, step) for one in shell_options(command).values() for flag in one.flags}
    known = {part for flag in flags for part in flag.split("/")}
    spellings = load_data("gemmscope.options", "spellings.toml")
    assert {shlex.split(instead)[0] for instead in spellings.values()} <= known
    assert not known & spellings.keys()


def test_what_is_not_known_stays() -> None:
    for line in ("--hidden-dim 8 gpt2 h200", "-- gpt2 h200", "gpt2 h200 --help"):
        assert spelled_out("forecast", line.split()) == line.split()
    assert spelled_out("forecast", ["--shapes", "--gpu", "h200"]) == ["--shapes", "default", "--gpu", "h200"]
    assert spelled_out("numerics", ["gpt2", "x.safetensors"]) == ["--preset", "gpt2", "x.safetensors"]
    assert spelled_out("compare", ["h200", "gpt2"]) == ["h200", "gpt2"]


PLAN = "plan smollm2-135m 2xh200 --recipes fp8current --tp 1 --pp 1 --cp 1"


def test_only_the_settings(run: Run) -> None:
    megatron = run(f"{PLAN} --emit megatron")
    assert (megatron.code, megatron.err) == (0, "")
    assert megatron.out.startswith("--bf16 --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise")
    assert "FORECAST" not in megatron.out
    assert run(f"{PLAN} --emit bridge").out.startswith("mixed_precision=")
    titan = run(f"{PLAN} --emit torchtitan").out
    assert '# FP8Current is not in torchtitan: this is the nearest that it has\nrecipe_name = "tensorwise"\n' in titan
    other = run(f"{PLAN} --emit torchao")
    assert other.code == 2
    assert "there are no settings for torchao there are settings for Megatron-LM" in " ".join(other.err.split())
    mix = run("numerics smollm2-135m --synthetic outliers --recipes mxfp8 --bound 10% --emit megatron")
    assert mix.out.startswith("--transformer-impl transformer_engine --fp8-format"), mix.err


def test_only_the_answer(run: Run) -> None:
    out = " ".join(run("forecast llama-3.1-8b h200 -q").out.split())
    assert out.startswith("FORECAST: Use FP8Delayed: ")
    assert out.endswith("for the training step on H200 SXM 141 GB.")
