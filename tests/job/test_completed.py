"""Sizes given beside a model's file complete it, or stand in place of the file's own, and are shown; Megatron's defaults stay."""

from __future__ import annotations

import pytest

from gemmscope.job.load import load_model, model_run
from gemmscope.model import megatron
from gemmscope.model.presets import load
from gemmscope.workload.derive import derive
from support.refusals import refused

SCRIPT = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 512
  --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 96 --tensor-model-parallel-size 4
"""


def codes(source) -> list[str]:
    return [finding.code for finding in source.findings]


def test_a_vocabulary_completes_a_script(tmp_path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("\n  ", " \\\n"))
    bare, whole = load_model(config=str(path)), load_model(config=str(path), vocab_size=32_000)
    assert next(finding for finding in bare.findings if finding.code == "vocabulary-missing").level == "warning"
    assert "vocabulary-missing" not in codes(whole)
    assert "run-overridden" in codes(whole)
    linears = [{op.name for op in derive(source.model, model_run(source).run).ops} for source in (bare, whole)]
    assert "LM Head" in linears[1] - linears[0]


def test_layers_of_a_preset_are_replaced() -> None:
    source = load_model(preset="llama-3.1-8b", num_hidden_layers=3)
    assert source.model is not None
    assert (len(source.model.layers), source.model.vocab_size) == (3, 128_256)
    assert source.config == {**load("llama-3.1-8b").config, "num_hidden_layers": 3}  # so that it can be checked
    assert [finding.facts["file_value"] for finding in source.findings if finding.code == "run-overridden"] == ["32"]
    assert codes(load_model(preset="llama-3.1-8b", num_hidden_layers=32)) == codes(load("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("preset", "pattern", "in_proportion"),
    [
        ("deepseek-v3", "3 dense, 5 MoE", False),  # as its class builds it with so many layers
        ("glm-4.5", "3 dense, 5 MoE", False),
        ("nemotron-h-8b", "5 Mamba-2, 3 MLP", True),  # its config lists the kinds
        ("longcat-flash", "4 dense, 4 MoE", True),
    ],
)
def test_fewer_layers_of_several_kinds(preset: str, pattern: str, in_proportion: bool) -> None:
    source = load_model(preset=preset, num_hidden_layers=8)
    assert source.model is not None
    assert source.model.pattern() == pattern
    assert ("layers-in-proportion" in codes(source)) == in_proportion == (source.config is None)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"hidden_size": 64, "vocab_size": 9}, ("named in 2 ways at once: preset and hidden_size",)),
        ({"vocab_size": 0}, ("vocab_size must be at least 1",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers must be at most",)),
    ],
)
def test_other_sizes_are_refused(given: dict[str, int], parts: tuple[str, ...]) -> None:
    with refused(*parts):
        load_model(preset="gpt2", **given)


def test_a_script_without_sequence_parallelism_has_none() -> None:
    source = megatron.read(SCRIPT, "run.sh")
    run = model_run(source).run
    assert (run.sequence_parallel, run.gpus, run.global_batch) == (False, 8, 96)
    assert "sequence_parallel" in model_run(source).settled  # a forecast assumes it only where nothing says otherwise
