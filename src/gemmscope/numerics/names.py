"""Where a linear is in a model, from its module's path: the layer, its name without the layer, and the op that `shapes` lists.

The names of frameworks are facts in `names.toml`. A path that is not known keeps its name, without an op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from zlib import crc32

from gemmscope.grouping import grouped
from gemmscope.roles import Role, name_of, pieces, role
from gemmscope.toml import load_data

EXPERTS = 4  # of each layer, that stand for all
FEED_FORWARD = ("MLP", "experts", "shared expert")  # blocks
CHUNK = "pipeline_part_"  # before the number of a part, where a rank has several parts of a pipeline


@dataclass(frozen=True)
class LinearName:
    """A linear's place in the model."""

    path: str
    """Without wrappers: model.layers.3.mlp.down_proj."""
    linear: str
    """Without layer and expert: mlp.down_proj."""
    layer: int | None = None
    expert: int | None = None
    role: str = ""

    @property
    def op(self) -> str:
        """What `shapes` calls it; empty if that is not known."""
        return name_of(self.role)

    @property
    def facts(self) -> Role | None:
        """The facts of its role."""
        return role(self.role) if self.role else None

    @property
    def is_recorded(self) -> bool:
        """Whether a recipe may quantize it: not if its values decide something, such as the expert."""
        return self.facts is None or self.facts.stays_high != "exact"


@cache
def _facts() -> dict[str, Any]:
    return load_data("gemmscope.numerics", "names.toml")


@cache
def _endings() -> dict[tuple[str, ...], str]:
    return {tuple(ending.split(".")): op for op, endings in _facts()["ops"].items() for ending in endings}


def unwrapped(path: str) -> str:
    """A path without what wrappers add to it.

    >>> unwrapped("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj")
    'model.layers.0.mlp.up_proj'
    """
    parts = path.split(".")
    if parts[0].removeprefix(CHUNK).isdigit() and parts[0].startswith(CHUNK):
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _facts()["wrappers"])


def name_linears(sizes: Mapping[str, tuple[int, int]]) -> dict[str, LinearName]:
    """The linears of one model: path → (inputs, outputs) in, path → name out. Paths may have wrappers.

    >>> names = name_linears({"layers.7.mlp.gate_proj": (64, 96), "layers.7.mlp.down_proj": (48, 64), "lm_head": (64, 99)})
    >>> [(name.layer, name.linear, name.op) for name in names.values()]
    [(7, 'mlp.gate_proj', 'MLP Gate+Up'), (7, 'mlp.down_proj', 'MLP Down'), (None, 'lm_head', 'LM Head')]
    """
    split = {path: _split(path) for path in sizes}
    stacks = Counter(stack for stack, layer, _, _ in split.values() if layer is not None)
    trunk = max(stacks, key=lambda stack: (stacks[stack], -len(stack)), default="")
    names = {}
    for path, (stack, layer, expert, rest) in split.items():
        inside = layer is not None
        linear = rest if not inside or stack == trunk else f"{stack}.{rest}"
        key = _role(rest, routed=expert is not None) if stack == trunk or not inside else ""
        names[path] = LinearName(unwrapped(path), linear, layer, expert, key)
    return _latent_queries(_with_gates(names, sizes))


def _split(path: str) -> tuple[str, int | None, int | None, str]:
    """The stack of layers, the layer, the expert, and the rest of the path.

    >>> _split("model.layers.3.mlp.experts.17.up_proj"), _split("lm_head")
    (('model.layers', 3, 17, 'mlp.experts.up_proj'), ('', None, None, 'lm_head'))
    >>> _split("layers.3.moe.experts.17.2")
    ('layers', 3, 17, 'moe.experts.2')
    """
    facts = _facts()
    parts = unwrapped(path).split(".")
    stack, layer, expert, rest = "", None, None, list[str]()
    for index, part in enumerate(parts):
        number = int(part) if part.isascii() and part.isdigit() and len(part) < 8 else None
        of_expert = parts[max(index - 1, 0)] in facts["experts"] or (
            index + 1 == len(parts) and set(parts) & set(facts["experts"])
        )
        if number is not None and expert is None and of_expert:
            expert = number
        elif (
            number is not None and layer is None and index + 1 < len(parts) and not set(parts[:index]) & set(facts["prediction"])
        ):
            stack, layer, rest = ".".join(parts[:index]), number, []
        else:
            rest.append(part)
    return stack, layer, expert, ".".join(rest)


