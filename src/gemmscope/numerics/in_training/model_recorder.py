"""Records the linears of a model, step by step: which ones, how many bytes each may have, what is written in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gemmscope.errors import UserError
from gemmscope.grouping import grouped
from gemmscope.numerics.in_training.capture import LinearPlace, StepCapture
from gemmscope.numerics.in_training.experts import ExpertHooks
from gemmscope.numerics.in_training.linears import GROUPED, NORM_MLP, LinearHooks, kind_of, module_weights
from gemmscope.numerics.in_training.norm_mlp import ACTIVATIONS, GATED
from gemmscope.numerics.names import CHUNK, LinearName, name_linears, unwrapped
from gemmscope.numerics.recording import LinearFacts, RecordingFacts, tensor_key, write_recording
from gemmscope.numerics.sample import EXPERTS, few_experts, random_for
from gemmscope.say import say
from gemmscope.training import Guard
from gemmscope.units import counted

TENSORS, ENTRY_BYTES = 31, 100  # of a sampled step of a linear, in the file's header; an entry has its name, too
FACTS_BYTES = 5_500
MAXIMA_BYTES = 260  # of a step without samples
COMPILED = "compiled modules do not show their linears: run the recorded steps with TORCH_COMPILE_DISABLE=1"
SMALLEST_SHARE = 16_000  # bytes for the samples of a linear; with fewer, they are not useful


Plan = tuple[list[tuple[nn.Module, list[LinearPlace]]], dict[str, LinearFacts], tuple[str, ...]]
"""Modules with their linears; what is known of each linear before it runs, by the key of its place; what is not recorded."""


class ModelRecorder:
    """Hooks on a model in recorded steps, and what they recorded."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], settings: Mapping[str, Any], guard: Guard) -> None:
        if isinstance(model, (list, tuple)):  # as Megatron keeps the parts of a pipeline stage
            model = model[0] if len(model) == 1 else nn.ModuleDict({f"{CHUNK}{number}": one for number, one in enumerate(model)})
        self._model_name = _class_name(model)
        self._settings, self._guard = settings, guard
        self._places, self._linears, self._notes = make_plan(model, settings)
        if not self._linears:
            raise UserError("; ".join(self._notes) or "the model has no known linears")
        """With the steps that were recorded."""
        self._share = share_of([facts.name for facts in self._linears.values()], settings)
        self._capture: StepCapture | None = None
        self._hooks: list[LinearHooks | ExpertHooks] = []
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._problems: dict[str, str] = {}

    def begin_step(self, step: int, number: int) -> None:
        """Hook the linears. Samples are drawn in the first recorded step, in case there are no others, and in the last ones."""
        sampled = number == 0 or number >= self._settings["steps"] - self._settings["samples"]
        histories = {key: linear.steps for key, linear in self._linears.items()}
        capture = StepCapture(step, self._share if sampled else None, self._settings["seed"], self._guard, histories)
        self._capture = capture
        for module, places in self._places:  # one by one, so that an error leaves none behind
            self._hooks.append((ExpertHooks if places[0].parameter else LinearHooks)(module, places, capture))

    def end_step(self) -> None:
        """Remove the hooks, and keep what was recorded."""
        self.remove()
        if (capture := self._capture) is None:
            return
        self._capture = None
        kept: dict[str, Tensor] = {}
        for key, (facts, tensors) in capture.finish().items():
            place, dtype, linear = capture.linears[key].place, capture.linears[key].dtype, self._linears[key]
            seen = {"inputs": place.inputs, "outputs": place.outputs, "dtype": str(dtype).removeprefix("torch.")}
            self._linears[key] = linear.model_copy(update={**seen, "steps": (*linear.steps, facts)})
            kept |= {tensor_key(linear.name, facts.step, name): tensor for name, tensor in tensors.items()}
        self._problems |= capture.problems
        if kept:
            self._kept[capture.step] = kept
            for step in sorted(self._kept)[: -self._settings["samples"]]:
                del self._kept[step]

    def remove(self) -> None:
        """Remove the hooks."""
        if self._capture is not None:
            self._capture.end()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def write(self, path: Path) -> str:
        """Write the file. Returns an empty string, or why there is nothing to write."""
        linears = tuple(self._described(key, linear) for key, linear in self._linears.items())
        if not any(linear.steps for linear in linears):
            nothing = f"none of the model's {len(linears)} linears ran and got a gradient; {COMPILED}"
            return next(iter(self._problems.values()), f"{nothing}; CUDA graphs cannot be recorded")
        facts = RecordingFacts(
            source="recording", model=self._model_name, seed=self._settings["seed"], rank=self._settings["rank"],
            steps=tuple(sorted({step.step for linear in linears for step in linear.steps})), notes=self._notes, linears=linears,
            packages={"torch": torch.__version__, **self._settings["packages"]},
        )  # fmt: skip
        write_recording(path, facts, {key: tensor for kept in self._kept.values() for key, tensor in kept.items()})
        return ""

    def _described(self, key: str, linear: LinearFacts) -> LinearFacts:
        """The facts for the file, which has only the maxima of steps without samples."""
        steps = tuple(step if step.step in self._kept else step.model_copy(update={"passes": {}}) for step in linear.steps)
        failure = self._problems.get(key, "" if steps else "it did not run in a recorded step, or got no gradient")
        return linear.model_copy(update={"steps": steps, "failure": failure})


