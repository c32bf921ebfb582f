"""Settings for a mix: run unchanged, they keep the layers of the mix. What a framework cannot do is a comment."""

from __future__ import annotations

import ast
import re
import sys
from contextlib import contextmanager
from fnmatch import fnmatch
from shlex import split
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from gemmscope.paste.emit import ready_to_paste
from gemmscope.paste.mix import mix_to_paste
from gemmscope.recipe.recipes import recipes
from gemmscope.results.numerics import Mix
from gemmscope.toml import parse_toml

LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
MEGATRON = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
            "mlp.experts.linear_fc1", "mlp.experts.local_experts.3.linear_fc2", "mlp.shared_experts.linear_fc2")  # fmt: skip


def mix(recipe: str = "FP8Rowwise", higher: str = "BF16", **kept: Any) -> Mix:
    return Mix(recipe=recipe, higher=higher, error=0.05, **kept)


ENDS = mix("NVFP4", first_layers=1, last_layers=2, linears=("mlp.down_proj", "self_attn.v_proj"))


def test_a_recipe_that_is_not_mixed_is_as_step_writes_it() -> None:
    assert mix_to_paste(mix("MXFP8"), LINEARS, 32) == ready_to_paste("MXFP8")
    assert mix_to_paste(mix("BF16"), LINEARS, 32) == {}


@pytest.mark.parametrize("name", ['a"\n--load x', "a\\", "\U0001f600\u2028x", "\ud800", 'x"]\n[job]\ny = ["'])
def test_names_from_a_file_add_no_line_to_paste(name: str) -> None:
    texts = mix_to_paste(mix("FP8Current", last_layers=1, linears=(name, "mlp.down_proj")), [*LINEARS, name], 4)
    assert set(parse_toml(texts["torchtitan"])) == {"model", "compile", "quantize"}
    flags, _, config = texts["Megatron-LM"].partition("\n# mix.yaml\n")
    assert all(line.startswith("#") for line in filter(None, flags.split("\n")[1:]))
    patterns = [matcher["pattern"] for matcher in yaml.safe_load(config)["matchers"].values()]
    assert patterns[0] == f"*.{name}".encode("utf-8", "replace").decode()
    ast.parse(texts["Transformer Engine"])


class Module(SimpleNamespace):
    """A stand-in for a module, with what the settings use."""

    def children(self) -> list[Any]:
        return self.parts


def named_modules(names: list[str]) -> list[tuple[str, Module]]:
    layers = [
        (f"model.layers.{layer}.{name}", Module(parts=[], forward=lambda: STATE[-1])) for layer in range(4) for name in names
    ]
    return [
        ("model", Module(parts=[1], forward=lambda: STATE[-1])),
        *layers,
        ("lm_head", Module(parts=[], forward=lambda: STATE[-1])),
    ]


STATE: list[Any] = [None]


@contextmanager
def autocast(enabled: bool, recipe: Any = None) -> Any:
    STATE.append(recipe if enabled else "BF16")
    yield
    STATE.pop()


