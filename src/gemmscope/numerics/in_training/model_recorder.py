"""Records the linears of a model, step by step: which ones, how many bytes each may have, what is written in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gemmscope.numerics.in_training.capture import (
    GROUPED,
    NORM_MLP,
    Guard,
    LinearHooks,
    LinearPlace,
    StepCapture,
    kind_of,
    module_weights,
)
from gemmscope.numerics.in_training.replay import ACTIVATIONS, GATED, ExpertWeights, ReplayedRegion, is_compiled, is_wrapper
from gemmscope.numerics.names import CHUNK, LinearName, name_linears, unwrapped
from gemmscope.numerics.recording import LinearFacts, RecordingFacts, StepFacts, tensor_key, write_recording
from gemmscope.numerics.sample import EXPERTS, few_experts, random_for
from gemmscope.units import counted

TENSORS, ENTRY_BYTES = 31, 100  # of a sampled step of a linear, in the file's header; an entry has its name, too
FACTS_BYTES = 5_500
MAXIMA_BYTES = 260  # of a step without samples
SMALLEST_SHARE = 16_000  # bytes for the samples of a linear; with fewer, they are not useful


@dataclass(frozen=True)
class RecordingPlan:
    """Where the linears are: plain modules, and regions that are replayed; and how many bytes each may have."""

    linears: list[tuple[nn.Module, list[LinearPlace]]]
    regions: list[tuple[nn.Module, list[tuple[nn.Module, list[LinearPlace]]], list[ExpertWeights]]]
    names: Mapping[str, LinearName]
    sizes: Mapping[str, tuple[int, int]]
    kinds: Mapping[str, str]
    experts: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        return list(self.names)


class ModelRecorder:
    """Hooks on a model in recorded steps, and what they recorded."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], settings: Mapping[str, Any], guarded: Guard) -> None:
        if isinstance(model, (list, tuple)):  # as Megatron keeps the parts of a pipeline stage
            model = model[0] if len(model) == 1 else nn.ModuleDict({f"{CHUNK}{number}": one for number, one in enumerate(model)})
        self._model_name = _class_name(model)
        self._settings, self._guarded = settings, guarded
        self._plan = make_plan(model, settings["seed"], settings)
        self._share = share_of([name.path for name in self._plan.names.values()], settings)
        self._capture: StepCapture | None = None
        self._hooks: list[LinearHooks | ReplayedRegion] = []
        self._places: dict[str, LinearPlace] = {}
        self._dtypes: dict[str, str] = {}
        self._facts: dict[str, list[StepFacts]] = defaultdict(list)
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._problems: dict[str, str] = {}

    def begin_step(self, step: int, number: int) -> None:
        """Hook the linears. Samples are drawn in the first recorded step, in case there are no others, and in the last ones."""
        sampled = number == 0 or number >= self._settings["steps"] - self._settings["samples"]
        budgets = dict.fromkeys(self._plan.keys, self._share) if sampled else None
        capture = StepCapture(step, budgets, self._settings["seed"], self._guarded)
        capture.histories = {key: tuple(steps) for key, steps in self._facts.items()}
        self._capture = capture
        self._hooks = [LinearHooks(module, places, capture) for module, places in self._plan.linears]
        self._hooks += [ReplayedRegion(module, linears, experts, capture) for module, linears, experts in self._plan.regions]

    def end_step(self) -> None:
        """Remove the hooks, and keep what was recorded."""
        self.remove()
        if (capture := self._capture) is None:
            return
        self._capture = None
        kept: dict[str, Tensor] = {}
        for key, (facts, tensors) in capture.finish().items():
            self._facts[key].append(facts)
            self._places[key] = capture.linears[key].place
            self._dtypes[key] = str(capture.linears[key].dtype).removeprefix("torch.")
            kept |= {tensor_key(self._plan.names[key].path, facts.step, name): tensor for name, tensor in tensors.items()}
        self._problems |= capture.problems
        if kept:
            self._kept[capture.step] = kept
            for step in sorted(self._kept)[: -self._settings["samples"]]:
                del self._kept[step]

    def remove(self) -> None:
        """Remove the hooks."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def write(self, path: Path) -> str:
        """Write the file. Returns an empty string, or why there is nothing to write."""
        linears = tuple(self._linear_facts(key) for key in self._plan.keys)
        if not any(linear.steps for linear in linears):
            return next(iter(self._problems.values()), "") or _nothing(self._plan)
        steps = sorted({step.step for linear in linears for step in linear.steps})
        versions = {"torch": torch.__version__, **self._settings["packages"]}
        facts = RecordingFacts(
            source="recording", model=self._model_name, steps=tuple(steps), seed=self._settings["seed"],
            rank=self._settings["rank"], packages=versions, notes=self._plan.notes, linears=linears,
        )  # fmt: skip
        write_recording(path, facts, {key: tensor for kept in self._kept.values() for key, tensor in kept.items()})
        return ""

    def _linear_facts(self, key: str) -> LinearFacts:
        name, place = self._plan.names[key], self._places.get(key)
        steps = [facts if facts.step in self._kept else _maxima_only(facts) for facts in self._facts.get(key, ())]
        failure = self._problems.get(key, "" if steps else "it did not run in a recorded step, or got no gradient")
        sizes = (place.inputs, place.outputs) if place is not None else self._plan.sizes[key]
        return LinearFacts(
            name=name.path, linear=name.linear, layer=name.layer, op=name.op, kind=self._plan.kinds[key],
            inputs=sizes[0], outputs=sizes[1], dtype=self._dtypes.get(key, ""), expert=name.expert,
            experts=self._plan.experts.get(key, 1), steps=tuple(steps), failure=failure,
        )  # fmt: skip


def _maxima_only(facts: StepFacts) -> StepFacts:
    return facts.model_copy(update={"passes": {}})


def _class_name(model: nn.Module) -> str:
    while is_wrapper(model) or type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        model = model._orig_mod if is_wrapper(model) else model.module
    return type(model).__name__


def _nothing(plan: RecordingPlan) -> str:
    if not plan.keys:
        return "the model has no known linears"
    compiled = "; if it is compiled, pass the module that torch.compile returned; CUDA graphs cannot be recorded"
    return f"none of the model's {len(plan.keys)} linears ran and got a gradient{'' if plan.regions else compiled}"


def share_of(names: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Bytes for the samples of one linear in one step: all have the same. What the file's header needs is taken off first.

    >>> share_of([f"model.layers.{number}.mlp.down_proj" for number in range(224)], {"megabytes": 64, "steps": 8, "samples": 1})
    274119
    """
    header = sum(TENSORS * (ENTRY_BYTES + len(name)) + FACTS_BYTES for name in names) * settings["samples"]
    maxima = len(names) * settings["steps"] * MAXIMA_BYTES
    return int((settings["megabytes"] * 1e6 - header - maxima) / max(len(names), 1) / settings["samples"])


