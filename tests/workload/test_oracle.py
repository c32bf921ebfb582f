"""The closed form against the real thing: Hugging Face's own classes, run forward and backward on the meta device.

Every GEMM must agree: as a multiset of (pass, m, k, n, groups) with counts, those of attention too, and the number of
parameters to the last one. `GEMMSCOPE_SEEDS=20 pytest tests/workload/test_oracle.py` tries more random configs of every type.
"""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.model import hf, presets
from gemmscope.model.families import ALIASES, known_model_types
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.check import differences
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention
from support.hf_variants import variant
from support.oracle import compare, live
from support.preset_names import ORIGINALS

transformers = pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="the oracle needs torch and transformers")
windows = pytest.importorskip("gemmscope.workload.huggingface").windows
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers

REQUIRED = (
    "llama mistral qwen2 qwen3 qwen2_moe qwen3_moe mixtral deepseek_v3 gpt_oss gemma2 gemma3_text phi3 gpt2 gpt_neox opt bert "
    "roberta esm modernbert olmo2 granite starcoder2 cohere glm4 nemotron"
).split()


SEEDS = int(os.environ.get("GEMMSCOPE_SEEDS", "1"))  # random configs of each type
NO_CLASS = {
    "step3p5",
    "longcat_flash",
}  # only inside of a multimodal class; it looks at values of tokens (test_oracle_by_layer.py)
LIVE_TYPES = [name for name in known_model_types() if name in transformers.CONFIG_MAPPING and name not in NO_CLASS]


def test_required_families_are_known() -> None:
    assert set(REQUIRED) <= set(known_model_types())
    assert len(known_model_types()) >= 50


@pytest.mark.parametrize("model_type", LIVE_TYPES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_configs(model_type: str, seed: int) -> None:
    rng = random.Random(f"{model_type} {seed}")
    settings = variant(model_type, transformers.AutoConfig.for_model(model_type).to_dict(), rng)
    config = transformers.AutoConfig.for_model(model_type, **settings).to_dict()
    assert compare(config, RunSpec(rng.choice([1, 2, 3]), rng.choice([16, 33]))) == []


DEEP = 8


def shortened(config: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    """The config with the first layers only, as many as have one of each kind."""
    depth = next(n for n in range(1, len(model.layers) + 1) if set(model.layers[:n]) == set(model.layers))
    short = {
        key: value[:depth] if isinstance(value, (list, str)) and len(value) == len(model.layers) else value
        for key, value in config.items()
    }
    return short | {key: depth for key in ALIASES["num_hidden_layers"] if key in config}


@pytest.mark.parametrize("name", ORIGINALS)
def test_presets(name: str) -> None:
    """The whole model at its real size, from the keys that the preset states: nothing filled in.

    A deep one is built as a whole, for its parameters and windows, and runs with as many layers as it has kinds of.
    """
    source, run = presets.load(name), RunSpec(1, 64)
    if source.config is None or source.config["model_type"] not in {*transformers.CONFIG_MAPPING} - NO_CLASS:
        pytest.skip("transformers has no class")
    model, config = source.model, dict(source.config)
    assert model is not None
    if len(model.layers) > DEEP:
        module, _ = trace_worker.build_huggingface(config, 1, 64)
        assert presets.describe(name).parameters == sum(
            {id(parameter): parameter.numel() for parameter in module.parameters()}.values()
        )
        assert derive(model, run).parameters == presets.describe(name).parameters
        if (declared := windows(module.config)) is not None:
            own = [layer.attention and (layer.attention.window or layer.attention.chunk) for layer in model.layers]
            assert own == [reach if layer.attention else None for layer, reach in zip(model.layers, declared, strict=True)]
        fewer = shortened(config, model)
        with suppress(UserError):  # settings that number layers which are no more there
            short = hf.from_config(fewer, "config.json").model
            assert short is not None
            if short.layers == model.layers[: len(short.layers)]:  # not where the config counts layers from the end
                config, model = fewer, short
    trace = live(config, run)
    assert differences(model, run, trace) == []
    assert len(model.layers) < len(source.model.layers) or presets.describe(name).parameters == trace.parameters


def test_zero_flops_difference() -> None:
    """Multisets are equal, so this must be: FLOPs add up to the same number."""
    source = presets.load("qwen3-30b-a3b")
    assert source.model is not None
    run = RunSpec(2, 128, separate_projections=True)
    traced = sum(gemm.flops * gemm.count for gemm in live(dict(source.config or {}), run).gemms)
    derived = sum(gemm.flops * gemm.count for gemm in derive(source.model, run).gemms())
    assert traced == derived > 0


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "bert", "opt", "gemma2", "gpt_neox", "modernbert", "starcoder2"])
def test_flops_by_torch_itself(model_type: str) -> None:
    """An oracle that shares no code with the recorder: torch's own FLOP counter over the same forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.AutoConfig.for_model(model_type).to_dict()
    config |= {key: 3 for key in ALIASES["num_hidden_layers"] if key in config}
    config |= {"layer_types": None} if "layer_types" in config else {}
    module, inputs = trace_worker.build_huggingface(config, 2, 32)
    with FlopCounterMode(display=False) as counter:
        module(**inputs).logits.sum().backward()
    model = hf.from_config(json.loads(json.dumps(config)), "x").model
    assert model is not None
    workload = derive(model, RunSpec(2, 32, separate_projections=True))
    gemms = sum(gemm.flops * gemm.count for gemm in workload.gemms())
    attention = [(op.count, product) for op in workload.ops if isinstance(op, Attention) for product in op.batched_gemms()]
    assert counter.get_total_flops() == gemms + sum(2 * count * m * k * n * batch for count, (_, m, k, n, batch) in attention)


def test_a_wrong_closed_form_is_noticed() -> None:
    """The comparison can fail: a config that differs in one size from the model traced."""
    config = transformers.AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=2).to_dict()
    run = RunSpec(1, 16)
    trace = live(config, run)
    model = hf.from_config({**config, "num_key_value_heads": 2}, "x").model
    assert model is not None
    differing = differences(model, run, trace)
    assert {difference.what for difference in differing} >= {"fprop 16x64x32", "parameters"}


@pytest.mark.parametrize(
    ("model_type", "live_settings", "wrong", "what"),
    [
        ("mistral", {"sliding_window": 8}, {"sliding_window": None}, "sliding window (0: none) of 3 layers (0, 1, 2)"),
        ("mistral", {"sliding_window": None}, {"sliding_window": 8}, "sliding window (0: none) of 3 layers (0, 1, 2)"),
        ("gemma3_text", {"sliding_window": 8}, {"sliding_window": 16}, "sliding window (0: none) of 2 layers (0, 2)"),
        ("modernbert", {}, {"layer_types": ["full_attention"] * 3}, "sliding window (0: none) of 2 layers (0, 2)"),
        ("bert", {"is_decoder": True}, {"is_decoder": False}, "layers with causal attention"),
        ("bert", {"is_decoder": False}, {"is_decoder": True}, "layers with causal attention"),
    ],
)
def test_a_wrong_mask_is_noticed(model_type: str, live_settings: dict[str, Any], wrong: dict[str, Any], what: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 16}
    if model_type in ("gemma3_text", "modernbert"):
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if model_type != "bert":
        sizes["num_key_value_heads"] = 4
    config = transformers.AutoConfig.for_model(model_type, **sizes, **live_settings).to_dict()
    run = RunSpec(1, 16)
    trace = live(config, run)
    right, other = (hf.from_config({**config, **change}, "x").model for change in ({}, wrong))
    assert right is not None
    assert other is not None
    assert differences(right, run, trace) == []
    assert what in {difference.what for difference in differences(other, run, trace)}


def test_a_setting_that_the_code_does_not_read() -> None:
    """Llama has no window, whatever its config.json says."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    config = {"model_type": "llama", **sizes, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    trace = live(config, RunSpec(1, 16))
    assert (trace.windows, trace.causal) == ((None, None), True)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "bert", "opt", "deepseek_v3", "modernbert"])