def share_of(names: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Bytes for the samples of one linear in one step: all have the same. What the file's header needs is taken off first.

    >>> share_of([f"model.layers.{number}.mlp.down_proj" for number in range(224)], {"megabytes": 64, "steps": 8, "samples": 1})
    274119
    """
    header = sum(TENSORS * (ENTRY_BYTES + len(name)) + FACTS_BYTES for name in names) * settings["samples"]
    maxima = len(names) * settings["steps"] * MAXIMA_BYTES
    return int((settings["megabytes"] * 1e6 - header - maxima) / max(len(names), 1) / settings["samples"])


def make_plan(model: nn.Module, settings: Mapping[str, Any]) -> Plan:
    """Find the linears of a model. Of many experts some are chosen, of too many linears those of some layers."""
    everything = list(find_modules(model, settings["seed"]))
    modules = [(path, module, own) for path, module, compiled, own in everything if not compiled]
    hidden = sum(len(own) for *_, compiled, own in everything if compiled)
    places = {place.key: place for *_, own in modules for place in own}
    named = {key: _global_layer(name, key, model) for key, name in _named(places).items() if name.is_recorded}
    counts = few_experts(named, settings["seed"])
    names, notes = _fitting(_unique({key: named[key] for key in counts}), settings)
    notes += tuple(
        f"{unwrapped(path)}: {type(module).__name__} is not recorded"
        for path, module, own in modules
        if kind_of(module) and not own
    )
    if hidden:
        notes += (f"{counted(hidden, 'linear')} inside compiled modules: not recorded; {COMPILED}",)
        say(f"gemmscope: {notes[-1]}")
    if count := sum(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        notes += (f"nn.MultiheadAttention is not recorded ({counted(count, 'module')}), because it does not call its linears",)
    own = [(module, [place for place in own if place.key in names]) for _, module, own in modules]
    facts = {
        key: LinearFacts(
            name=name.path, linear=name.linear, layer=name.layer, op=name.op, kind=places[key].kind, inputs=places[key].inputs,
            outputs=places[key].outputs, expert=name.expert, experts=max(places[key].experts, counts[key]),
        )
        for key, name in names.items()
    }  # fmt: skip
    return [(module, places) for module, places in own if places], facts, notes


def _named(places: Mapping[str, LinearPlace]) -> dict[str, LinearName]:
    """Name the linears of each part of a pipeline stage separately, because their layers have the same numbers."""
    chunks = {key: key.partition(".")[0] if key.startswith(CHUNK) else "" for key in places}
    parts = grouped((chunks[key], (key, (place.inputs, place.outputs))) for key, place in places.items())
    return {key: name for part in parts.values() for key, name in name_linears(dict(part)).items()}


def _global_layer(name: LinearName, key: str, model: nn.Module) -> LinearName:
    """The name with its layer's number in the whole model. Pipeline ranks count from 0; Megatron's layers have their number."""
    module, numbers = model, list[int]()
    for part in key.split("."):
        module = getattr(module, part, None)
        if isinstance(number := getattr(module, "layer_number", None), int):
            numbers.append(number)
    return replace(name, layer=numbers[0] - 1) if name.layer is not None and numbers else name


def find_modules(model: nn.Module, seed: int) -> Iterator[tuple[str, nn.Module, bool, list[LinearPlace]]]:
    """Every module that has linears: its path, whether it is inside a compiled module, and its linears; of experts some."""
    compiled: set[int] = set()
    for name, module in model.named_modules():
        path = _encodable(name)
        if is_compiled(module):
            compiled |= {id(one) for one in module.modules()}
        if kind_of(module) or _three_dimensional(module):
            yield path, module, id(module) in compiled, places_of(path, module, seed)


def _encodable(name: str) -> str:
    """A name that a file can hold: halves of characters are written out."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: by a wrapper, `module.compile()`, or `module.forward = torch.compile(module.forward)`."""
    calls = (module.__dict__.get("forward"), getattr(module, "_compiled_call_impl", None))
    compiled = hasattr(module, "_orig_mod") or any(hasattr(call, "_torchdynamo_orig_callable") for call in calls)
    return compiled and not torch._dynamo.config.disable


def _class_name(module: nn.Module) -> str:
    """The class of the module inside the wrappers of `torch.compile` and of data parallelism."""
    while hasattr(module, "_orig_mod") or type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        module = getattr(module, "_orig_mod", None) or module.module
    return _encodable(type(module).__name__)


def _three_dimensional(module: nn.Module) -> list[str]:
    """Names of the parameters [experts, ., .] of a module, not those of a convolution, position embeddings or learned tokens."""
    if type(module).__module__.startswith("torch.nn."):
        return []
    parameters = [(name, value) for name, value in module._parameters.items() if "embed" not in name and "token" not in name]
    return [name for name, value in parameters if value is not None and value.dim() == 3 and min(value.shape[1:]) > 1]


def places_of(path: str, module: Any, seed: int) -> list[LinearPlace]:
    """The linears of one module: one, or those of some experts; none if it is not supported."""
    kind, name = kind_of(module), _encodable(type(module).__name__)
    if not kind:
        return _parameter_places(path, module, seed)
    if kind == NORM_MLP:
        if module.activation not in {*ACTIVATIONS, *GATED} or getattr(module, "tp_size", 1) > 1:
            return []
        shapes = {"fc1": module.fc1_weight.shape, "fc2": module.fc2_weight.shape}
        return [LinearPlace(f"{path}.{part}", shape[1], shape[0], kind=name) for part, shape in shapes.items()]
    tp = _tensor_parallel(module)
    if kind == GROUPED:
        if not hasattr(module, "weight0"):  # all weights as one
            return []
        count, (outputs, inputs) = int(module.num_gemms), _size(module.weight0)
        numbers = _chosen(count, seed, path)
        return [LinearPlace(f"{path}.{number}", inputs, outputs, number, tp, name, count) for number in numbers]
    if not (weights := module_weights(module)):  # given in the call, as with tied embeddings in Megatron
        return []
    if weights[0].dim() == 2:
        outputs, inputs = sum(_size(weight)[0] for weight in weights), _size(weights[0])[1]
    else:  # a shard of FSDP1, which is flat
        outputs, inputs = int(module.out_features), int(module.in_features)
    return [LinearPlace(path, *((outputs, inputs) if kind == "Conv1D" else (inputs, outputs)), None, tp, name)]


def _parameter_places(path: str, module: nn.Module, seed: int) -> list[LinearPlace]:
    """Some experts of every parameter that holds the weights of all."""
    places, kind = [], _encodable(type(module).__name__)
    for name in _three_dimensional(module):
        count, outputs, inputs = getattr(module, name).shape
        if getattr(module, "is_transposed", False):  # as Hugging Face marks them
            outputs, inputs = inputs, outputs
        places += [
            LinearPlace(_encodable(f"{path}.{name}.{number}"), inputs, outputs, number, (0, 1), kind, count, name)
            for number in _chosen(count, seed, path)
        ]
    return places


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
    except (RuntimeError, ValueError):  # a group that is not initialized
        return (0, 1)
