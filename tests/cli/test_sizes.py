"""Sizes as people type them: 8k is 8192 tokens of a sequence, 2T is 2e12 tokens of a run."""

from __future__ import annotations

import json

import pytest

from gemmscope.cli.build import build
from gemmscope.cli.commands import _gpu_count
from gemmscope.errors import UserError, shown
from gemmscope.options.declare import options_of
from gemmscope.options.job import ModelOptions
from gemmscope.options.values import axis, bare_shapes, percentage, size, token_count
from support.command import Run, run
from support.refusals import refused, unnamed

__all__ = ["run"]  # the fixture

SIZES = "--hidden-size 4k --intermediate-size 16K --num-attention-heads 32 --num-hidden-layers 24 --vocab-size 1e5"


def test_options_of_the_model_and_the_run(run: Run) -> None:
    data = json.loads(run(f"shapes {SIZES} --micro-batch-size 1 --sequence-length 8k --json -").out)
    assert (data["run"]["sequence_length"], data["model"]["hidden_size"]) == (8192, 4096)
    head = next(gemm for gemm in data["gemms"] if gemm["n"] == 100_000)
    assert (head["m"], head["k"]) == (8192, 4096)


def test_every_whole_number_takes_a_size() -> None:
    names = [name for name, declared in options_of(ModelOptions).items() if int in declared.types]
    arguments = [word for name in names for word in (f"--{name.replace('_', '-')}", "8_192")]
    values = build("shapes").make_context("shapes", [*arguments, "--sequence-length", "1M", "--pp-layers", "1k,2"]).params
    assert {values[name] for name in names} == {8192}
    assert values["sequence_length"] == 1024**2
    values = build("step").make_context("step", ["--tokens", "15.5T", "--gpus", "16k", "--precision", "0.5%"]).params
    assert (values["tokens"], _gpu_count(values["gpus"]), values["precision"]) == (15.5e12, 16384, 0.005)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8192), ("8K", 8192), ("8_192", 8192), ("1M", 2**20), ("1e3", 1000), ("0.5k", 512), (" 8 ", 8)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize(
    "text", ["1.5", "0.3k", "two", "", "k", "8kk", "8B", "1e", "0x10", "nan", "inf", "٣", "8__1", "1e400", "3%"]
)
def test_not_sizes(text: str) -> None:
    with refused(shown(text), "8k", error=ValueError):
        size(text)


@pytest.mark.parametrize(("text", "value"), [("2T", 2e12), ("2t", 2e12), ("15.5T", 15.5e12), ("1e12", 1e12), ("300B", 3e11)])
def test_token_counts(text: str, value: float) -> None:
    assert token_count(text) == value


@pytest.mark.parametrize("text", ["3", "100%", "-1%", "x", "", "%", "nan%"])
def test_not_percentages(text: str) -> None:
    with refused(shown(text), "0.03", error=ValueError):
        percentage(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--num-hidden-layers 1.5", "'--num-hidden-layers': '1.5' is not a whole number such as 4096, 8k or 1M"),
        ("--sequence-length 8kb", "'8kb' is not a whole number"),
        ("--sequence-length 0.0001k", "'0.0001k' is not a whole number"),
    ],
)
def test_other_values_are_refused_with_one_message(run: Run, option: str, message: str) -> None:
    outcome = run(f"shapes --preset gpt2 --micro-batch-size 1 {option}")
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_tokens_that_are_not_a_number(run: Run) -> None:
    assert unnamed(run("step --preset gpt2 --tokens many").err, "--tokens", "'many'", "2T") == []


def test_sweeps_and_shapes() -> None:
    assert axis("sequence_length=4k,8K,16384") == ("sequence_length", [4096, 8192, 16384])
    assert axis("hidden_size=1k:2k:512") == ("hidden_size", range(1024, 2049, 512))
    assert bare_shapes("4k,8kx4kx14336") == [(4096,) * 3, (8192, 4096, 14336)]
    for wrong in ("tp=1.5", "tp=1:2", "tp=-1", "tp=1,,2", "tp="):
        with pytest.raises(UserError, match="neither NAME=FIRST:LAST:STEP nor"):
            axis(wrong)
    for shape in ("1.5", "8kx4k", "-4k", "4kx4kx4kx4k"):
        with refused(shape):
            bare_shapes(shape)
