"""Names of linears in the frameworks people use: layer, linear and op."""

from __future__ import annotations

import pytest

from gemmscope.numerics.names import LinearName, name_linears

LLAMA = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj".split()
LLAMA_OPS = ["QKV Proj"] * 3 + ["Attn Out", "MLP Gate+Up", "MLP Gate+Up", "MLP Down"]


def named(paths: list[str], sizes: dict[str, tuple[int, int]] | None = None) -> list[LinearName]:
    return list(name_linears({path: (sizes or {}).get(path, (64, 64 + len(paths))) for path in paths}).values())


@pytest.mark.parametrize(
    ("paths", "ops"),
    [
        ([f"model.layers.31.{name}" for name in LLAMA], LLAMA_OPS),
        (
            [
                f"layers.0.{name}"
                for name in ["attention.wq", "attention.wk", "attention.wo", "feed_forward.w1", "feed_forward.w2"]
            ],
            ["QKV Proj", "QKV Proj", "Attn Out", "MLP Gate+Up", "MLP Down"],
        ),
        (
            [
                f"decoder.layers.5.{name}"
                for name in ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc2"]
            ],
            ["QKV Proj", "Attn Out", "MLP Down"],
        ),
        (
            ["layers.2.mlp.experts.linear_fc1.7", "layers.2.mlp.shared_experts.linear_fc1", "layers.2.mlp.router"],
            ["Expert Gate+Up", "Shared Expert Gate+Up", "Router"],
        ),
        (
            [
                f"model.layers.4.{name}"
                for name in ["self_attn.q_a_proj", "self_attn.kv_b_proj", "mlp.experts.3.down_proj", "mlp.gate"]
            ],
            ["Q Down Proj", "KV Up Proj", "Expert Down", "Router"],
        ),
        (["layers.4.self_attn.q_proj", "layers.4.self_attn.kv_a_proj_with_mqa"], ["Q Proj", "KV Down Proj"]),
        (
            [f"encoder.layer.1.{name}" for name in ["attention.self.query", "attention.output.dense", "output.dense"]],
            ["QKV Proj", "Attn Out", "MLP Down"],
        ),
        (["layers.0.self_attention.layernorm_qkv", "layers.0.layernorm_mlp.fc2"], ["QKV Proj", "MLP Down"]),
        (["blocks.0.something.else", "blocks.0.my_linear"], ["", ""]),
        (["lm_head", "output_layer", "classifier"], ["LM Head", "LM Head", ""]),
    ],
)
def test_ops_of_frameworks(paths: list[str], ops: list[str]) -> None:
    assert [name.op for name in named(paths)] == ops


def test_layers_experts_and_wrappers() -> None:
    (name,) = named(["_orig_mod.module.model.layers.12._fsdp_wrapped_module.mlp.experts.5.w1"])
    assert (name.path, name.linear) == ("model.layers.12.mlp.experts.5.w1", "mlp.experts.w1")
    assert (name.layer, name.expert, name.op) == (12, 5, "Expert Gate+Up")
    (name,) = named(["layers.2.mlp.experts.gate_up_proj.7"])
    assert (name.linear, name.layer, name.expert) == ("mlp.experts.gate_up_proj", 2, 7)
    (name,) = named(["mtp.layers.0.mlp.down_proj"])
    assert name.layer is None, "not layer 0 of the trunk"


def test_an_mlp_without_gate_is_up_alone() -> None:
    paths = ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    sizes = {paths[0]: (64, 256), paths[1]: (256, 64)}
    assert [name.op for name in named(paths, sizes)] == ["MLP Up", "MLP Down"]
    assert [name.op for name in named(paths, sizes | {paths[0]: (64, 512)})] == ["MLP Gate+Up", "MLP Down"]
    gated = {"layers.0.w1": (64, 256), "layers.0.w3": (64, 256), "layers.0.w2": (256, 64)}
    assert [name.op for name in named(list(gated), gated)] == ["MLP Gate+Up", "MLP Gate+Up", "MLP Down"]


def test_a_second_stack_of_layers_keeps_its_name() -> None:
    paths = [f"model.language_model.layers.{n}.mlp.up_proj" for n in range(4)] + ["model.vision_tower.layers.0.mlp.up_proj"]
    names = named(paths)
    assert names[0].linear == "mlp.up_proj"
    assert (names[-1].linear, names[-1].layer, names[-1].op) == ("model.vision_tower.layers.mlp.up_proj", 0, "")
