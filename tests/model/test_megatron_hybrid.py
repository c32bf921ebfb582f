"""Hybrid patterns and linear attention in Megatron settings: scripts in the style of the public ones, checked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.model import bridge, megatron
from gemmscope.model.layer_spec import MixerSpec
from gemmscope.model.megatron_hybrid import spread
from gemmscope.model.spec import ModelSource, RunSpec
from gemmscope.workload.derive import derive
from support.megatron_files import DELTA_NET, DUMP, HYBRID_8B, NANO_MOE, SMALL
from support.reading import checked, codes, facts
from support.refusals import refused

HYBRID = "--hidden-size 256 --num-attention-heads 4 --normalization RMSNorm --disable-bias-linear --position-embedding-type none"
SMALL = f"{SMALL} --mamba-num-groups 2"


def parameters(source: ModelSource) -> int:
    return derive(source.model, RunSpec(micro_batch_size=1, sequence_length=8)).parameters


def mamba_parameters(hidden: int, heads: int, head_dim: int, groups: int, state: int) -> int:
    """Norm, input projection (z, x, B, C, dt), convolution with bias, A, D, time step's bias, gated norm, output projection."""
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state
    return hidden + hidden * (inner + channels + heads) + channels * 5 + 3 * heads + inner + inner * hidden


def test_shares_of_layers():
    source = megatron.read(HYBRID_8B, "train.sh")
    assert source.model.pattern() == "28 MLP, 24 Mamba-2, 4 attention"
    assert source.run_settings["tp"] == 4
    assert source.run_settings["gradient_accumulation"] == 64  # 1024 sequences, 4 data-parallel ranks, 4 at once
    mixer = source.model.layers[0].mixer
    assert mixer == MixerSpec(
        kind="ssd", heads=128, value_dim=64, groups=8, key_dim=128, conv_kernel=4, conv_bias=True, chunk=128, norm="group"
    )  # twice as wide as the model
    attention = 4096 + 4096 * (4096 + 2 * 1024) + 4096 * 4096
    mlp = 4096 + 2 * 4096 * 16384
    layers = 24 * mamba_parameters(4096, 128, 64, 8, 128) + 28 * mlp + 4 * attention
    assert parameters(source) == layers + 2 * 4096 * 256000 + 4096


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "pattern"),
    [
        (56, 0.08, 0.5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"),  # NVIDIA's 8B hybrid
        (10, 0.0, 0.0, "M" * 10),
        (4, 1.0, 0.0, "****"),
        (4, 0.0, 1.0, "----"),
        (9, 0.33, 0.0, "MM*M*MM*M"),
    ],
)
def test_shares_are_spread_as_megatron_does(layers: int, attention: float, mlp: float, pattern: str):
    assert spread(layers, attention, mlp) == pattern


def test_pattern_with_experts_and_pipeline_stages():
    source = megatron.read(NANO_MOE, "nano.sh")
    kinds = ["Mamba-2", "MoE", "Mamba-2", "attention", "MoE", "Mamba-2", "MoE", "MLP"]
    assert [layer.kind for layer in source.model.layers] == kinds
    assert {layer.norms for layer in source.model.layers} == {1}
    assert source.run_settings["pp_layers"] == (4, 4)
    assert (source.run_settings["micro_batch_size"], source.run_settings["ep"]) == (2, 2)
    attention = 256 + 256 * (512 + 2 * 128) + 512 * 256
    experts = 256 + 16 * 256 + 16 * 2 * 256 * 96 + 2 * 256 * 192
    mlp = 256 + 2 * 256 * 512
    layers = 3 * mamba_parameters(256, 12, 32, 4, 64) + attention + 3 * experts + mlp
    assert parameters(source) == layers + 2 * 256 * 1000 + 256
    assert codes(source) == []


def test_virtual_stages_of_a_pattern():
    source = megatron.read(f"{HYBRID} --hybrid-layer-pattern 'M-|M*|M-|M*-' --pipeline-model-parallel-size 2", "x")
    assert (source.run_settings["pp_layers"], source.run_settings["vp"]) == ((4, 5), 2)
    assert facts(source, "stage-of-several-pieces") == {"setting": "--hybrid-layer-pattern"}
    one = megatron.read(f"{HYBRID} --hybrid-layer-pattern '[M-]|[M*]'", "x")
    assert (len(one.model.layers), "pp_layers" in one.run_settings) == (4, False)


def test_pattern_replaces_the_number_of_layers_and_the_heads():
    source = megatron.read("python pretrain_mamba.py --hybrid-override-pattern MMMM --hidden-size 256", "x")
    assert [layer.kind for layer in source.model.layers] == ["Mamba-2"] * 4
    assert megatron.read(f"python pretrain_mamba.py {SMALL}", "x").model.pattern() == "4 Mamba-2"
    assert megatron.read(f"{SMALL} --is-hybrid-model", "x").model.pattern() == "4 Mamba-2"
    assert megatron.read(
        f"{SMALL} --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "x"
    ).model.pattern() == ("4 Mamba-2")
    both = f"if $M; then S=pretrain_mamba.py; else S=pretrain_gpt.py; fi\npython $S {SMALL}"
    assert megatron.read(both, "x").model.pattern() == "4 dense"


