"""Jobs of torchtitan's Python registries, in a small tree of the same structure."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.model import readers
from gemmscope.model.spec import ModelSource, RunSpec
from gemmscope.workload.derive import derive
from support.reading import codes, facts
from support.torchtitan_files import BLOCKS, JOBS, MODEL


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The registry of a package torchtitan.models.mine."""
    folder = tmp_path / "torchtitan" / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "blocks.py").write_text(BLOCKS)
    (folder / "__init__.py").write_text(MODEL)
    (folder / "config_registry.py").write_text(JOBS)
    return folder / "config_registry.py"


def read(tree: Path, name: str, *changes: tuple[str, str]) -> ModelSource:
    for path in tree.parent.iterdir() if changes else ():
        text = path.read_text()
        for old, new in changes:
            text = text.replace(old, new)
        path.write_text(text)
    return readers.read_config(f"{tree}:{name}")


def test_a_job(tree: Path):
    source = read(tree, "small")
    expected = {"tp": 2, "sequence_length": 512, "micro_batch_size": 4, "recompute": "full"}
    assert {name: source.run_settings[name] for name in expected} == expected
    assert source.model.describe() == "3 dense layers, hidden 64, 8 heads (2 key/value), intermediate 192"
    assert (source.model.vocab_size, source.model.name) == (256, "torchtitan llama3 small")


def test_a_job_that_changes_another(tree: Path):
    source = read(tree, "apart")
    assert (source.run_settings["tp"], source.run_settings["dp"], source.run_settings["recompute"]) == (2, 4, "none")
    assert facts(source, "converters-ignored") == {"value": "['Float8LinearConverter']"}


def test_projections_run_as_torchtitan_runs_them(tree: Path):
    for name, roles in (("small", {"qkv-proj"}), ("apart", {"q-proj", "k-proj", "v-proj"})):
        source = read(tree, name)
        run = RunSpec(**{**source.run_settings, "tp": 1, "sequence_parallel": False})
        roles_of_run = {op.role for op in derive(source.model, run).ops}
        assert {role for role in roles_of_run if role.endswith(("qkv-proj", "q-proj", "k-proj", "v-proj"))} == roles
        assert {"mlp-gate", "mlp-up"} <= roles_of_run


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([('model_registry("small")', 'model_registry("large")')], "the model comes from"),
        ([("FeedForward.Config", "OwnFeedForward.Config")], "feed_forward comes from OwnFeedForward"),
        ([("hidden=3 * dim", "hidden=measured(dim)")], "out_features comes from measured"),
        ([("Float8LinearConverter", "LoRAConverter")], "LoRAConverter: adapters are not modelled"),
        ([("torchtitan.models.mine", "torchtitan.models.other")], "which is not in this folder"),
        ([("layers=layers(3", "layers=other_layers(3")], "the model comes from other_layers"),
        ([("4 * 512", "777")], "is not a multiple of"),
        ([("Trainer.Config(", "Controller.Config("), ("training=", "trained=")], "makes a Controller, not a training job"),
    ],
)
def test_what_is_refused(tree: Path, changes: list[tuple[str, str]], says: str):
    with pytest.raises(UserError, match=says) as caught:
        read(tree, "apart" if "LoRA" in changes[0][1] else "small", *changes)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["", ":none_of_them", ":_helper"])
def test_the_job_must_be_named(tree: Path, name: str):
    with pytest.raises(UserError) as caught:
        readers.read_config(f"{tree}{name}")
    assert "small, apart" in caught.value.hint or "makes nothing" in caught.value.message


def test_a_setting_that_is_not_known_is_named(tree: Path):
    source = read(tree, "small", ("tensor_parallel_degree=2", "tensor_parallel_degree=degree()"))
    assert "tp" not in source.run_settings
    assert facts(source, "setting-without-value")["setting"] == "parallelism.tensor_parallel_degree"
    assert "document-mask-not-modelled" in codes(source)
