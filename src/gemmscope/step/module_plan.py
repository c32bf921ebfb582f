"""What the step of a live module runs, as plain data that crosses the process boundary as JSON.

A module of the user's runs as it is. A Hugging Face model runs at full depth where that fits into memory, else at a few smaller
depths. Its layers may be of several kinds: the depths are chosen so that their steps, each times a weight, add up to a model with
exactly as many layers of every kind as the whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from gemmscope.errors import DoesNotFitError, UserError
from gemmscope.model import hf

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
INNER = ("text_config", "llm_config", "language_config")  # where a multimodal config has its language model
MOST_DEPTHS, MOST_CANDIDATES = 5, 14  # run for one answer; of which they are chosen, where there are more than two
LEAST_DEPTH = 2
EXACT = 1e-6
Kinds = Counter[Hashable]


@dataclass(frozen=True)
class ModulePlan:
    """One rank's step of a live module: the user's (`module`, FILE.py:FUNCTION) or a Hugging Face model (`config`).

    `depth` is the number of layers; 0: the module runs as it is.
    """

    module: str | None
    config: Mapping[str, Any] | None
    depth: int
    micro_batch_size: int
    sequence_length: int
    accumulation: int = 1
    recompute: str = "none"

    def with_depth(self, depth: int) -> ModulePlan:
        """Its first layers, so many of them."""
        return replace(self, depth=depth)

    def with_batch(self, micro_batch_size: int, sequence_length: int) -> ModulePlan:
        """The same module on another batch."""
        return replace(self, micro_batch_size=micro_batch_size, sequence_length=sequence_length)

    def weights(self, most: int) -> dict[int, float]:
        """Depths to run, the deepest of at most `most` layers, with the weight of each in the step of the whole model."""
        if self.config is None or most >= self.depth:
            return {self.depth: 1.0}
        config = self.config
        return extrapolation(lambda depth: kinds_of(config, depth), self.depth, most)


def depth_of(config: Mapping[str, Any]) -> int:
    """How many layers a config has; 0 if it has no setting for this that could be changed.

    >>> depth_of({"num_hidden_layers": 3}), depth_of({"encoder_layers": 3})
    (3, 0)
    """
    inner = next((config[key] for key in INNER if isinstance(config.get(key), Mapping)), None)
    if inner is not None:
        return depth_of(inner)
    if config.get("is_encoder_decoder"):  # two stacks: neither is the model
        return 0
    depth = next((config[key] for key in DEPTH_KEYS if key in config), 0)
    return depth if isinstance(depth, int) else 0


def truncated(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The same model with its first layers only.

    >>> truncated({"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "moe_layers": [0, 2], "x_pattern": "M*M"}, 2)
    {'num_hidden_layers': 2, 'layer_types': ['a', 'b'], 'moe_layers': [0], 'x_pattern': 'M*'}
    """
    for key in INNER:
        if isinstance(config.get(key), Mapping):
            return {**config, key: truncated(config[key], depth)}
    name = next(key for key in DEPTH_KEYS if key in config)
    whole = config[name]
    by_layer = {key: _first(key, value, whole, depth) for key, value in config.items()}
    return {**by_layer, name: depth}


def _first(key: str, value: Any, whole: int, depth: int) -> Any:
    """What a setting is for the first layers: lists and patterns by layer are cut, lists of layer numbers lose the others."""
    if isinstance(value, (list, str)) and len(value) == whole and (isinstance(value, list) or "pattern" in key):
        return value[:depth]
    if isinstance(value, Mapping):  # Kimi Linear's, which counts from one
        first = int(any(_numbers(name, numbers, whole) and max(numbers) == whole for name, numbers in value.items()))
        return {name: _below(name, inner, whole, depth + first) for name, inner in value.items()}
    return _below(key, value, whole - 1, depth)


def _below(key: str, value: Any, largest: int, depth: int) -> Any:
    return [item for item in value if item < depth] if _numbers(key, value, largest) else value


def _numbers(key: str, value: Any, largest: int) -> bool:
    """Whether a setting is a list of layer numbers."""
    named = "layer" in key or key.endswith(("_ids", "_indices"))
    return named and isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item <= largest for item in value)


def kinds_of(config: Mapping[str, Any], depth: int) -> Kinds | None:
    """How many layers of each kind the first layers of a model have; None if such a model cannot be built."""
    try:
        shorter = truncated(config, depth)
        model = hf.from_config(shorter, "config").model
    except UserError:
        return None
    if model is not None:
        return Counter(model.layers)
    inner = next((shorter[key] for key in INNER if isinstance(shorter.get(key), Mapping)), shorter)
    by_layer = [value for key, value in inner.items() if isinstance(value, list) and len(value) == depth and "layer" in key]
    return Counter(zip(*by_layer, strict=True)) if by_layer else Counter({"layer": depth})


def extrapolation(kinds: Callable[[int], Kinds | None], layers: int, most: int) -> dict[int, float]:
    """The depths to run and their weights: of those whose layers add up exactly, the ones that add least noise.

    >>> {depth: round(weight, 6) for depth, weight in extrapolation(lambda depth: Counter(layer=depth), 32, 4).items()}
    {4: 15.0, 2: -14.0}
    >>> period = lambda depth: Counter(full=depth // 4, linear=depth - depth // 4)
    >>> {depth: round(weight, 6) for depth, weight in extrapolation(period, 48, 8).items()}
    {8: 11.0, 4: -10.0}
    """
    whole = kinds(layers) or Counter({"layer": layers})
    known = {depth: counts for depth in range(min(LEAST_DEPTH, most), most + 1) if (counts := kinds(depth)) is not None}

    def row(counts: Kinds) -> Any:
        """A step is so many layers of each kind, and everything outside of the layers once."""
        return np.array([1.0, *(counts[kind] for kind in whole)])

    target = row(whole)
    rows = {depth: row(counts) for depth, counts in known.items() if counts.keys() <= whole.keys()}
    enough = len(rows) > 1 and _weights(list(rows), rows, target) is not None
    for size in range(2, MOST_DEPTHS + 1) if enough else ():
        candidates = list(rows) if size == 2 else _spread(list(rows), MOST_CANDIDATES)
        solved = [weights for chosen in combinations(candidates, size) if (weights := _weights(chosen, rows, target)) is not None]
        if solved:
            best = min(solved, key=lambda weights: sum(weight**2 for weight in weights.values()))
            return dict(sorted(best.items(), reverse=True))
    raise DoesNotFitError(
        f"the model does not fit in memory, and {most} of its {layers} layers are too few to tell its kinds of layers apart",
        "use a smaller batch, or a GPU with more memory",
    )


def _spread(depths: list[int], most: int) -> list[int]:
    """At most so many of the depths, evenly spread, the deepest included."""
    return sorted({depths[round(index * (len(depths) - 1) / (most - 1))] for index in range(most)})


def _weights(chosen: Sequence[int], rows: Mapping[int, Any], target: Any) -> dict[int, float] | None:
    """The weights with which these depths add up to the whole model; None if there are none."""
    matrix = np.array([rows[depth] for depth in chosen]).T
    weights, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    if np.abs(matrix @ weights - target).max() > EXACT * target.max():
        return None
    return {depth: float(weight) for depth, weight in zip(chosen, weights, strict=True)}