def test_printed_list_of_a_hybrid():
    printed = DUMP.replace(
        "  kv_channels", "  hybrid_override_pattern ..... M-M*-M-M*-M-M*-M-M*-M-M*\n  is_hybrid_model ..... True\n  kv_channels"
    )
    assert megatron.read(printed, "train.log").model.pattern() == "10 Mamba-2, 9 MLP, 5 attention"
    off = DUMP.replace("  kv_channels", "  hybrid_attention_ratio .... 0.0\n  hybrid_override_pattern ... None\n  kv_channels")
    assert megatron.read(off, "train.log").model.pattern() == "24 dense"


def test_latent_attention_and_delta_nets_in_a_pattern():
    source = megatron.read(f"{HYBRID} --hybrid-layer-pattern G-+E --num-experts 4 --multi-latent-attention", "x")
    delta, _, latent, experts = source.model.layers
    assert (delta.mixer.kind, delta.mixer.heads, delta.mixer.groups) == ("gated delta rule", 32, 16)
    assert latent.attention.latent.kv_rank == 32
    assert experts.is_moe


def test_linear_attention():
    source = megatron.read(DELTA_NET, "next.sh")
    assert [layer.kind for layer in source.model.layers] == [*["gated delta rule + MoE"] * 3, "attention + MoE"] * 2
    keys, values = 4 * 32, 8 * 48
    delta = 256 * (2 * keys + 2 * values + 2 * 8) + (2 * keys + values) * 4 + 2 * 8 + 48 + values * 256
    attention = 256 * (256 + 2 * 128) + 256 * 256 + 2 * 64
    experts = 16 * 256 + 16 * 3 * 256 * 64
    layers = 6 * delta + 2 * attention + 8 * (experts + 2 * 256)
    assert parameters(source) == layers + 2 * 256 * 1000 + 256
    listed = DELTA_NET.replace("--linear-attention-freq 4", "--linear-attention-freq '[1]*7+[0]'")
    assert sum(layer.mixer is not None for layer in megatron.read(listed, "x").model.layers) == 7


SPARSE = f"""{HYBRID} --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --dsa-indexer-n-heads 4
 --dsa-indexer-head-dim 32 --dsa-indexer-topk 512"""


def test_sparse_attention():
    source = megatron.read(f"{SPARSE} --num-layers 6 --experimental-attention-variant dsa --dsa-indexer-topk-freq 3", "x")
    assert {layer.attention.top_k for layer in source.model.layers} == {512}
    assert [layer.attention.indexer is not None for layer in source.model.layers] == [True, False, False] * 2
    hybrid = megatron.read(f"{SPARSE} --hybrid-layer-pattern M-D-", "x")
    assert hybrid.model.layers[2].attention.indexer.heads == 4
    assert hybrid.model.pattern() == "1 Mamba-2, 1 MLP, 1 attention, 1 MLP"


PREDICTION = f"{HYBRID} --hybrid-layer-pattern M-*-/*-/*- --vocab-size 1000 --untie-embeddings-and-output-weights"


def test_layers_of_multi_token_prediction():
    attention = 256 + 4 * 256 * 256
    mlp = 256 + 8 * 256 * 256
    depth = 3 * 256 + 2 * 256 * 256 + attention + mlp
    layers = mamba_parameters(256, 8, 64, 8, 128) + attention + 2 * mlp + 256
    source = megatron.read(PREDICTION, "x")
    assert parameters(source) == layers + 2 * 256 * 1000 + 2 * depth
    assert codes(source) == ["mlp-width-default"]
    other = megatron.read(PREDICTION.replace("/*-/*-", "/MM/MM"), "x")
    assert other.model.prediction_layers == 0
    assert facts(other, "prediction-layers-not-included")["setting"] == "--hybrid-layer-pattern"
    assert parameters(megatron.read(f"{PREDICTION} --mtp-use-repeated-layer", "x")) == parameters(source) - depth
    legacy = PREDICTION.replace("/*-/*-", "") + " --mtp-hybrid-override-pattern '*-' --mtp-num-layers 2"
    assert parameters(megatron.read(legacy, "x")) == parameters(source)
    without = megatron.read(PREDICTION.replace("/*-/*-", "") + " --mtp-num-layers 2", "x")  # a hybrid needs their pattern
    assert without.model.prediction_layers == 0
    plain = f"{HYBRID} --num-layers 2 --vocab-size 1000"
    added = parameters(megatron.read(f"{plain} --mtp-num-layers 1", "x")) - parameters(megatron.read(plain, "x"))
    assert added == 3 * 256 + 2 * 256 * 256 + attention + mlp


def test_latent_experts():
    flags = "--hybrid-layer-pattern E --num-experts 8 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 96"
    source = megatron.read(f"{HYBRID} {flags} --moe-latent-size 32", "x")
    experts = 256 * 8 + 2 * 256 * 32 + 8 * 2 * 32 * 64 + 2 * 256 * 96
    assert parameters(source) == experts + 256 + 256


