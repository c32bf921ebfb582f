"""Megatron-Bridge recipes spread over files, in a small tree in the style of the public one, and every small damage to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.model import bridge_recipe, presets, readers
from gemmscope.model.bridge_recipe import hub_presets
from gemmscope.model.hf_keys import accepted
from gemmscope.model.spec import ModelSource
from gemmscope.workload.summary import count_parameters
from support.reading import codes, facts

COMMON = """
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig, TrainingConfig

def _pretrain_common() -> ConfigContainer:
    cfg = ConfigContainer(
        model=None,
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", use_tokenizer_vocab_size=True),
        comm_overlap=None,
    )
    return cfg

def _benchmark(cfg, *, graphs: bool = False) -> None:
    cfg.tokenizer.use_tokenizer_vocab_size = False
    if graphs:
        cfg.model.cuda_graph_impl = "local"
    if cfg.comm_overlap is not None:
        cfg.comm_overlap.overlap_grad_reduce = True
"""

LIBRARY = """
from megatron.bridge import AutoBridge
from megatron.bridge.models.llama import Llama3ModelProvider70B
from megatron.bridge.recipes.common import _pretrain_common
from .ids import LLAMA_8B as HUB_ID, layout

def _provider(hub_id: str = HUB_ID, *, sequence: int = 8192):
    model = AutoBridge.from_hf_pretrained(hub_id).to_megatron_provider(load_weights=False)
    model.seq_length = sequence
    return model

def llama31_8b_pretrain_2gpu_h100_config():
    cfg = _pretrain_common()
    cfg.model = _provider()
    cfg.model.context_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = layout(cfg.model.pipeline_model_parallel_size)
    cfg.train.micro_batch_size = 1
    cfg.tokenizer.vocab_size = 32000
    return cfg

def llama3_70b_pretrain_config():
    cfg = _pretrain_common()
    cfg.model = Llama3ModelProvider70B(num_layers=8)
    return cfg
"""

IDS = """
LLAMA_8B = "meta-llama/Llama-3.1-8B"

def layout(stages):
    layouts = {1: None, 4: [["embedding"] + ["decoder"] * 8] + [["decoder"] * 8] * 2 + [["decoder"] * 8 + ["loss"]]}
    if stages not in layouts:
        raise ValueError(f"no layout for {stages}")
    return layouts[stages]
"""

ALIASES = """
from megatron.bridge.recipes.llama.h100.llama3 import (
    llama31_8b_pretrain_2gpu_h100_config as llama31_8b_pretrain_config,
)
from megatron.bridge.recipes.llama.h100.llama3 import *
"""

PERFORMANCE = """
from megatron.bridge.recipes.common import _benchmark
from megatron.bridge.recipes.llama.llama3 import llama31_8b_pretrain_config, llama3_70b_pretrain_config
from megatron.bridge.training.comm_overlap import CommOverlapConfig

def llama31_8b_pretrain_16gpu_gb200_config():
    cfg = llama31_8b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.train.global_batch_size = 64
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    _benchmark(cfg, graphs=True)
    return cfg

def llama3_70b_pretrain_8gpu_gb200_config():
    cfg = llama3_70b_pretrain_config()
    _benchmark(cfg)
    return cfg