@pytest.mark.parametrize("higher", ["BF16", "MXFP8"])
def test_transformer_engine(higher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module runs in the recipe that the mix gives it, experts with numbers included; the head is as it was."""
    te, common = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    vars(te)["autocast"] = autocast
    vars(common).update({"NVFP4BlockScaling": lambda: "NVFP4", "MXFP8BlockScaling": lambda: "MXFP8"})
    packages = {"transformer_engine": ModuleType("transformer_engine"), "transformer_engine.common": ModuleType("common")}
    for name, module in {**packages, te.__name__: te, common.__name__: common}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(packages["transformer_engine"], "pytorch", te, raising=False)
    names = ["mlp.down_proj", "mlp.experts.7.up_proj", "self_attn.q_proj"]
    modules = dict(named_modules(names))
    plan = mix("NVFP4", higher, last_layers=1, linears=("mlp.experts.up_proj",))
    ran: dict[str, Any] = {}
    run = SimpleNamespace(named_modules=lambda: list(modules.items()))
    text = mix_to_paste(plan, names, 4)["Transformer Engine"]
    exec(
        text, {"model": run, "layers": lambda _: ran.update({name: one.forward() for name, one in modules.items()}), "hidden": 0}
    )
    kept = {name for name, recipe in ran.items() if recipe == higher}
    assert kept == {f"model.layers.3.{name}" for name in names} | {f"model.layers.{n}.mlp.experts.7.up_proj" for n in range(4)}
    assert {recipe for name, recipe in ran.items() if name not in kept} == {"NVFP4"}


def test_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """The higher recipe converts what is kept, the other one the rest; neither touches the head."""
    calls: list[Any] = []
    torchao, torch = ModuleType("torchao.float8"), ModuleType("torch")
    vars(torchao)["Float8LinearConfig"] = SimpleNamespace(from_recipe_name=lambda name: name)
    vars(torchao)["convert_to_float8_training"] = lambda _, config, module_filter_fn: calls.append((config, module_filter_fn))
    vars(torch)["compile"] = lambda layer: layer
    for name, module in (("torchao", ModuleType("torchao")), ("torchao.float8", torchao), ("torch", torch)):
        monkeypatch.setitem(sys.modules, name, module)
    text = mix_to_paste(mix("FP8Tensorwise", "FP8Rowwise", first_layers=1, linears=("mlp.down_proj",)), LINEARS, 32)["torchao"]
    exec(text, {"model": SimpleNamespace(layers=[])})
    linear = SimpleNamespace(in_features=64, out_features=32)
    names = ["layers.0.self_attn.q_proj", "layers.9.mlp.down_proj", "layers.10.self_attn.q_proj", "lm_head"]
    taken = {config: [name for name in names if chosen(linear, name)] for config, chosen in calls}
    assert taken == {"rowwise": names[:2], "tensorwise": names[2:3]}


def test_torchtitan() -> None:
    """Names contain the text: `layers.1.` is not in `layers.11.`."""
    text = mix_to_paste(mix(first_layers=2, last_layers=1, linears=("mlp.down_proj",)), LINEARS, 32)["torchtitan"]
    filters = parse_toml(text)["quantize"]["linear"]["float8"]["filter_fqns"]
    assert filters[3:] == ["layers.0.", "layers.1.", "layers.31.", "feed_forward.w2"]
    assert not any(pattern in "layers.11.feed_forward.w1" for pattern in filters)
    mxfp8 = mix_to_paste(mix("MXFP8", last_layers=1), LINEARS, 2)["torchtitan"]
    assert parse_toml(mxfp8)["quantize"]["linear"]["mx"]["recipe_name"] == "mxfp8_cublas"
    other = mix_to_paste(mix("FP8Tensorwise", "FP8Rowwise", last_layers=1, linears=("mlp.experts.up_proj",)), LINEARS, 2)[
        "torchtitan"
    ]
    assert "# torchtitan keeps these in BF16" in other
    assert "moe.experts" in parse_toml(other)["quantize"]["linear"]["float8"]["filter_fqns"]


def file_of(text: str) -> Any:
    return yaml.safe_load(text.partition("# mix.yaml\n")[2])


def matched(text: str) -> set[str]:
    patterns = [matcher["pattern"] for matcher in file_of(text)["matchers"].values() if matcher["enabled"]]
    return {name for name in MEGATRON if any(fnmatch(f"decoder.layers.3.{name}", pattern) for pattern in patterns)}


def test_megatron() -> None:
    text = mix_to_paste(ENDS, LINEARS, 32)["Megatron-LM"]
    flags = split(text.splitlines()[0], comments=True)
    assert flags[flags.index("--first-last-layers-bf16") :] == [
        "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "1", "--num-layers-at-end-in-bf16", "2",
        "--te-precision-config-file", "mix.yaml",
    ]  # fmt: skip
    assert matched(text) == {"self_attention.linear_qkv", "mlp.linear_fc2"}
    assert "also holds self_attn.q_proj and self_attn.k_proj" in text
    assert file_of(text)["configs"]["higher"]["training_recipe"] == {}
    experts = mix_to_paste(mix("MXFP8", linears=("mlp.experts.down_proj",)), LINEARS, 32)["Megatron-LM"]
    assert matched(experts) == {"mlp.experts.local_experts.3.linear_fc2"}
    shared = mix_to_paste(mix("MXFP8", linears=("mlp.shared_expert.down_proj",)), LINEARS, 32)["Megatron-LM"]
    assert matched(shared) == {"mlp.shared_experts.linear_fc2"}


def test_megatron_in_another_recipe_and_where_it_cannot() -> None:
    other = mix_to_paste(mix("NVFP4", "MXFP8", last_layers=2), LINEARS, 32)["Megatron-LM"]
    assert "--first-last-layers-bf16" not in other
    assert [matcher["pattern"] for matcher in file_of(other)["matchers"].values()] == ["*layers.30.*", "*layers.31.*"]
    assert "pipeline" in other
    current = mix_to_paste(mix("NVFP4", "FP8Current", linears=("mlp.down_proj",)), LINEARS, 32)["Megatron-LM"]
    assert file_of(current)["configs"]["higher"]["training_recipe"]["fp8_format"] == "hybrid"
    delayed = mix_to_paste(mix("FP8Delayed", last_layers=1), LINEARS, 32)["Megatron-LM"]
    assert "\n# Megatron-LM cannot mix FP8Delayed" in delayed
    assert "bf16" not in delayed
    unknown = mix_to_paste(mix("MXFP8", linears=("ffn.out",)), ["ffn.out"], 32)["Megatron-LM"]
    assert "ffn.out is the recorded name" in unknown


@pytest.mark.parametrize("name", [name for name in recipes() if recipes()[name].quantizes])
def test_every_recipe_has_settings_or_says_why_not(name: str) -> None:
    texts = mix_to_paste(mix(name, first_layers=1, linears=("mlp.down_proj",)), LINEARS, 8)
    assert texts
    for framework, text in texts.items():
        assert "{{" not in text
        if framework in ("Transformer Engine", "torchao"):
            compile(text, framework, "exec")
        if framework == "torchtitan":
            parse_toml(text)


def test_a_model_without_layers_keeps_by_name_alone() -> None:
    text = mix_to_paste(mix(linears=("encoder.out",)), ["encoder.out"], 1, in_layers=False)["torchao"]
    scope: dict[str, Any] = {"re": re}
    exec(text[text.index("def kept") : text.index("def fits")], scope)
    assert scope["kept"]("encoder.out")
    assert not scope["kept"]("encoder.inner")


def test_names_that_only_end_alike_are_not_kept() -> None:
    names = ["mlp.down_proj", "shared_mlp.down_proj"]
    text = mix_to_paste(mix(linears=("mlp.down_proj",)), names, 4)["torchao"]
    scope: dict[str, Any] = {"re": re}
    exec(text[text.index("def kept") : text.index("def fits")], scope)
    assert scope["kept"]("model.layers.2.mlp.down_proj")
    assert not scope["kept"]("model.layers.2.shared_mlp.down_proj")


def test_numbers_inside_of_a_layer_and_other_stacks_of_layers() -> None:
    """As in nn.Sequential, and in a model with an encoder and a decoder."""
    names = ["encoder.block.layer.0.q", "layer.0.q", "mlp.0", "mlp.2", "experts.0", "experts.2"]
    text = mix_to_paste(mix(linears=("layer.0.q", "mlp.0", "experts.2")), names, 4)["torchao"]
    scope: dict[str, Any] = {"re": re}
    exec(text[text.index("def kept") : text.index("def fits")], scope)
    assert all(map(scope["kept"], ["decoder.block.1.layer.0.q", "h1.1.mlp.0", "h.0.experts.7.2"]))
    assert not any(map(scope["kept"], ["encoder.block.1.layer.0.q", "h1.1.mlp.2", "h.0.experts.2.0"]))


def test_names_that_say_what_they_are_only_with_the_part_before() -> None:
    names = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "layer.1.DenseReluDense.wo"]
    for name, known in ((names[1], {"self_attention.linear_proj"}), (names[3], {"mlp.linear_fc2"}), (names[4], set())):
        assert matched(mix_to_paste(mix("MXFP8", linears=(name,)), names, 4)["Megatron-LM"]) == known


def test_experts_may_be_a_parameter_without_a_module() -> None:
    comment = "experts that are one parameter"
    assert comment in mix_to_paste(mix("FP8Current", linears=("mlp.experts.down_proj",)), LINEARS, 4)["Transformer Engine"]
    assert comment not in mix_to_paste(mix("FP8Current", linears=("mlp.down_proj",)), LINEARS, 4)["Transformer Engine"]


def test_torchtitan_says_what_later_versions_take() -> None:
    assert "MXFP8LinearConverter.Config" in mix_to_paste(mix("MXFP8", first_layers=1), LINEARS, 4)["torchtitan"]
    assert "Float8LinearConverter.Config" in mix_to_paste(mix("FP8Rowwise", first_layers=1), LINEARS, 4)["torchtitan"]


def test_ops_become_the_modules_that_they_consist_of() -> None:
    ops = ["QKV Proj", "Attn Out", "MLP Gate+Up", "MLP Down"]
    text = mix_to_paste(mix("NVFP4", linears=("QKV Proj", "MLP Down")), ops, 1, in_layers=False)
    assert matched(text["Megatron-LM"]) == {"self_attention.linear_qkv", "mlp.linear_fc2"}
    assert "also holds" not in text["Megatron-LM"]
    assert (
        "endswith(('.self_attn.q_proj', '.self_attn.k_proj', '.self_attn.v_proj', '.mlp.down_proj'))"
        in text["Transformer Engine"]
    )
