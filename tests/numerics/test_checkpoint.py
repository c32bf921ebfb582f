"""Weights of a checkpoint: one file, several with an index, a folder; in BF16, FP8 with scales; of another model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gemmscope.model.spec import from_hyperparameters  # noqa: E402
from gemmscope.numerics.evaluation import checkpoint  # noqa: E402
from gemmscope.numerics.evaluation.checkpoint import read_checkpoint  # noqa: E402
from gemmscope.numerics.evaluation.requests import model_linears  # noqa: E402
from gemmscope.numerics.quantizers import operands  # noqa: E402
from gemmscope.numerics.safetensors import read_header  # noqa: E402
from support.refusals import refused  # noqa: E402
from support.tensor_files import write_tensors  # noqa: E402  # noqa: E402

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
    recording, measured = read_checkpoint(tmp_path / "model.safetensors", model=model())
    assert recording.source == "checkpoint"
    assert {linear.layer for linear in recording.linears} == {0, 1}
    assert [linear.linear for linear in recording.linears[:6]] == sorted(SIZES), "as the file has them"
    linear = next(one for one in measured if one.name == "model.layers.1.mlp.up_proj")
    weight = stored["model.layers.1.mlp.up_proj.weight"]
    assert (linear.inputs, linear.outputs, linear.op, linear.dtype) == (256, 512, "MLP Up", "bfloat16")
    low = operands("NVFP4", "fprop")[0].quantizer(weight.float()).values
    error = float((low - weight.float()).norm() / weight.float().norm())
    assert linear.weights["NVFP4/transformer_engine"].relative == pytest.approx(error, rel=1e-4)


def test_shards_with_an_index_and_folders(tmp_path: Path) -> None:
    whole = weights()
    names = sorted(whole)
    for number in range(2):
        write_tensors(tmp_path / f"model-{number}.safetensors", {name: whole[name] for name in names[number::2]}, {})
    places = {name: f"model-{number}.safetensors" for number in range(2) for name in names[number::2]}
    checkpoints = [read_checkpoint(tmp_path)[0]]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    checkpoints += [read_checkpoint(tmp_path)[0], read_checkpoint(index)[0]]
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
        linears = read_checkpoint(tmp_path / name, model=model())[0].linears
        assert {linear.layer for linear in linears} == set(range(layers))


@pytest.mark.parametrize(("shape", "sizes"), [((256, 768), (256, 768)), ((768, 256), (256, 768))])
def test_conv1d_of_gpt2_and_linears_with_the_same_names(tmp_path: Path, shape: tuple[int, int], sizes: tuple[int, int]) -> None:
    stored = {"transformer.wte.weight": torch.zeros(1000, 256), "transformer.h.0.attn.c_attn.weight": torch.randn(shape)}
    write_tensors(tmp_path / "model.safetensors", stored, {})
    [linear] = read_checkpoint(tmp_path / "model.safetensors")[0].linears
    assert (linear.inputs, linear.outputs) == sizes


def test_a_model_whose_name_contains_that_of_a_norm(tmp_path: Path) -> None:
    stored = {"roberta_prelayernorm.encoder.layer.0.attention.self.query.weight": torch.randn(64, 64)}
    write_tensors(tmp_path / "model.safetensors", stored, {})
    assert len(read_checkpoint(tmp_path / "model.safetensors")[0].linears) == 1


def test_fp8_weights_are_dequantized_and_that_is_said(tmp_path: Path) -> None:
    exact = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    stored = (exact / wide).to(torch.float8_e4m3fn)
    key = "model.layers.0.mlp.down_proj.weight"
    write_tensors(tmp_path / "a.safetensors", {key: stored, f"{key}_scale_inv": scales}, {})
    recording, measured = read_checkpoint(tmp_path / "a.safetensors")
    whole = (stored.float() * wide).bfloat16().float()
    error = float((operands("NVFP4", "fprop")[0].quantizer(whole).values - whole).norm() / whole.norm())
    assert next(measured).weights["NVFP4/transformer_engine"].relative == pytest.approx(error, rel=1e-4)
    assert "dequantized" in recording.notes[0]
    write_tensors(tmp_path / "b.safetensors", {key: stored}, {})
    with refused(key, f"{key}_scale_inv"):
        next(read_checkpoint(tmp_path / "b.safetensors")[1])


@pytest.mark.parametrize("shape", [(), (1,), (300,), (300, 1), (3, 2)])
def test_fp8_weights_are_dequantized_in_pieces(shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 7 * 200)  # no multiple of the blocks
    stored = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200] if shape == (3, 2) else scales.reshape(-1, 1)
    key = "model.layers.0.mlp.down_proj.weight"
    write_tensors(tmp_path / "a.safetensors", {key: stored, f"{key}_scale_inv": scales}, {})
    weights, _ = checkpoint.find_weights([read_header(tmp_path / "a.safetensors")])
    assert torch.equal(next(iter(weights.values())).load(), (stored.float() * wide).bfloat16())
    write_tensors(tmp_path / "b.safetensors", {key: stored, f"{key}_scale_inv": torch.ones(4, 2)}, {})
    with refused(key, "(4, 2)"):
        next(read_checkpoint(tmp_path / "b.safetensors")[1])


MEASURED = """
import resource, sys
from pathlib import Path
import torch
from gemmscope.errors import UserError
from gemmscope.numerics.evaluation.checkpoint import read_checkpoint  # noqa: E402
torch.set_num_threads(1)
list(read_checkpoint(sys.argv[1])[1])
for path, size in zip(sys.argv[2::2], map(int, sys.argv[3::2])):
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * size + 2**28, -1))
    try:
        print(len(list(read_checkpoint(path)[1])))
    except UserError as error:
        print(error.message)