def make_plan(model: nn.Module, seed: int, settings: Mapping[str, Any]) -> RecordingPlan:
    """Find the linears of a model. Of many experts some are chosen, of too many linears those of some layers."""
    modules = list(_modules_with_linears(model))
    sizes: dict[str, tuple[int, int]] = {}
    kinds: dict[str, str] = {}
    experts: dict[str, int] = {}
    for path, module, _ in modules:
        for place in _all_places(path, module, seed):
            sizes[place.key], kinds[place.key] = (place.inputs, place.outputs), type(module).__name__
            experts[place.key] = expert_count(module) or _parameter_experts(module, place.key)
    names = {key: name for key, name in _named(sizes).items() if name.is_recorded}
    names = {key: _global_layer(name, key, model) for key, name in names.items()}
    for key, count in few_experts(names, seed).items():
        experts[key] = max(experts[key], count)
    names = _unique({key: names[key] for key in few_experts(names, seed)})
    names, notes = _fitting(names, settings)
    notes += tuple(
        f"{unwrapped(path)}: {type(module).__name__} is not recorded"
        for path, module, _ in modules
        if kind_of(module) and not _all_places(path, module, seed)
    )
    if count := sum(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        notes += (f"nn.MultiheadAttention is not recorded ({counted(count, 'module')}), because it does not call its linears",)
    plain: list[tuple[nn.Module, list[LinearPlace]]] = []
    inside: dict[int, tuple[nn.Module, list[tuple[nn.Module, list[LinearPlace]]], list[ExpertWeights]]] = {}
    for path, module, region in modules:
        places = [place for place in _all_places(path, module, seed) if place.key in names]
        stacked = [] if kind_of(module) else _stacked(path, module, names)
        if region is None and not stacked and kind_of(module) != NORM_MLP:
            plain += [(module, places)] if places else []
        elif places or stacked:
            root = region if region is not None else module
            _, linears, weights = inside.setdefault(id(root), (root, [], []))
            if kind_of(module):
                linears.append((module, places))
            weights.extend(stacked)
    return RecordingPlan(plain, list(inside.values()), names, sizes, kinds, experts, notes)


def _named(sizes: Mapping[str, tuple[int, int]]) -> dict[str, LinearName]:
    """Name the linears of each part of a pipeline stage separately, because their layers have the same numbers."""
    parts: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for key, size in sizes.items():
        parts[key.partition(".")[0] if key.startswith(CHUNK) else ""][key] = size
    return {key: name for part in parts.values() for key, name in name_linears(part).items()}


def _global_layer(name: LinearName, key: str, model: nn.Module) -> LinearName:
    """The name with its layer's number in the whole model. Pipeline ranks count from 0; Megatron's layers have their number."""
    module, numbers = model, list[int]()
    for part in key.split("."):
        module = getattr(module, part, None)
        if isinstance(number := getattr(module, "layer_number", None), int):
            numbers.append(number)
    return replace(name, layer=numbers[0] - 1) if name.layer is not None and numbers else name


def linear_sizes_of(model: nn.Module, seed: int) -> dict[str, tuple[int, int]]:
    """Path → inputs and outputs of every linear; of experts that share a module, of some."""
    return {
        place.key: (place.inputs, place.outputs)
        for path, module, _ in _modules_with_linears(model)
        for place in _all_places(path, module, seed)
    }


def _modules_with_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Path, module and the outermost compiled module around it, of every module that has linears."""
    compiled: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        while compiled and not (path == compiled[-1][0] or path.startswith(f"{compiled[-1][0]}.") or not compiled[-1][0]):
            compiled.pop()
        if is_compiled(module) and not compiled:
            compiled.append((path, module))
        if kind_of(module) or _three_dimensional(module):
            yield path, module, compiled[-1][1] if compiled else None


def _three_dimensional(module: nn.Module) -> list[str]:
    """Names of the parameters [experts, ., .] of a module, not those of a convolution, position embeddings or learned tokens."""
    if type(module).__module__.startswith("torch.nn."):
        return []
    parameters = [(name, value) for name, value in module._parameters.items() if "embed" not in name and "token" not in name]
    return [name for name, value in parameters if value is not None and value.dim() == 3 and min(value.shape[1:]) > 1]


def _all_places(path: str, module: nn.Module, seed: int) -> list[LinearPlace]:
    if count := expert_count(module):
        return places_of(path, module, _chosen(count, seed, path))
    if kind_of(module):
        return norm_mlp_places(path, module) if kind_of(module) == NORM_MLP else places_of(path, module)
    places = []
    for name in _three_dimensional(module):
        count, outputs, inputs = getattr(module, name).shape
        if getattr(module, "is_transposed", False):  # as Hugging Face marks them
            outputs, inputs = inputs, outputs
        numbers = _chosen(count, seed, path)
        places += [LinearPlace(f"{path}.{name}.{number}", inputs, outputs, number) for number in numbers]
    return places


def _parameter_experts(module: nn.Module, key: str) -> int:
    name = key.split(".")[-2] if "." in key else ""
    value = module._parameters.get(name)
    return int(value.shape[0]) if value is not None and value.dim() == 3 else 1


def _stacked(path: str, module: nn.Module, names: Mapping[str, LinearName]) -> list[ExpertWeights]:
    weights = []
    for name in _three_dimensional(module):
        count = getattr(module, name).shape[0]
        numbers = tuple(number for number in range(count) if f"{path}.{name}.{number}" in names)
        weights += [ExpertWeights(f"{path}.{name}", module, name, numbers)] if numbers else []
    return weights


def _chosen(count: int, seed: int, path: str) -> tuple[int, ...]:
    """The experts to record: the same ones for all linears of a layer."""
    random = random_for(seed, unwrapped(path).rpartition(".")[0])
    return tuple(sorted(int(number) for number in random.choice(count, min(EXPERTS, count), replace=False)))


def _unique(names: dict[str, LinearName]) -> dict[str, LinearName]:
    """Make names unique: paths that differ only in their wrappers keep the wrappers."""
    seen: set[str] = set()
    unique = {}
    for key, name in names.items():
        unique[key] = replace(name, path=key) if name.path in seen else name
        seen.add(unique[key].path)
    return unique


def _fitting(names: dict[str, LinearName], settings: Mapping[str, Any]) -> tuple[dict[str, LinearName], tuple[str, ...]]:
    """All linears, or those of layers at equal distances, so that each has a large enough share of the file."""
    layers = sorted({name.layer for name in names.values() if name.layer is not None})
    few, count = names, len(layers)
    while few and share_of([name.path for name in few.values()], settings) < SMALLEST_SHARE:
        count -= 1
        if count > 0:
            chosen = {layers[int(index)] for index in np.linspace(0, len(layers) - 1, count).round()}
            few = {key: name for key, name in names.items() if name.layer is None or name.layer in chosen}
        else:  # too many outside of layers
            few = dict(list(few.items())[:-1])
    if len(few) == len(names):
        return names, ()
    return few, (f"{len(few)} of {len(names)} linears are recorded: the file is too small for more",)


def places_of(path: str, module: nn.Module, experts: tuple[int, ...] | None = None) -> list[LinearPlace]:
    """The linears of one module: one, or those of some experts."""
    kind, tp = kind_of(module), _tensor_parallel(module)
    if kind == GROUPED:
        if not hasattr(module, "weight0"):  # all weights as one
            return []
        numbers = experts if experts is not None else range(int(module.num_gemms))
        sizes = _size(module.weight0)
        return [LinearPlace(f"{path}.{number}", sizes[1], sizes[0], number, tp) for number in numbers]
    if not kind or kind == NORM_MLP:
        return []
    if not (weights := module_weights(module)):  # given in the call, as with tied embeddings in Megatron
        return []
    if weights[0].dim() == 2:
        outputs, inputs = sum(_size(weight)[0] for weight in weights), _size(weights[0])[1]
    else:  # a shard of FSDP1, which is flat
        outputs, inputs = int(module.out_features), int(module.in_features)
    return [LinearPlace(path, *((outputs, inputs) if kind == "Conv1D" else (inputs, outputs)), None, tp)]


def expert_count(module: nn.Module) -> int:
    """How many experts a grouped linear has; 0 if it is not one."""
    return int(module.num_gemms) if kind_of(module) == GROUPED else 0


def _size(weight: Any) -> tuple[int, int]:
    """Rows and columns on this rank. FSDP keeps shards of whole weights: the size is that of the whole."""
    placements = getattr(weight, "placements", ())
    mesh = getattr(weight, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    shape = list(weight.shape)
    for dimension, placement in enumerate(placements):
        if len(names) > dimension and "tp" in str(names[dimension]) and placement.is_shard():
            shape[placement.dim] //= mesh.size(dimension)  # type: ignore[union-attr]
    return shape[0], shape[1]


def _tensor_parallel(module: nn.Module) -> tuple[int, int]:
    group = getattr(module, "tp_group", None)
    try:
        return (group.rank(), group.size()) if group is not None else (0, 1)
    except Exception:  # a group that is not initialized
        return (0, 1)


def norm_mlp_places(path: str, module: Any) -> list[LinearPlace]:
    """The two linears of a LayerNormMLP; none if `NormMlp` does not support it."""
    if module.activation not in {*ACTIVATIONS, *GATED} or getattr(module, "tp_size", 1) > 1:
        return []
    names = (("fc1", module.fc1_weight.shape), ("fc2", module.fc2_weight.shape))
    return [LinearPlace(f"{path}.{name}", shape[1], shape[0]) for name, shape in names]