"""

FILES = {
    "megatron/bridge/recipes/common.py": COMMON,
    "megatron/bridge/recipes/llama/h100/llama3.py": LIBRARY,
    "megatron/bridge/recipes/llama/h100/ids.py": IDS,
    "megatron/bridge/recipes/llama/llama3.py": ALIASES,
    "megatron/bridge/perf_recipes/llama3.py": PERFORMANCE,
}
PERF = "megatron/bridge/perf_recipes/llama3.py"
SMALL, LARGE = "llama31_8b_pretrain_16gpu_gb200_config", "llama3_70b_pretrain_8gpu_gb200_config"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def shape(source: ModelSource) -> object:
    """What the model is, apart from its vocabulary: settings of the run that may be damaged decide that."""
    assert source.model is not None
    return source.model.layers, source.model.hidden_size


def test_a_recipe_of_several_files(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    source = readers.read_config(f"{tmp_path / PERF}:{SMALL}")
    assert source.model is not None
    assert (source.model.name, source.model.vocab_size, source.global_batch) == ("llama-3.1-8b", 128256, 64)
    expected = {"tp": 4, "cp": 2, "dp": 2, "micro_batch_size": 1, "sequence_length": 8192, "gradient_accumulation": 32}
    assert {name: source.run_settings[name] for name in expected} == expected
    assert (source.run_settings["dp_overlap"], source.run_settings["cuda_graphs"]) == (True, True)
    assert codes(source) == ["recipe-gpus"]
    large = readers.read_config(f"{tmp_path / PERF}:{LARGE}")
    assert large.model is not None
    assert (len(large.model.layers), large.model.hidden_size) == (8, 8192)
    library = readers.read_config(f"{tmp_path}/megatron/bridge/recipes/llama/llama3.py:llama31_8b_pretrain_config")
    assert library.model is not None
    assert library.model.vocab_size == 32000
    assert facts(library, "vocabulary-of-tokenizer") == {"size": 32000, "own": "128256"}
    with pytest.raises(UserError, match=r"several models: meta-llama/Llama-3\.1-8B, Llama3ModelProvider70B") as several:
        readers.read_config(str(tmp_path / PERF))
    assert f"FILE.py:{SMALL}" in several.value.hint
    with pytest.raises(UserError, match="there is no function llama3_7b"):
        readers.read_config(f"{tmp_path / PERF}:llama3_7b")


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (
            "megatron/bridge/recipes/llama/llama3.py",
            "llama31_8b_pretrain_config of megatron.bridge.recipes.llama.llama3, which is not",
        ),
        ("megatron/bridge/recipes/llama/h100/ids.py", "LLAMA_8B of .ids, which is not in this folder"),
    ],
)
def test_what_cannot_be_resolved_is_named(tmp_path: Path, missing: str, says: str) -> None:
    write(tmp_path, {name: text for name, text in FILES.items() if name != missing})
    with pytest.raises(UserError, match=says):
        readers.read_config(f"{tmp_path / PERF}:{SMALL}")


def damages(text: str) -> dict[str, None]:
    """The text without each of its lines, and with each of its names renamed, once and everywhere."""
    lines, names = text.split("\n"), list(re.finditer(r"[A-Za-z_]\w*", text))
    without = ["\n".join(lines[:at] + lines[at + 1 :]) for at in range(len(lines))]
    once = [f"{text[: word.end()]}X{text[word.end() :]}" for word in names[::4]]
    everywhere = [re.sub(rf"\b{name}\b", f"{name}X", text) for name in {word[0] for word in names}]
    undecided = [re.sub(r"^( +)(?=\S)", r"\1if FLAG: ", text, count=1, flags=re.MULTILINE)]
    return dict.fromkeys([*without, *once, *everywhere, *undecided])


@pytest.fixture(autouse=True)
def _without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of this machine stands in for a file that is missing."""
    monkeypatch.setattr("gemmscope.model.python_code.ON_PATH", ())


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_recipe_is_the_same_model_or_none(tmp_path: Path, name: str) -> None:
    write(tmp_path, FILES)
    expected = {function: shape(readers.read_config(f"{tmp_path / PERF}:{function}")) for function in (SMALL, LARGE)}
    answered = refused = 0
    for text in damages(FILES[name]):
        (tmp_path / name).write_text(text)
        for function in [SMALL] if name.endswith("common.py") else expected:
            try:
                source = accepted(readers.read_config(f"{tmp_path / PERF}:{function}"))
            except UserError as error:
                assert error.hint
                refused += 1
                continue
            answered += 1
            assert shape(source) == expected[function], text
    assert answered
    assert refused