"""


def test_memory_is_twice_the_largest_tensor_at_most(tmp_path: Path) -> None:
    """And a constant of 256 MiB: in FP8 with scales, wide, and with scales that no linear has."""
    key, size = "model.layers.0.mlp.down_proj.weight", 2**27
    write_tensors(tmp_path / "small", weights(), {})
    fp8, scales = torch.zeros(2**14, 2**13, dtype=torch.float8_e4m3fn), torch.ones(128, 64)
    write_tensors(tmp_path / "fp8", {key: fp8, f"{key}_scale_inv": scales}, {})
    write_tensors(tmp_path / "wide", {key: torch.zeros(128, 2**19, dtype=torch.bfloat16)}, {})
    write_tensors(tmp_path / "scales", {key: fp8[:64, :64], f"{key}_scale_inv": torch.ones(3162, 3162)}, {})
    files = [str(tmp_path / "fp8"), str(size), str(tmp_path / "wide"), str(size), str(tmp_path / "scales"), str(3162**2 * 4)]
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "small"), *files]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:2] == ["1", "1"]
    assert "(3162, 3162)" in ended.stdout


@pytest.mark.parametrize(("limit", "most"), [("MOST_LINEARS", 11), ("MOST_SAMPLED", 11), ("MOST_TENSORS", 13)])
def test_too_many_are_one_message(limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensors(tmp_path / "model.safetensors", weights(), {})
    monkeypatch.setattr(checkpoint, limit, most + 1)
    assert len(read_checkpoint(tmp_path)[0].linears) == 12
    monkeypatch.setattr(checkpoint, limit, most)
    with refused(most):
        read_checkpoint(tmp_path)


def test_halves_of_characters_in_names(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"layers.0.\ud800.weight": torch.ones(64, 64)}, {})
    assert read_checkpoint(tmp_path / "a.safetensors")[0].linears[0].name == "layers.0.?"


def test_of_many_experts_some_are_sampled(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    apart = {
        f"model.layers.0.mlp.experts.{n}.{name}.weight": torch.randn(32, 32, generator=generator)
        for n in range(8)
        for name in ("up_proj", "down_proj")
    }
    write_tensors(tmp_path / "a.safetensors", apart, {})
    linears = read_checkpoint(tmp_path / "a.safetensors")[0].linears
    assert len(linears) == 8
    assert len({linear.expert for linear in linears}) == 4, "the same for all linears of a layer"
    assert {linear.experts for linear in linears} == {8}
    stacked = {
        "layers.0.experts.gate_up_proj": torch.randn(8, 32, 128, generator=generator),
        "layers.0.experts.down_proj": torch.randn(8, 64, 32),
    }
    write_tensors(tmp_path / "b.safetensors", stacked, {})
    linears = read_checkpoint(tmp_path / "b.safetensors")[0].linears
    assert {(linear.op, linear.inputs, linear.outputs) for linear in linears} == {
        ("Expert Gate+Up", 32, 128),
        ("Expert Down", 64, 32),
    }
    weights, _ = checkpoint.find_weights([read_header(tmp_path / "b.safetensors")])
    assert torch.equal(weights["layers.0.experts.down_proj.3"].load(), stacked["layers.0.experts.down_proj"][3].T)


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
