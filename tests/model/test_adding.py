"""Adding a preset, a model family and a reader, as CONTRIBUTING.md says, in a temporary copy of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.package_copy import PackageCopy, package_copy

PRESET = """
description = "A small model"
source = "https://example.org/config.json"
parameters = 505_956_352

[config]
model_type = "llama"
hidden_size = 2048
intermediate_size = 8192
num_hidden_layers = 4
num_attention_heads = 32
num_key_value_heads = 8
head_dim = 64
max_position_embeddings = 131072
vocab_size = 128256
tie_word_embeddings = true
"""
READER = '''"""A line of sizes: `sizes: hidden 64, layers 2, heads 4`."""

import re

from gemmscope.errors import UserError
from gemmscope.model.spec import ModelSource, from_hyperparameters

SIZES = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}


def recognises(text: str) -> bool:
    return text.startswith("sizes:")


def read(text: str, origin: str) -> ModelSource:
    given = {SIZES[name]: int(number) for name, number in re.findall(r"(\\w+) (\\d{1,9})\\b", text) if name in SIZES}
    if missing := [name for name, size in SIZES.items() if size not in given]:
        raise UserError(f"there is no {missing[0]}", f"write for example {missing[0]} 64")
    return ModelSource(origin, from_hyperparameters(**given, intermediate_size=128, name=origin))
'''
RUN = "--micro-batch-size 1 --sequence-length 64"


@pytest.fixture
def copy(tmp_path: Path) -> PackageCopy:
    return package_copy(tmp_path / "copy")


def description(file: Path) -> str:
    """The sizes of the model of a run file."""
    return str(json.loads(file.read_text())["model"]["description"])


def parameters(file: Path) -> int:
    return int(json.loads(file.read_text())["totals"]["parameters"])


def test_add_a_preset(copy: PackageCopy, tmp_path: Path) -> None:
    copy.add("model/presets/small-llama.toml", PRESET)
    assert "small-llama" in copy.run("shapes --list-presets").split()
    for command in ("shapes", "forecast --gpu h200"):
        copy.run(f"{command} --preset small-llama {RUN} --json {tmp_path / command[:5]}")
        assert description(tmp_path / command[:5]).startswith("4 dense layers, hidden 2048")
    assert parameters(tmp_path / "shape") == 505_956_352


def test_add_a_model_family(copy: PackageCopy, tmp_path: Path) -> None:
    copy.add("model/families.toml", '\n[nearly_llama]\nlike = "llama"\nmlp_bias = true\n')
    copy.add("model/class_sizes.toml", "\n[nearly_llama]\nvocab_size = 1000\n")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    for model_type in ("llama", "nearly_llama"):
        config = tmp_path / f"{model_type}.json"
        config.write_text(json.dumps({"model_type": model_type, "vocab_size": 1000, **sizes}))
        copy.run(f"shapes --config {config} {RUN} --json {tmp_path / model_type}")
    biases = 2 * (128 + 128 + 64)  # of gate, up and down, in two layers
    assert parameters(tmp_path / "nearly_llama") == parameters(tmp_path / "llama") + biases
    config.write_text(json.dumps({"model_type": "nearly_llama", **sizes}))
    copy.run(f"shapes --config {config} {RUN} --json {tmp_path / 'of_class'}")
    assert parameters(tmp_path / "of_class") == parameters(tmp_path / "nearly_llama")


def test_add_a_reader(copy: PackageCopy, tmp_path: Path) -> None:
    copy.add("model/sizes_line.py", READER)
    copy.change("model/readers.py", "READERS = (hf,", "READERS = (sizes_line, hf,")
    copy.change("model/readers.py", "hub, megatron, torchtitan", "hub, megatron, sizes_line, torchtitan")
    file, result = tmp_path / "model.txt", tmp_path / "result"
    file.write_text("sizes: hidden 64, layers 2, heads 4")
    for command in ("shapes", "forecast --gpu h200"):
        copy.run(f"{command} --config {file} {RUN} --json {result}")
        assert "2 dense layers, hidden 64, 4 heads" in description(result)
    file.write_text("sizes: hidden 64")
    message = copy.run(f"shapes --config {file} {RUN}", code=2)
    assert "model.txt" in message
    assert "layers" in message