def _role(rest: str, *, routed: bool) -> str:
    """The role of a path without layer and expert, by its longest known ending."""
    facts, parts = _facts(), tuple(rest.split("."))
    key = next((_endings()[parts[start:]] for start in range(len(parts)) if parts[start:] in _endings()), "")
    if set(parts) & set(facts["shared"]):
        return str(facts["of_shared_expert"].get(key, key))
    if routed or set(parts) & set(facts["routed"]):
        return str(facts["of_experts"].get(key, key))
    return key


def _with_gates(names: Mapping[str, LinearName], sizes: Mapping[str, tuple[int, int]]) -> dict[str, LinearName]:
    """`Up` instead of `Gate+Up` where an MLP has no gate: its first linears add up to the input width of its last one."""
    wide: Counter[tuple[int | None, int | None, str]] = Counter()
    narrow: dict[tuple[int | None, int | None, str], int] = {}
    blocks = {
        path: (name.layer, name.expert, name.facts.block)
        for path, name in names.items()
        if name.facts is not None and name.facts.block in FEED_FORWARD
    }
    for path, block in blocks.items():
        if role(names[path].role).ends_block:
            narrow[block] = max(narrow.get(block, 0), sizes[path][0])
        else:
            wide[block] += sizes[path][1]
    renamed = dict(names)
    for path, block in blocks.items():
        gated = "gate" in names[path].linear.rpartition(".")[2]
        if not gated and wide[block] == narrow.get(block):
            renamed[path] = replace(names[path], role=pieces(names[path].role)[-1])
    return renamed


def _latent_queries(names: Mapping[str, LinearName]) -> dict[str, LinearName]:
    """Beside latent keys and values, the queries are a linear of their own, as in DeepSeek-V2-Lite."""
    latent = {name.layer for name in names.values() if name.role == _facts()["latent"]}
    return {
        path: replace(name, role=pieces(name.role)[0])
        if name.layer in latent and name.facts is not None and name.facts.kit_part == "qkv"
        else name
        for path, name in names.items()
    }


def number_of(seed: int, *parts: str | int) -> int:
    """A random number of its own for each linear, step and purpose: nothing depends on what else is recorded."""
    text = "/".join(str(part) for part in (seed, *parts)).encode("utf-8", "surrogatepass")
    return crc32(text) << 16 | crc32(text[::-1]) >> 16


def few_of(numbers: Iterable[int], seed: int, *parts: str | int) -> tuple[int, ...]:
    """A few experts that stand for all of them: the same ones for all linears of a layer.

    >>> few_of(range(8), 0, 3, "mlp.experts"), few_of([5], 0)
    ((0, 1, 4, 5), (5,))
    """
    drawn = sorted(numbers, key=lambda number: number_of(seed, *parts, number))[:EXPERTS]
    return tuple(sorted(drawn))


def few_experts(names: Mapping[str, LinearName], seed: int) -> dict[str, int]:
    """The linears to measure: path → the number of experts that it stands for, 1 where it is not an expert.

    >>> paths = [f"layers.0.experts.{number}.up_proj" for number in range(8)] + ["layers.0.o_proj"]
    >>> names = name_linears(dict.fromkeys(paths, (64, 64)))
    >>> sorted(few_experts(names, seed=0).values())
    [1, 8, 8, 8, 8]
    """
    numbers = grouped((_group(name), name.expert) for name in names.values() if name.expert is not None)
    groups = {group: set(own) for group, own in numbers.items()}
    chosen = {group: few_of(own, seed, group[0] or 0, group[1]) for group, own in groups.items()}
    return {
        path: 1 if name.expert is None else len(groups[_group(name)])
        for path, name in names.items()
        if name.expert is None or name.expert in chosen[_group(name)]
    }


def _group(name: LinearName) -> tuple[int | None, str]:
    return name.layer, name.linear.rpartition(".")[0]