def test_gated_attention():
    gated, plain = (
        megatron.read(f"{HYBRID} --num-layers 1 --vocab-size 64{flag}", "x") for flag in (" --attention-output-gate", "")
    )
    assert parameters(gated) == parameters(plain) + 256 * 256


def test_bridge_overrides_of_a_hybrid():
    text = "model: {_target_: x.NemotronHModelProvider8B, hybrid_override_pattern: 'M-M*/*-/*-', num_layers: 4, vocab_size: 100}"
    source = bridge.read(text, "x")
    assert [layer.kind for layer in source.model.layers] == ["Mamba-2", "MLP", "Mamba-2", "attention"]
    assert source.model.prediction_layer.kind == "attention + MLP"
    assert source.model.prediction_layers == 2
    plain = "model: {_target_: megatron.bridge.models.mamba.mamba_provider.MambaModelProvider, hidden_size: 256, "
    assert bridge.read(plain + "num_layers: 3, vocab_size: 100}", "x").model.pattern() == "3 Mamba-2"
    with refused("MambaModelProvider", "hidden_size"):
        bridge.read("model: {_target_: megatron.bridge.models.mamba.mamba_provider.MambaModelProvider, num_layers: 3}", "x")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hybrid-override-pattern M-X*", "--hybrid-override-pattern has 'X', which is not a layer"),
        ("--hybrid-layer-pattern M-C*", "has 'C', which is the compressed attention of DeepSeek-V4, not supported for a file"),
        ("--hybrid-override-pattern M-M* --num-layers 6", "has 4 layers, but --num-layers is 6"),
        ("--hybrid-layer-pattern 'M*/M|'", r"has '\|', which is not a layer"),
        (
            "--hybrid-layer-pattern M --mtp-hybrid-override-pattern XE",
            "--mtp-hybrid-override-pattern has 'X', which is not a layer",
        ),
        ("--hybrid-override-pattern '||'", "must be one symbol per layer, not '||'"),
        ("--hybrid-override-pattern $PATTERN", "the value of --hybrid-override-pattern is not known"),
        ("--hybrid-layer-pattern 'M*/MM/M*'", "has different layers of multi-token prediction: 'MM' and 'M.'"),
        ("--hybrid-layer-pattern 'M|M|*' --pipeline-model-parallel-size 2", "has 3 parts, but there are 2 pipeline stages"),
        ("--hybrid-layer-pattern ME", r"has experts \(E\), but --num-experts is not given"),
        ("--hybrid-layer-pattern M --mamba-head-dim 48", "is not a multiple of --mamba-head-dim = 48"),
        (
            "--hybrid-layer-pattern M --mamba-num-groups 3 --mamba-num-heads 8",
            "--mamba-num-groups = 3 does not divide the 8 heads",
        ),
        ("--num-layers 4 --hybrid-attention-ratio 1.5", "--hybrid-attention-ratio must be between 0 and 1, not '1.5'"),
        ("--num-layers 4 --hybrid-attention-ratio 0.5 --hybrid-mlp-ratio 0.6", "must not add up to more than 1"),
        ("--num-layers 4 --experimental-attention-variant gdn", "gdn needs --linear-attention-freq: the layers without it"),
        ("--num-layers 4 --experimental-attention-variant dsv4_hybrid", "dsv4_hybrid' is not supported for a file"),
        ("--hybrid-layer-pattern G --linear-num-key-heads 3", "--linear-num-value-heads = 32 is not a multiple of"),
        ("--is-hybrid-model", "the file has no --num-layers"),
        ("--hybrid-layer-pattern D", "only with latent attention and a low rank of the queries"),
        ("--num-layers 2 --experimental-attention-variant dsa", "only with latent attention and a low rank of the queries"),
        (
            "--num-layers 2 --experimental-attention-variant dsa --multi-latent-attention --q-lora-rank 64 --dsa-indexer-topk 8",
            "needs --dsa-indexer-n-heads and --dsa-indexer-head-dim",
        ),
    ],
)
def test_messages(flags: str, says: str):
    with pytest.raises(UserError, match=says) as caught:
        megatron.read(f"{HYBRID} {flags}", "x.sh")
    assert caught.value.hint


def test_missing_sizes():
    with refused("--hidden-size", "--num-attention-heads"):
        megatron.read("--hybrid-override-pattern M*", "x.sh")


@settings(max_examples=100, deadline=None)
@given(
    st.text(alphabet="MG*+-E|/[]D ", max_size=12) | st.text(max_size=6), st.sampled_from(["", "--pipeline-model-parallel-size 2"])
)
def test_any_pattern(pattern: str, flags: str):
    checked(megatron, f"{HYBRID} {flags} --num-experts 4 --hybrid-layer-pattern '{pattern}'")


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.floats(0, 1), st.floats(0, 1))
def test_any_shares(layers: int, attention: float, mlp: float):
    pattern = spread(layers, attention, min(mlp, 1 - attention))
    assert len(pattern) == layers
