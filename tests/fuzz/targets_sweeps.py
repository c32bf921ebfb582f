"""Sweeps as people mistype them: axes, sizes and GPUs of `gemmscope forecast --sweep`."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from fuzz.targets import Target, command_line

NUMBERS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "7",
        "8",
        "64",
        "1024",
        "-1",
        "2**3",
        "1e3",
        "1_000",
        "٣",
        "inf",
        "nan",
        "9" * 30,
        "9" * 5000,
        "",
        " ",
        "0x10",
    ]
)
TEXTS = (
    NUMBERS
    | st.text(st.characters(blacklist_characters="\0"), max_size=6)
    | st.sampled_from(["\x1b[2J", "\ud800", "‹tp=2›", "[red]", "\u202e"])
)
OF_RUN = ("micro_batch_size", "sequence_length", "tp", "cp", "pp", "ep", "etp", "gradient_accumulation")
OF_MODEL = ("hidden_size", "intermediate-size", "num_attention_heads", "num_hidden_layers", "vocab_size", "head_dim")
SIZES = st.sampled_from([*OF_RUN, *OF_MODEL, "recompute"])
GOOD = st.sampled_from(["1", "2", "4", "8"])
RANGES = st.lists(GOOD, min_size=1, max_size=3).map(",".join) | st.builds("{}:{}:{}".format, GOOD, GOOD, GOOD)
BAD_RANGES = st.lists(TEXTS, min_size=1, max_size=4).map(",".join) | st.lists(NUMBERS, min_size=1, max_size=4).map(":".join)
BAD_AXES = st.builds("{}{}{}".format, SIZES | TEXTS, st.sampled_from(["=", "=", "=", "==", "", ":"]), RANGES | BAD_RANGES)
AXES = st.builds("{}={}".format, st.sampled_from(OF_RUN) | SIZES, RANGES)
MODELS = st.sampled_from(
    [
        "--hidden-size 64 --intermediate-size 128 --num-attention-heads 2 --num-hidden-layers 2",
        "--preset llama-3.2-1b",
        "--preset mixtral-8x7b",
        "--hidden-size 64",
        "",
    ]
)


@st.composite
def sweeps(draw: st.DrawFn) -> list[str]:
    """The arguments of one command."""
    hostile = draw(st.booleans())
    gpu = st.sampled_from(["h200", "b300,h200", "a100"])
    arguments = ["forecast", *draw(MODELS).split(), "--gpu", draw(gpu | TEXTS if hostile else gpu)]
    for axis in draw(st.lists(AXES | BAD_AXES if hostile else AXES, min_size=1, max_size=2 + hostile)):
        arguments += ["--sweep", axis]
    for name in draw(st.lists(SIZES, max_size=3, unique=True)) if hostile else ():
        arguments += [f"--{name}", draw(TEXTS)]
    outputs = draw(st.sampled_from(["", "--json -", "--csv -", "--markdown -", "--detail"]))
    return [*arguments, "--micro-batch-size", "1", "--sequence-length", "64", *outputs.split()]


def run_sweep(arguments: list[str], folder: Path) -> str:
    """As it is typed."""
    return command_line(arguments)


TARGETS = [Target("sweep-options", sweeps(), run_sweep)]
