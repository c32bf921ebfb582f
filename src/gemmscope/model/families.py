"""The facts of `families.toml`: what Hugging Face's code builds for a model type, applied to one config."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gemmscope.errors import UserError, closest, shown
from gemmscope.model.limits import check_size
from gemmscope.toml import inherited, load_data

LARGEST_NUMBER = 2**62  # of any setting; most have a far smaller limit of their own
_NOT_FAMILIES = frozenset({"decoder", "encoder", "gpt"})  # templates for the others

_KEYS = load_data("gemmscope.model", "config_keys.toml")
ALIASES: Mapping[str, Sequence[str]] = _KEYS["aliases"]
"""The same size under the names that different configs give it."""


@cache
def _facts() -> Mapping[str, Mapping[str, Any]]:
    return load_data("gemmscope.model", "families.toml")


@cache
def _class_sizes() -> Mapping[str, Mapping[str, int]]:
    return load_data("gemmscope.model", "class_sizes.toml")


@cache
def known_keys() -> frozenset[str]:
    """Keys of configs that some family reads: none of them is a misspelling."""
    tables = [*_class_sizes().values(), *(facts.get("defaults", {}) for facts in _facts().values())]
    named = [value for facts in _facts().values() for value in facts.values() if isinstance(value, str)]
    return frozenset(named).union(*tables, *ALIASES.values())


@cache
def multimodal_types() -> tuple[str, ...]:
    """Every `model_type` of which the language part is known."""
    return tuple(
        name for name, facts in _facts().items() if not {"language", "language_like", "language_settings"}.isdisjoint(facts)
    )


@cache
def known_model_types() -> tuple[str, ...]:
    """Every `model_type` that has a closed form."""
    return tuple(sorted(_facts().keys() - _NOT_FAMILIES - set(multimodal_types())))


def language_part(model_type: str, config: Mapping[str, Any]) -> Any:
    """The language part of a multimodal config, with its model type where that is known from the whole.

    >>> language_part("qwen3_5", {"text_config": {"hidden_size": 64}})
    {'hidden_size': 64, 'model_type': 'qwen3_5_text'}
    """
    facts, part = _facts().get(model_type, {}), config.get("text_config")
    if isinstance(part, Mapping):
        part = {**part, **_language_settings(facts, part)}
    if "language" in facts and (part is None or isinstance(part, Mapping)):
        own = (part or {}).get("model_type")
        return {**(part or {}), "model_type": own if own in known_model_types() else facts["language"]}
    flat = {key: value for key, value in config.items() if not isinstance(value, Mapping)}  # as in Qwen2.5-VL
    sizes = flat if part is None and facts.get("language_flat") else part
    # A language part with a class of its own, which has other defaults, so the config must have the keys that matter.
    required = {*_KEYS["language"]["required"], *facts.get("language_keys", ())}
    if isinstance(sizes, Mapping) and "language_like" in facts and sizes.keys() >= required:
        return {**sizes, "model_type": facts["language_like"]}
    return part


def _language_settings(facts: Mapping[str, Any], language: Mapping[str, Any]) -> dict[str, Any]:
    """What a multimodal class sets in its language part, whatever the config says."""
    settings = dict(facts.get("language_settings", {}))
    if language.get("model_type") != facts.get("language_settings_for", language.get("model_type")):
        return {}
    if "head_dim" in settings:
        hidden, heads = language.get("hidden_size"), language.get("num_attention_heads")
        settings["head_dim"] = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    return settings


def _letters(name: str) -> str:
    """What a family is called: `gemma` of gemma9, but not of gemmini."""
    return re.split("[^a-z]", name, maxsplit=1)[0]


def built_like(config: Mapping[str, Any]) -> str:
    """The known model type that an unknown one probably resembles, by its architecture, its name or its keys; or empty.

    >>> [built_like({"model_type": name, "num_key_value_heads": 8}) for name in ("gemma9", "gemmini", "frob")]
    ['gemma', 'llama', 'llama']
    >>> built_like({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]})
    'deepseek_v3'
    """
    listed = config.get("architectures")
    architecture = str(listed[0]).partition("For")[0].lower() if isinstance(listed, list) and listed else ""
    by_architecture = [name for name in known_model_types() if re.sub(r"[_-]", "", name) == architecture]
    given = str(config.get("model_type")).lower()
    letters = _letters(given)
    relatives = [name for name in known_model_types() if _letters(name) == letters]
    by_name = closest(given, relatives, cutoff=0.75)
    by_keys = [name for key, name in _KEYS["resembles"].items() if key in config]
    return next(iter([*by_architecture, *by_name, *by_keys]), "")


@cache
def family(model_type: str) -> Mapping[str, Any]:
    """The facts of one model type, including inherited ones."""
    return inherited(_facts(), model_type)


@dataclass(frozen=True)
class FamilyConfig:
    """A config together with the facts of its family. `assumed`: keys that were looked up and that the config does not have."""

    model_type: str
    config: Mapping[str, Any]
    assumed: set[str] = field(default_factory=set, compare=False)

    @property
    def facts(self) -> Mapping[str, Any]:
        return family(self.model_type)

    def value(self, key: str) -> Any:
        """The config's value, else the default of the configuration class, else None. An explicit null stays None."""
        if key in self.config:
            return self.config[key]
        self.assumed.add(key)
        return self.default(key)

    def default(self, key: str) -> Any:
        """What the configuration class assumes where the config does not say."""
        return {**_class_sizes().get(self.model_type, {}), **self.facts.get("defaults", {})}.get(key)

    def flag(self, fact: str, default: bool = False) -> bool:
        """A fact that is true or false, or that names the key (or the key=value) that decides it."""
        rule = self.facts.get(fact, default)
        if isinstance(rule, bool):
            return rule
        key, _, wanted = str(rule).partition("=")
        given = self.value(key)
        if wanted:
            return bool(given == wanted)
        if given is not None and not isinstance(given, (bool, int)):
            raise UserError(f"{key} must be true or false, not {shown(given)}", f'write "{key}": true or "{key}": false')
        return bool(given)

    def number(self, fact: str) -> int | None:
        """A fact that is a number, or that names the key with the number."""
        rule = self.facts.get(fact)
        return self.optional_size(rule) if isinstance(rule, str) and rule else rule or None

    def optional_size(self, name: str) -> int | None:
        """A whole number under any of its names; None where the config does not have it, or has null."""
        names = ALIASES.get(name, (name,))
        given = {key: self.config[key] for key in names if self.config.get(key) is not None}
        if self.config.keys().isdisjoint(names):
            self.assumed.add(name)
            given = {key: value for key in names if (value := self.default(key)) is not None}
        if len(set(map(shown, given.values()))) > 1:
            pairs = " but ".join(f"{key} = {shown(value)}" for key, value in given.items())
            raise UserError(f"contradictory sizes in the config: {pairs}", "these are two names of the same size: keep one")
        value = next(iter(given.values()), None)
        if value is None or (type(value) is int and 0 <= value <= LARGEST_NUMBER):
            return value
        if type(value) is not int:
            problem = f"must be a whole number, not {shown(value)}"
        else:
            problem = f"must {'not be negative' if value < 0 else f'be at most {LARGEST_NUMBER}'}, got {shown(value)}"
        raise UserError(f"{next(iter(given))} {problem}", "correct it in the config")

    def size(self, name: str, limit: str = "") -> int:
        """A size that the model needs, checked if a `limit` is named.

        Where only the class has it, a key of the config that resembles it is a misspelling.
        """
        value, names = self.optional_size(name), ALIASES.get(name, (name,))
        similar = _misspelled(names, [*self.config]) if value is None or self.config.keys().isdisjoint(names) else ""
        if value is None or similar:
            raise UserError(
                f"the config of this {self.model_type} model has no {' or '.join(names)}"
                + (f"; it has {similar!r}" if similar else ""),
                f'add "{names[0]}": N' + (f", or rename {similar!r}" if similar else ""),
            )
        return check_size(name, value, limit) if limit else value


def _misspelled(names: Sequence[str], config: Sequence[str]) -> str:
    """A key of the config that is very similar to one of `names`, and not a known key itself."""
    unknown = [key for key in config if key not in known_keys() and key not in names]
    close = (closest(name, unknown, 1, cutoff=0.85) for name in names)
    return next((match[0] for match in close if match), "")
