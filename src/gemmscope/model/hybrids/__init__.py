"""Layers of families that are more than attention and MLP. `layers_by` in families.toml names the function."""

from collections.abc import Callable

from gemmscope.model.families import FamilyConfig
from gemmscope.model.spec import LayerSpec

LayerBuilder = Callable[[FamilyConfig, int, int], list[LayerSpec]]
"""From a config, its hidden size and its number of layers."""

HYBRIDS: dict[str, LayerBuilder] = {}
