"""The provider classes of Megatron-Bridge: `Llama3ModelProvider8B` alone names a model.

A file names the class, and the sizes are in Megatron-Bridge's code, so they ship as data with gemmscope (`bridge_classes.toml`),
under Megatron-core's names. What the file says itself overrides them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from gemmscope.toml import load_data

VOCABULARY = "tokenizer_vocabulary"


@cache
def provider_classes() -> dict[str, dict[str, object]]:
    """The settings of every known class. Classes that leave the sizes open have no `num_layers` and no pattern.

    >>> provider_classes()["Llama3ModelProvider8B"]["hidden_size"]
    4096
    """
    settings: dict[str, dict[str, object]] = {}
    for family in load_data("gemmscope.model", "bridge_classes.toml").values():
        defaults, classes = family.get("defaults", {}), family.get("classes", {})
        settings |= {name: dict(defaults) for name in family.get("bases", ())}
        settings |= {name: {**defaults, **_own_settings(classes, facts)} for name, facts in classes.items()}
    return settings


def _own_settings(classes: dict[str, Any], facts: dict[str, Any]) -> dict[str, object]:
    """What a class sets beyond its family's defaults; "none" is None, which TOML does not have."""
    inherited = _own_settings(classes, classes[facts["like"]]) if "like" in facts else {}
    own = {name: None if value == "none" else value for name, value in facts.items() if name != "like"}
    return {**inherited, **own}


def has_sizes(settings: Mapping[str, object]) -> bool:
    """Whether these are the settings of a whole model."""
    return "num_layers" in settings or "hybrid_layer_pattern" in settings
