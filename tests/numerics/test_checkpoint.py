"""Weights of a checkpoint: one file, several with an index, a folder; in BF16, FP8 with scales; of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gemmscope.model.spec import from_hyperparameters  # noqa: E402
from gemmscope.numerics.evaluation.checkpoint import read_checkpoint  # noqa: E402
from gemmscope.numerics.evaluation.requests import model_linears  # noqa: E402
from gemmscope.numerics.safetensors import write_tensors  # noqa: E402
from support.refusals import refused  # noqa: E402

SIZES = {
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (256, 256), "self_attn.v_proj": (256, 256),
    "self_attn.o_proj": (256, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512),
}  # fmt: skip


def weights(layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.zeros(1000, 256), "model.norm.weight": torch.ones(256)}
    for layer in range(layers):
        for name, size in SIZES.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(size, generator=generator).bfloat16()
    return tensors


def model(**changes: int):  # type: ignore[no-untyped-def]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2} | changes
    return model_linears(from_hyperparameters(**sizes))


def test_one_file(tmp_path: Path) -> None:
    stored = weights()
    write_tensors(tmp_path / "model.safetensors", stored, {})
    recording = read_checkpoint(tmp_path / "model.safetensors", model=model())
    assert recording.facts.source == "checkpoint"
    assert {linear.facts.layer for linear in recording.linears} == {0, 1}
    assert [linear.facts.linear for linear in recording.linears[:6]] == sorted(SIZES), "as the file has them"
    linear = next(one for one in recording.linears if one.name == "model.layers.1.mlp.up_proj")
    weight = stored["model.layers.1.mlp.up_proj.weight"]
    assert (linear.facts.inputs, linear.facts.outputs, linear.facts.op, linear.facts.dtype) == (256, 512, "MLP Up", "bfloat16")
    (step,) = linear.sampled_steps
    assert step.passes == ("fprop", "dgrad")
    assert step.facts.tensors["W"].amax == float(weight.abs().max())
    assert set(step.facts.tensors) == {"W"}
    assert torch.equal(step.sample("dgrad", "W").rows, weight.T), "all of it: it is small"


def test_shards_with_an_index_and_folders(tmp_path: Path) -> None:
    whole = weights()
    names = sorted(whole)
    for number in range(2):
        write_tensors(tmp_path / f"model-{number}.safetensors", {name: whole[name] for name in names[number::2]}, {})
    places = {name: f"model-{number}.safetensors" for number in range(2) for name in names[number::2]}
    checkpoints = [read_checkpoint(tmp_path)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    checkpoints += [read_checkpoint(tmp_path), read_checkpoint(index)]
    assert all(
        sorted(linear.name for linear in one.linears) == sorted(linear.name for linear in checkpoints[0].linears)
        for one in checkpoints
    )
    assert len(checkpoints[0].linears) == 12


def test_a_checkpoint_of_another_model_is_one_message(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", weights(), {})
    for changes, facts in (
        ({"num_hidden_layers": 3}, ("2 layers", 3)),
        ({"num_attention_heads": 4, "head_dim": 128}, ("Attn Out", "256 x 256", "512 x 256")),
        ({"intermediate_size": 768}, ("MLP Down", "512 x 256", "768 x 256")),
    ):
        with refused("model.safetensors", *facts):
            read_checkpoint(tmp_path / "model.safetensors", model=model(**changes))


def test_layers_that_predict_further_tokens_and_single_files_are_no_other_model(tmp_path: Path) -> None:
    for name, layers in (("model.safetensors", 3), ("model-00001-of-00002.safetensors", 1)):
        write_tensors(tmp_path / name, weights(layers=layers), {})
        linears = read_checkpoint(tmp_path / name, model=model()).linears
        assert {linear.facts.layer for linear in linears} == set(range(layers))


@pytest.mark.parametrize(("shape", "sizes"), [((256, 768), (256, 768)), ((768, 256), (256, 768))])
def test_conv1d_of_gpt2_and_linears_with_the_same_names(tmp_path: Path, shape: tuple[int, int], sizes: tuple[int, int]) -> None:
    stored = {"transformer.wte.weight": torch.zeros(1000, 256), "transformer.h.0.attn.c_attn.weight": torch.randn(shape)}
    write_tensors(tmp_path / "model.safetensors", stored, {})
    [linear] = read_checkpoint(tmp_path / "model.safetensors").linears
    assert (linear.facts.inputs, linear.facts.outputs) == sizes


def test_a_model_whose_name_contains_that_of_a_norm(tmp_path: Path) -> None:
    stored = {"roberta_prelayernorm.encoder.layer.0.attention.self.query.weight": torch.randn(64, 64)}
    write_tensors(tmp_path / "model.safetensors", stored, {})
    assert len(read_checkpoint(tmp_path / "model.safetensors").linears) == 1


def test_fp8_weights_are_dequantized_and_that_is_said(tmp_path: Path) -> None:
    exact = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    stored = (exact / wide).to(torch.float8_e4m3fn)
    key = "model.layers.0.mlp.down_proj.weight"
    write_tensors(tmp_path / "a.safetensors", {key: stored, f"{key}_scale_inv": scales}, {})
    recording = read_checkpoint(tmp_path / "a.safetensors")
    sample = recording.linears[0].steps[0].sample("fprop", "W")
    assert torch.equal(sample.rows, (stored.float() * wide).bfloat16())
    assert "dequantized" in recording.facts.notes[0]
    write_tensors(tmp_path / "b.safetensors", {key: stored}, {})
    with refused(key, f"{key}_scale_inv"):
        read_checkpoint(tmp_path / "b.safetensors")


def test_of_many_experts_some_are_sampled(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    apart = {
        f"model.layers.0.mlp.experts.{n}.{name}.weight": torch.randn(32, 32, generator=generator)
        for n in range(8)
        for name in ("up_proj", "down_proj")
    }
    write_tensors(tmp_path / "a.safetensors", apart, {})
    linears = read_checkpoint(tmp_path / "a.safetensors").linears
    assert len(linears) == 4
    assert len({linear.facts.expert for linear in linears}) == 2, "the same for all linears of a layer"
    assert {linear.facts.experts for linear in linears} == {8}
    stacked = {
        "layers.0.experts.gate_up_proj": torch.randn(8, 32, 128, generator=generator),
        "layers.0.experts.down_proj": torch.randn(8, 64, 32),
    }
    write_tensors(tmp_path / "b.safetensors", stacked, {})
    linears = read_checkpoint(tmp_path / "b.safetensors").linears
    assert {(linear.facts.op, linear.facts.inputs, linear.facts.outputs) for linear in linears} == {
        ("Expert Gate+Up", 32, 128),
        ("Expert Down", 64, 32),
    }
    number = linears[-1].facts.expert
    sample = linears[-1].steps[0].sample("fprop", "W")
    assert torch.equal(
        sample.rows,
        stacked["layers.0.experts.gate_up_proj"][number].T
        if linears[-1].facts.outputs == 128
        else stacked["layers.0.experts.down_proj"][number].T,
    )


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, ("../elsewhere.safetensors",)),
        ({"weight_map": {"a": "gone.safetensors"}}, ("1 file", "gone.safetensors")),
        ({"weight_map": {"a": 1}}, ("weight_map",)),
        ([], ("weight_map",)),
    ],
)
def test_a_strange_index_is_one_message(content: object, facts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with refused("model.safetensors.index.json", *facts):
        read_checkpoint(tmp_path)


def test_nothing_to_sample_is_one_message(tmp_path: Path) -> None:
    with refused(tmp_path.name, "folder"):
        read_checkpoint(tmp_path)
    write_tensors(tmp_path / "a.safetensors", {"model.norm.weight": torch.ones(4)}, {})
    with refused(tmp_path.name, "linears"):
        read_checkpoint(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"not one")
    with refused("b.safetensors"):
        read_checkpoint(tmp_path / "b.safetensors")


def test_a_recording_is_no_checkpoint(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"l/0/X.exponents": torch.ones(4)}, {"gemmscope": "{}"})
    with refused("a.safetensors", "recording"):
        read_checkpoint(tmp_path / "a.safetensors")
