"""Writes `model/class_keys.toml`, the keys that transformers' classes read: `python tests/support/class_keys.py`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from gemmscope.model import hf_keys
from gemmscope.model.families import family, known_model_types

TARGET = Path(hf_keys.__file__).with_name("class_keys.toml")
HEAD = """\
# What the classes of transformers {version} know, without the keys that change no shape (`harmless` in key_rules.toml):
# `keys` of each model type's config.json beside the `common` ones (with a minus: not that one); `activations`; `multimodal`
# types, whose language part is their `text_config`.
# tests/support/class_keys.py writes this file, and a test compares it with the classes.
"""
COMMON = set(
    "hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
    "tie_word_embeddings vocab_size".split()
)
# Keys that a class reads without declaring them: older names, and those that its model looks up.
_OLDER = re.compile(r'kwargs\.(?:pop|get)\(\s*"(\w+)"|"(\w+)" in kwargs')
_LOOKED_UP = re.compile(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"()')


def class_keys(model_type: str) -> set[str]:
    """The keys that the class of a model type reads; those inside of its own objects as `object.key`."""
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind().to_dict()
    inner = {f"{key}.{name}" for key, value in config.items() if isinstance(value, dict) for name in value}
    modeling = Path(inspect.getfile(kind).replace("configuration_", "modeling_"))
    matches = [*_OLDER.findall(inspect.getsource(kind)), *_LOOKED_UP.findall(modeling.read_text(encoding="utf-8"))]
    named = {name for match in matches for name in match if name}
    keys = (
        set(config) | set(kind.attribute_map) | named | {key for key in inner if not hf_keys.is_harmless(key.partition(".")[0])}
    )
    return {key for key in keys if not hf_keys.is_harmless(key)}


def listed(keys: set[str]) -> str:
    """The keys of one class as the file has them."""
    return " ".join([*sorted(keys - COMMON), *(f"-{key}" for key in sorted(COMMON - keys))])


def text() -> str:
    """The file's content."""
    import transformers

    source = Path(transformers.__file__).with_name("activations.py").read_text(encoding="utf-8")
    activations = re.findall(r'^ +"(\w+)":', source, re.MULTILINE)
    lines = [HEAD.format(version=transformers.__version__), f'activations = "{" ".join(sorted(activations))}"', ""]
    multimodal = sorted(name for name in transformers.CONFIG_MAPPING if "text_config" in _sub_configs(transformers, name))
    lines += [f'multimodal = "{" ".join(multimodal)}"', "", f'common = "{" ".join(sorted(COMMON))}"', "", "[keys]"]
    live = {name: family(name).get("built_as", name) for name in known_model_types()}
    live = {name: built for name, built in live.items() if built in transformers.CONFIG_MAPPING}
    return "\n".join([*lines, *(f'{name} = "{listed(class_keys(built))}"' for name, built in live.items()), ""])


def _sub_configs(transformers: Any, name: str) -> Any:
    return getattr(transformers.CONFIG_MAPPING[name], "sub_configs", {})


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
