"""Keys of a config.json that nothing reads: never another model without a warning or a refusal."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.job.load import load_model
from gemmscope.model import hf, hf_keys, presets
from gemmscope.model.families import known_model_types
from gemmscope.model.hf_keys import accepted
from gemmscope.model.spec import ModelSource
from support.reading import codes, facts

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def warnings(source: ModelSource) -> list[str]:
    return [entry.code for entry in source.findings if entry.level != "note"]


def read(config: dict[str, Any]) -> ModelSource:
    return accepted(hf.from_config(config, "config.json"))


def shape(source: ModelSource) -> tuple[Any, ...]:
    """What the model is, without its name."""
    model = source.model
    assert model is not None
    return tuple(value for name, value in vars(model).items() if name not in ("name", "source", "model_type", "_groups"))


@cache
def configs() -> dict[str, dict[str, Any]]:
    """Of every preset, and the default of every known class, as JSON has them."""
    configs_by_name = {
        name: dict(presets.load(name).config or {}) for name in presets.names() if presets.load(name).config is not None
    }
    transformers = pytest.importorskip("transformers", reason="the defaults of classes need transformers")
    transformers.logging.set_verbosity_error()
    for name in known_model_types():
        if name in transformers.CONFIG_MAPPING:
            configs_by_name[f"class {name}"] = json.loads(json.dumps(transformers.CONFIG_MAPPING[name]().to_dict()))
    return configs_by_name


INCOMPLETE = {f"class {name}" for name in ("deepseek_v2", "dots1", "esm", "lfm2_moe")}
"""Classes that assume no number of experts or no vocabulary: their default is no model."""


@cache
def readable() -> list[tuple[str, dict[str, Any], ModelSource]]:
    """One preset of each type, and the default of every class."""
    types = {config["model_type"]: name for name, config in configs().items() if not name.startswith("class ")}
    chosen = [name for name in configs() if name in types.values() or (name.startswith("class ") and name not in INCOMPLETE)]
    return [(name, configs()[name], read(configs()[name])) for name in chosen]


def test_presets_and_defaults_have_no_warning() -> None:
    assert [(name, warnings(source)) for name, _, source in readable() if warnings(source)] == []
    assert [name for name in presets.names() if warnings(load_model(preset=name))] == []


def changed(name: str, config: dict[str, Any], source: ModelSource) -> str:
    """Empty where the model of a changed config is the same, refused, or has a warning; else what is wrong."""
    try:
        other = read(config)
    except UserError:
        return ""
    if other.model is None or warnings(other) or shape(other) == shape(source):
        return ""
    return name


def test_renamed_keys() -> None:
    """Every key of every config with a name that nothing reads."""
    silent = [
        f"{name}: {key} as {new}"
        for name, config, source in readable()
        for key in config
        if not hf_keys.is_harmless(key)
        for new in [f"own_{key}"]
        if changed(name, {new if old == key else old: value for old, value in config.items()}, source)
    ]
    assert silent == []


def test_removed_keys() -> None:
    """A key that is left out means what the class assumes, and a note says so."""
    silent = []
    for name, config, source in readable():
        for key in filter(lambda key: not hf_keys.is_harmless(key), config):
            try:
                other = read({old: value for old, value in config.items() if old != key})
            except UserError:
                continue
            assumed = facts(other, "defaults-of-class") if "defaults-of-class" in codes(other) else {"settings": []}
            if other.model is not None and shape(other) != shape(source) and not (key in assumed["settings"] or warnings(other)):
                silent.append(f"{name}: {key}")
    assert silent == []


WORDS = st.sampled_from(
    "moe latent expert routed attn mla hidden head router block ffn kv q shared dense group value conv".split()
)
ENDS = st.sampled_from(
    "hidden_size dim head_dim rank lora_rank layers heads experts layer_types pattern num_groups intermediate_size width "
    "channels block_size expert_hidden_size kernel ratios top_k_experts layer_freq".split()
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_added_sizes(data: st.DataObject) -> None:
    """A key named like a size, added to a real config, is read, or refused."""
    name = data.draw(st.sampled_from(sorted(configs().keys() - INCOMPLETE)))
    key = "_".join([*data.draw(st.lists(WORDS, max_size=2)), data.draw(ENDS)])
    config = configs()[name]
    if key not in config:
        added = {**config, key: data.draw(st.sampled_from([7, 64, [1, 2], {"rank": 8}, "FS"]))}
        assert changed(name, added, read(config)) == ""


@pytest.mark.parametrize(
    ("added", "sizes"),
    [
        ({"routed_expert_hidden_size": 32}, ["routed_expert_hidden_size"]),
        ({"moe": {"latent_dim": 8}}, ["moe"]),
        ({"n_embd": 64}, ["n_embd"]),
        ({"num_experts": 8, "use_gate": True}, ["num_experts"]),
    ],
)
def test_sizes_that_nothing_reads_are_refused(added: dict[str, Any], sizes: list[str]) -> None:
    with pytest.raises(UserError, match="has sizes that neither gemmscope nor the class") as caught:
        read({**LLAMA, **added})
    assert all(size in caught.value.message for size in sizes)
    assert "use_gate" not in caught.value.message


def test_ignored_keys(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "latent_rank": 8, "use_gate": True}), encoding="utf-8")
    source = load_model(config=str(file), ignore_key=["latent_rank"])
    assert facts(source, "keys-ignored") == {"settings": ["latent_rank"]}
    assert facts(source, "keys-not-read") == {"settings": ["use_gate"]}
    with pytest.raises(UserError, match="has no key of that name"):
        load_model(config=str(file), ignore_key=["latent_rank", "hidden_size"])
    with pytest.raises(UserError, match="has no key of that name"):
        load_model(preset="llama-3.1-8b", ignore_key=["latent_rank"])


@pytest.mark.parametrize(
    ("added", "code"),
    [
        ({"use_gate": True}, "keys-not-read"),
        ({"hidden_act": "situ"}, "activation-unknown"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}}, "code-of-its-own"),
        ({"moe_layer_freq": 2, "ignored": None}, "keys-not-read"),
    ],
)
def test_what_is_a_warning(added: dict[str, Any], code: str) -> None:
    source = hf.from_config({**LLAMA, **added}, "config.json")
    assert code in warnings(source if not source.unread else accepted(source, [key for key in source.unread if "freq" in key]))


def test_code_that_the_class_was_made_from() -> None:
    code = {"AutoModelForCausalLM": "deepseek-ai/DeepSeek-V3--modeling_deepseek.DeepseekV3ForCausalLM", "AutoConfig": "c.C"}
    config = {**configs()["deepseek-v3"], "moe_layer_freq": 1, "ep_size": 1, "aux_loss_alpha": 0.001, "auto_map": code}
    assert warnings(read(config)) == []


def test_the_language_part_follows_the_same_rule() -> None:
    outer = {"model_type": "llava", "vision_config": {"own_size": 7}}
    assert warnings(read({**outer, "text_config": LLAMA})) == ["language-part-only"]
    own = read({**outer, "model_type": "own_vl", "text_config": LLAMA})
    assert warnings(own) == ["language-part-only", "outer-class-unknown"]
    with pytest.raises(UserError, match="latent_rank"):
        read({**outer, "text_config": {**LLAMA, "latent_rank": 8}})
    with pytest.raises(UserError, match="own_text_config"):  # not the default of the class
        read({"model_type": "gemma3", "own_text_config": LLAMA})


def test_settings_of_numbered_layers_are_read() -> None:
    gemma = {**configs()["gemma-4-31b"], "per_layer_config": {"0": {"num_key_value_heads": 4}}}
    assert shape(read(gemma)) != shape(read(configs()["gemma-4-31b"]))
    assert read({**gemma, "per_layer_config": {"0": {"own_rank": 4}}}).model is None  # it is traced
    none, empty = (read({**gemma, "per_layer_config": value}) for value in (None, {}))  # as the class reads them
    assert shape(none) == shape(empty) != shape(read(configs()["gemma-4-31b"]))


def test_the_keys_of_the_classes() -> None:
    """`class_keys.toml` is what the installed classes have."""
    pytest.importorskip("transformers")
    from support import class_keys

    assert class_keys.TARGET.read_text(encoding="utf-8") == class_keys.text()