def test_a_hub_id_is_exactly_that_of_a_preset() -> None:
    text = "from megatron.bridge import AutoBridge\nmodel = AutoBridge.from_hf_pretrained({!r})\nmodel.seq_length = 8"
    for hub_id in (
        *hub_presets(),
        "",
        "/",
        "//",
        "Qwen",
        "Qwen/",
        "/Qwen3-8B",
        "qwen/qwen3-8b",
        "Qwen/Qwen3-8B/",
        "Qwen/Qwen3-8",
    ):
        try:
            source = readers.read_text(text.format(hub_id), "recipe.py")
        except UserError:
            assert hub_id not in hub_presets()
        else:
            assert source.model is not None
            assert source.model.name == hub_presets()[hub_id]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("cfg.model = pick()", r"the model of f_config\(\) comes from pick\(\), which the file does not define"),
        ("if FLAG:\n  cfg.model = Qwen3ModelProvider4B()", "depends on a condition"),
        ("match FLAG:\n  case 1:\n   cfg.model = Qwen3ModelProvider4B()", "depends on a condition"),
        ("try:\n  check()\n except Exception:\n  cfg.model = Qwen3ModelProvider4B()", "depends on a condition"),
        ("for _ in sizes:\n  cfg.model = Qwen3ModelProvider4B()", "depends on a condition"),
        ("cfg.model = Own()", r"code decides its layers \(Own.provide\)"),
        ("cfg.model.transformer_layer_spec = own_layers", r"code decides its layers \(transformer_layer_spec\)"),
        ("cfg.model = Qwen3ModelProvider8B(**sizes)", "sizes whose names the file does not show"),
        ("cfg.model = build(**sizes)", "model.num_layers is not known: layers"),
        ("cfg.model.num_layrs = 8", "sizes that gemmscope does not read: model.num_layrs"),
        ("cfg.model.residual_stream_size = 8", "sizes that gemmscope does not read: model.residual_stream_size"),
        ("cfg.model.num_layers = pick()", "model.num_layers is not known: pick"),
        ("return other()", "comes from"),
        ("if FLAG:\n  return None", "depends on a condition"),
    ],
)
def test_a_model_that_is_not_certain_is_refused(lines: str, says: str) -> None:
    text = f"""import megatron.bridge
class Own(Qwen3ModelProvider8B):
    def provide(self):
        return Tower(self)
def build(layers=8):
    return Qwen3ModelProvider8B(num_layers=layers)
def f_config():
 cfg = ConfigContainer(model=Qwen3ModelProvider8B())
 {lines}
 return cfg
"""
    with pytest.raises(UserError, match=says):
        accepted(bridge_recipe.read(text, "recipe.py", function="f_config"))


def test_calls_that_are_not_read() -> None:
    text = "import megatron.bridge\ndef f_config():\n cfg = ConfigContainer(model=Qwen3ModelProvider8B())\n {}\n return cfg"
    source = readers.read_text(text.format("shrink(cfg.model)"), "recipe.py")
    assert facts(source, "recipe-calls-not-read") == {"calls": ["shrink()"]}
    assert codes(readers.read_text(text.format("pretrain(cfg)"), "recipe.py")) == []
    assert codes(readers.read_text(text.format("cfg.peft = LoRA(dim=8)"), "recipe.py")) == ["frozen-parts-not-modelled"]


@pytest.mark.parametrize(
    "line",
    [
        "x = [x, x]\n" * 60,
        "x.append(x)",
        "x = x + x\n" * 60,
        "x = 'a' * 10**9",
        "x = 9 * x\n" * 900,
        "x = {1: x}\n" * 300,
        "m.m = m",
    ],
)
def test_values_that_grow_without_bound(line: str) -> None:
    source = readers.read_text(
        f"import megatron.bridge\nx = [1]\nm = Qwen3ModelProvider8B()\n{line}\nm.seq_length = 8", "recipe.py"
    )
    assert source.run_settings["sequence_length"] == 8