def test_attention_flops(model_type: str) -> None:
    """Of traced attention, as far as its mask is known: the pairs that the closed form counts."""
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    config |= {key: 2 for key in ALIASES["num_hidden_layers"] if key in config}
    config |= {"layer_types": None} if "layer_types" in config else {}
    model = hf.from_config(json.loads(json.dumps(config)), "x").model
    assert model is not None
    run = RunSpec(2, 32)
    trace = live(config, run)
    attention = [op.total().flops for op in derive(model, run).ops if isinstance(op, Attention)]
    assert "explicit" not in trace.masks
    assert sum(op.total().flops for op in trace.attentions) == sum(attention)


@pytest.mark.parametrize(
    "model_type",
    (
        "smollm3 mistral gemma2 gpt_oss modernbert qwen2 olmo3 cohere2 gemma3_text ministral cwm granite_swa kolibri1 exaone_moe"
    ).split(),
)
def test_windows(model_type: str) -> None:
    """Which layers slide: the closed form's pattern is that of the configuration class."""
    extra = {"use_sliding_window": True, "sliding_window": 64} if model_type in ("qwen2", "smollm3") else {}
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=12, max_window_layers=5, **extra)
    plain = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    model = hf.from_config(json.loads(json.dumps(plain)), "x").model
    assert model is not None
    slides = [layer.attention.window is not None for layer in model.layers]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 12
    assert slides == [kind == "sliding_attention" for kind in kinds]
    windows = {op.window for op in derive(model, RunSpec(1, 8192)).ops if isinstance(op, Attention)} - {None}
    assert windows == {config.local_attention if model_type == "modernbert" else config.sliding_window}


_SIZES = {key for name, keys in ALIASES.items() if name not in ("num_key_value_heads", "head_dim") for key in keys} | {
    *("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
}
# What a configuration class cannot do without, and does not assume either.
_NEEDED: dict[str, dict[str, Any]] = {
    "esm": {"pad_token_id": 1, "mask_token_id": 2, "vocab_size": 33},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "ministral": {"head_dim": 128},
    "gemma3n_text": {"num_kv_shared_layers": 1, "intermediate_size": 512},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
}


@pytest.mark.parametrize("model_type", LIVE_TYPES)
def test_keys_left_out_mean_what_the_class_assumes(model_type: str) -> None:
    """A config that states its sizes and nothing else, as old ones on the hub do."""
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    minimal = {key: value for key, value in defaults.items() if key in _SIZES and value is not None}
    minimal |= {key: 3 for key in ALIASES["num_hidden_layers"] if key in minimal}
    assert compare({"model_type": model_type} | minimal | _NEEDED.get(model_type, {}), RunSpec(1, 16)) == []
