"""Invalid options of every command, alone and combined. No GPU is visible, so nothing is measured."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import typer
from hypothesis import strategies as st

from fuzz.targets import Target, command_line
from fuzz.targets_configs import without_workers
from gemmscope.cli.main import COMMANDS, app

NUMBERS = (
    "0 1 2 3 4 8 64 100 1024 -1 -0 1.5 1e3 1e309 nan inf -inf ٣ １ 1_000 0x10 2**3 1e-400 true 0.01 1e18 131072 131073".split()
)
NUMBERS += ["1e-200", "1e-320", "1e308", "8k", "1.5K", "2T", "1e99k", "3%", " 8 ", "", " ", "9" * 30, "9" * 5000]
TEXTS = "- -- x \x1b[31m \udcff \u202e ‹tp=2› [red] %s {} $(ls) llama = ,".split()
TEXTS += ["", " ", "a\nb", "x" * 2000]
PLAUSIBLE = {
    "preset": ["gpt2", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "GPT2"],
    "gpu": ["h200", "b300,h200", "a100", "H200,h200", ",", "rtx 5090"],
    "recipes": ["BF16", "FP8Block", "MXFP8,NVFP4", "fp8current", "FP32", ","],
    "shapes": ["64", "default", "1024,4096", "64x128x256", "0", "9" * 13, "1x2", "64,", "10000000x1x1"],
    "profile-shape": ["64", "64x64x64", "0"],
    "sweep": ["tp=1,2", "hidden_size=64:256:64", "tp=1:1000000000:1", "tp=2:1:1", "tp=1:2:0", "sequence_length=64"],
    "price": ["2.5", "h200=2.5,b300=4", "h200=nan", "-1", "h200=", "=1", "1e308"],
    "tokens": ["1e12", "0", "-1", "1e308"],
    "gpus": ["8", "16", "7", "0"],
    "recompute": ["none", "full", "selective", "none,full"],
    "vary": ["hidden=64,128", "layers=1:2:3", "hidden=0", "experts=4", "hidden=", "=1", "sequence=64,1000", "hidden=99999999999"],
    "tp": ["1", "2", "1,2", "1,,2", "0", "3", "9" * 30],
    "zero": ["0", "1", "3", "1,3", "4"],
    "network": ["ethernet", "50", "0", "nan", "infiniband-ndr", "1e400"],
    "pp-layers": ["1,1", "12", ",", "1,-1,24", "1," * 2000 + "1"],
    "state": ["sustained", "burst"],
    "backend": ["torch", "torchao", "transformer-engine"],
    "device": ["cuda", "cuda:0", "CPU"],
    "timing": ["cuda-events", "profiler"],
    "module": ["x.py:f", "x.py", ":f", "x.py:", "/dev/zero:f", "x.py:f f"],
    "config": ["/dev/zero", "/dev/null", "config.json", "acme/model", "/", ".", "~", "x/" * 3000],
    "gemms": ["-", "/dev/zero", "/dev/null", "none.csv", "/"],
    "json": ["-", "out.json", "/dev/full", "/", "none/out.json", "out.json/"],
    "csv": ["-", "out.csv", "/", "none/out.csv"],
    "markdown": ["-", "out.md", "none/out.md"],
    "output": ["out.png", "out.svg", "out.txt", "-", "none/out.png", "/"],
}
MODEL = "--preset gpt2 --micro-batch-size 1 --sequence-length 64"
SIZES = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 4 --num-hidden-layers 2"
STARTS = {
    "shapes": [MODEL, f"{SIZES} --micro-batch-size 1 --sequence-length 64", "", "--list-presets"],
    "forecast": [f"--gpu h200 {what}" for what in (MODEL, "--shapes 64", f"{MODEL} --sweep tp=1,2", "--gemms -", "")],
    "plan": [f"--gpu h200 --gpus 4 --global-batch 8 {what} --sequence-length 64" for what in ("--preset gpt2", SIZES, "")],
    "bench": [MODEL, "--shapes 64", ""],
    "step": [MODEL, ""],
}


def options_of(command: str) -> dict[str, bool]:
    """Every option of a command: whether it takes a value."""
    group = typer.main.get_command(app)
    parameters = group.get_command(None, command).params  # type: ignore[attr-defined]
    return {
        name: not parameter.is_flag
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }


OPTIONS = {command: options_of(command) or {"--help": False} for command in COMMANDS}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command that works, or nearly, with options added; some of them twice."""
    command = draw(st.sampled_from([*COMMANDS, "shapes", "forecast", "forecast", "plan", "plan", "bench", "step"]))
    arguments = [command, *draw(st.sampled_from(STARTS.get(command, [""]))).split()]
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(sorted(OPTIONS[command])))
        value = draw(st.sampled_from([*PLAUSIBLE.get(name[2:], NUMBERS), *PLAUSIBLE.get(name[2:], NUMBERS), *NUMBERS, *TEXTS]))
        if not OPTIONS[command][name]:
            arguments.append(name)
        else:
            arguments += [f"{name}={value}"] if draw(st.booleans()) else [name, value]
    if draw(st.integers(0, 5)) == 0:
        arguments.insert(draw(st.integers(0, len(arguments))), draw(st.sampled_from([*TEXTS, "--help", "-h", "--version", "-o"])))
    return arguments


def run_options(arguments: list[str], folder: Path) -> str:
    """In an empty folder, where files may be written."""
    usable = [argument.replace("\0", "") for argument in arguments]  # no shell can pass it
    before = Path.cwd()
    os.chdir(folder)
    try:
        with without_workers(), mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"):
            return command_line(usable, stdin=b"m,k,n,format\n64,64,64,bf16\n")
    finally:
        os.chdir(before)


TARGETS = [Target("options", command_lines(), run_options)]
