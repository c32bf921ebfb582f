"""Records the linears of a model, step by step: which ones, which of them are measured in a step, what is written in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemmscope.errors import UserError, in_a_line
from gemmscope.grouping import grouped
from gemmscope.numerics.in_training.capture import LinearPlace, StepCapture
from gemmscope.numerics.in_training.experts import ExpertHooks
from gemmscope.numerics.in_training.linears import GROUPED, NORM_MLP, ROUTER, LinearHooks, kind_of, module_weights, top_k_of
from gemmscope.numerics.in_training.norm_mlp import ACTIVATIONS, GATED
from gemmscope.numerics.in_training.probe import measured_divergences
from gemmscope.numerics.names import CHUNK, LinearName, few_experts, few_of, name_linears, unwrapped
from gemmscope.numerics.recording import LinearFacts, ProbeFacts, RecordingFacts, earlier_maxima, write_recording
from gemmscope.say import say
from gemmscope.training import Guard
from gemmscope.units import counted

NOT_RUN = "it did not run in a recorded step, or got no gradient"
COMPILED = "compiled modules do not show their linears: run the recorded steps with TORCH_COMPILE_DISABLE=1"
FEWEST = 8  # linears that are measured in a step, if the model has as many


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
        self._capture: StepCapture | None = None
        self._hooks: list[LinearHooks | ExpertHooks] = []
        self._problems: dict[str, str] = {}
        self._model = model if settings["probe"] is not None else None

    def begin_step(self, step: int, number: int) -> None:
        """Hook the linears. A part of them is measured, another one in each of the recorded steps."""
        keys, settings = list(self._linears), self._settings
        count = measured_in_a_step(len(keys), settings["steps"], settings["samples"])
        chosen = [keys[(number * count + place) % len(keys)] for place in range(count)]
        measured = {key: earlier_maxima(self._linears[key].steps, step) for key in chosen}
        self._capture = capture = StepCapture(step, measured, settings["seed"], self._guard)
        for module, places in self._places:  # one by one, so that an error leaves none behind
            self._hooks.append((ExpertHooks if places[0].parameter else LinearHooks)(module, places, capture))

    def end_step(self) -> None:
        """Remove the hooks, and keep what was recorded."""
        self.remove()
        if (capture := self._capture) is None:
            return
        self._capture = None
        for key, facts in capture.finish().items():
            place, dtype, linear = capture.linears[key].place, capture.linears[key].dtype, self._linears[key]
            seen = {"inputs": place.inputs, "outputs": place.outputs, "dtype": str(dtype).removeprefix("torch.")}
            self._linears[key] = linear.model_copy(update={**seen, "steps": (*linear.steps, facts)})
        self._problems |= capture.problems

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
            packages={"torch": torch.__version__, **self._settings["packages"]}, probes=self._probed(),
        )  # fmt: skip
        write_recording(path, facts)
        return ""

    def _probed(self) -> tuple[ProbeFacts, ...]:
        """What the user's forward pass gives, once with each recipe and each layer. What fails there is said, and costs nothing
        else."""
        if self._model is None:
            return ()
        say("gemmscope: probe: the forward pass that was given runs up to 25 times, without gradients")
        try:
            layers = {key: linear.layer for key, linear in self._linears.items() if not linear.top_k}
            return tuple(measured_divergences(self._model, layers, self._settings["probe"]))
        except Exception as error:
            say(f"gemmscope: nothing was probed, the recording is complete: {in_a_line(error)}")
            return ()

    def _described(self, key: str, linear: LinearFacts) -> LinearFacts:
        """The facts for the file."""
        missing = "the training ended before it was measured" if linear.steps else NOT_RUN
        return linear.model_copy(update={"failure": self._problems.get(key, "" if linear.measured else missing)})


def measured_in_a_step(linears: int, steps: int, samples: int) -> int:
    """How many linears are measured in one step, so that each is measured in at least `samples` of the steps.

    >>> measured_in_a_step(196, 8, 1), measured_in_a_step(28, 8, 1), measured_in_a_step(6, 8, 8)
    (25, 8, 6)
    """
    return min(max(-(-linears * samples // steps), FEWEST), linears)


def make_plan(model: nn.Module, settings: Mapping[str, Any]) -> Plan:
    """Find the linears of a model. Of many experts some are chosen, of too many linears those of some layers."""
    everything = list(find_modules(model, settings["seed"]))
    modules = [(path, module, own) for path, module, compiled, own in everything if not compiled]
    hidden = sum(len(own) for *_, compiled, own in everything if compiled)
    places = {place.key: place for *_, own in modules for place in own}
    routers = {
        id(one): top_k_of(module) for module in model.modules() for one in (module, *module.children()) if top_k_of(module)
    }
    every = _named(places)
    top_k = {
        place.key: routers.get(id(module), 0)
        for _, module, own in modules
        for place in own
        if kind_of(module) == ROUTER or not every[place.key].is_recorded
    }
    named = {key: _global_layer(name, key, model) for key, name in every.items() if top_k.get(key, name.is_recorded)}
    counts = few_experts(named, settings["seed"])
    names = _unique({key: named[key] for key in counts})
    notes = tuple(
        f"{unwrapped(path)}: {type(module).__name__} is not recorded"
        for path, module, own in modules
        if kind_of(module) and not own
    )
    if hidden:
        notes += (f"{counted(hidden, 'linear')} inside compiled modules: not recorded; {COMPILED}",)
        say(f"gemmscope: {notes[-1]}")
    if count := sum(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        notes += (f"nn.MultiheadAttention is not recorded ({counted(count, 'module')}), because it does not call its linears",)
    own = [
        (module, [replace(place, top_k=top_k.get(place.key, 0)) for place in own if place.key in names])
        for _, module, own in modules
    ]
    facts = {
        key: LinearFacts(
            name=name.path, linear=name.linear, layer=name.layer, op=name.op, kind=places[key].kind, inputs=places[key].inputs,
            outputs=places[key].outputs, expert=name.expert, experts=max(places[key].experts, counts[key]),
            top_k=top_k.get(key, 0),
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
    return few_of(range(count), seed, unwrapped(path).rpartition(".")[0])


def _unique(names: dict[str, LinearName]) -> dict[str, LinearName]:
    """Make names unique: paths that differ only in their wrappers keep the wrappers."""
    seen: set[str] = set()
    unique = {}
    for key, name in names.items():
        unique[key] = replace(name, path=key) if name.path in seen else name
        seen.add(unique[key].path)
    return unique


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