def test_recipes_that_take_too_many_steps() -> None:
    calls = "".join(f"def f{n}():\n a = f{n + 1}()\n b = f{n + 1}()\n return a\n" for n in range(25))
    with pytest.raises(UserError, match="too many steps"):
        readers.read_text(
            f"import megatron.bridge\n{calls}\ndef f25():\n return 1\nx = f0()\nm = Qwen3ModelProvider8B()", "recipe.py"
        )


HUB = """from megatron.bridge import AutoBridge
def a_pretrain_config():
    cfg = ConfigContainer(model=AutoBridge.from_hf_pretrained("{}").to_megatron_provider(load_weights=False))
    {}
    return cfg
"""


@pytest.mark.parametrize(
    "setting",
    [
        'hybrid_layer_pattern = "M*M*"',
        "add_qkv_bias = True",
        "qk_layernorm = False",
        "share_embeddings_and_output_weights = True",
        "window_size = (511, 0)",
        "moe_latent_size = 512",
        "enable_mhc_connections = True",
        'position_embedding_type = "learned_absolute"',
        "kv_channels = 64",
    ],
)
def test_a_model_of_the_hub_with_other_layers_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"changes model.{setting.split()[0]}"):
        bridge_recipe.read(HUB.format("Qwen/Qwen3-8B", f"cfg.model.{setting}"), "recipe.py")


@pytest.mark.parametrize(
    "setting", ["add_qkv_bias = False", "qk_layernorm = True", "kv_channels = 128", "window_size = None", "num_layers = 36"]
)
def test_a_model_of_the_hub_with_its_own_settings(setting: str) -> None:
    source = bridge_recipe.read(HUB.format("Qwen/Qwen3-8B", f"cfg.model.{setting}"), "recipe.py")
    assert source.model == presets.load("qwen3-8b").model
    assert codes(source) == []


@pytest.mark.parametrize(
    ("hub_id", "line", "depths", "parameters"),
    [
        # Nemotron-3-Super: a depth is attention and experts, after two norms, a projection of twice the hidden size, and a norm.
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "cfg.model.mtp_num_layers = 1", 1, 123_611_012_096),
        (
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "cfg.model.mtp_num_layers = 2; cfg.model.mtp_use_repeated_layer = True",
            2,
            123_611_012_096,
        ),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "pass", 0, 120_668_687_360),
        ("Qwen/Qwen3.5-27B", "pass", 1, 27_320_697_856),  # the config's own number of depths
        ("Qwen/Qwen3.5-27B", "cfg.model.mtp_num_layers = None", 0, 26_895_998_464),
        ("deepseek-ai/DeepSeek-V4-Flash", "cfg.model.mtp_num_layers = 0", 0, 284_332_230_231),
    ],
)
def test_prediction_layers_of_a_model_of_the_hub(hub_id: str, line: str, depths: int, parameters: int) -> None:
    model = bridge_recipe.read(HUB.format(hub_id, line), "recipe.py").model
    assert model is not None
    assert (model.prediction_layers, count_parameters(model)[0]) == (depths, parameters)


def test_a_multimodal_model_of_the_hub_is_only_its_language_part() -> None:
    text = HUB.format("Qwen/Qwen3.5-27B", "cfg.model.freeze_vision_model = True; cfg.model.freeze_language_model = False")
    source = bridge_recipe.read(text, "recipe.py")
    assert facts(source, "language-part-only") == {"model_type": "qwen3_5"}
    assert facts(source, "frozen-parts-not-modelled") == {"settings": ["model.freeze_vision_model"]}


def test_the_window_of_gemma_counts_the_query() -> None:
    text = "import megatron.bridge\nm = {}(window_size=512, num_layers=6, hidden_size=1152, num_attention_heads=4)"
    for provider, window in (("Gemma3ModelProvider1B", 512), ("GPTModelProvider", 513)):
        model = bridge_recipe.read(text.format(provider), "recipe.py").model
        assert model is not None
        assert {attention.window for attention in model.attentions} - {None} == {window}
